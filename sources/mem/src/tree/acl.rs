//! POSIX ACLs in the format of `system.posix_acl_access` and `system.posix_acl_default`: version 2, little-endian,
//! entries of tag (2 bytes), permissions (2) and id (4). The rules are those of Linux's fs/posix_acl.c.

pub(crate) use ferry_vfs::acl::{ACCESS, DEFAULT};
use ferry_vfs::acl::{ENTRY_BYTES, GROUP, GROUP_OBJ, MASK, OTHER, USER, USER_OBJ, VERSION};
use ferry_vfs::{Errno, Result};

const HEADER_BYTES: usize = size_of_val(&VERSION);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AclEntry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// A valid ACL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Acl(Vec<AclEntry>);

/// Restricts an entry to the three permission bits of one class of a mode, and the reverse.
fn restrict(perm: &mut u16, mode: &mut u32, shift: u32) {
    let class = u16::try_from((*mode >> shift) & 7).expect("three bits");
    *perm &= class;
    *mode &= !(7 << shift) | (u32::from(*perm) << shift);
}

impl Acl {
    /// Parses the attribute's value; `None` for one without entries, which means no ACL.
    pub(crate) fn parse(value: &[u8]) -> Result<Option<Self>> {
        let Some((header, rest)) = value.split_first_chunk::<HEADER_BYTES>() else {
            return if value.is_empty() { Ok(None) } else { Err(Errno::INVAL) };
        };
        if u32::from_le_bytes(*header) != VERSION {
            return Err(Errno::OPNOTSUPP);
        }
        let (chunks, []) = rest.as_chunks::<ENTRY_BYTES>() else { return Err(Errno::INVAL) };
        let entry = |&[t0, t1, p0, p1, i0, i1, i2, i3]: &[u8; ENTRY_BYTES]| AclEntry {
            tag: u16::from_le_bytes([t0, t1]),
            perm: u16::from_le_bytes([p0, p1]),
            id: u32::from_le_bytes([i0, i1, i2, i3]),
        };
        let acl = Self(chunks.iter().map(entry).collect());
        if acl.0.is_empty() {
            return Ok(None);
        }
        if acl.is_valid() { Ok(Some(acl)) } else { Err(Errno::INVAL) }
    }

    /// Checks the order (owner, users, group, groups, mask, others), and that named users or groups have a mask.
    fn is_valid(&self) -> bool {
        let mut last = 0;
        let mut named = false;
        for entry in &self.0 {
            let again = entry.tag == last && matches!(entry.tag, USER | GROUP);
            if entry.perm > 7 || !matches!(entry.tag, USER_OBJ | USER | GROUP_OBJ | GROUP | MASK | OTHER) {
                return false;
            }
            if entry.tag <= last && !again {
                return false;
            }
            named |= matches!(entry.tag, USER | GROUP);
            last = entry.tag;
        }
        let has = |tag| self.0.iter().any(|entry| entry.tag == tag);
        has(USER_OBJ) && has(GROUP_OBJ) && has(OTHER) && (has(MASK) || !named)
    }

    /// The attribute's value.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for entry in &self.0 {
            bytes.extend(entry.tag.to_le_bytes());
            bytes.extend(entry.perm.to_le_bytes());
            bytes.extend(entry.id.to_le_bytes());
        }
        bytes
    }

    fn perm_mut(&mut self, tag: u16) -> Option<&mut u16> {
        self.0.iter_mut().find(|entry| entry.tag == tag).map(|entry| &mut entry.perm)
    }

    fn perm(&self, tag: u16) -> Option<u32> {
        self.0.iter().find(|entry| entry.tag == tag).map(|entry| entry.perm.into())
    }

    /// Returns whether the ACL cannot be expressed by the permission bits of a mode.
    pub(crate) fn is_extended(&self) -> bool {
        self.0.iter().any(|entry| matches!(entry.tag, USER | GROUP | MASK))
    }

    /// Returns the mode with the permission bits of this access ACL; the group's bits are those of the mask.
    pub(crate) fn mode(&self, mode: u32) -> u32 {
        let group = self.perm(MASK).or(self.perm(GROUP_OBJ)).unwrap_or_default();
        let (user, other) = (self.perm(USER_OBJ).unwrap_or_default(), self.perm(OTHER).unwrap_or_default());
        (mode & !0o777) | (user << 6) | (group << 3) | other
    }

    /// Follows a chmod.
    pub(crate) fn chmod(&mut self, mode: u32) {
        let class = |shift: u32| u16::try_from((mode >> shift) & 7).expect("three bits");
        let group = if self.perm(MASK).is_some() { MASK } else { GROUP_OBJ };
        for (tag, shift) in [(USER_OBJ, 6), (group, 3), (OTHER, 0)] {
            if let Some(perm) = self.perm_mut(tag) {
                *perm = class(shift);
            }
        }
    }

    /// Turns a directory's default ACL into the access ACL of a file created in it with `mode`; returns the new mode.
    pub(crate) fn restrict_to(&mut self, mut mode: u32) -> u32 {
        let group = if self.perm(MASK).is_some() { MASK } else { GROUP_OBJ };
        for (tag, shift) in [(USER_OBJ, 6), (group, 3), (OTHER, 0)] {
            if let Some(perm) = self.perm_mut(tag) {
                restrict(perm, &mut mode, shift);
            }
        }
        mode
    }

    /// Returns whether a user who is neither the owner nor root has all permissions of `want` (rwx bits).
    pub(crate) fn allows(&self, want: u32, uid: u32, in_group: impl Fn(u32) -> bool, owning_group: u32) -> bool {
        let mask = self.perm(MASK).unwrap_or(7);
        if let Some(user) = self.0.iter().find(|entry| entry.tag == USER && entry.id == uid) {
            return u32::from(user.perm) & mask & want == want;
        }
        let mut member = false;
        for entry in &self.0 {
            let group = match entry.tag {
                GROUP_OBJ => owning_group,
                GROUP => entry.id,
                _ => continue,
            };
            if in_group(group) {
                member = true;
                if u32::from(entry.perm) & mask & want == want {
                    return true;
                }
            }
        }
        !member && self.perm(OTHER).unwrap_or_default() & want == want
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An ACL from `(tag, permissions, id)`.
    pub(crate) fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        Acl(entries.iter().map(|&(tag, perm, id)| AclEntry { tag, perm, id }).collect()).to_bytes()
    }

    const NOBODY: u32 = u32::MAX;

    #[test]
    fn accepts_the_same_acls_as_linux() {
        let minimal = [(USER_OBJ, 6, NOBODY), (GROUP_OBJ, 4, NOBODY), (OTHER, 4, NOBODY)];
        let named = [(USER_OBJ, 6, 0), (USER, 7, 9), (USER, 5, 8), (GROUP_OBJ, 4, 0), (MASK, 5, 0), (OTHER, 0, 0)];
        for good in [&minimal[..], &named] {
            let bytes = acl(good);
            assert_eq!(Acl::parse(&bytes).unwrap().unwrap().to_bytes(), bytes);
        }
        assert_eq!(Acl::parse(&[]), Ok(None));
        assert_eq!(Acl::parse(&2_u32.to_le_bytes()), Ok(None));
        assert_eq!(Acl::parse(&3_u32.to_le_bytes()), Err(Errno::OPNOTSUPP));
        let without = |index: usize| {
            let mut entries = named.to_vec();
            entries.remove(index);
            acl(&entries)
        };
        let mut twice = minimal.to_vec();
        twice.push(minimal[2]);
        let mut wild = minimal;
        wild[1].1 = 8;
        let mut odd = minimal;
        odd[1].0 = 3;
        let bad = [without(0), without(3), without(4), without(5), acl(&twice), acl(&wild), acl(&odd), vec![2, 0, 0]];
        for bytes in bad {
            assert_eq!(Acl::parse(&bytes), Err(Errno::INVAL), "{bytes:?}");
        }
    }

    #[test]
    fn mode_and_acl_follow_each_other() {
        let named = acl(&[(USER_OBJ, 7, 0), (USER, 7, 9), (GROUP_OBJ, 1, 0), (MASK, 5, 0), (OTHER, 2, 0)]);
        let mut named = Acl::parse(&named).unwrap().unwrap();
        assert!(named.is_extended());
        assert_eq!(named.mode(0o102_000), 0o102_752);
        named.chmod(0o134);
        assert_eq!(named.mode(0), 0o134);
        assert_eq!(named.perm(GROUP_OBJ), Some(1), "the mask takes the group's bits");
        let plain = acl(&[(USER_OBJ, 7, 0), (GROUP_OBJ, 5, 0), (OTHER, 5, 0)]);
        let mut plain = Acl::parse(&plain).unwrap().unwrap();
        assert!(!plain.is_extended());
        assert_eq!(plain.restrict_to(0o100_640), 0o100_640);
        assert_eq!(plain.mode(0), 0o640);
    }

    #[test]
    fn decides_as_linux_does() {
        let value =
            acl(&[(USER_OBJ, 7, 0), (USER, 6, 9), (GROUP_OBJ, 4, 0), (GROUP, 1, 20), (MASK, 5, 0), (OTHER, 2, 0)]);
        let acl = Acl::parse(&value).unwrap().unwrap();
        // user, groups, wanted, allowed; the owning group is 10.
        for (uid, groups, want, allowed) in [
            (9, &[][..], 4, true),
            (9, &[], 2, false), // the mask
            (8, &[10], 4, true),
            (8, &[10], 1, false),
            (8, &[10, 20], 1, true),
            (8, &[10, 20], 5, false), // no single entry has both
            (8, &[30], 2, true),
            (8, &[20], 2, false), // a member is no other
        ] {
            assert_eq!(acl.allows(want, uid, |gid| groups.contains(&gid), 10), allowed, "{uid} {groups:?} {want}");
        }
    }
}
