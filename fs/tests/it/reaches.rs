//! Which calls of a program reach the author of a file system that is mounted on this host: the table "Hints and
//! mappings" of the author's guide, row by row.
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_fs::{
    Attr, Caller, Data, Entry, Errno, FallocateFlags, Features, FileSystem, FileType, Handle, Ino, Input, IoRange,
    Name, OFlags, Output, Result, SetAttr, XattrFlags, fuse,
};
use rustix::fs::Advice;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};

const FILE: Ino = Ino(2);
const FILE_BYTES: usize = 1 << 20;
/// What the kernel reads ahead at a time, unless told otherwise.
const WINDOW_BYTES: u64 = 128 << 10;
const WINDOW_LEN: usize = 128 << 10;
const PAGE_BYTES: u64 = 4096;
const PAGE_LEN: usize = 4096;
/// Where a mapping is looked at and written to.
const MAPPED_AT: usize = FILE_BYTES / 2;
/// How long a call may take from the kernel to the author.
const SETTLE: Duration = Duration::from_secs(10);

/// `_IOWR('r', 7, u64)`.
const IOCTL: u32 = 0xc008_7207;

/// A call that reached the author.
#[derive(Clone, Debug, PartialEq)]
enum Call {
    Read { offset: u64, len: u64, flags: OFlags },
    Write { offset: u64, bytes: Vec<u8>, flags: OFlags },
    Fallocate { offset: u64, len: u64, flags: FallocateFlags },
    Ioctl(u32, Vec<u8>),
    Setxattr(Vec<u8>),
}

/// A file system of one file that records its requests.
struct Recorder {
    calls: Mutex<Vec<Call>>,
    bytes: Mutex<Vec<u8>>,
    xattrs: Mutex<BTreeMap<Vec<u8>, Vec<u8>>>,
}

impl Recorder {
    fn new() -> Self {
        Self { calls: Mutex::default(), bytes: Mutex::new(vec![7; FILE_BYTES]), xattrs: Mutex::default() }
    }

    fn call(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }

    fn take(&self) -> Vec<Call> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    /// Waits for a call that is like this.
    #[track_caller]
    fn wait(&self, what: &str, like: impl Fn(&Call) -> bool) {
        let end = Instant::now() + SETTLE;
        while !self.calls.lock().unwrap().iter().any(&like) {
            assert!(Instant::now() < end, "no {what} came: {:?}", self.calls.lock().unwrap());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl FileSystem for Recorder {
    fn features(&self) -> Features {
        Features { posix_acl: true, ..Features::default() }
    }

    fn lookup(&self, cx: &Caller, _: Ino, name: Name) -> Result<Entry> {
        if name.as_bytes() != b"file" {
            return Err(Errno::NOENT);
        }
        Ok(Entry::new(FILE, self.getattr(cx, FILE, None)?))
    }

    fn getattr(&self, _: &Caller, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        // Constant times: a file with a new mtime is read again.
        let still =
            Attr { mtime: Default::default(), ctime: Default::default(), ..Attr::new(ino, FileType::Directory, 0o755) };
        let mode = FileType::RegularFile.as_raw_mode() | 0o644;
        let size = self.bytes.lock().unwrap().len() as u64;
        Ok(if ino == FILE { Attr { mode, nlink: 1, ..still }.with_size(size) } else { still })
    }

    fn setattr(&self, cx: &Caller, ino: Ino, handle: Option<Handle>, _: &SetAttr) -> Result<Attr> {
        self.getattr(cx, ino, handle)
    }

    fn open(&self, _: &Caller, ino: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(ino.0))
    }

    fn read(&self, _: &Caller, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        self.call(Call::Read { offset: at.offset, len: at.len.into(), flags: at.flags });
        Ok(at.read_from(&self.bytes.lock().unwrap(), out))
    }

    fn write(&self, _: &Caller, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        let mut bytes = vec![0; at.len as usize];
        let count = input.take(&mut bytes);
        bytes.truncate(count);
        let answer = at.write_to(&mut self.bytes.lock().unwrap(), &mut bytes.as_slice(), 2 * FILE_BYTES as u64);
        self.call(Call::Write { offset: at.offset, bytes, flags: at.flags });
        answer
    }

    fn fsync(&self, _: &Caller, _: Ino, _: Handle, _: bool) -> Result<Option<Arc<ferry_fs::Backing>>> {
        Ok(None)
    }

    fn fallocate(&self, _: &Caller, _: Ino, _: Handle, offset: u64, len: u64, flags: FallocateFlags) -> Result<()> {
        self.call(Call::Fallocate { offset, len, flags });
        Ok(())
    }

    fn ioctl(&self, _: &Caller, _: Ino, _: Handle, command: u32, input: &[u8], _: usize) -> Result<Vec<u8>> {
        self.call(Call::Ioctl(command, input.to_vec()));
        Ok(42u64.to_ne_bytes().to_vec())
    }

    fn getxattr(&self, _: &Caller, _: Ino, name: &[u8]) -> Result<Vec<u8>> {
        self.xattrs.lock().unwrap().get(name).cloned().ok_or(Errno::NODATA)
    }

    fn setxattr(&self, _: &Caller, _: Ino, name: &[u8], value: &[u8], _: XattrFlags, _: bool) -> Result<()> {
        self.call(Call::Setxattr(name.to_vec()));
        self.xattrs.lock().unwrap().insert(name.to_vec(), value.to_vec());
        Ok(())
    }
}

/// Runs a test on a mount of a recorder, with each transport.
fn on_mounts(test: impl Fn(&Recorder, File, &std::path::Path)) {
    if !rustix::process::geteuid().is_root() || File::open("/dev/fuse").is_err() {
        ferry_skip::skip!("needs root and /dev/fuse");
        return;
    }
    for path in [fuse::Path::Auto, fuse::Path::Devfuse] {
        let directory = tempfile::tempdir().unwrap();
        let recorder = Arc::new(Recorder::new());
        let options = fuse::Options { path, ..fuse::Options::default() };
        let source = Arc::clone(&recorder) as Arc<dyn FileSystem>;
        let export = fuse::Export::mount(directory.path(), source, options).unwrap();
        let name = directory.path().join("file");
        test(&recorder, OpenOptions::new().read(true).write(true).open(&name).unwrap(), &name);
        export.stop();
    }
}

fn advise(file: &File, offset: u64, len: u64, advice: Advice) {
    rustix::fs::fadvise(file, offset, std::num::NonZeroU64::new(len), advice).unwrap();
}

fn read(file: &File, offset: u64, len: u64) {
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    file.read_exact_at(&mut bytes, offset).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7));
}

/// A mapping of the whole file.
struct Mapping(*mut std::ffi::c_void);

impl Mapping {
    fn new(file: &File) -> Self {
        let (len, flags) = (FILE_BYTES, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: mmap without MAP_FIXED takes address space that nobody uses; the file is open, and nobody cuts it
        // while the mapping is there.
        Self(unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, flags, MapFlags::SHARED, file, 0) }.unwrap())
    }

    fn advise(&self, len: usize, advice: rustix::mm::Advice) {
        // SAFETY: the range is within the mapping; advice changes no bytes of a file's pages.
        unsafe { rustix::mm::madvise(self.0, len, advice) }.unwrap();
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are the mapping's, and nothing points into it any more.
        unsafe { rustix::mm::munmap(self.0, FILE_BYTES) }.unwrap();
    }
}

/// How a program announces that it needs the start of a file.
type Ask = fn(&File);

#[test]
fn willneed_causes_reads_and_dontneed_repeats_them() {
    let asks: [(&str, Ask); 3] = [
        ("posix_fadvise", |file| advise(file, 0, WINDOW_BYTES, Advice::WillNeed)),
        // SAFETY: only the descriptor and numbers.
        ("readahead", |file| assert_eq!(unsafe { libc::readahead(file.as_raw_fd(), 0, WINDOW_LEN) }, 0)),
        ("madvise", |file| Mapping::new(file).advise(WINDOW_LEN, rustix::mm::Advice::WillNeed)),
    ];
    for (how, ask) in asks {
        on_mounts(|recorder, file, _| {
            ask(&file);
            recorder.wait(&format!("READ after {how}"), |call| matches!(call, Call::Read { offset: 0, .. }));
            read(&file, 0, WINDOW_BYTES);
            // What the program reads now is there, and for what follows the kernel may have begun to look.
            let again = |call: &Call| matches!(call, Call::Read { offset, .. } if *offset == 0);
            assert_eq!(recorder.take().iter().filter(|call| again(call)).count(), 1, "{how}");
            read(&file, 0, PAGE_BYTES);
            assert!(!recorder.take().iter().any(again), "read twice although nobody said DONTNEED");
            advise(&file, 0, FILE_BYTES as u64, Advice::DontNeed);
            read(&file, 0, PAGE_BYTES);
            recorder.wait("READ after DONTNEED", again);
        });
    }
}

#[test]
fn random_reads_keep_the_programs_length() {
    on_mounts(|recorder, file, _| {
        let lens = |calls: Vec<Call>| -> Vec<u64> {
            calls.iter().filter_map(|call| if let Call::Read { len, .. } = call { Some(*len) } else { None }).collect()
        };
        for other in [Advice::Sequential, Advice::Normal] {
            advise(&file, 0, 0, Advice::Random);
            read(&file, 8 * PAGE_BYTES, PAGE_BYTES);
            assert_eq!(lens(recorder.take()), [PAGE_BYTES]);
            advise(&file, 0, FILE_BYTES as u64, Advice::DontNeed);
            advise(&file, 0, 0, other);
            read(&file, 0, PAGE_BYTES);
            assert!(lens(recorder.take()).iter().sum::<u64>() > PAGE_BYTES, "{other:?}: nothing was read ahead");
            // What is still being read ahead is waited for, and dropped.
            read(&file, 0, FILE_BYTES as u64);
            advise(&file, 0, FILE_BYTES as u64, Advice::DontNeed);
            recorder.take();
        }
    });
}

#[test]
fn noreuse_and_cold_only_affect_the_kernel() {
    on_mounts(|recorder, file, _| {
        read(&file, 0, FILE_BYTES as u64);
        recorder.take();
        let mapping = Mapping::new(&file);
        advise(&file, 0, FILE_BYTES as u64, Advice::NoReuse);
        // What is cold is dropped first when memory is short, so that page is not read.
        mapping.advise(PAGE_LEN, rustix::mm::Advice::LinuxCold);
        read(&file, PAGE_BYTES, FILE_BYTES as u64 - PAGE_BYTES);
        assert_eq!(recorder.take(), [], "nothing is to reach the author");
    });
}

#[test]
fn each_request_has_the_flags_of_the_open_file() {
    on_mounts(|recorder, _, name| {
        let page = Page([7; 4096]);
        // Whether the next WRITE, and the next READ that the cache cannot answer, have these flags of all that are tried.
        let tried = OFlags::DIRECT | OFlags::SYNC | OFlags::APPEND | OFlags::NOATIME;
        let check = |file: &File, flags: OFlags| {
            recorder.take();
            file.write_all_at(&page.0, 0).unwrap();
            advise(file, 0, FILE_BYTES as u64, Advice::DontNeed);
            let mut back = Page([0; 4096]);
            file.read_exact_at(&mut back.0, 0).unwrap();
            let calls = recorder.take();
            let of = |call: &Call| match call {
                Call::Read { offset: 0, flags, .. } => Some((false, *flags & tried)),
                Call::Write { flags, .. } => Some((true, *flags & tried)),
                _ => None,
            };
            assert_eq!(calls.iter().filter_map(of).collect::<Vec<_>>(), [(true, flags), (false, flags)], "{flags:?}");
        };
        let open = |flags: OFlags| {
            OpenOptions::new().read(true).write(true).custom_flags(flags.bits().cast_signed()).open(name).unwrap()
        };
        for flags in [OFlags::empty(), OFlags::DIRECT | OFlags::SYNC, OFlags::DSYNC, OFlags::APPEND, OFlags::NOATIME] {
            check(&open(flags), flags);
        }
        // Set and taken back later; of these the kernel lets a program change its mind.
        let file = open(OFlags::empty());
        for flags in [OFlags::APPEND, OFlags::NOATIME, OFlags::DIRECT, OFlags::empty()] {
            rustix::fs::fcntl_setfl(&file, flags).unwrap();
            check(&file, flags);
        }
    });
}

/// O_DIRECT wants its memory aligned.
#[repr(align(4096))]
struct Page([u8; 4096]);

#[test]
fn mappings_reach_read_and_write() {
    on_mounts(|recorder, file, _| {
        let mapping = Mapping::new(&file);
        let place = mapping.0.cast::<u8>().wrapping_add(MAPPED_AT);
        // SAFETY: half of the file is within the mapping, which is readable and writable and this thread's alone.
        assert_eq!(unsafe { place.read_volatile() }, 7);
        recorder.wait("READ of a mapped page", |call| {
            matches!(call, Call::Read { offset, len, .. } if (*offset..offset + len).contains(&(MAPPED_AT as u64)))
        });
        // SAFETY: as above.
        unsafe { place.write_volatile(9) };
        // SAFETY: base and length are the mapping's.
        unsafe { rustix::mm::msync(mapping.0, FILE_BYTES, MsyncFlags::SYNC) }.unwrap();
        recorder.wait(
            "WRITE of a mapped page",
            |call| matches!(call, Call::Write { offset, bytes, .. } if *offset == MAPPED_AT as u64 && bytes[0] == 9),
        );
    });
}

#[test]
fn fallocate_ioctl_attributes_and_acls_arrive() {
    on_mounts(|recorder, file, name| {
        let keep = FallocateFlags::KEEP_SIZE;
        let zero = FallocateFlags::ZERO_RANGE;
        for flags in [FallocateFlags::empty(), keep, zero, zero | keep, FallocateFlags::PUNCH_HOLE | keep] {
            rustix::fs::fallocate(&file, flags, 4096, 8192).unwrap();
            assert_eq!(recorder.take(), [Call::Fallocate { offset: 4096, len: 8192, flags }]);
        }
        // FUSE has no others.
        for flags in [FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE, FallocateFlags::UNSHARE_RANGE] {
            assert_eq!(rustix::fs::fallocate(&file, flags, 4096, 8192), Err(Errno::OPNOTSUPP), "{flags:?}");
            assert_eq!(recorder.take(), []);
        }

        let mut argument = 5u64;
        // SAFETY: the command's number says that it reads and writes eight bytes, which `argument` has.
        unsafe {
            let call = rustix::ioctl::Updater::<{ IOCTL as rustix::ioctl::Opcode }, u64>::new(&mut argument);
            rustix::ioctl::ioctl(&file, call).unwrap();
        }
        assert_eq!(argument, 42);
        recorder.wait("IOCTL", |call| *call == Call::Ioctl(IOCTL, 5u64.to_ne_bytes().to_vec()));

        rustix::fs::setxattr(name, "user.colour", b"green", XattrFlags::empty()).unwrap();
        let mut value = [0; 16];
        assert_eq!(rustix::fs::getxattr(name, "user.colour", &mut value).unwrap(), 5);
        assert_eq!(&value[..5], b"green");
        recorder.wait("SETXATTR", |call| *call == Call::Setxattr(b"user.colour".to_vec()));

        // Version 2: user::rw-, user:1:r--, group::r--, mask::r--, other::r--.
        let entries: [(u16, u16, u32); 5] = [(1, 6, !0), (2, 4, 1), (4, 4, !0), (0x10, 4, !0), (0x20, 4, !0)];
        let mut acl = 2u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            acl.extend(tag.to_le_bytes().into_iter().chain(permissions.to_le_bytes()).chain(id.to_le_bytes()));
        }
        rustix::fs::setxattr(name, "system.posix_acl_access", &acl, XattrFlags::empty()).unwrap();
        recorder.wait("an ACL", |call| *call == Call::Setxattr(b"system.posix_acl_access".to_vec()));
    });
}
