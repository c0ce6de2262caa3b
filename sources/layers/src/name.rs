//! The names of the tree: references of images in base64, and digests.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ferry_registry::Reference;

/// The length of a SHA-256 digest in hexadecimal digits.
const HEX_DIGITS: usize = 64;

/// Returns the name of an image's directory, as in containers/storage.
#[must_use]
pub fn reference_name(reference: &str) -> String {
    STANDARD.encode(reference)
}

/// Decodes the name of an image's directory to `HOST/NAME:TAG` or `HOST/NAME@sha256:DIGEST`. `None`: it is not a name that
/// [`reference_name`] returns.
#[must_use]
pub fn reference_of(name: &[u8]) -> Option<String> {
    let text = String::from_utf8(STANDARD.decode(name).ok()?).ok()?;
    // Base64 has spare bits, but each image must have one name.
    let is_own = reference_name(&text).as_bytes() == name;
    (is_own && location(&text).is_some()).then_some(text)
}

/// Returns the location of an image in a registry.
pub(crate) fn location(reference: &str) -> Option<Reference> {
    // A scheme belongs to Ferry's own syntax, not to the image's name.
    let is_plain = !reference.contains("://");
    is_plain.then(|| format!("oci:{reference}").parse().ok()).flatten()
}

/// Returns the name if it is a digest: `sha256:` and hexadecimal digits.
pub(crate) fn digest_of(name: &[u8]) -> Option<&str> {
    let digits = name.strip_prefix(b"sha256:")?;
    let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    (digits.len() == HEX_DIGITS && digits.iter().all(is_digit)).then(|| std::str::from_utf8(name).ok())?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_those_of_containers_storage() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for reference in [
            "docker.io/library/debian:12",
            "localhost:5000/a:latest",
            &format!("quay.io/a/b@{digest}"),
            "[::1]:5000/a:1",
        ] {
            let name = reference_name(reference);
            assert!(!name.contains('/'), "{name}");
            assert_eq!(reference_of(name.as_bytes()).as_deref(), Some(reference));
        }
        assert_eq!(digest_of(digest.as_bytes()), Some(&*digest));
    }

    #[test]
    fn other_names_are_refused() {
        for text in
            ["", "debian", "/debian", "http://localhost:5000/a:1", "h/A:1", "h/a b", "h/../a", "h/a:1@sha256:00"]
        {
            assert_eq!(reference_of(reference_name(text).as_bytes()), None, "{text}");
        }
        for name in ["bG9jYWxob3N0L2E6MQ", "bG9jYWxob3N0L2E6MR==", "....", "diff", ".Trash-0", "\u{fe}"] {
            assert_eq!(reference_of(name.as_bytes()), None, "{name}");
        }
        for name in [
            "",
            "sha256:",
            "sha256:00",
            "use",
            &format!("sha512:{}", "0".repeat(64)),
            &format!("sha256:{}", "A".repeat(64)),
        ] {
            assert_eq!(digest_of(name.as_bytes()), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn each_image_has_one_name(name in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Some(reference) = reference_of(&name) {
                prop_assert_eq!(reference_name(&reference).into_bytes(), name.clone());
            }
            prop_assert!(digest_of(&name).is_none());
        }
    }
}
