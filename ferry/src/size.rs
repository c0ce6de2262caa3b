//! Parses sizes, and implements `Deserialize` by parsing.

use std::str::FromStr;

/// Implements `Deserialize` for types that configuration files spell as the command line does.
macro_rules! deserialize_from_str {
    ($($name:ty),+) => {$(
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
                String::deserialize(input)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )+};
}

pub(crate) use deserialize_from_str;

/// A number of bytes, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    /// Bytes, or a number with K, M, G or T (powers of 1024).
    fn from_str(text: &str) -> Result<Self, String> {
        let unit = text.as_bytes().last().map(u8::to_ascii_uppercase);
        let shift = match unit {
            Some(b'K') => 10,
            Some(b'M') => 20,
            Some(b'G') => 30,
            Some(b'T') => 40,
            _ => 0,
        };
        let digits = if shift == 0 { text } else { &text[..text.len() - 1] };
        let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
        let bytes = digits.parse::<u64>().ok().filter(|_| plain).and_then(|n| n.checked_mul(1 << shift));
        match bytes {
            Some(0) => Err("a size must be at least 1".into()),
            Some(bytes) => Ok(Self(bytes)),
            None => Err(format!("{text:?} is not a size; write it like 512M or 2G")),
        }
    }
}

deserialize_from_str!(Size);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [("4096", 4096), ("1k", 1024), ("512M", 512 << 20), ("2g", 2 << 30), ("3T", 3 << 40)] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for wrong in ["", "M", "-1G", "+1G", "1.5G", "1GB", "0", "0G", "99999999999T", "18446744073709551616", "é"] {
            assert!(wrong.parse::<Size>().is_err(), "{wrong}");
        }
    }
}
