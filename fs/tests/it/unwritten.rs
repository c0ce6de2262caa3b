//! What programs see of a file system whose author has not implemented a method: the table "What is not written" of the
//! author's guide, row by row, on a real mount.
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use ferry_fs::{
    Attr, Caller, CreateArgs, Data, DirItem, DirOutput, DirRange, Entry, Errno, FallocateFlags, Features, FileSystem,
    FileType, Handle, Ino, Input, IoRange, Name, OFlags, Output, Result, SetAttr, XattrFlags, fuse,
};
use rustix::fs::{FlockOperation, Mode, RenameFlags, SeekFrom};

/// The most bytes of a file.
const BYTES_MAX: u64 = 1 << 20;
const TEXT: &[u8] = b"text\0\0\0\0\0\0 and more";

/// By inode, from 2 on: names and bytes.
type Files = BTreeMap<u64, (Vec<u8>, Vec<u8>)>;

/// A file system with the methods that files need, and no other.
#[derive(Default)]
struct Bare {
    read_only: bool,
    files: Mutex<Files>,
    /// Calls of `mknod`, and of `read` and `write` with any handle but 0.
    made: Mutex<usize>,
    reads: Mutex<usize>,
    handles: Mutex<Vec<Handle>>,
}

impl Bare {
    fn attr(&self, ino: Ino) -> Result<Attr> {
        // Times that stay: a file whose mtime changes is read again.
        let still =
            Attr { mtime: Default::default(), ctime: Default::default(), ..Attr::new(ino, FileType::Directory, 0o755) };
        if ino == Ino::ROOT {
            return Ok(still);
        }
        let files = self.files.lock().unwrap();
        let (_, bytes) = files.get(&ino.0).ok_or(Errno::NOENT)?;
        let mode = FileType::RegularFile.as_raw_mode() | 0o644;
        Ok(Attr { mode, nlink: 1, ..still }.with_size(bytes.len() as u64))
    }

    fn note(&self, handle: Handle) {
        self.handles.lock().unwrap().push(handle);
    }
}

impl FileSystem for Bare {
    fn features(&self) -> Features {
        Features { read_only: self.read_only, ..Features::default() }
    }

    fn lookup(&self, _: &Caller, _: Ino, name: Name) -> Result<Entry> {
        let find = |(ino, (known, _)): (&u64, &(Vec<u8>, _))| (known == name.as_bytes()).then_some(Ino(*ino));
        let ino = self.files.lock().unwrap().iter().find_map(find).ok_or(Errno::NOENT)?;
        Ok(Entry::new(ino, self.attr(ino)?))
    }

    fn getattr(&self, _: &Caller, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        self.attr(ino)
    }

    fn setattr(&self, _: &Caller, ino: Ino, _: Option<Handle>, _: &SetAttr) -> Result<Attr> {
        self.attr(ino)
    }

    fn mknod(&self, _: &Caller, _: Ino, name: Name, _: &CreateArgs) -> Result<Entry> {
        *self.made.lock().unwrap() += 1;
        let ino = Ino(self.files.lock().unwrap().len() as u64 + 2);
        self.files.lock().unwrap().insert(ino.0, (name.as_bytes().into(), Vec::new()));
        Ok(Entry::new(ino, self.attr(ino)?))
    }

    fn read(&self, _: &Caller, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        *self.reads.lock().unwrap() += 1;
        self.note(at.handle);
        let files = self.files.lock().unwrap();
        Ok(at.read_from(&files.get(&at.ino.0).ok_or(Errno::NOENT)?.1, out))
    }

    fn write(&self, _: &Caller, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        self.note(at.handle);
        let mut files = self.files.lock().unwrap();
        at.write_to(&mut files.get_mut(&at.ino.0).ok_or(Errno::NOENT)?.1, input, BYTES_MAX)
    }

    fn readdir(&self, _: &Caller, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        self.note(at.handle);
        for (ino, (name, _)) in self.files.lock().unwrap().iter().filter(|(ino, _)| **ino >= at.offset + 2) {
            if !out.fits(name) {
                break;
            }
            out.push(&DirItem { ino: *ino, next: ino - 1, kind: FileType::RegularFile, name }, None);
        }
        Ok(())
    }
}

/// Runs a test on a mount with a file `file` of [`TEXT`], with each transport.
fn on_mounts(read_only: bool, test: impl Fn(&Bare, &Path)) {
    if !rustix::process::geteuid().is_root() || File::open("/dev/fuse").is_err() {
        ferry_skip::skip!("needs root and /dev/fuse");
        return;
    }
    for path in [fuse::Path::Auto, fuse::Path::Devfuse] {
        let directory = tempfile::tempdir().unwrap();
        let bare = Arc::new(Bare { read_only, ..Bare::default() });
        bare.files.lock().unwrap().insert(2, (b"file".into(), TEXT.into()));
        let options = fuse::Options { path, ..fuse::Options::default() };
        let export = fuse::Export::mount(directory.path(), Arc::clone(&bare) as _, options).unwrap();
        test(&bare, directory.path());
        assert!(bare.handles.lock().unwrap().iter().all(|handle| *handle == Handle(0)), "the handle is 0");
        export.stop();
    }
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

#[test]
fn opening_succeeds_and_read_data_stay_cached() {
    on_mounts(false, |bare, at| {
        // Twice: the kernel asks the first time only.
        for round in 0..2 {
            assert_eq!(fs::read(at.join("file")).unwrap(), TEXT, "round {round}");
            assert_eq!(fs::read_dir(at).unwrap().count(), 1, "round {round}");
        }
        assert!(!bare.handles.lock().unwrap().is_empty());
        // This change is not published, so it is not seen.
        bare.files.lock().unwrap().get_mut(&2).unwrap().1[0] = b'n';
        let reads = *bare.reads.lock().unwrap();
        assert_eq!(fs::read(at.join("file")).unwrap(), TEXT);
        assert_eq!(*bare.reads.lock().unwrap(), reads);
    });
}

#[test]
fn files_are_created_by_mknod() {
    on_mounts(false, |bare, at| {
        for number in 1..=2 {
            let name = at.join(format!("new{number}"));
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(&name).unwrap();
            assert_eq!(*bare.made.lock().unwrap(), number);
            file.write_all_at(TEXT, 0).unwrap();
            assert_eq!(fs::read(&name).unwrap(), TEXT);
        }
    });
}

#[test]
fn unsupported_operations_return_errors() {
    on_mounts(false, |_, at| {
        let name = at.join("file");
        let file = open(&name);
        for round in 0..2 {
            let made = rustix::fs::open(at, OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR).map(drop);
            assert_eq!(made, Err(Errno::OPNOTSUPP), "tmpfile, round {round}");
            let allocated = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 4096);
            assert_eq!(allocated, Err(Errno::OPNOTSUPP), "fallocate, round {round}");
            let mut value = [0; 16];
            let set = rustix::fs::setxattr(&name, "user.x", b"1", XattrFlags::empty());
            assert_eq!(set, Err(Errno::OPNOTSUPP), "setxattr, round {round}");
            assert_eq!(rustix::fs::getxattr(&name, "user.x", &mut value), Err(Errno::OPNOTSUPP), "round {round}");
            assert_eq!(rustix::fs::listxattr(&name, &mut value), Err(Errno::OPNOTSUPP), "round {round}");
            assert_eq!(rustix::fs::removexattr(&name, "user.x"), Err(Errno::OPNOTSUPP), "round {round}");
            let mut argument = 5u64;
            // SAFETY: the command's number says that it reads and writes eight bytes, which `argument` has.
            let controlled = unsafe {
                let call = rustix::ioctl::Updater::<0xc008_7207, u64>::new(&mut argument);
                rustix::ioctl::ioctl(&file, call)
            };
            assert_eq!(controlled, Err(Errno::NOTTY), "ioctl, round {round}");
        }
    });
}

#[test]
fn flushing_and_syncing_succeed() {
    on_mounts(false, |_, at| {
        for _ in 0..2 {
            let (file, dir) = (open(&at.join("file")), File::open(at).unwrap());
            file.sync_all().unwrap();
            file.sync_data().unwrap();
            dir.sync_all().unwrap();
            rustix::fs::syncfs(&dir).unwrap();
            // Closing flushes; the number is not used after this.
            let number = std::os::fd::IntoRawFd::into_raw_fd(file);
            // SAFETY: the descriptor was ours, and nobody else has it.
            assert_eq!(unsafe { libc::close(number) }, 0, "{}", std::io::Error::last_os_error());
        }
    });
}

#[test]
fn files_have_no_holes() {
    on_mounts(false, |_, at| {
        let file = open(&at.join("file"));
        let len = TEXT.len() as u64;
        for _ in 0..2 {
            assert_eq!(rustix::fs::seek(&file, SeekFrom::Data(5)), Ok(5));
            assert_eq!(rustix::fs::seek(&file, SeekFrom::Hole(5)), Ok(len));
            assert_eq!(rustix::fs::seek(&file, SeekFrom::Data(len)), Err(Errno::NXIO));
        }
    });
}

#[test]
fn the_kernel_copies() {
    on_mounts(false, |bare, at| {
        for name in ["new1", "new2"] {
            let to = OpenOptions::new().write(true).create_new(true).open(at.join(name)).unwrap();
            let copied = rustix::fs::copy_file_range(open(&at.join("file")), None, &to, None, TEXT.len());
            assert_eq!(copied, Ok(TEXT.len()));
            assert_eq!(fs::read(at.join(name)).unwrap(), TEXT);
        }
        assert!(*bare.reads.lock().unwrap() > 0);
    });
}

#[test]
fn the_kernel_keeps_locks() {
    on_mounts(false, |_, at| {
        let [one, other] = [(); 2].map(|()| open(&at.join("file")));
        rustix::fs::flock(&one, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert_eq!(rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared), Err(Errno::WOULDBLOCK));
        drop(one);
        rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared).unwrap();
        rustix::fs::fcntl_lock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
    });
}

/// Operations that create, move and remove names, none of which is implemented.
fn changes(at: &Path) -> [(&'static str, Result<()>); 6] {
    let (root, new) = (File::open(at).unwrap(), "other");
    [
        ("rename", rustix::fs::renameat(&root, "file", &root, new)),
        ("mkdir", rustix::fs::mkdirat(&root, new, Mode::RWXU)),
        ("symlink", rustix::fs::symlinkat("to", &root, new)),
        ("link", rustix::fs::linkat(&root, "file", &root, new, rustix::fs::AtFlags::empty())),
        ("unlink", rustix::fs::unlinkat(&root, "file", rustix::fs::AtFlags::empty())),
        ("rename with flags", rustix::fs::renameat_with(&root, "file", &root, new, RenameFlags::NOREPLACE)),
    ]
}

#[test]
fn names_cannot_be_changed() {
    for read_only in [false, true] {
        on_mounts(read_only, |_, at| {
            for (what, outcome) in [changes(at), changes(at)].concat() {
                let expected = match what {
                    _ if read_only => Errno::ROFS,
                    "rename with flags" => Errno::INVAL,
                    "link" => Errno::PERM,
                    _ => Errno::NOSYS,
                };
                assert_eq!(outcome, Err(expected), "{what}, read only: {read_only}");
            }
        });
    }
}
