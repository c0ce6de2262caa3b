//! POSIX ACLs as Linux stores them in extended attributes (`linux/posix_acl.h`, `linux/posix_acl_xattr.h`), and their modes
//! for clients that do not check ACLs.

use crate::{Attr, Caller, Errno, FileSystem, FileType, Ino};

/// The extended attribute of an access ACL.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// The extended attribute of a directory's default ACL.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

/// `POSIX_ACL_XATTR_VERSION`, the header of the value, little endian.
pub const VERSION: u32 = 2;
/// The size of an entry in bytes: tag (2), permissions (2) and id (4), little endian.
pub const ENTRY_BYTES: usize = 8;

/// `ACL_USER_OBJ`: the owner.
pub const USER_OBJ: u16 = 0x01;
/// `ACL_USER`: the user with the id of the entry.
pub const USER: u16 = 0x02;
/// `ACL_GROUP_OBJ`: the file's group.
pub const GROUP_OBJ: u16 = 0x04;
/// `ACL_GROUP`: the group with the id of the entry.
pub const GROUP: u16 = 0x08;
/// `ACL_MASK`: the maximum permissions of all except the owner and others.
pub const MASK: u16 = 0x10;
/// `ACL_OTHER`: all others.
pub const OTHER: u16 = 0x20;

/// Permission bits of group and others. Without any of them, an ACL grants nothing that the mode shows.
const GROUP_AND_OTHERS: u32 = 0o077;

/// Returns the mode of an inode with these attributes that may have an ACL: see [`FileSystem::mode_without_acl`].
pub fn mode_without_acl<F: FileSystem + ?Sized>(source: &F, cx: &Caller<'_>, ino: Ino, attr: &Attr) -> u32 {
    let mode = attr.mode;
    if mode & GROUP_AND_OTHERS == 0 || attr.kind() == FileType::Symlink {
        return mode;
    }
    match source.getxattr(cx, ino, ACCESS) {
        Ok(acl) => narrow(mode, &acl),
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => mode,
        // There may be an ACL.
        Err(_) => mode & !GROUP_AND_OTHERS,
    }
}

/// Returns a mode that grants no user more than the ACL does. Linux shows the mask as the group's bits; a client that
/// checks those would grant the owning group what only the mask allows. A mode cannot name users and groups, so group and
/// others lose each permission that some named user or group lacks. A named user may be a member of the owning group or
/// not. Members of a named group are not in the owning group, or the ACL grants them its permissions too.
fn narrow(mode: u32, acl: &[u8]) -> u32 {
    let refused = mode & !GROUP_AND_OTHERS;
    let Some((version, entries)) = acl.split_first_chunk() else { return if acl.is_empty() { mode } else { refused } };
    let (entries, []) = entries.as_chunks::<ENTRY_BYTES>() else { return refused };
    if u32::from_le_bytes(*version) != VERSION {
        return refused;
    }
    let (mut owner, mut group, mut others, mut mask) = (0, 0, 0, 7);
    let (mut users, mut groups) = (7, 7);
    for &[tag_low, tag_high, perm_low, perm_high, ..] in entries {
        let perm = u32::from(u16::from_le_bytes([perm_low, perm_high])) & 7;
        match u16::from_le_bytes([tag_low, tag_high]) {
            USER_OBJ => owner = perm,
            USER => users &= perm,
            GROUP_OBJ => group = perm,
            GROUP => groups &= perm,
            MASK => mask = perm,
            OTHER => others = perm,
            _ => return refused,
        }
    }
    if entries.is_empty() {
        return mode;
    }
    let is_named = entries.iter().any(|entry| matches!(u16::from_le_bytes([entry[0], entry[1]]), USER | GROUP));
    // The mask applies to the group and to named users and groups.
    let named = if is_named { users & groups & mask } else { 7 };
    (mode & !0o777) | (owner << 6) | ((group & mask & users) << 3) | (others & named)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOBODY: u32 = u32::MAX;

    fn acl(entries: &[(u16, u32, u32)]) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for (tag, perm, id) in entries {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(u16::try_from(*perm).expect("three bits").to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn modes_are_never_wider_than_acls() {
        let base = |group, mask, other| {
            vec![(USER_OBJ, 6, NOBODY), (GROUP_OBJ, group, NOBODY), (MASK, mask, NOBODY), (OTHER, other, NOBODY)]
        };
        let with = |entry, mut entries: Vec<_>| {
            entries.push(entry);
            acl(&entries)
        };
        for (value, mode, shown) in [
            (acl(&base(0, 6, 0)), 0o100_660, 0o100_600),
            (acl(&base(7, 4, 4)), 0o100_644, 0o100_644),
            // A named user may be in the group, or one of the others.
            (with((USER, 0, 7), base(6, 6, 4)), 0o100_664, 0o100_600),
            (with((USER, 6, 7), base(4, 6, 4)), 0o100_664, 0o100_644),
            (with((USER, 6, 7), base(4, 0, 4)), 0o100_604, 0o100_600),
            // A named group takes no permission from the owning one.
            (with((GROUP, 0, 7), base(6, 6, 4)), 0o100_664, 0o100_660),
            (with((GROUP, 4, 7), base(0, 6, 4)), 0o102_664, 0o102_604),
            (acl(&[(USER_OBJ, 6, 0), (GROUP_OBJ, 4, 0), (OTHER, 4, 0)]), 0o100_644, 0o100_644),
            (Vec::new(), 0o100_664, 0o100_664),
            (VERSION.to_le_bytes().to_vec(), 0o100_664, 0o100_664),
            // The meaning of these is unknown.
            (vec![2, 0, 0], 0o104_775, 0o104_700),
            (3_u32.to_le_bytes().to_vec(), 0o100_664, 0o100_600),
            (acl(&[(0x40, 7, 0)]), 0o100_664, 0o100_600),
        ] {
            let now = narrow(mode, &value);
            assert_eq!(now, shown, "{value:?}: {now:o}");
        }
    }

    /// Returns whether Linux's `posix_acl_permission` grants a permission to a user who is not the owner.
    fn linux_allows(entries: &[(u16, u32, u32)], uid: u32, groups: &[u32], want: u32) -> bool {
        let perm = |tag| entries.iter().find(|entry| entry.0 == tag).map(|entry| entry.1);
        let mask = perm(MASK).unwrap_or(7);
        if let Some(user) = entries.iter().find(|entry| entry.0 == USER && entry.2 == uid) {
            return user.1 & mask & want == want;
        }
        let is_mine = |entry: &&(u16, u32, u32)| match entry.0 {
            GROUP_OBJ => groups.contains(&0),
            GROUP => groups.contains(&entry.2),
            _ => false,
        };
        let mine: Vec<_> = entries.iter().filter(is_mine).collect();
        match mine.is_empty() {
            true => perm(OTHER).unwrap_or_default() & want == want,
            false => mine.iter().any(|entry| entry.1 & mask & want == want),
        }
    }

    proptest! {
        /// The owning group is 0; users and groups 1 to 3 may be named.
        #[test]
        fn the_mode_grants_no_more_than_the_acl(
            (group, mask, other) in (0..8u32, 0..8u32, 0..8u32),
            users in proptest::collection::btree_map(1..4u32, 0..8u32, 0..3),
            named in proptest::collection::btree_map(1..4u32, 0..8u32, 0..3),
            uid in 1..5u32, member in proptest::collection::vec(0..4u32, 0..4), want in 1..8u32,
        ) {
            let mut entries = vec![(USER_OBJ, 7, NOBODY)];
            entries.extend(users.iter().map(|(id, perm)| (USER, *perm, *id)));
            entries.push((GROUP_OBJ, group, NOBODY));
            entries.extend(named.iter().map(|(id, perm)| (GROUP, *perm, *id)));
            entries.extend([(MASK, mask, NOBODY), (OTHER, other, NOBODY)]);
            let mode = narrow(0o100_700 | (mask << 3) | other, &acl(&entries));
            let class = if member.contains(&0) { mode >> 3 } else { mode } & 7;
            prop_assert!(class & want != want || linux_allows(&entries, uid, &member, want), "{mode:o} {entries:?}");
        }

        #[test]
        fn any_bytes_are_accepted(value in proptest::collection::vec(any::<u8>(), 0..60), mode in 0..0o200_000u32) {
            let now = narrow(mode, &value);
            prop_assert_eq!(now & !0o777, mode & !0o777);
        }
    }
}
