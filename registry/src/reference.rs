//! Locations of images in registries, as users write them.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;
use crate::manifest::Sha256;

/// The maximum length of a name in bytes, of the distribution specification (host and name together).
const NAME_BYTES_MAX: usize = 255;
/// The maximum length of a tag in bytes, of the same specification.
const TAG_BYTES_MAX: usize = 128;
/// The maximum length of a prefix in bytes: a key of S3 has at most 1024.
const PREFIX_BYTES_MAX: usize = 512;

/// The location of an image: `oci:[https://|http://]HOST[:PORT]/NAME[:TAG|@sha256:DIGEST]` or
/// `s3:BUCKET/PREFIX[:TAG|@sha256:DIGEST]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    pub(crate) location: Location,
    pub(crate) version: Version,
}

/// The server, and the repository there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// A registry: its scheme, if given, its host with port, and a repository.
    Oci { scheme: Option<&'static str>, host: String, name: String },
    /// A bucket, and the prefix of keys.
    S3 { bucket: String, prefix: String },
}

/// A manifest of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    Tag(String),
    Digest(Sha256),
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => f.write_str(tag),
            Self::Digest(digest) => write!(f, "sha256:{digest}"),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.location {
            Location::Oci { scheme, host, name } => {
                let scheme = scheme.map(|scheme| format!("{scheme}://")).unwrap_or_default();
                write!(f, "oci:{scheme}{host}/{name}")?;
            }
            Location::S3 { bucket, prefix } => write!(f, "s3:{bucket}/{prefix}")?,
        }
        match &self.version {
            Version::Tag(tag) => write!(f, ":{tag}"),
            Version::Digest(digest) => write!(f, "@sha256:{digest}"),
        }
    }
}

impl FromStr for Reference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = |reason: &str| Error::Reference { text: text.into(), reason: reason.into() };
        let (kind, rest) = text.split_once(':').ok_or_else(|| invalid("it has no scheme"))?;
        match kind {
            "oci" => {
                let (scheme, rest) = match (rest.strip_prefix("https://"), rest.strip_prefix("http://")) {
                    (Some(rest), _) => (Some("https"), rest),
                    (_, Some(rest)) => (Some("http"), rest),
                    _ => (None, rest),
                };
                let (host, rest) = rest.split_once('/').ok_or_else(|| invalid("it has no name after the host"))?;
                if host.is_empty()
                    || !host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-:[]_".contains(&byte))
                {
                    return Err(invalid("its host is invalid"));
                }
                let (name, version) = parse_version(rest).map_err(invalid)?;
                if name.len() + host.len() > NAME_BYTES_MAX || !name.split('/').all(is_component) {
                    return Err(invalid(
                        "a name has lower-case letters and digits, with single . _ - between them, in parts separated by /",
                    ));
                }
                Ok(Self { location: Location::Oci { scheme, host: host.into(), name: name.into() }, version })
            }
            "s3" => {
                let (bucket, rest) =
                    rest.split_once('/').ok_or_else(|| invalid("it has no prefix after the bucket"))?;
                let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
                if !(1..=255).contains(&bucket.len()) || !bucket.bytes().all(is_plain) {
                    return Err(invalid("its bucket is invalid"));
                }
                let (prefix, version) = parse_version(rest).map_err(invalid)?;
                let is_part = |part: &str| !matches!(part, "" | "." | "..") && part.bytes().all(is_plain);
                if prefix.len() > PREFIX_BYTES_MAX || !prefix.split('/').all(is_part) {
                    return Err(invalid("a prefix has letters, digits, . _ and -, in parts separated by /"));
                }
                Ok(Self { location: Location::S3 { bucket: bucket.into(), prefix: prefix.into() }, version })
            }
            _ => Err(invalid("its scheme is neither oci nor s3")),
        }
    }
}

/// Splits a name from the tag or digest after it.
fn parse_version(text: &str) -> Result<(&str, Version), &'static str> {
    if let Some((name, digest)) = text.split_once('@') {
        let digest = digest.strip_prefix("sha256:").and_then(Sha256::from_hex);
        return Ok((name, Version::Digest(digest.ok_or("after @ must be sha256: and 64 hexadecimal digits")?)));
    }
    let (name, tag) = text.rsplit_once(':').unwrap_or((text, "latest"));
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let is_valid_start = tag.bytes().next().is_some_and(is_word);
    if !is_valid_start || tag.len() > TAG_BYTES_MAX || !tag.bytes().all(|byte| is_word(byte) || b".-".contains(&byte)) {
        return Err("a tag has letters, digits, _ . and -, at most 128");
    }
    Ok((name, Version::Tag(tag.into())))
}

/// `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*` of the specification of the distribution API.
fn is_component(part: &str) -> bool {
    let is_end = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = part.as_bytes();
    let separators = part.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    let is_separator = |text: &str| matches!(text, "" | "." | "_" | "__") || text.bytes().all(|byte| byte == b'-');
    bytes.first().is_some_and(is_end) && bytes.last().is_some_and(is_end) && separators.into_iter().all(is_separator)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use super::*;

    #[test]
    fn references_are_read_and_written() {
        let digest = "0123456789abcdef".repeat(4);
        for (text, shown) in [
            ("oci:registry.example/os/base", "oci:registry.example/os/base:latest"),
            ("oci:localhost:5000/a:1.2-x", "oci:localhost:5000/a:1.2-x"),
            ("oci:[::1]:5000/a__b/c--d:T", "oci:[::1]:5000/a__b/c--d:T"),
            ("oci:https://localhost:5000/a", "oci:https://localhost:5000/a:latest"),
            ("s3:bucket/a/B.c:12", "s3:bucket/a/B.c:12"),
            ("s3:bucket/images", "s3:bucket/images:latest"),
            (&format!("oci:h/a@sha256:{digest}"), &format!("oci:h/a@sha256:{digest}")),
        ] {
            assert_eq!(text.parse::<Reference>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn invalid_references_are_refused_with_one_sentence() {
        let long = format!("oci:h/{}", "a".repeat(300));
        for text in [
            "",
            "oci",
            "oci:",
            "oci:host",
            "oci:host/",
            "oci:/a",
            "oci:h/A",
            "oci:h/a//b",
            "oci:h/a/../b",
            "oci:h/.a",
            "oci:h/a..b",
            "oci:h/a:",
            "oci:h/a:-x",
            "oci:h/a@sha256:00",
            "oci:h/a@md5:00",
            "oci:h?x/a",
            "oci:u@h/a",
            "oci:h/a b",
            "s3:b",
            "s3:b/",
            "s3:/a",
            "s3:b/../a",
            "s3:b/a?x",
            "s3:b/a/",
            "ftp:h/a",
            "oci:h/a:x y",
            "oci:h/é",
            &long,
        ] {
            let error = text.parse::<Reference>().unwrap_err().to_string();
            assert!(error.contains("is not the location of an image") && error.lines().count() == 1, "{text}: {error}");
        }
    }
}
