//! Extended attributes, ACLs among them.

use ferry_vfs::{Caller, Change, Errno, FileType, Ino, Result, XattrFlags};

use super::acl::{self, Acl};
use super::attrs::{S_ISGID, now_after};
use super::node::{Node, State};
use super::space::{SpaceAmount, space_of_xattrs, xattr_bytes};
use super::{Tree, log};
use crate::store::{Meta, Record, Store};

/// The longest name (`XATTR_NAME_MAX`).
const NAME_BYTES_MAX: usize = 255;
/// The largest value (`XATTR_SIZE_MAX`).
const VALUE_BYTES_MAX: usize = 64 << 10;
/// The longest list of names that a client can request, in bytes (`XATTR_LIST_MAX`).
const LIST_BYTES_MAX: usize = 64 << 10;
/// The maximum total of names and values of an inode in bytes: 16 of the largest values.
const INODE_BYTES_MAX: usize = 1 << 20;

pub(crate) const CAPABILITY: &[u8] = b"security.capability";

/// The extended attributes of an inode, in the order of their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Xattrs {
    all: Vec<(Bytes, Bytes)>,
    /// The lengths of all names and values, in bytes.
    name_bytes: usize,
    value_bytes: usize,
}

type Bytes = Box<[u8]>;

impl Xattrs {
    fn find(&self, name: &[u8]) -> std::result::Result<usize, usize> {
        self.all.binary_search_by(|(known, _)| (**known).cmp(name))
    }

    pub(crate) fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.find(name).ok().map(|index| &*self.all[index].1)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.all.iter().map(|(name, value)| (&**name, &**value))
    }

    pub(crate) fn set(&mut self, name: &[u8], value: &[u8]) {
        self.value_bytes += value.len();
        match self.find(name) {
            Ok(index) => {
                let before = std::mem::replace(&mut self.all[index].1, value.into());
                self.value_bytes -= before.len();
            }
            Err(index) => {
                self.name_bytes += name.len();
                self.all.insert(index, (name.into(), value.into()));
            }
        }
    }

    fn remove(&mut self, name: &[u8]) {
        if let Ok(index) = self.find(name) {
            let (name, value) = self.all.remove(index);
            self.name_bytes -= name.len();
            self.value_bytes -= value.len();
        }
    }

    /// Returns whether a value of this length fits under this name.
    pub(crate) fn has_room(&self, name: &[u8], value_bytes: usize) -> bool {
        let (count, names, values) = match self.get(name) {
            Some(value) => (self.all.len() - 1, self.name_bytes - name.len(), self.value_bytes - value.len()),
            None => (self.all.len(), self.name_bytes, self.value_bytes),
        };
        // The names of a list end with a zero.
        let names = names + count + name.len() + 1;
        names <= LIST_BYTES_MAX && names + values + value_bytes <= INODE_BYTES_MAX
    }

    /// Returns the space that they take, in bytes.
    pub(crate) fn space(&self) -> u64 {
        space_of_xattrs(self.all.len(), self.name_bytes + self.value_bytes)
    }
}

/// The operations allowed for an attribute of this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    AccessAcl,
    DefaultAcl,
    Plain,
}

fn class(name: &[u8], kind: FileType) -> Result<Class> {
    if name.len() > NAME_BYTES_MAX {
        return Err(Errno::RANGE);
    }
    if name == acl::ACCESS || name == acl::DEFAULT {
        return match kind {
            FileType::Symlink => Err(Errno::OPNOTSUPP),
            _ if name == acl::ACCESS => Ok(Class::AccessAcl),
            _ => Ok(Class::DefaultAcl),
        };
    }
    let known = [&b"user."[..], b"trusted.", b"security."];
    if known.iter().any(|prefix| name.len() > prefix.len() && name.starts_with(prefix)) {
        Ok(Class::Plain)
    } else {
        Err(Errno::OPNOTSUPP)
    }
}

/// User attributes are allowed for files and directories only, as on Linux.
fn takes(name: &[u8], kind: FileType) -> bool {
    !name.starts_with(b"user.") || matches!(kind, FileType::RegularFile | FileType::Directory)
}

impl<S: Store> State<S> {
    pub(crate) fn xattr(&self, name: &[u8]) -> Option<&[u8]> {
        self.xattrs.as_ref().and_then(|xattrs| xattrs.get(name))
    }

    /// Sets or removes an attribute, without any check.
    pub(crate) fn put_xattr(&mut self, name: &[u8], value: Option<&[u8]>) {
        match value {
            Some(value) => self.xattrs.get_or_insert_default().set(name, value),
            None => {
                if let Some(xattrs) = &mut self.xattrs {
                    xattrs.remove(name);
                    if xattrs.all.is_empty() {
                        self.xattrs = None;
                    }
                }
            }
        }
    }

    /// Returns the access ACL; stored values were parsed before.
    pub(crate) fn access_acl(&self) -> Option<Acl> {
        self.xattr(acl::ACCESS).and_then(|value| Acl::parse(value).ok().flatten())
    }
}

impl<S: Store> Tree<S> {
    /// Logs and applies a change of an attribute together with the inode's other attributes.
    pub(crate) fn change_xattr(
        &self,
        node: &Node<S>,
        state: &mut State<S>,
        (name, value): (&[u8], Option<&[u8]>),
        meta: Meta,
    ) -> Result<()> {
        let bytes = |value: Option<&[u8]>| value.map_or(0, |value| xattr_bytes(name, value));
        let (before, after) = (bytes(state.xattr(name)), bytes(value));
        let reserved = self.reserve(SpaceAmount { inodes: 0, bytes: after.saturating_sub(before) })?;
        log(&self.store, || Record::Xattr { ino: node.ino, name, value, meta })?;
        reserved.keep();
        state.put_xattr(name, value);
        self.taken.remove(SpaceAmount { inodes: 0, bytes: before.saturating_sub(after) });
        state.meta = meta;
        Ok(())
    }

    pub(crate) fn getxattr(&self, _: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let node = self.table.get(ino)?;
        class(name, node.kind)?;
        node.read().xattr(name).map(<[u8]>::to_vec).ok_or(Errno::NODATA)
    }

    pub(crate) fn listxattr(&self, cx: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        let node = self.table.get(ino)?;
        let state = node.read();
        let mut list = Vec::new();
        for (name, _) in state.xattrs.iter().flat_map(|xattrs| xattrs.iter()) {
            list.extend_from_slice(name);
            list.push(0);
        }
        Ok(cx.visible_xattrs(list))
    }

    pub(crate) fn setxattr(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
        clear_sgid: bool,
    ) -> Result<()> {
        let _change = self.begin()?;
        let node = self.table.get(ino)?;
        let class = class(name, node.kind)?;
        if !takes(name, node.kind) {
            return Err(Errno::PERM);
        }
        if value.len() > VALUE_BYTES_MAX {
            return Err(Errno::TOOBIG);
        }
        let mut state = node.write_live()?;
        let known = state.xattr(name).is_some();
        if flags.contains(XattrFlags::CREATE) && known {
            return Err(Errno::EXIST);
        }
        if flags.contains(XattrFlags::REPLACE) && !known {
            return Err(Errno::NODATA);
        }
        if !state.xattrs.as_deref().unwrap_or(&Xattrs::default()).has_room(name, value.len()) {
            return Err(Errno::NOSPC);
        }
        self.sync_attr(&node, &mut state)?;
        let mut meta = Meta { ctime: now_after::<S>([state.meta.ctime]), ..state.meta };
        let value = match class {
            Class::Plain => Some(value),
            Class::DefaultAcl => {
                let acl = Acl::parse(value)?;
                if acl.is_some() && !node.is_dir() {
                    return Err(Errno::ACCESS);
                }
                acl.map(|_| value)
            }
            Class::AccessAcl => {
                let acl = Acl::parse(value)?;
                if let Some(acl) = &acl {
                    meta.mode = acl.mode(meta.mode);
                    if clear_sgid {
                        meta.mode &= !S_ISGID;
                    }
                }
                // An ACL that is equivalent to a mode is stored as the mode.
                acl.filter(Acl::is_extended).map(|_| value)
            }
        };
        self.change_xattr(&node, &mut state, (name, value), meta)?;
        drop(state);
        self.changes.publish(cx.session, || Change::Attr { ino });
        Ok(())
    }

    pub(crate) fn removexattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<()> {
        let _change = self.begin()?;
        let node = self.table.get(ino)?;
        let class = class(name, node.kind)?;
        let mut state = node.write_live()?;
        if state.xattr(name).is_none() {
            // On Linux, removing a missing ACL is not an error.
            return if class == Class::Plain { Err(Errno::NODATA) } else { Ok(()) };
        }
        self.sync_attr(&node, &mut state)?;
        let meta = Meta { ctime: now_after::<S>([state.meta.ctime]), ..state.meta };
        self.change_xattr(&node, &mut state, (name, None), meta)?;
        drop(state);
        self.changes.publish(cx.session, || Change::Attr { ino });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sums_match_the_attributes(
            steps in prop::collection::vec(("[a-c]{1,3}", prop::option::of(0..9000_usize)), 1..60),
        ) {
            let mut xattrs = Xattrs::default();
            for (name, value) in &steps {
                let name = name.as_bytes();
                match value {
                    Some(bytes) => xattrs.set(name, &vec![0; *bytes]),
                    None => xattrs.remove(name),
                }
                let space: u64 = xattrs.iter().map(|(name, value)| xattr_bytes(name, value)).sum();
                prop_assert_eq!(xattrs.space(), space);
                let (new, bytes) = (&b"b"[..], INODE_BYTES_MAX / 2);
                let others = xattrs.iter().filter(|(known, _)| *known != new);
                let all: usize = others.map(|(name, value)| name.len() + 1 + value.len()).sum();
                prop_assert_eq!(xattrs.has_room(new, bytes), all + 2 + bytes <= INODE_BYTES_MAX);
            }
        }
    }
}
