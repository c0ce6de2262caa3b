//! The memory that ring entries share with the kernel.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use ferry_engine::Segment;
use ferry_wire::fuse::IN_HEADER_BYTES;
use ferry_wire::fuse::abi::{InHeader, UringEntInOut, UringReqHeader};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap_anonymous, mremap, mremap_fixed, munmap};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::machine::page_bytes;

/// What one entry has apart from its payload.
#[repr(C, align(64))]
struct Head {
    header: UringReqHeader,
    /// Where header and payload are, for REGISTER.
    vectors: [Segment; 2],
}

/// The memory of a few entries: their heads, then their payloads. Pages that are never used cost nothing.
///
/// Each payload is mapped twice. The kernel permanently knows the first address; transfers use the second. So a
/// transfer can be abandoned: the first address gets other pages ([`Chunk::replace`]).
#[derive(Debug)]
pub(super) struct Chunk {
    base: NonNull<u8>,
    bytes: usize,
    heads_bytes: usize,
    payload_bytes: usize,
    /// For each entry, the second address of its payload.
    seconds: Box<[AtomicPtr<u8>]>,
}

/// A mapping of so many bytes, which goes when this is dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: nothing in it belongs to a thread, and it gives no access to the memory.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> rustix::io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping where the kernel likes.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        // Most requests use a page of their MiB: huge pages would take all of it.
        // SAFETY: the mapping is ours.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxNoHugepage) };
        Ok(Self { base: base.cast(), bytes })
    }

    /// Maps the same pages once more, from an address that is mapped.
    ///
    /// # Safety
    /// There are `bytes` of one shared mapping of ours at `from`.
    unsafe fn again(from: *mut u8, bytes: usize) -> rustix::io::Result<Self> {
        // SAFETY: an old size of 0 leaves the mapping as it is and makes another one of its pages (mremap(2)).
        let base = unsafe { mremap(from.cast(), 0, bytes, MremapFlags::MAYMOVE) }?;
        Ok(Self { base: base.cast(), bytes })
    }

    /// Returns the address, for a later unmap.
    fn into_raw(self) -> *mut u8 {
        std::mem::ManuallyDrop::new(self).base
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever used it has ended (see where it is made).
        let unmapped = unsafe { munmap(self.base.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "a mapping of ours: {unmapped:?}");
    }
}

/// Other memory for a payload, at both its addresses.
#[derive(Debug)]
pub(super) struct Spare {
    first: Mapping,
    second: Mapping,
}

// SAFETY: nothing in it belongs to a thread; access to an entry's memory is ordered by its lease.
unsafe impl Send for Chunk {}
// SAFETY: as above: all methods that touch the memory ask their callers to have it for themselves.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Maps memory for `entries` of `payload_bytes` each.
    pub(super) fn new(entries: usize, payload_bytes: usize) -> rustix::io::Result<Self> {
        let heads_bytes = (entries * size_of::<Head>()).next_multiple_of(page_bytes());
        let payload_bytes = payload_bytes.next_multiple_of(page_bytes());
        let bytes = heads_bytes + entries * payload_bytes;
        let mapping = Mapping::new(bytes)?;
        let second = |index: usize| {
            // SAFETY: each payload is a part of the mapping.
            unsafe { Mapping::again(mapping.base.add(heads_bytes + index * payload_bytes), payload_bytes) }
        };
        let seconds: Vec<Mapping> = (0..entries).map(second).collect::<Result<_, _>>()?;
        let seconds = seconds.into_iter().map(|second| AtomicPtr::new(second.into_raw())).collect();
        let base = NonNull::new(mapping.into_raw()).expect("mmap returns no null pointer");
        let chunk = Self { base, bytes, heads_bytes, payload_bytes, seconds };
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
        self.seconds.len()
    }

    pub(super) fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    fn head(&self, index: usize) -> *mut Head {
        assert!(index < self.entries(), "an entry of the chunk");
        // SAFETY: within the mapping, which is page-aligned.
        unsafe { self.base.as_ptr().add(index * size_of::<Head>()).cast() }
    }

    /// Where an entry's payload begins.
    pub(super) fn payload(&self, index: usize) -> *mut u8 {
        assert!(index < self.entries(), "an entry of the chunk");
        // SAFETY: within the mapping.
        unsafe { self.base.as_ptr().add(self.heads_bytes + index * self.payload_bytes) }
    }

    /// Where transfers move data into and out of an entry's payload.
    pub(super) fn second(&self, index: usize) -> *mut u8 {
        self.seconds[index].load(Ordering::Acquire)
    }

    /// Memory for [`Self::replace`].
    pub(super) fn spare(&self) -> rustix::io::Result<Spare> {
        let first = Mapping::new(self.payload_bytes)?;
        // SAFETY: the whole of a mapping that was just made.
        let second = unsafe { Mapping::again(first.base, first.bytes) }?;
        Ok(Spare { first, second })
    }

    /// Replaces the memory of an entry's payload. A running transfer keeps the old memory at its second address, which
    /// the returned value owns. If the kernel refuses, which is not expected, the entry is unusable.
    ///
    /// # Safety
    ///
    /// The caller owns the entry, except for a transfer at the second address of its payload. The returned value is
    /// kept, or leaked for the transfer, until that has ended.
    pub(super) unsafe fn replace(&self, index: usize, spare: Spare) -> (Mapping, rustix::io::Result<()>) {
        let Spare { first, second } = spare;
        let base = self.seconds[index].swap(second.into_raw(), Ordering::AcqRel);
        let left = Mapping { base, bytes: self.payload_bytes };
        let (from, to) = (first.base.cast(), self.payload(index).cast());
        // SAFETY: the new mapping is ours and unused; nobody looks at the payload that it replaces, the caller says.
        let moved = unsafe { mremap_fixed(from, first.bytes, first.bytes, MremapFlags::MAYMOVE, to) };
        if moved.is_ok() {
            // It is a part of the chunk now.
            std::mem::forget(first);
        }
        (left, moved.map(drop))
    }

    /// The memory that a transfer used which was left alone, for dropping.
    ///
    /// # Safety
    /// The second address of a payload of this chunk that was replaced, and whose transfer has ended; to be called once.
    pub(super) unsafe fn abandoned_memory(&self, second: *mut u8) -> Mapping {
        Mapping { base: second, bytes: self.payload_bytes }
    }

    /// Returns the two vectors for REGISTER.
    pub(super) fn vectors(&self, index: usize) -> *const Segment {
        // SAFETY: within the mapping.
        unsafe { (&raw const (*self.head(index)).vectors).cast() }
    }

    /// Returns the request's header, and the kernel's data about the entry.
    ///
    /// # Safety
    ///
    /// The kernel has passed the entry to this process, and no other thread writes to it meanwhile.
    pub(super) unsafe fn request(&self, index: usize) -> (InHeader, UringEntInOut) {
        // SAFETY: within the mapping; any bytes are a valid value; the caller keeps others away.
        let header = unsafe { (&raw const (*self.head(index)).header).read() };
        let (in_header, _) = InHeader::read_from_prefix(&header.in_out).expect("128 bytes hold a header of 40");
        (in_header, header.ring_ent_in_out)
    }

    /// Copies out of the message, as it would come from /dev/fuse: header, the operation's structure of `op_bytes`,
    /// payload. Returns how many bytes there were.
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

    /// Copies into the reply: its header, and right behind it the payload. Returns how many bytes there was room for.
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
        // By now neither a worker nor the kernel uses it.
        drop(Mapping { base: self.base.as_ptr(), bytes: self.bytes });
        for second in &mut self.seconds {
            drop(Mapping { base: *second.get_mut(), bytes: self.payload_bytes });
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
    /// Reads the kernel's data, limited to the size of the memory.
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
    fn a_payload_is_one_memory_at_two_addresses_until_it_is_replaced() {
        let chunk = Chunk::new(2, 4096).unwrap();
        let (first, second) = (chunk.payload(1), chunk.second(1));
        assert_ne!(first, second);
        // SAFETY: nobody else knows the memory; each address is used while it is mapped.
        unsafe {
            second.copy_from_nonoverlapping(b"moved".as_ptr(), 5);
            assert_eq!(std::slice::from_raw_parts(first, 5), b"moved");
            chunk.payload(0).write(b'0');

            let (left, replaced) = chunk.replace(1, chunk.spare().unwrap());
            replaced.unwrap();
            assert_eq!((chunk.payload(1), first.read()), (first, 0), "new memory where the kernel looks");
            first.write(b'n');
            second.write(b'l');
            assert_eq!((first.read(), second.read(), chunk.second(1).read()), (b'n', b'l', b'n'));
            chunk.second(1).write(b'm');
            assert_eq!((first.read(), second.read(), chunk.payload(0).read()), (b'm', b'l', b'0'));
            drop(left);
            assert_eq!((first.read(), chunk.second(1).read()), (b'm', b'm'));
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
