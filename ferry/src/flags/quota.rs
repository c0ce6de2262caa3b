//! Limits of what a directory may hold: `--quota`.

use std::str::FromStr;

use ferry_quota::Limits;

use crate::size::{Size, deserialize_from_str};

/// How a quota is written.
const SYNTAX: &str = "write a size, as in 10G, and files=N if needed, as in 10G,files=100000";

/// A quota on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota(pub Limits);

impl FromStr for Quota {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        // Unlike other sizes, it may be 0: then the tree can only shrink.
        let bytes = match words.next().unwrap_or_default() {
            "0" => 0,
            size => size.parse::<Size>().map_err(|why| format!("{text:?} is not a quota: {why}; {SYNTAX}"))?.0,
        };
        let mut files = None;
        for word in words {
            let number = word.strip_prefix("files=").ok_or_else(|| format!("a quota has no {word:?}: {SYNTAX}"))?;
            let is_plain = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
            let number = number.parse().ok().filter(|_| is_plain);
            let number: u64 =
                number.ok_or_else(|| format!("{word:?} is not possible: the number is from 0 to {}", u64::MAX))?;
            if files.replace(number).is_some() {
                return Err(format!("files is given twice in {text:?}"));
            }
        }
        Ok(Self(Limits { bytes, files }))
    }
}

deserialize_from_str!(Quota);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_read() {
        for (text, bytes, files) in [
            ("0", 0, None),
            ("4096", 4096, None),
            ("10G", 10 << 30, None),
            ("1k,files=0", 1024, Some(0)),
            ("18446744073709551615,files=18446744073709551615", u64::MAX, Some(u64::MAX)),
        ] {
            assert_eq!(text.parse(), Ok(Quota(Limits { bytes, files })), "{text}");
        }
        for (text, words) in [
            ("", "\"\" is not a quota"),
            ("x", "\"x\" is not a size"),
            ("-1", "is not a quota"),
            ("0K", "at least 1"),
            ("18446744073709551616", "is not a size"),
            ("files=5", "is not a size"),
            ("1G,", "a quota has no \"\""),
            ("1G,inodes=5", "a quota has no \"inodes=5\": write a size"),
            ("1G,files=", "\"files=\" is not possible"),
            ("1G,files=-1", "is not possible"),
            ("1G,files=+1", "is not possible"),
            ("1G,files=1K", "is not possible"),
            ("1G,files=18446744073709551616", "the number is from 0 to 18446744073709551615"),
            ("1G,files=1,files=1", "files is given twice"),
        ] {
            let error = text.parse::<Quota>().expect_err(text);
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
