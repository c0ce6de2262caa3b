//! Limits of rates: `--limit`, and `ferry set TARGET limit=`.

use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use ferry_control::SettingChange;
use ferry_engine::{BURST_MAX, BURST_MIN, BYTES_MAX, REQUESTS_MAX, Rates, TokenBucket};

use crate::size::{Size, deserialize_from_str};

/// The maximum length of a group's name in bytes, enough for a machine's name.
const GROUP_BYTES_MAX: usize = 64;

/// How a limit is written.
const SYNTAX: &str =
    "write iops=N, bps=SIZE or both, as in iops=2000,bps=100M, and burst=SECONDS or group=NAME if needed";

/// A limit on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The rates.
    pub rates: Rates,
    /// The shares with this name use the rates together.
    pub group: Option<String>,
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut requests, mut bytes, mut burst, mut group) = (None, None, None, None);
        for word in text.split(',') {
            let (key, value) = word.split_once('=').ok_or_else(|| format!("{word:?} is not a limit: {SYNTAX}"))?;
            let is_new = match key {
                "iops" => requests.replace(number(key, value, value.parse().ok(), REQUESTS_MAX)?).is_none(),
                "bps" => {
                    let size = value.parse::<Size>().ok().map(|size| size.0);
                    bytes.replace(number(key, value, size, BYTES_MAX)?).is_none()
                }
                "burst" => burst.replace(number(key, value, value.parse().ok(), BURST_MAX.as_secs())?).is_none(),
                "group" => group.replace(group_name(value)?).is_none(),
                _ => return Err(format!("a limit has no {key:?}: {SYNTAX}")),
            };
            if !is_new {
                return Err(format!("{key} is given twice in {text:?}"));
            }
        }
        if requests.is_none() && bytes.is_none() {
            return Err(format!("{text:?} limits nothing: {SYNTAX}"));
        }
        let burst = burst.map_or(BURST_MIN, |seconds| Duration::from_secs(seconds.get()));
        Ok(Self { rates: Rates { requests, bytes, burst }, group })
    }
}

fn number(key: &str, text: &str, value: Option<u64>, max: u64) -> Result<NonZeroU64, String> {
    let value = value.filter(|value| *value <= max).and_then(NonZeroU64::new);
    value.ok_or_else(|| format!("{key}={text} is not possible: the number is from 1 to {max}"))
}

fn group_name(text: &str) -> Result<String, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if (1..=GROUP_BYTES_MAX).contains(&text.len()) && text.bytes().all(is_plain) {
        return Ok(text.into());
    }
    Err(format!(
        "group={text:?} is not a name: use 1 to {GROUP_BYTES_MAX} letters, digits, dots, dashes or underscores"
    ))
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rates { requests, bytes, burst } = self.rates;
        let burst = (burst > BURST_MIN).then(|| format!("burst={}", burst.as_secs()));
        let words = [requests.map(|n| format!("iops={n}")), bytes.map(|n| format!("bps={n}")), burst];
        let words = words.into_iter().flatten().chain(self.group.as_ref().map(|group| format!("group={group}")));
        f.write_str(&words.collect::<Vec<_>>().join(","))
    }
}

deserialize_from_str!(Limit);

/// Returns the bucket of each share's limit; those of a group have the same one.
pub fn buckets<'a>(limits: impl IntoIterator<Item = Option<&'a Limit>>) -> Vec<Arc<TokenBucket>> {
    let mut groups = HashMap::new();
    let bucket = |limit: Option<&Limit>| {
        let new = || TokenBucket::new(limit.map(|limit| limit.rates));
        match limit.and_then(|limit| limit.group.clone()) {
            Some(group) => Arc::clone(groups.entry(group).or_insert_with(new)),
            None => new(),
        }
    };
    limits.into_iter().map(bucket).collect()
}

/// Returns a conflict between limits: those of a group must be equal.
pub fn group_conflict<'a>(limits: impl IntoIterator<Item = &'a Limit>) -> Option<String> {
    let mut groups: HashMap<&str, &Limit> = HashMap::new();
    for limit in limits {
        let first = limit.group.as_deref().map(|group| *groups.entry(group).or_insert(limit));
        if let Some(first) = first.filter(|first| *first != limit) {
            return Some(format!("--limit {limit} and --limit {first} are of one group: give both the same rates"));
        }
    }
    None
}

/// Returns the change of `ferry set TARGET limit=TEXT`, which returns the sentence that says so.
pub fn change(bucket: &Arc<TokenBucket>, group: Option<&str>, text: &str) -> Result<SettingChange, String> {
    let limit = (text != "none").then(|| text.parse::<Limit>()).transpose()?;
    if limit.as_ref().is_some_and(|limit| limit.group.is_some()) {
        return Err(format!("limit={text}: the group is chosen when the share starts; omit group="));
    }
    let of = group.map(|group| format!(" of group {group}")).unwrap_or_default();
    let outcome = limit.as_ref().map_or_else(|| format!("no limit{of}"), |limit| format!("limit {limit}{of}"));
    let bucket = Arc::clone(bucket);
    Ok(Box::new(move || {
        bucket.set(limit.map(|limit| limit.rates));
        outcome
    }))
}

/// Returns the limit in force, as the words of `--limit`.
pub fn in_force(bucket: &TokenBucket, group: Option<&str>) -> Option<String> {
    bucket.rates().map(|rates| Limit { rates, group: group.map(str::to_owned) }.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_and_written() {
        for (text, requests, bytes, burst_s, group) in [
            ("iops=1", 1, 0, 0, None),
            ("bps=1M", 0, 1 << 20, 0, None),
            ("iops=2000,bps=100m,burst=60", 2000, 100 << 20, 60, None),
            ("group=a.b-c_1,bps=1T,iops=1000000000", REQUESTS_MAX, 1 << 40, 0, Some("a.b-c_1")),
        ] {
            let limit: Limit = text.parse().expect(text);
            let burst = Duration::from_secs(burst_s).max(BURST_MIN);
            let rates = Rates { requests: NonZeroU64::new(requests), bytes: NonZeroU64::new(bytes), burst };
            assert_eq!(limit, Limit { rates, group: group.map(str::to_owned) }, "{text}");
            assert_eq!(limit.to_string().parse(), Ok(limit), "{text}");
        }
    }

    #[test]
    fn impossible_limits_are_refused_with_their_value() {
        let long = format!("iops=1,group={}", "a".repeat(65));
        for (text, words) in [
            ("", "is not a limit"),
            ("5", "\"5\" is not a limit"),
            ("none", "is not a limit"),
            ("iops=0", "iops=0 is not possible: the number is from 1 to 1000000000"),
            ("iops=1000000001", "iops=1000000001 is not possible"),
            ("iops=18446744073709551616", "iops=18446744073709551616 is not possible"),
            ("iops=-1", "iops=-1 is not possible"),
            ("iops=1K", "iops=1K is not possible"),
            ("bps=0", "bps=0 is not possible"),
            (
                "bps=18446744073709551615",
                "bps=18446744073709551615 is not possible: the number is from 1 to 1099511627776",
            ),
            ("bps=18446744073709551616", "bps=18446744073709551616 is not possible"),
            ("bps=2T", "bps=2T is not possible"),
            ("bps=99999999999T", "bps=99999999999T is not possible"),
            ("iops=1,burst=0", "burst=0 is not possible: the number is from 1 to 60"),
            ("iops=1,burst=61", "burst=61 is not possible"),
            ("iops=1,burst=NaN", "burst=NaN is not possible"),
            ("burst=1", "\"burst=1\" limits nothing"),
            ("group=a", "\"group=a\" limits nothing"),
            ("iops=1,iops=2", "iops is given twice"),
            ("iops=1,rate=2", "a limit has no \"rate\""),
            ("iops=1,", "\"\" is not a limit"),
            ("iops=1,group=", "group=\"\" is not a name"),
            ("iops=1,group=\u{1b}[2J", "group=\"\\u{1b}[2J\" is not a name"),
            (&long, "is not a name"),
        ] {
            let error = text.parse::<Limit>().expect_err(text);
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn a_running_limit_changes_or_stays_as_it_was() {
        let bucket = TokenBucket::new(None);
        let set = |group, text: &str| change(&bucket, group, text).map(|change| change());
        assert_eq!(in_force(&bucket, None), None);
        assert_eq!(set(None, "iops=5").as_deref(), Ok("limit iops=5"));
        assert_eq!(in_force(&bucket, Some("g")).as_deref(), Some("iops=5,group=g"));
        let rates = bucket.rates();
        assert_eq!(rates.and_then(|rates| rates.requests).map(NonZeroU64::get), Some(5));
        for wrong in ["iops=0", "iops=6,group=b", "x"] {
            let error = set(None, wrong).expect_err(wrong);
            assert!(error.contains(wrong), "{error}");
            assert_eq!(bucket.rates(), rates, "{wrong}");
        }
        // Nothing changes before all settings are checked.
        drop(change(&bucket, None, "none").expect("it is a limit"));
        assert_eq!(bucket.rates(), rates);
        assert_eq!(set(Some("g"), "none").as_deref(), Ok("no limit of group g"));
        assert_eq!(bucket.rates(), None);
    }

    #[test]
    fn shares_of_a_group_have_one_bucket_and_one_limit() {
        let read = |text: &str| text.parse::<Limit>().ok();
        let limits = ["iops=1,group=a", "iops=1", "iops=1,group=a", ""].map(read);
        let all = buckets(limits.iter().map(Option::as_ref));
        assert!(Arc::ptr_eq(&all[0], &all[2]) && !Arc::ptr_eq(&all[0], &all[1]));
        assert_eq!((all[0].rates().is_some(), all[3].rates()), (true, None));
        assert_eq!(group_conflict(limits.iter().flatten()), None);
        let error =
            group_conflict(["iops=1,group=a", "iops=2,group=a"].map(read).iter().flatten()).expect("a conflict");
        assert!(error.contains("--limit iops=2,group=a and --limit iops=1,group=a"), "{error}");
    }
}
