//! Formats operations for the request log.

use std::fmt;

use ferry_engine::requests::{Access, Mode, Text, of_data, setattr};
use ferry_vfs::{DirRange, IoRange};
use ferry_wire::fuse::Operation;

/// An operation whose `Debug` is for people: names and numbers, without what only programs can use.
pub(crate) struct RequestText<'a>(pub(crate) &'a Operation<'a>);

impl fmt::Debug for RequestText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self.0 {
            Operation::Lookup { name } => write!(f, "Lookup {name:?}"),
            Operation::Forget { count } => write!(f, "Forget {count} times"),
            Operation::BatchForget { .. } => write!(f, "BatchForget"),
            Operation::Getattr { .. } => write!(f, "Getattr"),
            Operation::Statx { .. } => write!(f, "Statx"),
            Operation::Setattr { ref set, .. } => setattr(f, set),
            Operation::Symlink { name, target } => write!(f, "Symlink {name:?} to {:?}", Text(target)),
            Operation::Mknod { name, ref new } => write!(f, "Mknod {name:?}{}", Mode(new.mode & !new.umask)),
            Operation::Mkdir { name, ref new } => write!(f, "Mkdir {name:?}{}", Mode(new.mode & !new.umask)),
            Operation::Unlink { name } => write!(f, "Unlink {name:?}"),
            Operation::Rmdir { name } => write!(f, "Rmdir {name:?}"),
            Operation::Rename { name, new_name, .. } => write!(f, "Rename {name:?} to {new_name:?}"),
            Operation::Link { name, .. } => write!(f, "Link {name:?}"),
            Operation::Open { flags, .. } => write!(f, "Open{}", Access(flags)),
            Operation::Opendir { .. } => write!(f, "Opendir"),
            Operation::Create { name, ref new, flags, .. } => {
                write!(f, "Create {name:?}{}{}", Mode(new.mode & !new.umask), Access(flags))
            }
            Operation::Tmpfile { ref new, .. } => write!(f, "Tmpfile{}", Mode(new.mode & !new.umask)),
            Operation::Read(IoRange { offset, len, .. }) => write!(f, "Read {len} bytes from byte {offset}"),
            Operation::Write { range: IoRange { offset, len, .. }, .. } => {
                write!(f, "Write {len} bytes from byte {offset}")
            }
            Operation::Fallocate { offset, len, flags, .. } => {
                write!(f, "Fallocate {len} bytes from byte {offset} {flags:?}")
            }
            Operation::Lseek { offset, seek, .. } => write!(f, "Lseek {offset} {seek:?}"),
            Operation::Flush { .. } => write!(f, "Flush"),
            Operation::Release(_) => write!(f, "Release"),
            Operation::Fsync { data_only, .. } => write!(f, "Fsync{}", of_data(data_only)),
            Operation::Readdir { at: DirRange { offset, .. }, .. } => write!(f, "Readdir from {offset}"),
            Operation::Releasedir(_) => write!(f, "Releasedir"),
            Operation::Fsyncdir { data_only, .. } => write!(f, "Fsyncdir{}", of_data(data_only)),
            Operation::Setxattr { name, value, .. } => {
                write!(f, "Setxattr {:?} of {} bytes", Text(name), value.len())
            }
            Operation::Getxattr { name, .. } => write!(f, "Getxattr {:?}", Text(name)),
            Operation::Listxattr { .. } => write!(f, "Listxattr"),
            Operation::Removexattr { name } => write!(f, "Removexattr {:?}", Text(name)),
            ref other => write!(f, "{other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::{CreateArgs, Handle, Ino, Name, OFlags, SetAttr};

    use super::*;

    #[test]
    fn operations_are_read_by_people() {
        let name = Name::new(b"a b").expect("a name");
        let range = IoRange {
            ino: Ino(7),
            handle: Handle(8),
            offset: 4096,
            len: 100,
            flags: OFlags::RDWR,
            clear_privileges: false,
            owner: Some(9),
        };
        let set = SetAttr { mode: Some(0o100_644), size: Some(5), ..SetAttr::default() };
        let new = CreateArgs { mode: 0o100_666, umask: 0o022, rdev: 0 };
        for (operation, text) in [
            (Operation::Lookup { name }, "Lookup \"a b\""),
            (Operation::Read(range), "Read 100 bytes from byte 4096"),
            (Operation::Write { range, cached: false }, "Write 100 bytes from byte 4096"),
            (Operation::Setattr { handle: None, owner: None, set }, "Setattr mode 0644 size 5"),
            (Operation::Mkdir { name, new }, "Mkdir \"a b\" mode 0644"),
            (Operation::Getxattr { name: b"user.x", bytes_max: 9 }, "Getxattr \"user.x\""),
            (Operation::Symlink { name, target: b"../t" }, "Symlink \"a b\" to \"../t\""),
            (Operation::Statfs, "Statfs"),
        ] {
            assert_eq!(format!("{:?}", RequestText(&operation)), text);
        }
    }
}
