//! Images from anywhere: every look at them ends with an answer or a flaw, what fsck calls clean can be used in full, and their readers
//! get EIO for the rest.
#![no_main]

use std::collections::HashSet;
use std::fs;
use std::sync::OnceLock;

use ferry_image::{ChangeKind, Data, Digests, Flaw, Image, ObjectLocation, Source, Store, check, diff, object_locations};
use ferry_vfs::{
    Caller, DirItem, DirOutput, DirRange, Entry, Errno, FileSystem, FileType, Handle, Ino, IoRange, Mappable, Name,
    OFlags, SessionId,
};
use libfuzzer_sys::fuzz_target;

/// Inodes that are looked at. A damaged image may lead to the same ones for ever.
const LOOKS_MAX: usize = 500;

fuzz_target!(|bytes: &[u8]| {
    let Ok(image) = Image::from_bytes(bytes.to_vec()) else { return };
    let report = check(&image);
    let is_clean = report.findings.is_empty();
    let whole = look(&image, is_clean);
    assert!(!is_clean || whole.is_ok(), "clean, but {whole:?}");
    match object_locations(&image) {
        Ok(places) => assert!(places.keys().all(|place| match place {
            ObjectLocation::Packed(name, _) => image.packs().iter().any(|pack| pack.name == *name),
            ObjectLocation::Object(_) => image.is_composefs(),
        })),
        Err(flaw) => assert!(!is_clean, "clean, but {flaw}"),
    }
    let same = diff::<Flaw>(&image, &image, &Digests::default(), &mut |change| {
        panic!("an image is not itself: {:?} {:?}", change.kind == ChangeKind::Changed, change.what)
    });
    assert!(!is_clean || same.is_ok(), "clean, but {same:?}");
    ask(image, is_clean);
});

/// A store with nothing in it.
fn store() -> &'static tempfile::TempDir {
    static STORE: OnceLock<tempfile::TempDir> = OnceLock::new();
    STORE.get_or_init(|| {
        let directory = tempfile::tempdir().expect("a directory can be made");
        fs::create_dir(directory.path().join("objects")).expect("a directory can be made");
        Store::create(directory.path()).expect("a store can be made");
        directory
    })
}

/// The names of a directory.
struct Names(Vec<Vec<u8>>);

impl DirOutput for Names {
    fn fits(&self, _: &[u8]) -> bool {
        self.0.len() < LOOKS_MAX
    }

    fn push(&mut self, item: &DirItem<'_>, _: Option<&Entry>) {
        self.0.push(item.name.to_vec());
    }
}

/// Asks a source for everything, by the requests that clients have. Of an image that names packs there is none: they are not here.
fn ask(image: Image, is_clean: bool) {
    let Ok(source) = Source::open_idle(image, store().path()) else { return };
    let caller = Caller { session: SessionId::unique(), uid: 0, gid: 0, pid: 1, groups: &[] };
    let (mut seen, mut left) = (HashSet::new(), vec![Ino::ROOT]);
    while let Some(ino) = left.pop().filter(|_| seen.len() < LOOKS_MAX) {
        if !seen.insert(ino) {
            continue;
        }
        let mut names = Names(Vec::new());
        let listed =
            source.readdir(&caller, &DirRange { ino, handle: Handle(ino.0), offset: 0, plus: true }, &mut names);
        assert!(!is_clean || matches!(listed, Ok(()) | Err(Errno::NOTDIR)), "clean, but {listed:?}");
        for name in names.0.iter().filter(|name| !matches!(&***name, b"." | b"..")) {
            let found = source.lookup(&caller, ino, Name::new(name).expect("nothing else is handed out"));
            assert!(!is_clean || found.is_ok(), "clean, but {found:?}");
            left.extend(found.map(|entry| entry.ino));
        }
        let _ = (source.lookup_parent(&caller, ino), source.getattr(&caller, ino, None), source.readlink(&caller, ino));
        let _ = (source.getxattr(&caller, ino, b"user.one"), source.listxattr(&caller, ino));
        let Ok(handle) = source.open(&caller, ino, OFlags::empty()) else { continue };
        for offset in [0, 4095, u64::MAX] {
            let (flags, len) = (OFlags::empty(), 70_000);
            let at = IoRange { ino, handle, offset, len, flags, clear_privileges: false, owner: None };
            let _ = (source.read(&caller, &at, &mut Vec::new()), source.map_pieces(&caller, ino, 0, offset));
        }
        let _ = source.backing(&caller, ino, handle);
    }
}

/// Reads everything readable, also after errors; returns the first error.
fn look(image: &Image, is_clean: bool) -> Result<(), Flaw> {
    let mut outcome = Ok(());
    let mut left = vec![image.root()];
    for _ in 0..LOOKS_MAX {
        let Some(nid) = left.pop() else { break };
        let looked = image.inode(nid).and_then(|inode| {
            image.xattrs(&inode)?;
            match inode.kind() {
                FileType::Directory => {
                    image.parent(&inode)?;
                    for entry in image.entries(&inode, 0)? {
                        let entry = entry?;
                        // Where a listing goes on is where it would have come to.
                        let next = image.entries(&inode, entry.next)?.next().transpose();
                        if !matches!(entry.name, b"." | b"..") {
                            let name = Name::new(entry.name).expect("nothing else is handed out");
                            let found = image.lookup(&inode, name)?;
                            assert!(!is_clean || found == Some(entry.nid));
                            left.push(entry.nid);
                        }
                        next?;
                    }
                }
                FileType::Symlink => drop(image.link(&inode)?),
                FileType::RegularFile => match image.data(&inode)? {
                    Data::Near(whole, rest) => assert_eq!((whole.len() + rest.len()) as u64, inode.bytes),
                    Data::Far { pack, block } => assert!(block < image.packs()[pack].blocks),
                    data @ Data::Chunks(_) => {
                        let mut bytes = 0;
                        for run in data.runs(inode.bytes, 0..inode.bytes).take(LOOKS_MAX) {
                            let run = run?;
                            assert!(run.bytes > 0 && run.at < image.packs()[run.pack].blocks * 4096);
                            bytes += run.bytes;
                        }
                        assert!(bytes <= inode.bytes);
                    }
                    Data::Object { .. } => {}
                },
                _ => {}
            }
            Ok(())
        });
        if outcome.is_ok() {
            outcome = looked;
        }
    }
    outcome
}
