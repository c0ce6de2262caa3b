//! How front ends are asked to map files: what is said differs, what is meant does not.

use super::Part;

/// The ways in which virtual machine monitors let a device have a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WindowDialect {
    /// That of the vhost-user document, which QEMU from 11.1 and crosvm speak: the front end asks for the window's length,
    /// and is sent SHMEM_MAP and SHMEM_UNMAP.
    #[default]
    Shmem,
    /// That of the first drafts of virtio-fs, which alioth speaks: nobody asks for anything. The window is as long as somebody
    /// told either side, and is there once the front end can be reached.
    FsMap,
}

/// A request, ready to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// Its number.
    pub(super) code: u32,
    /// What follows the header.
    pub(super) body: Vec<u8>,
}

/// What a front end understands. It answers either request by a number, 0 for success.
pub(super) trait Dialect: Send + Sync {
    /// To map a part of the file that goes along.
    fn map(&self, part: Part) -> Message;
    /// To undo that.
    fn unmap(&self, part: Part) -> Message;
    /// Whether each mapping comes back as a region of the guest's memory (ADD_MEM_REG); `None`: that shows.
    fn tells(&self) -> Option<bool>;
}

impl WindowDialect {
    pub(super) fn speak(self) -> &'static dyn Dialect {
        match self {
            Self::Shmem => &Shmem,
            Self::FsMap => &FsMap,
        }
    }
}

/// vhost-user, "Back-end message types" and "Shared memory regions".
struct Shmem;

impl Shmem {
    const MAP: u32 = 9;
    const UNMAP: u32 = 10;
    const WRITABLE: u64 = 1;

    /// `VhostUserMMap`: the number of the region and seven bytes of padding, then four numbers of eight bytes.
    fn body(part: Part) -> Vec<u8> {
        let Part { window_offset, file_offset, bytes, writable } = part;
        let numbers = [0, file_offset, window_offset, bytes, if writable { Self::WRITABLE } else { 0 }];
        numbers.into_iter().flat_map(u64::to_ne_bytes).collect()
    }
}

impl Dialect for Shmem {
    fn map(&self, part: Part) -> Message {
        Message { code: Self::MAP, body: Self::body(part) }
    }

    fn unmap(&self, part: Part) -> Message {
        Message { code: Self::UNMAP, body: Self::body(part) }
    }

    fn tells(&self) -> Option<bool> {
        None
    }
}

/// `VHOST_USER_BACKEND_FS_MAP` and `_FS_UNMAP`, which never came into the document: their numbers mean something else there.
struct FsMap;

impl FsMap {
    const MAP: u32 = 6;
    const UNMAP: u32 = 7;
    /// A message has room for so many mappings. One of no length is none.
    const ENTRIES: usize = 8;
    const READABLE: u64 = 1;
    const WRITABLE: u64 = 2;

    /// Four lists of eight numbers: offsets in the files, offsets in the window, lengths, flags.
    fn body(part: Part) -> Vec<u8> {
        let Part { window_offset, file_offset, bytes, writable } = part;
        let flags = Self::READABLE | if writable { Self::WRITABLE } else { 0 };
        let list = |first: u64| {
            let mut list = [0; Self::ENTRIES];
            list[0] = first;
            list
        };
        let lists = [file_offset, window_offset, bytes, flags].map(list);
        lists.into_iter().flatten().flat_map(u64::to_ne_bytes).collect()
    }
}

impl Dialect for FsMap {
    fn map(&self, part: Part) -> Message {
        Message { code: Self::MAP, body: Self::body(part) }
    }

    fn unmap(&self, part: Part) -> Message {
        Message { code: Self::UNMAP, body: Self::body(part) }
    }

    fn tells(&self) -> Option<bool> {
        Some(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: Part = Part { window_offset: 0x40_0000, file_offset: 0x20_0000, bytes: 0x1000, writable: false };

    fn numbers(message: &Message) -> Vec<u64> {
        message.body.chunks(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"))).collect()
    }

    #[test]
    fn the_document_has_one_part_in_a_message() {
        let dialect = WindowDialect::Shmem.speak();
        let (map, unmap) = (dialect.map(PART), dialect.unmap(Part { writable: true, ..PART }));
        assert_eq!((map.code, numbers(&map)), (9, vec![0, 0x20_0000, 0x40_0000, 0x1000, 0]));
        assert_eq!((unmap.code, numbers(&unmap)), (10, vec![0, 0x20_0000, 0x40_0000, 0x1000, 1]));
    }

    #[test]
    fn the_draft_has_eight() {
        let dialect = WindowDialect::FsMap.speak();
        let (map, unmap) = (dialect.map(PART), dialect.unmap(PART));
        assert_eq!((map.code, unmap.code, map.body.len()), (6, 7, 256));
        assert_eq!(map.body, unmap.body);
        let numbers = numbers(&map);
        assert_eq!([0, 8, 16, 24].map(|at| numbers[at]), [0x20_0000, 0x40_0000, 0x1000, 1]);
        assert_eq!(numbers.iter().filter(|number| **number == 0).count(), 28);
        assert_eq!(dialect.map(Part { writable: true, ..PART }).body[24 * 8], 3);
    }
}
