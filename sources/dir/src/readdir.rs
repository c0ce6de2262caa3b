//! Directory listings.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ferry_vfs::sync::lock;
use ferry_vfs::{Caller, DirItem, DirOutput, DirRange, Errno, FileType, Result};
use rustix::fs::SeekFrom;

use crate::Dir;
use crate::io::Open;
use crate::resolve::kind;
use crate::sys;

/// The buffer of one getdents64 in bytes: libc's own choice, about a thousand names.
const BUFFER_BYTES: usize = 32 * 1024;
/// `struct linux_dirent64` up to its name: ino, offset, length, type.
const HEADER_BYTES: usize = 19;

/// The position of a directory handle. Offsets are the host's (`d_off`), which stay valid while other names come and
/// go. Names that were read but not delivered stay in the buffer.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    buffer: Vec<u8>,
    at: usize,
    len: usize,
    /// The offset of the next name in the buffer, or of the descriptor.
    next: u64,
}

/// One `struct linux_dirent64`.
#[derive(Clone, Copy, Debug)]
struct Dirent<'a> {
    ino: u64,
    next: u64,
    kind: FileType,
    name: &'a [u8],
    bytes: usize,
}

impl<'a> Dirent<'a> {
    fn parse(buffer: &'a [u8]) -> Result<Self> {
        let header: &[u8; HEADER_BYTES] = buffer.first_chunk().ok_or(Errno::IO)?;
        let [i0, i1, i2, i3, i4, i5, i6, i7, o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, kind] = *header;
        let bytes = usize::from(u16::from_ne_bytes([l0, l1]));
        let name = buffer.get(HEADER_BYTES..bytes).ok_or(Errno::IO)?;
        let end = name.iter().position(|byte| *byte == 0).ok_or(Errno::IO)?;
        let kind = match kind {
            libc::DT_REG => FileType::RegularFile,
            libc::DT_DIR => FileType::Directory,
            libc::DT_LNK => FileType::Symlink,
            libc::DT_CHR => FileType::CharacterDevice,
            libc::DT_BLK => FileType::BlockDevice,
            libc::DT_FIFO => FileType::Fifo,
            libc::DT_SOCK => FileType::Socket,
            _ => FileType::Unknown,
        };
        Ok(Self {
            ino: u64::from_ne_bytes([i0, i1, i2, i3, i4, i5, i6, i7]),
            next: u64::from_ne_bytes([o0, o1, o2, o3, o4, o5, o6, o7]),
            kind,
            name: &name[..end],
            bytes,
        })
    }
}

/// The names in a directory, from its descriptor's position.
#[derive(Debug, Default)]
pub(crate) struct Names {
    buffer: Vec<u8>,
    at: usize,
    len: usize,
}

impl Names {
    /// Returns the next name, with its number and type.
    pub(crate) fn next(&mut self, dir: BorrowedFd<'_>) -> Result<Option<(u64, FileType, &[u8])>> {
        if self.at == self.len {
            self.buffer.resize(BUFFER_BYTES, 0);
            (self.at, self.len) = (0, sys::getdents(dir, &mut self.buffer)?);
            if self.len == 0 {
                return Ok(None);
            }
        }
        let Dirent { ino, kind, name, bytes, .. } = Dirent::parse(&self.buffer[self.at..self.len])?;
        self.at += bytes;
        Ok(Some((ino, kind, name)))
    }
}

impl Stream {
    /// Seeks to an offset that was delivered earlier.
    fn seek(&mut self, open: &Open, offset: u64) -> Result<()> {
        if offset != self.next {
            match rustix::fs::seek(open.file.as_fd(), SeekFrom::Start(offset)) {
                // As getdents64: in ext4, a directory that was removed has no such place.
                Err(rustix::io::Errno::INVAL) if rustix::fs::fstat(&open.file)?.st_nlink == 0 => {
                    return Err(Errno::NOENT);
                }
                sought => sought?,
            };
            (self.at, self.len, self.next) = (0, 0, offset);
        }
        Ok(())
    }

    /// Returns the next name without advancing.
    fn peek(&mut self, open: &Open) -> Result<Option<Dirent<'_>>> {
        if self.at == self.len {
            self.buffer.resize(BUFFER_BYTES, 0);
            (self.at, self.len) = (0, 0);
            self.len = sys::getdents(open.file.as_fd(), &mut self.buffer)?;
            if self.len == 0 {
                return Ok(None);
            }
        }
        Dirent::parse(&self.buffer[self.at..self.len]).map(Some)
    }
}

impl Dir {
    pub(crate) fn readdir(&self, cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        let open: Arc<Open> = self.handles.get(cx.session, at.ino, at.handle)?;
        let mut stream = lock(open.stream.as_ref().ok_or(Errno::NOTDIR)?);
        stream.seek(&open, at.offset)?;
        let fd = if at.plus { Some(self.path_fd(&open.inode)?) } else { None };
        let mut pushed = false;
        loop {
            let dirent = match stream.peek(&open) {
                Ok(Some(dirent)) => dirent,
                Ok(None) => break,
                // Delivered entries carry references, so the error comes with the next call.
                Err(_) if pushed => break,
                Err(error) => return Err(error),
            };
            if !out.fits(dirent.name) {
                break;
            }
            let (bytes, next) = (dirent.bytes, dirent.next);
            pushed |= self.push(&open, &dirent, fd.as_deref(), out);
            stream.at += bytes;
            stream.next = next;
        }
        Ok(())
    }

    /// Delivers one name; returns false if it is gone.
    fn push(
        &self,
        open: &Open,
        dirent: &Dirent<'_>,
        fd: Option<&crate::table::PathFd>,
        out: &mut dyn DirOutput,
    ) -> bool {
        let mut item = DirItem { ino: dirent.ino, next: dirent.next, kind: dirent.kind, name: dirent.name };
        if dirent.name == b".." && open.inode.ino == ferry_vfs::Ino::ROOT {
            // The client must not see what is above the share.
            item.ino = open.inode.found.key.ino;
        }
        let is_wanted = fd.is_some() && !matches!(dirent.name, b"." | b"..") && out.wants(dirent.name, dirent.kind);
        let Some(fd) = fd.filter(|_| is_wanted) else {
            out.push(&item, None);
            return true;
        };
        match self.find(&open.inode, fd.as_fd(), dirent.name) {
            Ok((inode, st)) => {
                item.ino = st.stx_ino;
                item.kind = kind(&st);
                out.push(&item, Some(&self.entry(&inode, &st)));
            }
            // Removed since the directory was read.
            Err(Errno::NOENT) => return false,
            // The name exists, so it is listed. The client looks it up and gets the error then.
            Err(error) => {
                tracing::debug!(name = %dirent.name.escape_ascii(), %error, "readdirplus");
                out.push(&item, None);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_records_are_an_error() {
        let mut record = vec![0; 24];
        record[16] = 24;
        record[18] = libc::DT_REG;
        record[19] = b'x';
        let dirent = Dirent::parse(&record).unwrap();
        assert_eq!((dirent.name, dirent.kind, dirent.bytes), (&b"x"[..], FileType::RegularFile, 24));
        for len in 0..24 {
            assert!(Dirent::parse(&record[..len]).is_err());
        }
        record[16] = 18;
        assert!(Dirent::parse(&record).is_err());
        record[16] = 24;
        record[19..].fill(b'x');
        assert!(Dirent::parse(&record).is_err());
    }
}
