use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use ferry_vfs::OFlags;

use super::io_hints::READ_TRIES;
use super::route::RING_BATCH_MIN;
use super::*;

fn segments(bytes: &mut [u8], pieces: usize) -> Vec<Segment> {
    let piece = bytes.len().div_ceil(pieces).max(1);
    bytes.chunks_mut(piece).map(|chunk| Segment { address: chunk.as_mut_ptr(), bytes: chunk.len() }).collect()
}

fn backing(file: File) -> Arc<Backing> {
    Arc::new(Backing::new(file.into()))
}

fn open(path: &Path, flags: OFlags) -> Arc<Backing> {
    let fd = rustix::fs::open(path, flags | OFlags::CLOEXEC, rustix::fs::Mode::from_raw_mode(0o644)).unwrap();
    Arc::new(Backing::new(fd))
}

fn run(transfers: &mut Transfers) -> Vec<(u64, io::Result<usize>)> {
    let mut outcomes = Vec::new();
    while transfers.unfinished() > 0 {
        if !transfers.flush().has_done() {
            transfers.sleep().unwrap();
        }
        while let Some(outcome) = transfers.next_done() {
            outcomes.push(outcome);
        }
    }
    outcomes.sort_by_key(|(token, _)| *token);
    outcomes
}

const WRITE: Operation = Operation::Write { clear_privileges: false, waits: false };

/// Runs a test with every means, on file systems that can and cannot try without waiting.
fn everywhere(test: impl Fn(&mut Transfers, &Path)) {
    for mode in [IoMode::Uring, IoMode::Sync] {
        for parent in [Path::new("/dev/shm"), &std::env::temp_dir()] {
            let dir = tempfile::tempdir_in(parent).unwrap();
            test(&mut Transfers::new(mode, 64).unwrap(), dir.path());
        }
    }
}

#[test]
fn transfers_move_the_requested_bytes() {
    everywhere(|transfers, dir| {
        let path = dir.join("file");
        let pattern: Vec<u8> = (0..1u32 << 20).map(|n| (n % 251) as u8).collect();
        let mut source = pattern.clone();
        let file = open(&path, OFlags::CREATE | OFlags::RDWR);
        for (index, piece) in source.chunks_mut(64 << 10).enumerate() {
            let offset = (index * (64 << 10)) as u64;
            // SAFETY: `source` outlives the run.
            unsafe { transfers.queue(index as u64, WRITE, Arc::clone(&file), offset, segments(piece, 3)) };
        }
        assert!(run(transfers).iter().all(|(_, outcome)| matches!(outcome, Ok(0x10000))));
        assert!(std::fs::read(&path).unwrap() == pattern);
        for batch in [1usize, 2, 16] {
            let mut target = vec![0u8; pattern.len() + 4096];
            let piece_bytes = target.len().div_ceil(batch);
            for (index, piece) in target.chunks_mut(piece_bytes).enumerate() {
                let offset = (index * piece_bytes) as u64;
                // SAFETY: `target` outlives the run.
                unsafe {
                    transfers.queue(index as u64, Operation::Read, Arc::clone(&file), offset, segments(piece, 5))
                };
            }
            let total: usize = run(transfers).into_iter().map(|(_, outcome)| outcome.unwrap()).sum();
            assert_eq!(total, pattern.len(), "the read past the end is short, {batch} at once");
            assert!(target[..pattern.len()] == pattern);
        }
        // SAFETY: no memory is involved.
        unsafe { transfers.queue(1, Operation::Fsync { data_only: false }, file, 0, []) };
        assert!(matches!(run(transfers)[..], [(1, Ok(0))]));
    });
}

#[test]
fn errors_and_short_writes_are_reported() {
    everywhere(|transfers, dir| {
        let mut bytes = vec![7u8; 8192];
        let read_only = open(Path::new("/proc/self/exe"), OFlags::RDONLY);
        // SAFETY: `bytes` outlives the run.
        unsafe { transfers.queue(1, WRITE, read_only, 0, segments(&mut bytes, 1)) };
        let directory = open(dir, OFlags::RDONLY);
        // SAFETY: as above.
        unsafe { transfers.queue(2, Operation::Read, directory, 0, segments(&mut bytes, 1)) };
        let codes: Vec<_> =
            run(transfers).into_iter().map(|(_, outcome)| outcome.unwrap_err().raw_os_error().unwrap()).collect();
        assert_eq!(codes, [libc::EBADF, libc::EISDIR]);
    });
}

#[test]
fn a_write_clears_suid_on_request() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root: for other users the kernel always clears suid");
        return;
    }
    everywhere(|transfers, dir| {
        for (clear_privileges, waits) in [(false, false), (true, false), (true, true), (false, true)] {
            let path = dir.join("suid");
            std::fs::write(&path, b"x").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o6777)).unwrap();
            let file = backing(File::options().write(true).open(&path).unwrap());
            let mut bytes = *b"new";
            let operation = Operation::Write { clear_privileges, waits };
            // SAFETY: `bytes` outlives the run.
            unsafe { transfers.queue(1, operation, file, 0, segments(&mut bytes, 1)) };
            assert!(matches!(run(transfers)[..], [(1, Ok(3))]));
            let mode = std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
            assert_eq!(mode, if clear_privileges { 0o777 } else { 0o6777 });
        }
    });
}

fn event() -> Arc<OwnedFd> {
    Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap())
}

#[test]
fn a_watched_descriptor_ends_a_sleep_also_after_it_was_replaced() {
    everywhere(|transfers, _| {
        let (old, new) = (event(), event());
        let watch = transfers.watch(Arc::clone(&old));
        for _ in 0..3 {
            rustix::io::write(&old, &1u64.to_ne_bytes()).unwrap();
            transfers.sleep().unwrap();
        }
        transfers.unwatch(watch).unwrap();
        transfers.watch(Arc::clone(&new));
        let waker = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(30));
            rustix::io::write(&new, &1u64.to_ne_bytes()).unwrap();
            new
        });
        let start = std::time::Instant::now();
        while start.elapsed() < std::time::Duration::from_millis(25) {
            transfers.sleep().unwrap();
        }
        waker.join().unwrap();
    });
}

#[test]
fn drop_waits_for_transfers_in_flight() {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let mut bytes = [0u8; RING_BATCH_MIN];
    let mut transfers = Transfers::new(IoMode::Uring, 8).unwrap();
    let file = Arc::new(Backing::new(OwnedFd::from(reader)));
    file.add_io_hints(READ_TRIES);
    let late = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(30));
        writer.write_all(b"abc").unwrap();
    });
    for (token, segment) in segments(&mut bytes, RING_BATCH_MIN).into_iter().enumerate() {
        // A read at the current position (-1) of a pipe waits for the writer.
        // SAFETY: `bytes` outlives `transfers`, which waits when dropped.
        unsafe { transfers.queue(token as u64, Operation::Read, Arc::clone(&file), u64::MAX, [segment]) };
    }
    drop(transfers);
    bytes.sort_unstable();
    assert_eq!(&bytes, b"abc");
    late.join().unwrap();
}

#[test]
fn adjacent_transfers_are_merged() {
    everywhere(|transfers, dir| {
        let file = open(&dir.join("file"), OFlags::CREATE | OFlags::RDWR);
        let mut source: Vec<u8> = (0..4096u32).map(|n| (n % 241) as u8).collect();
        for (index, piece) in source.chunks_mut(512).enumerate() {
            // SAFETY: `source` outlives the run.
            unsafe { transfers.queue(index as u64, WRITE, Arc::clone(&file), 512 * index as u64, segments(piece, 2)) };
        }
        assert_eq!((transfers.queued.len(), transfers.unfinished()), (1, 1));
        assert!(run(transfers).iter().map(|(_, outcome)| outcome.as_ref().unwrap()).eq(&[512; 8]));
        let mut target = vec![0u8; 6 * 1024];
        for (index, piece) in target.chunks_mut(1024).enumerate() {
            // SAFETY: `target` outlives the run.
            unsafe {
                let at = 512 + 1024 * index as u64;
                transfers.queue(index as u64, Operation::Read, Arc::clone(&file), at, segments(piece, 3));
            }
        }
        assert_eq!(transfers.queued.len(), 1);
        let counts: Vec<usize> = run(transfers).into_iter().map(|(_, outcome)| outcome.unwrap()).collect();
        assert_eq!(counts, [1024, 1024, 1024, 512, 0, 0], "the file ends in the middle");
        assert!(target[..3584] == source[512..]);
        // A gap, another file and another kind are not adjacent.
        let other = open(&dir.join("file"), OFlags::RDWR);
        for (file, at, operation) in
            [(&file, 0, WRITE), (&file, 1024, WRITE), (&other, 1536, WRITE), (&other, 2048, Operation::Read)]
        {
            // SAFETY: `source` outlives the run.
            unsafe { transfers.queue(1, operation, Arc::clone(file), at, segments(&mut source[..512], 1)) };
        }
        assert_eq!(transfers.queued.len(), 4);
        run(transfers);
    });
}

/// The offset does not matter, and the host's file system tries no write that makes a file longer.
#[test]
fn appends_are_made_one_by_one_in_their_order() {
    everywhere(|transfers, dir| {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::APPEND;
        let fd = rustix::fs::open(dir.join("file"), flags, rustix::fs::Mode::from(0o600)).unwrap();
        let file = Arc::new(Backing::appending(fd));
        let mut source: Vec<u8> = (0..64u8).flat_map(|n| [n; 512]).collect();
        for (index, piece) in source.chunks_mut(512).enumerate() {
            // SAFETY: `source` outlives the run.
            unsafe { transfers.queue(index as u64, WRITE, Arc::clone(&file), 512 * index as u64, segments(piece, 1)) };
        }
        assert_eq!(transfers.queued.len(), 64, "none is merged");
        assert!(run(transfers).iter().map(|(_, outcome)| outcome.as_ref().unwrap()).eq(&[512; 64]));
        assert!(std::fs::read(dir.join("file")).unwrap() == source);
    });
}

#[test]
fn a_failure_affects_only_its_own_transfer() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    for mode in [IoMode::Uring, IoMode::Sync] {
        let mut transfers = Transfers::new(mode, 64).unwrap();
        let fd = memfd_create("ferry-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 1024).unwrap();
        fcntl_add_seals(&fd, SealFlags::GROW).unwrap();
        let file = Arc::new(Backing::new(fd));
        let mut source = vec![7u8; 2048];
        for (index, piece) in source.chunks_mut(512).enumerate() {
            // SAFETY: `source` outlives the run.
            unsafe { transfers.queue(index as u64, WRITE, Arc::clone(&file), 512 * index as u64, segments(piece, 1)) };
        }
        assert_eq!(transfers.queued.len(), 1);
        let outcomes: Vec<bool> = run(&mut transfers).iter().map(|(_, outcome)| outcome.is_ok()).collect();
        assert_eq!(outcomes, [true, true, false, false]);
        let mut back = [0u8; 1024];
        assert_eq!(rustix::io::pread(&*file, &mut back, 0), Ok(1024));
        assert_eq!(back, [7; 1024]);
    }
}

/// Memory that serves half of each request.
#[derive(Debug)]
struct Half(std::sync::Mutex<[u8; 8]>);

impl ferry_vfs::Memory for Half {
    unsafe fn read(&self, _: BorrowedFd<'_>, offset: u64, to: &[Segment]) -> Option<ferry_vfs::Result<usize>> {
        let memory = self.0.lock().unwrap();
        let (start, segment) = (usize::try_from(offset).unwrap(), to[0]);
        let part = memory.get(start..start + segment.bytes)?;
        // SAFETY: the segment is valid by contract.
        unsafe { segment.address.copy_from_nonoverlapping(part.as_ptr(), part.len()) };
        Some(Ok(part.len()))
    }

    unsafe fn write(&self, _: BorrowedFd<'_>, offset: u64, from: &[Segment]) -> Option<ferry_vfs::Result<usize>> {
        (offset < 8).then_some(Err(ferry_vfs::Errno::NOSPC)).filter(|_| from[0].bytes == 4)
    }
}

#[test]
fn memory_is_preferred_to_the_descriptor() {
    everywhere(|transfers, dir| {
        let fd = open(&dir.join("file"), OFlags::CREATE | OFlags::RDWR).as_fd().try_clone_to_owned().unwrap();
        rustix::io::pwrite(&fd, b"descriptor", 0).unwrap();
        let memory = Arc::new(Half(std::sync::Mutex::new(*b"inmemory")));
        let file = Arc::new(Backing::with_memory(fd, memory));
        let mut bytes = [0; 4];
        let flagged = Operation::Write { clear_privileges: true, waits: true };
        for (operation, offset, outcome) in [
            (Operation::Read, 2, Ok(&b"memo"[..])),
            (Operation::Read, 6, Ok(b"ptor")),
            (flagged, 0, Err(libc::ENOSPC)),
            (flagged, 10, Ok(b"ptor")),
            (Operation::Read, 10, Ok(b"ptor")),
        ] {
            // SAFETY: `bytes` outlives the run.
            unsafe { transfers.queue(1, operation, Arc::clone(&file), offset, segments(&mut bytes, 1)) };
            assert!(transfers.flush().has_done(), "nothing waits");
            let (_, told) = transfers.next_done().unwrap();
            assert_eq!(told.map(|_| &bytes[..]).map_err(|error| error.raw_os_error().unwrap()), outcome);
        }
        // Adjacent transfers are not merged: a failure of memory is not retried on the descriptor.
        let mut bytes = [0; 8];
        for (offset, half) in (0..).step_by(4).zip(bytes.chunks_mut(4)) {
            // SAFETY: `bytes` outlives the run.
            unsafe { transfers.queue(offset, WRITE, Arc::clone(&file), offset, segments(half, 1)) };
        }
        assert_eq!(transfers.queued.len(), 2);
        assert!(run(transfers).iter().all(|(_, outcome)| outcome.is_err()));
    });
}

/// Memory whose pages can be removed by others.
struct Shared {
    file: std::os::fd::OwnedFd,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: a mapping is valid on every thread.
unsafe impl Send for Shared {}
// SAFETY: as above; shared references only return segments.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(bytes: usize) -> Arc<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};

        let file = rustix::fs::memfd_create("ferry-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a free place.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0) }.unwrap();
        Arc::new(Self { file, start: start.cast(), bytes })
    }

    fn whole(self: &Arc<Self>) -> (Segment, crate::MemoryOwner) {
        (self.piece(0, self.bytes), Arc::clone(self) as crate::MemoryOwner)
    }

    fn piece(&self, at: usize, bytes: usize) -> Segment {
        assert!(at + bytes <= self.bytes);
        Segment { address: self.start.wrapping_add(at), bytes }
    }

    /// Removes all pages, as a balloon would.
    fn punch(&self) {
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, 0, self.bytes as u64).unwrap();
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        rustix::io::pread(&self.file, &mut bytes, 0).unwrap();
        bytes
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: nobody else unmaps it; transfers to it have ended.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.bytes) };
    }
}

/// Reads four blocks from the page cache through the ring, each into several segments.
fn read_four(transfers: &mut Transfers, file: &Arc<Backing>, to: &Shared, pieces: usize) {
    file.add_io_hints(READ_TRIES);
    for block in 0..4usize {
        let bytes = 4096 / pieces;
        let pieces: Vec<_> = (0..pieces).map(|piece| to.piece(8192 * block + piece * 2 * bytes, bytes)).collect();
        // With a gap, so that blocks are not merged.
        let at = 8192 * block as u64;
        // SAFETY: `to` outlives the run.
        unsafe { transfers.queue(block as u64, Operation::Read, Arc::clone(file), at, pieces) };
    }
    let outcomes = run(transfers);
    assert!(outcomes.iter().all(|(_, outcome)| matches!(outcome, Ok(4096))), "{outcomes:?}");
}

#[test]
fn registered_memory_is_used_until_it_is_unregistered() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![9; 1 << 16]).unwrap();
    let lasting = Backing::new(File::open(&path).unwrap().into()).long_lived();
    let file = Arc::new(lasting);
    let mut transfers = Transfers::new(IoMode::Uring, 64).unwrap();
    let (first, second) = (Shared::new(1 << 15), Shared::new(1 << 15));
    let filled = |shared: &Shared| (0..4).all(|block| shared.bytes()[8192 * block..][..2048] == [9; 2048]);
    // SAFETY: the keepers are the mappings.
    unsafe { transfers.register_memory([first.whole(), second.whole()]) }.unwrap();
    for shared in [&first, &second] {
        read_four(&mut transfers, &file, shared, 2);
        assert!(filled(shared), "several pieces, as far as the kernel knows how");
        read_four(&mut transfers, &file, shared, 1);
        assert!(filled(shared));
        // The kernel keeps using the registered pages, so replaced pages show that it uses them.
        shared.punch();
        read_four(&mut transfers, &file, shared, 1);
        assert!(!filled(shared), "the memory was looked up again");
    }
    // SAFETY: the keepers are the mappings.
    unsafe { transfers.register_memory([second.whole()]) }.unwrap();
    read_four(&mut transfers, &file, &first, 1);
    assert!(filled(&first), "what is not registered any more is looked up again");
    read_four(&mut transfers, &file, &second, 1);
    assert!(!filled(&second), "memory that stayed registered was not registered again");
    let again = Shared::new(1 << 15);
    // SAFETY: as above.
    unsafe { transfers.register_memory([second.whole(), again.whole()]) }.unwrap();
    read_four(&mut transfers, &file, &again, 1);
    assert!(filled(&again));
    // SAFETY: as above.
    unsafe { transfers.register_memory([]) }.unwrap();
    read_four(&mut transfers, &file, &second, 1);
    assert!(filled(&second));
    assert_eq!(Arc::strong_count(&second), 1, "nothing is held for longer than it is registered");
}

#[test]
fn memory_that_cannot_be_registered_still_works() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![9; 1 << 16]).unwrap();
    let file = backing(File::open(&path).unwrap());
    let mut transfers = Transfers::new(IoMode::Uring, 64).unwrap();
    let good = Shared::new(1 << 15);
    // Nothing is mapped at the end of user space.
    let bad = Segment { address: std::ptr::without_provenance_mut(0x7fff_ffff_0000), bytes: 4096 };
    let keeper: crate::MemoryOwner = Arc::new(());
    // SAFETY: the kernel refuses unmapped memory; no transfer uses it.
    unsafe { transfers.register_memory([good.whole(), (bad, keeper)]) }.unwrap_err();
    good.punch();
    read_four(&mut transfers, &file, &good, 1);
    assert_eq!(good.bytes()[..512], [9; 512]);
    // Nor is part of it registered.
    assert_eq!(Arc::strong_count(&good), 1);
    // SAFETY: the keeper is the mapping.
    unsafe { transfers.register_memory([good.whole()]) }.unwrap();
}

#[test]
fn long_lived_files_are_registered_up_to_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![9; 1 << 16]).unwrap();
    let mut transfers = Transfers::new(IoMode::Uring, 64).unwrap();
    let memory = Shared::new(1 << 15);
    let open = || Arc::new(Backing::new(File::open(&path).unwrap().into()).long_lived());
    let files: Vec<_> = (0..70).map(|_| open()).collect();
    for file in files.iter().chain(&files) {
        memory.punch();
        read_four(&mut transfers, file, &memory, 1);
        assert_eq!(memory.bytes()[..512], [9; 512]);
    }
    let held = files.iter().filter(|file| Arc::strong_count(file) == 2).count();
    assert_eq!(held, 64);
    drop(transfers);
    assert!(files.iter().all(|file| Arc::strong_count(file) == 1));
}

#[test]
fn a_sleep_for_several_completions_ends_with_one() {
    let mut bytes = [0u8; 2 * BUSY_FROM];
    let mut transfers = Transfers::new(IoMode::Uring, 64).unwrap();
    let event = event();
    transfers.watch(Arc::clone(&event));
    let (reader, mut writer) = std::io::pipe().unwrap();
    let file = Arc::new(Backing::waiting(OwnedFd::from(reader)));
    for (token, segment) in segments(&mut bytes, 2 * BUSY_FROM).into_iter().enumerate() {
        // SAFETY: `bytes` outlives `transfers`, which waits when dropped.
        unsafe { transfers.queue(token as u64, Operation::Read, Arc::clone(&file), u64::MAX, [segment]) };
    }
    assert!(!transfers.flush().has_done());
    for left in (0..2 * BUSY_FROM).rev() {
        writer.write_all(b"x").unwrap();
        while transfers.in_flight() > left {
            transfers.sleep().unwrap();
        }
        assert!(matches!(transfers.next_done(), Some((_, Ok(1)))));
        assert!(!transfers.has_done());
        rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
        transfers.sleep().unwrap();
    }
}

#[test]
fn inline_transfers_run_as_a_batch() {
    for parent in [Path::new("/dev/shm"), &std::env::temp_dir()] {
        let dir = tempfile::tempdir_in(parent).unwrap();
        let path = dir.path().join("file");
        let mut transfers = Transfers::new(IoMode::Uring, 64).unwrap();
        let file = open(&path, OFlags::CREATE | OFlags::RDWR);
        file.add_io_hints(io_hints::WRITE_CANNOT_TRY | io_hints::READ_CANNOT_TRY);
        let read_only = open(&path, OFlags::RDONLY);
        read_only.add_io_hints(io_hints::WRITE_CANNOT_TRY);
        // More than one call takes, in several segments each, with gaps; some of them fail.
        let mut source: Vec<u8> = (0..150 * 512u32).map(|n| (n % 251) as u8).collect();
        for (index, piece) in source.chunks_mut(512).enumerate() {
            let to = if index % 10 == 9 { &read_only } else { &file };
            // SAFETY: `source` outlives the run.
            unsafe { transfers.queue(index as u64, WRITE, Arc::clone(to), 1024 * index as u64, segments(piece, 3)) };
        }
        for (token, outcome) in run(&mut transfers) {
            let error = outcome.as_ref().err().and_then(io::Error::raw_os_error);
            assert_eq!(error, (token % 10 == 9).then_some(libc::EBADF), "{token}: {outcome:?}");
        }
        assert!(transfers.aio_batch.is_some());
        let mut target = vec![0u8; 150 * 512];
        for (index, piece) in target.chunks_mut(512).enumerate() {
            let at = 1024 * index as u64;
            // SAFETY: `target` outlives the run.
            unsafe { transfers.queue(index as u64, Operation::Read, Arc::clone(&file), at, segments(piece, 3)) };
        }
        let counts: Vec<usize> = run(&mut transfers).into_iter().map(|(_, outcome)| outcome.unwrap()).collect();
        // The last was not written: the file ends before it.
        assert_eq!(counts, [vec![512; 149], vec![0]].concat());
        for (index, (found, sent)) in target.chunks(512).zip(source.chunks(512)).enumerate() {
            assert!(if index % 10 == 9 { found == [0; 512] } else { found == sent }, "piece {index}");
        }
    }
}

/// Makes `io_uring_enter` fail on this thread whenever it would wait.
fn forbid_waiting(errno: libc::c_int) {
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let end = libc::BPF_RET | libc::BPF_K;
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k };
    let wanted = std::mem::offset_of!(libc::seccomp_data, args) + 2 * size_of::<u64>();
    let low_half = if cfg!(target_endian = "little") { wanted } else { wanted + 4 };
    let mut steps = [
        step(load, 0, 0, 0),
        step(equal, 0, 3, u32::try_from(libc::SYS_io_uring_enter).unwrap()),
        step(load, 0, 0, u32::try_from(low_half).unwrap()),
        step(equal, 1, 0, 0),
        step(end, 0, 0, libc::SECCOMP_RET_ERRNO | u32::try_from(errno).unwrap()),
        step(end, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 6, filter: steps.as_mut_ptr() };
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program and its instructions are only read during the call.
    let outcome = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(outcome, 0, "{}", io::Error::last_os_error());
}

#[test]
fn transfers_are_retried_when_the_kernel_is_short_of_memory() {
    for errno in [libc::EAGAIN, libc::EBUSY, libc::ENOMEM, libc::EBADF] {
        let asked = move || {
            let mut transfers = Transfers::new(IoMode::Uring, 64).unwrap();
            transfers.watch(event());
            forbid_waiting(errno);
            (0..3).map(|_| transfers.sleep().is_ok()).collect::<Vec<_>>()
        };
        // A separate thread, because a filter cannot be removed.
        let slept = std::thread::spawn(asked).join().unwrap();
        assert_eq!(slept, [errno != libc::EBADF; 3], "errno {errno}");
    }
}
