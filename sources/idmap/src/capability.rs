//! The id in the value of `security.capability` (`linux/capability.h`): the root of the user namespace in which a
//! file's capabilities are valid.

use std::borrow::Cow;

use ferry_vfs::{Errno, Result};

/// The name of the attribute.
pub const NAME: &[u8] = b"security.capability";

const REVISION_MASK: u32 = 0xFF00_0000;
/// In this revision the id is 0 and not stored.
const REVISION_2: u32 = 0x0200_0000;
const REVISION_3: u32 = 0x0300_0000;
/// A word of revision and flags, and two words of each of two sets.
const BYTES: usize = 20;

/// Translates the root id. An invalid value is returned unchanged.
///
/// # Errors
///
/// `PERM` if the id has no mapping.
pub fn of_root(value: &[u8], uid: impl FnOnce(u32) -> Option<u32>) -> Result<Cow<'_, [u8]>> {
    let Some((head, root)) = value.split_at_checked(BYTES) else { return Ok(Cow::Borrowed(value)) };
    let Some((&word, sets)) = head.split_first_chunk() else { return Ok(Cow::Borrowed(value)) };
    let word = u32::from_le_bytes(word);
    let old = match (word & REVISION_MASK, <[u8; 4]>::try_from(root)) {
        (REVISION_2, Err(_)) if root.is_empty() => 0,
        (REVISION_3, Ok(root)) => u32::from_le_bytes(root),
        _ => return Ok(Cow::Borrowed(value)),
    };
    let new = uid(old).ok_or(Errno::PERM)?;
    if new == old {
        return Ok(Cow::Borrowed(value));
    }
    let revision = if new == 0 { REVISION_2 } else { REVISION_3 };
    let mut value = (word & !REVISION_MASK | revision).to_le_bytes().to_vec();
    value.extend_from_slice(sets);
    if new != 0 {
        value.extend_from_slice(&new.to_le_bytes());
    }
    Ok(Cow::Owned(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EFFECTIVE: u32 = 1;
    const SETS: [u8; 16] = [7; 16];

    fn value(root: u32) -> Vec<u8> {
        let revision = if root == 0 { REVISION_2 } else { REVISION_3 };
        let word = (revision | EFFECTIVE).to_le_bytes();
        let root = if root == 0 { Vec::new() } else { root.to_le_bytes().to_vec() };
        [&word[..], &SETS, &root].concat()
    }

    #[test]
    fn only_the_root_changes() {
        for (old, new) in [(0, 1000), (1000, 0), (1000, 2000), (0, 0), (7, 7)] {
            assert_eq!(of_root(&value(old), |root| (root == old).then_some(new)).unwrap(), value(new), "{old} {new}");
        }
        assert_eq!(of_root(&value(0), |_| None), Err(Errno::PERM));
        // A root of 0 may be written, too.
        let written = [&value(5)[..BYTES], &[0; 4]].concat();
        assert_eq!(of_root(&written, |root| Some(root + 9)).unwrap(), value(9));
    }

    #[test]
    fn other_forms_stay() {
        let long = [value(5), vec![0]].concat();
        let short = &value(5)[..BYTES];
        let old = [&0x0100_0001_u32.to_le_bytes()[..], &[1; 8]].concat();
        for other in [&[][..], &[2], &old, short, &long] {
            assert_eq!(of_root(other, |_| Some(1)).unwrap(), other);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_borne(value in proptest::collection::vec(any::<u8>(), 0..30), word in 0..4u32) {
            for value in [value.clone(), [(word << 24).to_le_bytes().to_vec(), value].concat()] {
                let there = of_root(&value, |root| Some(!root)).unwrap();
                let back = of_root(&there, |root| Some(!root)).unwrap();
                // A root of 0 that was written is not any more.
                prop_assert!(*back == *value || back.len() == BYTES && value[BYTES..] == [0; 4]);
            }
        }
    }
}
