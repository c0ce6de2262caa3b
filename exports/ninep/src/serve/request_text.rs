//! Formats requests for the request log.

use std::fmt;

use ferry_engine::requests::{Access, Mode, Text, of_data, setattr};
use ferry_vfs::LockKind;
use ferry_wire::ninep::{LockRequest, Request, Step, Steps, WriteHead};

/// The last byte of a lock that reaches to the end of any file.
const END: u64 = i64::MAX as u64;

/// Formats a request for people: its operation with names and numbers, without the client's fids.
pub(super) struct RequestText<'a>(pub(super) &'a Request<'a>);

impl fmt::Debug for RequestText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self.0 {
            Request::Version { msize, version } => {
                write!(f, "Version {:?} with messages of {msize} bytes", Text(version))
            }
            Request::Auth { tree, .. } => write!(f, "Auth for {:?}", Text(tree)),
            Request::Attach { ref user, tree, .. } => {
                write!(f, "Attach {:?} as ", Text(tree))?;
                match user.uid {
                    Some(uid) => write!(f, "user {uid}"),
                    None => write!(f, "{:?}", Text(user.name)),
                }
            }
            Request::Flush { old } => write!(f, "Flush of the request with tag {}", old.0),
            Request::Walk { steps, .. } => walk(f, &steps),
            Request::Read { offset, bytes_max, .. } => write!(f, "Read {bytes_max} bytes from byte {offset}"),
            Request::Write { offset, data, .. } => write(f, offset, data.len()),
            Request::Clunk { .. } => write!(f, "Clunk"),
            Request::Remove { .. } => write!(f, "Remove"),
            Request::Statfs { .. } => write!(f, "Statfs"),
            Request::Open { flags, .. } => write!(f, "Open{}", Access(flags)),
            Request::Create { name, flags, mode, .. } => write!(f, "Create {name:?}{}{}", Mode(mode), Access(flags)),
            Request::Symlink { name, target, .. } => write!(f, "Symlink {name:?} to {:?}", Text(target)),
            Request::Mknod { name, mode, .. } => write!(f, "Mknod {name:?}{}", Mode(mode)),
            Request::Rename { name, .. } => write!(f, "Rename to {name:?}"),
            Request::Readlink { .. } => write!(f, "Readlink"),
            Request::Getattr { .. } => write!(f, "Getattr"),
            Request::Setattr { ref set, ctime, .. } => {
                setattr(f, set)?;
                if ctime { write!(f, " ctime") } else { Ok(()) }
            }
            Request::Xattrwalk { name: b"", .. } => write!(f, "Xattrwalk of all names"),
            Request::Xattrwalk { name, .. } => write!(f, "Xattrwalk {:?}", Text(name)),
            Request::Xattrcreate { name, bytes, .. } => write!(f, "Xattrcreate {:?} of {bytes} bytes", Text(name)),
            Request::Readdir { offset, .. } => write!(f, "Readdir from {offset}"),
            Request::Fsync { data_only, .. } => write!(f, "Fsync{}", of_data(data_only)),
            Request::Lock { ref lock, wait, .. } => {
                write!(f, "Lock ")?;
                range(f, lock)?;
                if wait { write!(f, ", waits") } else { Ok(()) }
            }
            Request::Getlock { ref lock, .. } => {
                write!(f, "Getlock ")?;
                range(f, lock)
            }
            Request::Link { name, .. } => write!(f, "Link {name:?}"),
            Request::Mkdir { name, mode, .. } => write!(f, "Mkdir {name:?}{}", Mode(mode)),
            Request::Renameat { name, new_name, .. } => write!(f, "Renameat {name:?} to {new_name:?}"),
            Request::Unlinkat { name, is_dir: false, .. } => write!(f, "Unlinkat {name:?}"),
            Request::Unlinkat { name, is_dir: true, .. } => write!(f, "Unlinkat of the directory {name:?}"),
            Request::Events { .. } => write!(f, "Events"),
        }
    }
}

/// Formats a write whose data stays with its carrier.
pub(super) struct WriteText<'a>(pub(super) &'a WriteHead);

impl fmt::Debug for WriteText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write(f, self.0.offset, self.0.bytes as usize)
    }
}

fn write(f: &mut fmt::Formatter<'_>, offset: u64, bytes: usize) -> fmt::Result {
    write!(f, "Write {bytes} bytes from byte {offset}")
}

/// Returns the walked path; the file itself if there are no steps.
fn walk(f: &mut fmt::Formatter<'_>, steps: &Steps<'_>) -> fmt::Result {
    write!(f, "Walk")?;
    for step in steps.iter() {
        match step {
            Step::Parent => write!(f, " \"..\"")?,
            Step::Child(name) => write!(f, " {name:?}")?,
        }
    }
    Ok(())
}

fn range(f: &mut fmt::Formatter<'_>, lock: &LockRequest<'_>) -> fmt::Result {
    let kind = match lock.kind {
        LockKind::Read => "for reading",
        LockKind::Write => "for writing",
        LockKind::Unlock => "unlock",
    };
    write!(f, "{kind}, from byte {} to ", lock.start)?;
    match lock.end {
        END => write!(f, "the end"),
        end => write!(f, "byte {end}"),
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::{Name, OFlags, SetAttr};
    use ferry_wire::ninep::{Fid, Tag, User};

    use super::*;

    #[test]
    fn requests_are_read_by_people() {
        let (fid, dir, new_fid) = (Fid(7), Fid(8), Fid(9));
        let name = Name::new(b"a \x1b[2J\nb").expect("a name");
        let mut buffer = Vec::new();
        let steps = Steps::write(&mut buffer, [Step::Child(name), Step::Parent]);
        let set = SetAttr { mode: Some(0o100_644), size: Some(5), ..SetAttr::default() };
        let lock = LockRequest { kind: LockKind::Write, start: 10, end: END, pid: 1, client: b"c" };
        let read = LockRequest { kind: LockKind::Read, start: 0, end: 9, ..lock };
        for (request, text) in [
            (
                Request::Version { msize: 8192, version: b"9P2000.L" },
                "Version \"9P2000.L\" with messages of 8192 bytes",
            ),
            (
                Request::Attach { fid, afid: Fid::NONE, user: User { name: b"", uid: Some(5) }, tree: b"\x1bt" },
                r#"Attach "\u{1b}t" as user 5"#,
            ),
            (Request::Flush { old: Tag(3) }, "Flush of the request with tag 3"),
            (Request::Walk { fid, new_fid, steps }, r#"Walk "a \x1b[2J\nb" "..""#),
            (Request::Walk { fid, new_fid, steps: Steps::default() }, "Walk"),
            (Request::Write { fid, offset: 4096, data: b"data" }, "Write 4 bytes from byte 4096"),
            (Request::Open { fid, flags: OFlags::RDONLY }, "Open for reading"),
            (Request::Setattr { fid, set, ctime: true }, "Setattr mode 0644 size 5 ctime"),
            (Request::Mkdir { dir, name, mode: 0o40_755, gid: 0 }, r#"Mkdir "a \x1b[2J\nb" mode 0755"#),
            (Request::Xattrwalk { fid, new_fid, name: b"" }, "Xattrwalk of all names"),
            (Request::Xattrwalk { fid, new_fid, name: b"user.x" }, "Xattrwalk \"user.x\""),
            (
                Request::Lock { fid, lock, wait: true, reclaim: false },
                "Lock for writing, from byte 10 to the end, waits",
            ),
            (Request::Getlock { fid, lock: read }, "Getlock for reading, from byte 0 to byte 9"),
            (Request::Unlinkat { dir, name, is_dir: true }, r#"Unlinkat of the directory "a \x1b[2J\nb""#),
        ] {
            assert_eq!(format!("{:?}", RequestText(&request)), text);
        }
        let head = WriteHead { fid, offset: 1, bytes: 2 };
        assert_eq!(format!("{:?}", WriteText(&head)), "Write 2 bytes from byte 1");
    }
}
