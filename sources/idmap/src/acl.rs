//! The ids in the value of a POSIX ACL (`linux/posix_acl_xattr.h`).

use ferry_vfs::{Errno, Result};

/// The attributes that are ACLs.
pub const NAMES: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

const HEADER_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;
/// Tags of entries with an id.
const ACL_USER: u16 = 0x02;
const ACL_GROUP: u16 = 0x08;

/// Returns whether an attribute is an ACL.
pub fn is_acl(name: &[u8]) -> bool {
    NAMES.contains(&name)
}

/// Maps the ids of all users and groups in a value. An invalid value is passed on, and refused by the source.
///
/// # Errors
///
/// `PERM` if an id has no mapping.
pub fn each_id(value: &mut [u8], uid: impl Fn(u32) -> Option<u32>, gid: impl Fn(u32) -> Option<u32>) -> Result<()> {
    let Some((_, entries)) = value.split_at_mut_checked(HEADER_BYTES) else { return Ok(()) };
    for entry in entries.chunks_exact_mut(ENTRY_BYTES) {
        let Some((&mut [tag_low, tag_high, _, _], id)) = entry.split_first_chunk_mut() else { continue };
        let Ok(old) = <[u8; 4]>::try_from(&*id).map(u32::from_le_bytes) else { continue };
        let new = match u16::from_le_bytes([tag_low, tag_high]) {
            ACL_USER => uid(old),
            ACL_GROUP => gid(old),
            _ => Some(old),
        };
        id.copy_from_slice(&new.ok_or(Errno::PERM)?.to_le_bytes());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn acl(entries: &[(u16, u32)]) -> Vec<u8> {
        let mut value = 2_u32.to_le_bytes().to_vec();
        for (tag, id) in entries {
            value.extend(tag.to_le_bytes());
            value.extend(6_u16.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        value
    }

    #[test]
    fn only_named_users_and_groups_change() {
        let mut value = acl(&[(1, u32::MAX), (ACL_USER, 5), (4, u32::MAX), (ACL_GROUP, 5), (0x10, 7), (0x20, 7)]);
        each_id(&mut value, |uid| Some(uid + 100), |gid| Some(gid + 200)).unwrap();
        let expected = [(1, u32::MAX), (ACL_USER, 105), (4, u32::MAX), (ACL_GROUP, 205), (0x10, 7), (0x20, 7)];
        assert_eq!(value, acl(&expected));
        assert_eq!(each_id(&mut value, |_| None, Some), Err(Errno::PERM));
    }

    proptest! {
        #[test]
        fn any_bytes_are_borne(mut value in proptest::collection::vec(any::<u8>(), 0..100)) {
            let before = value.clone();
            each_id(&mut value, |uid| Some(!uid), |gid| Some(!gid)).unwrap();
            each_id(&mut value, |uid| Some(!uid), |gid| Some(!gid)).unwrap();
            prop_assert_eq!(value, before);
        }
    }
}
