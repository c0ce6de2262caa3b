//! Maps ids of users or groups.

use std::str::FromStr;

/// A client's kernel sends this instead of an id; no user has it.
const NOBODY: u32 = u32::MAX;

/// Why rules are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RuleError {
    /// The text is not a rule.
    #[error(
        "{0:?} is no translation: TYPE:FROM:TO:COUNT, as in map:0:100000:65536, with TYPE one of guest, host, squash-guest, \
         squash-host and map, or forbid-guest:FROM:COUNT"
    )]
    Form(String),
    /// A number is invalid, or a range is empty or exceeds 32 bits.
    #[error("{0:?} does not fit: numbers are below 4294967295, and a range has at least one")]
    Range(String),
    /// Two rules concern the same id.
    #[error("{0} and {1} are about the same numbers: each may be in one rule of a direction only")]
    Overlap(Rule, Rule),
}

/// A rule of virtiofsd's `--translate-uid` and `--translate-gid`: `TYPE:FROM:TO:COUNT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    kind: RuleKind,
    from: u32,
    /// The target of `from`; unused by [`RuleKind::ForbidGuest`].
    to: u32,
    count: u32,
}

/// The direction and type of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RuleKind {
    /// Maps the client's range to a range of the host.
    Guest,
    /// Maps a range of the host to a range of the client.
    Host,
    /// Maps the client's range to a single id of the host.
    SquashGuest,
    /// Maps a range of the host to a single id of the client.
    SquashHost,
    /// Forbids the client's range for new owners.
    ForbidGuest,
    /// `Guest` and its inverse.
    Map,
}

const KINDS: [(RuleKind, &str); 6] = [
    (RuleKind::Guest, "guest"),
    (RuleKind::Host, "host"),
    (RuleKind::SquashGuest, "squash-guest"),
    (RuleKind::SquashHost, "squash-host"),
    (RuleKind::ForbidGuest, "forbid-guest"),
    (RuleKind::Map, "map"),
];

impl FromStr for Rule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let form = || RuleError::Form(text.into());
        let (word, numbers) = text.split_once(':').ok_or_else(form)?;
        let (kind, _) = KINDS.into_iter().find(|(_, name)| *name == word).ok_or_else(form)?;
        let numbers: Vec<&str> = numbers.split(':').collect();
        let (from, to, count) = match (kind, numbers.as_slice()) {
            (RuleKind::ForbidGuest, [from, count]) => (from, from, count),
            (RuleKind::ForbidGuest, _) => return Err(form()),
            (_, [from, to, count]) => (from, to, count),
            _ => return Err(form()),
        };
        let range = || RuleError::Range(text.into());
        let number = |text: &str| text.parse::<u32>().map_err(|_| range());
        let rule = Self { kind, from: number(from)?, to: number(to)?, count: number(count)? };
        let one = matches!(kind, RuleKind::SquashGuest | RuleKind::SquashHost);
        let fits = |base: u32, count: u32| base.checked_add(count).is_some();
        if rule.count == 0 || !fits(rule.from, rule.count) || !fits(rule.to, if one { 1 } else { rule.count }) {
            return Err(range());
        }
        Ok(rule)
    }
}

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kind, from, to, count } = self;
        let word = KINDS.iter().find(|(one, _)| one == kind).map_or("", |(_, word)| word);
        match kind {
            RuleKind::ForbidGuest => write!(f, "{word}:{from}:{count}"),
            _ => write!(f, "{word}:{from}:{to}:{count}"),
        }
    }
}

/// The target of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    /// The ids from this one.
    Range(u32),
    One(u32),
    Forbidden,
}

/// The mapping in one direction: disjoint ranges, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Table(Vec<(u32, u32, To)>);

impl Table {
    /// Returns the mapping of an id; ids outside of all ranges map to themselves.
    fn get(&self, id: u32) -> Option<u32> {
        let after = self.0.partition_point(|(base, _, _)| *base <= id);
        let Some((base, count, to)) = after.checked_sub(1).and_then(|at| self.0.get(at)) else { return Some(id) };
        if id - base >= *count {
            return Some(id);
        }
        match *to {
            To::Range(first) => Some(first + (id - base)),
            To::One(one) => Some(one),
            To::Forbidden => None,
        }
    }
}

/// A mapping of user or group ids in both directions. The default is the identity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ids {
    guest: Table,
    host: Table,
}

impl Ids {
    /// Combines rules. Ids without a rule map to themselves.
    ///
    /// # Errors
    ///
    /// [`RuleError::Overlap`].
    pub fn new(rules: &[Rule]) -> Result<Self, RuleError> {
        let (mut guest, mut host) = (Vec::new(), Vec::new());
        for rule in rules {
            let Rule { kind, from, to, count } = *rule;
            match kind {
                RuleKind::Guest => guest.push((from, count, To::Range(to), rule)),
                RuleKind::Host => host.push((from, count, To::Range(to), rule)),
                RuleKind::SquashGuest => guest.push((from, count, To::One(to), rule)),
                RuleKind::SquashHost => host.push((from, count, To::One(to), rule)),
                RuleKind::ForbidGuest => guest.push((from, count, To::Forbidden, rule)),
                RuleKind::Map => {
                    guest.push((from, count, To::Range(to), rule));
                    host.push((to, count, To::Range(from), rule));
                }
            }
        }
        let table = |mut ranges: Vec<(u32, u32, To, &Rule)>| {
            ranges.sort_by_key(|(base, ..)| *base);
            for pair in ranges.windows(2) {
                if let [(base, count, _, one), (next, _, _, other)] = pair
                    && next - base < *count
                {
                    return Err(RuleError::Overlap(**one, **other));
                }
            }
            Ok(Table(ranges.into_iter().map(|(base, count, to, _)| (base, count, to)).collect()))
        };
        Ok(Self { guest: table(guest)?, host: table(host)? })
    }

    /// Maps all ids of the client to `mine`, and `mine` to the client's root: for a server without privileges, whose
    /// user is root inside.
    pub fn of_one(mine: u32) -> Self {
        let all = (0, NOBODY, To::One(mine));
        // The host's root must not look like the client's root as well.
        let others = if mine == 0 { Vec::new() } else { vec![(0, 1, To::One(OVERFLOW)), (mine, 1, To::One(0))] };
        Self { guest: Table(vec![all]), host: Table(others) }
    }

    /// Returns whether every id maps to itself.
    pub(crate) fn is_identity(&self) -> bool {
        self.guest.0.is_empty() && self.host.0.is_empty()
    }

    /// Returns the host's id for one of the client; `None` if it is forbidden.
    pub(crate) fn to_host(&self, id: u32) -> Option<u32> {
        if id == NOBODY { Some(id) } else { self.guest.get(id) }
    }

    /// Returns the client's id for one of the host.
    pub(crate) fn to_client(&self, id: u32) -> u32 {
        self.host.get(id).unwrap_or(id)
    }
}

/// Linux's id for an owner without a mapping (`/proc/sys/kernel/overflowuid`).
const OVERFLOW: u32 = 65_534;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids(rules: &[&str]) -> Ids {
        let rules: Vec<Rule> = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        Ids::new(&rules).unwrap()
    }

    #[test]
    fn each_kind_of_rule_is_applied() {
        for (rule, guest, host) in [
            ("guest:10:100:5", vec![(9, Some(9)), (10, Some(100)), (14, Some(104)), (15, Some(15))], vec![(100, 100)]),
            ("host:100:10:5", vec![(10, Some(10))], vec![(99, 99), (100, 10), (104, 14), (105, 105)]),
            ("squash-guest:0:1000:4294967295", vec![(0, Some(1000)), (77, Some(1000))], vec![(1000, 1000)]),
            ("squash-host:5:7:3", vec![(5, Some(5))], vec![(4, 4), (5, 7), (7, 7), (8, 8)]),
            ("forbid-guest:10:2", vec![(9, Some(9)), (10, None), (11, None), (12, Some(12))], vec![(10, 10)]),
            ("map:0:100000:65536", vec![(0, Some(100_000)), (65_536, Some(65_536))], vec![(100_001, 1), (5, 5)]),
        ] {
            let ids = ids(&[rule]);
            assert_eq!(rule.parse::<Rule>().unwrap().to_string(), rule);
            for (from, to) in guest {
                assert_eq!(ids.to_host(from), to, "{rule}: {from}");
            }
            for (from, to) in host {
                assert_eq!(ids.to_client(from), to, "{rule}: {from}");
            }
            assert_eq!(ids.to_host(NOBODY), Some(NOBODY), "{rule}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "map", "map:1:2", "map:1:2:3:4", "mop:1:2:3", "forbid-guest:1:2:3", "Map:1:2:3"] {
            assert!(matches!(text.parse::<Rule>(), Err(RuleError::Form(_))), "{text}");
        }
        for text in ["map:1:2:0", "map:x:2:3", "map:-1:2:3", "map:4294967295:0:1", "map:0:4294967290:6", "map:1::3"] {
            assert!(matches!(text.parse::<Rule>(), Err(RuleError::Range(_))), "{text}");
        }
        let rule = |text: &str| text.parse::<Rule>().unwrap();
        let pairs =
            [("guest:0:5:10", "forbid-guest:9:1"), ("map:0:100:10", "host:109:5:1"), ("map:0:100:10", "map:50:90:11")];
        for (one, other) in pairs {
            let error = Ids::new(&[rule(one), rule(other)]).unwrap_err().to_string();
            assert!(error.contains(one) && error.contains(other), "{error}");
        }
        Ids::new(&[rule("guest:0:5:10"), rule("host:0:5:10"), rule("guest:10:15:1")]).unwrap();
    }

    #[test]
    fn one_user_can_stand_for_all() {
        let ids = Ids::of_one(1000);
        assert_eq!((ids.to_host(0), ids.to_host(4000), ids.to_host(NOBODY)), (Some(1000), Some(1000), Some(NOBODY)));
        assert_eq!((ids.to_client(1000), ids.to_client(0), ids.to_client(33)), (0, OVERFLOW, 33));
        let root = Ids::of_one(0);
        assert_eq!((root.to_host(7), root.to_client(0), root.to_client(7)), (Some(0), 0, 7));
    }

    proptest! {
        #[test]
        fn maps_are_reversible(from in 0_u32..1000, to in 0_u32..1000, count in 1_u32..1000, id: u32) {
            let ids = ids(&[&format!("map:{from}:{to}:{count}")]);
            let inside = id.checked_sub(from).is_some_and(|at| at < count);
            let there = ids.to_host(id).unwrap();
            if inside {
                prop_assert_eq!(ids.to_client(there), id);
            } else {
                prop_assert_eq!(there, id);
            }
        }

        #[test]
        fn any_text_is_borne(text in ".{0,40}") {
            let _ = text.parse::<Rule>();
        }
    }
}
