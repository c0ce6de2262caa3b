//! The maps of a user namespace (`--uid-map`, `--gid-map`) as translation rules.

/// Linux's id for users without a mapping (`/proc/sys/kernel/overflowuid`).
const OVERFLOW_ID: u64 = 65_534;
/// One more than the highest user or group id.
const IDS: u64 = u32::MAX as u64;

/// A map of a user namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Map {
    guest: u64,
    host: u64,
    count: u64,
}

impl Map {
    /// Parses `:GUEST:HOST:COUNT:` with any separator.
    pub fn parse(map: &str) -> Result<Self, String> {
        let wrong = || format!("{map:?} is not a map: :GUEST:HOST:COUNT:, as in :0:100000:65536:");
        let separator = map.chars().next().ok_or_else(wrong)?;
        let body = map.strip_prefix(separator).and_then(|map| map.strip_suffix(separator)).ok_or_else(wrong)?;
        let numbers: Vec<u64> = body
            .split(separator)
            .map(str::parse::<u32>)
            .map(|number| number.map(u64::from))
            .collect::<Result<_, _>>()
            .map_err(|_| wrong())?;
        let [guest, host, count] = numbers[..] else { return Err(wrong()) };
        Ok(Self { guest, host, count })
    }

    /// Checks that the map contains only this id, for servers that cannot use others.
    pub fn check_id(self, id: u32) -> Result<(), String> {
        let Self { guest, host, count } = self;
        if host == u64::from(id) && count == 1 {
            return Ok(());
        }
        Err(format!(
            ":{guest}:{host}:{count}:: a server without privileges can only create files of its own id, {id}: start it as root, \
             or map only that id, as in :0:{id}:1:"
        ))
    }
}

/// Returns the translation rules for the maps of a user namespace: ids without a mapping become nobody.
pub fn namespace_rules(maps: &[Map]) -> Vec<String> {
    if maps.is_empty() {
        return Vec::new();
    }
    let mut rules: Vec<String> =
        maps.iter().map(|Map { guest, host, count }| format!("map:{guest}:{host}:{count}")).collect();
    let inside = maps.iter().map(|map| (map.guest, map.count)).collect();
    let outside = maps.iter().map(|map| (map.host, map.count)).collect();
    rules.extend(gaps(inside).map(|(base, count)| format!("forbid-guest:{base}:{count}")));
    rules.extend(gaps(outside).map(|(base, count)| format!("squash-host:{base}:{OVERFLOW_ID}:{count}")));
    rules
}

/// Returns the gaps between these ranges.
fn gaps(mut ranges: Vec<(u64, u64)>) -> impl Iterator<Item = (u64, u64)> {
    ranges.sort_unstable();
    ranges.push((IDS, 0));
    let mut from = 0;
    ranges.into_iter().filter_map(move |(base, count)| {
        let gap = (from, base.saturating_sub(from));
        from = from.max(base + count);
        (gap.1 > 0).then_some(gap)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_of_a_namespace_leave_all_others_out() {
        let maps = [":0:100000:65536:", "/70000/5/1/"].map(|map| Map::parse(map).expect(map));
        let rules = namespace_rules(&maps);
        let expected = [
            "map:0:100000:65536",
            "map:70000:5:1",
            "forbid-guest:65536:4464",
            "forbid-guest:70001:4294897294",
            "squash-host:0:65534:5",
            "squash-host:6:65534:99994",
            "squash-host:165536:65534:4294801759",
        ];
        assert_eq!(rules, expected);
        let rules: Vec<ferry_idmap::Rule> = rules.iter().map(|rule| rule.parse().expect(rule)).collect();
        ferry_idmap::Ids::new(&rules).expect("no two of one number");
    }

    #[test]
    fn a_map_that_needs_privileges_is_refused_without_them() {
        let map = |map| Map::parse(map).expect(map).check_id(1000);
        assert_eq!(map(":0:1000:1:"), Ok(()));
        assert_eq!(map(":5:1000:1:"), Ok(()));
        for refused in [":0:1000:2:", ":1:100000:65536:", ":0:0:1:"] {
            let said = map(refused).expect_err(refused);
            assert!(said.starts_with(refused) && said.ends_with("as in :0:1000:1:"), "{said}");
        }
    }
}
