//! The memory that entries of a ring share with the kernel.

use std::ffi::c_void;
use std::ptr::NonNull;

use ferry_engine::Segment;
use ferry_wire::fuse::IN_HEADER_BYTES;
use ferry_wire::fuse::abi::{InHeader, UringEntInOut, UringReqHeader};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Payloads are aligned for files that are opened with `O_DIRECT`.
const PAGE_BYTES: usize = 4096;

/// What one entry has apart from its payload.
#[repr(C, align(64))]
struct Head {
    header: UringReqHeader,
    /// Where header and payload are, for REGISTER.
    vectors: [Segment; 2],
}

/// The memory of a few entries: their heads, then their payloads. Pages that are never used cost nothing.
#[derive(Debug)]
pub(super) struct Chunk {
    base: NonNull<u8>,
    bytes: usize,
    heads_bytes: usize,
    payload_bytes: usize,
    entries: usize,
}

// SAFETY: nothing in it belongs to a thread; access to an entry's memory is ordered by its lease.
unsafe impl Send for Chunk {}
// SAFETY: as above: all methods that touch the memory ask their callers to have it for themselves.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Maps memory for `entries` of `payload_bytes` each.
    ///
    /// # Errors
    /// No memory, or no address space (`ulimit -v`).
    pub(super) fn new(entries: usize, payload_bytes: usize) -> rustix::io::Result<Self> {
        let heads_bytes = (entries * size_of::<Head>()).next_multiple_of(PAGE_BYTES);
        let payload_bytes = payload_bytes.next_multiple_of(PAGE_BYTES);
        let bytes = heads_bytes + entries * payload_bytes;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping where the kernel likes.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        // Most requests use a page of their MiB: huge pages would take all of it.
        // SAFETY: the mapping is ours.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxNoHugepage) };
        let base = NonNull::new(base.cast::<u8>()).expect("mmap answers no null pointer");
        let chunk = Self { base, bytes, heads_bytes, payload_bytes, entries };
        for index in 0..entries {
            let vectors = [
                Segment { address: chunk.head(index).cast(), bytes: size_of::<UringReqHeader>() },
                Segment { address: chunk.payload(index), bytes: payload_bytes },
            ];
            // SAFETY: within the mapping, aligned, and nobody else knows of it yet.
            unsafe { (&raw mut (*chunk.head(index)).vectors).write(vectors) };
        }
        Ok(chunk)
    }

    pub(super) fn entries(&self) -> usize {
        self.entries
    }

    pub(super) fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    fn head(&self, index: usize) -> *mut Head {
        assert!(index < self.entries, "an entry of the chunk");
        // SAFETY: within the mapping, which is page-aligned.
        unsafe { self.base.as_ptr().add(index * size_of::<Head>()).cast() }
    }

    /// Where an entry's payload begins.
    pub(super) fn payload(&self, index: usize) -> *mut u8 {
        assert!(index < self.entries, "an entry of the chunk");
        // SAFETY: within the mapping.
        unsafe { self.base.as_ptr().add(self.heads_bytes + index * self.payload_bytes) }
    }

    /// The two vectors that REGISTER tells the kernel of.
    pub(super) fn vectors(&self, index: usize) -> *const Segment {
        // SAFETY: within the mapping.
        unsafe { (&raw const (*self.head(index)).vectors).cast() }
    }

    /// The request's header, and what the kernel says about the entry.
    ///
    /// # Safety
    /// The kernel has given the entry to us, and nobody else writes to it meanwhile.
    pub(super) unsafe fn request(&self, index: usize) -> (InHeader, UringEntInOut) {
        // SAFETY: within the mapping; any bytes are a valid value; the caller keeps others away.
        let header = unsafe { (&raw const (*self.head(index)).header).read() };
        let (in_header, _) = InHeader::read_from_prefix(&header.in_out).expect("128 bytes hold a header of 40");
        (in_header, header.ring_ent_in_out)
    }

    /// Copies out of the message, as it would come from /dev/fuse: header, the operation's structure of `op_bytes`,
    /// payload. Answers how many bytes there were.
    ///
    /// # Safety
    /// As for [`Self::request`].
    pub(super) unsafe fn copy_out(&self, index: usize, message: &Message, offset: usize, out: &mut [u8]) -> usize {
        let head = self.head(index);
        let payload_at = IN_HEADER_BYTES + message.op_bytes;
        // SAFETY: within the mapping.
        let (in_out, op_in) = unsafe { (&raw const (*head).header.in_out, &raw const (*head).header.op_in) };
        let pieces: [(usize, usize, *const u8); 3] = [
            (0, IN_HEADER_BYTES, in_out.cast()),
            (IN_HEADER_BYTES, message.op_bytes, op_in.cast()),
            (payload_at, message.payload_bytes, self.payload(index).cast_const()),
        ];
        let mut done = 0;
        for (start, bytes, from) in pieces {
            let at = offset + done;
            if at < start || at >= start + bytes || done == out.len() {
                continue;
            }
            let count = (start + bytes - at).min(out.len() - done);
            // SAFETY: `Message::new` has checked the lengths against the memory; `out` is apart from it; the caller
            // keeps others away.
            unsafe { std::ptr::copy_nonoverlapping(from.add(at - start), out.as_mut_ptr().add(done), count) };
            done += count;
        }
        done
    }

    /// Copies into the reply: its header, and right behind it the payload. Answers how many bytes there was room for.
    ///
    /// # Safety
    /// As for [`Self::request`].
    pub(super) unsafe fn copy_in(&self, index: usize, offset: usize, bytes: &[u8]) -> usize {
        let header_bytes = ferry_serve::HEADER_BYTES;
        let in_header = header_bytes.saturating_sub(offset).min(bytes.len());
        let (header, payload) = bytes.split_at(in_header);
        if in_header > 0 {
            // SAFETY: within the header's 128 bytes.
            unsafe {
                let to = (&raw mut (*self.head(index)).header.in_out).cast::<u8>().add(offset);
                std::ptr::copy_nonoverlapping(header.as_ptr(), to, in_header);
            }
        }
        let start = (offset + in_header).saturating_sub(header_bytes).min(self.payload_bytes);
        let count = payload.len().min(self.payload_bytes - start);
        // SAFETY: within the payload; the caller keeps others away.
        unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), self.payload(index).add(start), count) };
        in_header + count
    }

    /// Says how long the reply's payload is.
    ///
    /// # Safety
    /// As for [`Self::request`].
    pub(super) unsafe fn set_reply_payload(&self, index: usize, bytes: usize) {
        let bytes = u32::try_from(bytes.min(self.payload_bytes)).unwrap_or(0);
        // SAFETY: within the mapping; the caller keeps others away.
        unsafe { (&raw mut (*self.head(index)).header.ring_ent_in_out.payload_sz).write(bytes) };
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and by now neither a worker nor the kernel uses it.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), self.bytes) } {
            tracing::debug!("memory of a ring stays mapped: {error}");
        }
    }
}

/// How a message lies in its entry.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Message {
    /// Bytes of the operation's structure, in the head.
    pub(super) op_bytes: usize,
    /// Bytes in the payload.
    pub(super) payload_bytes: usize,
}

impl Message {
    /// Takes in what the kernel says, within the bounds of the memory.
    pub(super) fn new(header: &InHeader, entry: &UringEntInOut, payload_bytes_max: usize) -> Self {
        let op_bytes_max = UringReqHeader::new_zeroed().op_in.as_bytes().len();
        let payload_bytes = (entry.payload_sz as usize).min(payload_bytes_max);
        let op_bytes = (header.len as usize).saturating_sub(IN_HEADER_BYTES + payload_bytes).min(op_bytes_max);
        Self { op_bytes, payload_bytes }
    }

    /// Bytes of the whole message.
    pub(super) fn bytes(&self) -> usize {
        IN_HEADER_BYTES + self.op_bytes + self.payload_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_piece_and_a_reply_is_two() {
        let chunk = Chunk::new(3, 5000).unwrap();
        assert_eq!(chunk.payload_bytes(), 8192);
        let header = InHeader { len: 40 + 8 + 5, unique: 6, ..InHeader::ZERO };
        let mut whole = UringReqHeader::new_zeroed();
        whole.in_out[..40].copy_from_slice(header.as_bytes());
        whole.op_in[..8].copy_from_slice(b"operands");
        whole.ring_ent_in_out.payload_sz = 5;
        // SAFETY: nobody else knows the memory.
        unsafe {
            (&raw mut (*chunk.head(2)).header).write(whole);
            chunk.payload(2).copy_from_nonoverlapping(c"name".as_ptr().cast(), 5);
            let (header, entry) = chunk.request(2);
            let message = Message::new(&header, &entry, chunk.payload_bytes());
            assert_eq!((header.unique, message.op_bytes, message.bytes()), (6, 8, 53));
            let mut all = [0; 100];
            assert_eq!(chunk.copy_out(2, &message, 0, &mut all), 53);
            assert_eq!(&all[40..53], b"operandsname\0");
            let mut some = [0; 6];
            assert_eq!(chunk.copy_out(2, &message, 45, &mut some), 6);
            assert_eq!(&some, b"ndsnam");
            assert_eq!(chunk.copy_out(2, &message, 53, &mut some), 0);

            assert_eq!(chunk.copy_in(2, 8, b"12345678payload"), 15);
            chunk.set_reply_payload(2, 7);
            let (_, entry) = chunk.request(2);
            assert_eq!(entry.payload_sz, 7);
            let mut reply = [0; 7];
            reply.copy_from_slice(std::slice::from_raw_parts(chunk.payload(2), 7));
            assert_eq!(&reply, b"payload");
            assert_eq!(chunk.copy_in(2, 16 + 8190, b"abc"), 2, "no more than there is room for");
        }
    }

    #[test]
    fn lengths_that_make_no_sense_stay_within_the_memory() {
        for (len, payload_sz) in [(0, 0), (40, u32::MAX), (u32::MAX, 0), (u32::MAX, u32::MAX), (41, 100)] {
            let header = InHeader { len, ..InHeader::ZERO };
            let entry = UringEntInOut { payload_sz, ..UringEntInOut::ZERO };
            let message = Message::new(&header, &entry, 4096);
            assert!(message.op_bytes <= 128 && message.payload_bytes <= 4096, "{len} {payload_sz}: {message:?}");
        }
    }
}
