//! Copies from and to memory that may be truncated. The kernel copies, so a fault is an error, not SIGBUS.

use ferry_engine::Segment;

/// The most pieces per call (Linux `UIO_MAXIOV`).
const PIECES_MAX: usize = 1024;

/// Copies the pieces into `bytes`; returns how many bytes could be copied.
pub(crate) fn read(pieces: impl Iterator<Item = Segment>, bytes: &mut [u8]) -> usize {
    let target = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: the kernel checks every address; `bytes` is valid for writes of its length, and not used meanwhile.
    in_calls(pieces, target, |pid, local, remote, count| unsafe {
        libc::process_vm_readv(pid, local, 1, remote, count, 0)
    })
}

/// Copies `bytes` to the pieces; returns how much could be copied.
pub(crate) fn write(pieces: impl Iterator<Item = Segment>, bytes: &[u8]) -> usize {
    let source = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: the kernel checks every address; `bytes` is only read. The pieces are memory that the guest may write
    // to at any time, so no reference to any byte of it exists.
    in_calls(pieces, source, |pid, local, remote, count| unsafe {
        libc::process_vm_writev(pid, local, 1, remote, count, 0)
    })
}

fn in_calls(
    pieces: impl Iterator<Item = Segment>,
    whole: libc::iovec,
    call: impl Fn(libc::pid_t, *const libc::iovec, *const libc::iovec, libc::c_ulong) -> isize,
) -> usize {
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    let remote: Vec<_> =
        pieces.map(|piece| libc::iovec { iov_base: piece.address.cast(), iov_len: piece.bytes }).collect();
    let mut done = 0;
    for remote in remote.chunks(PIECES_MAX) {
        let wanted: usize = remote.iter().map(|piece| piece.iov_len).sum();
        let local =
            libc::iovec { iov_base: whole.iov_base.wrapping_byte_add(done), iov_len: wanted.min(whole.iov_len - done) };
        let count = libc::c_ulong::try_from(remote.len()).expect("it is a short list");
        let Ok(moved) = usize::try_from(call(pid, &raw const local, remote.as_ptr(), count)) else { return done };
        done += moved;
        if moved < wanted {
            return done;
        }
    }
    done
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use vm_memory::{FileOffset, MmapRegion};

    use super::*;
    use crate::memory::tests::memfd;

    #[test]
    fn missing_pages_are_not_fatal() {
        let file = memfd(8192);
        let map = MmapRegion::<()>::from_file(FileOffset::new(File::try_clone(&file).unwrap(), 0), 8192).unwrap();
        let piece = |offset: usize, bytes| Segment { address: map.as_ptr().wrapping_add(offset), bytes };
        assert_eq!(write([piece(10, 2), piece(4090, 10)].into_iter(), b"abcdefghijkl"), 12);
        let mut out = [0; 12];
        assert_eq!(read([piece(10, 2), piece(4090, 10)].into_iter(), &mut out), 12);
        assert_eq!(&out, b"abcdefghijkl");
        file.set_len(4096).unwrap();
        let mut out = [0; 12];
        assert_eq!(read([piece(10, 2), piece(5000, 10)].into_iter(), &mut out), 2);
        assert_eq!(&out[..3], b"ab\0");
        assert_eq!(write([piece(5000, 10)].into_iter(), b"abc"), 0);
        // An address that is not mapped.
        let nowhere = Segment { address: std::ptr::without_provenance_mut(4096), bytes: 8 };
        assert_eq!(read([nowhere].into_iter(), &mut out), 0);
    }

    #[test]
    fn many_pieces_take_several_calls() {
        let file = memfd(8192);
        let map = MmapRegion::<()>::from_file(FileOffset::new(file, 0), 8192).unwrap();
        let pieces = || (0..2500).map(|at| Segment { address: map.as_ptr().wrapping_add(2 * at), bytes: 1 });
        let bytes: Vec<u8> = (0..2500u32).map(|at| at.to_le_bytes()[0]).collect();
        assert_eq!(write(pieces(), &bytes), 2500);
        let mut out = vec![0; 2500];
        assert_eq!(read(pieces(), &mut out), 2500);
        assert!(out == bytes);
    }
}
