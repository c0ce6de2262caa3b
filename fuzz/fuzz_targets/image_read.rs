//! Images from anywhere: every look at them ends with an answer or a flaw, and what fsck calls clean can be used in full.
#![no_main]

use ferry_image::{ChangeKind, Data, Digests, Flaw, Image, Place, check, diff, places};
use ferry_vfs::{FileType, Name};
use libfuzzer_sys::fuzz_target;

/// Inodes that are looked at. A damaged image may lead to the same ones for ever.
const LOOKS_MAX: usize = 500;

fuzz_target!(|bytes: &[u8]| {
    let Ok(image) = Image::from_bytes(bytes.to_vec()) else { return };
    let report = check(&image);
    let is_clean = report.findings.is_empty();
    let whole = look(&image, is_clean);
    assert!(!is_clean || whole.is_ok(), "clean, but {whole:?}");
    match places(&image) {
        Ok(places) => assert!(places.keys().all(|place| match place {
            Place::Packed(name, _) => image.packs().iter().any(|pack| pack.name == *name),
            Place::Object(_) => image.is_composefs(),
        })),
        Err(flaw) => assert!(!is_clean, "clean, but {flaw}"),
    }
    let same = diff::<Flaw>(&image, &image, &Digests::default(), &mut |change| {
        panic!("an image is not itself: {:?} {:?}", change.kind == ChangeKind::Changed, change.what)
    });
    assert!(!is_clean || same.is_ok(), "clean, but {same:?}");
});

/// Looks at everything that can be looked at, past flaws; answers the first.
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
                        if let Ok(name) = Name::new(entry.name) {
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
                    data @ Data::Pieces(_) => {
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
