//! Directory listings.

use ferry_driver::fuse::{DirEntries, DirEntry};
use ferry_vfs::{DirItem, DirOutput, Entry, FileType, Ino};
use ferry_wire::fuse::*;
use proptest::prelude::*;

use super::FULL;
use super::seed::{Seed, seed};

const KINDS: [FileType; 4] = [FileType::Directory, FileType::RegularFile, FileType::Symlink, FileType::Unknown];

fn items(seeds: &[Seed]) -> Vec<(DirItem<'_>, Option<Entry>)> {
    let mut items = Vec::new();
    for (index, seed) in seeds.iter().enumerate() {
        let name = if index == 0 { b".." } else { &seed.names[0][..] };
        let item = DirItem { ino: seed.words[0], next: seed.words[1], kind: KINDS[index % KINDS.len()], name };
        items.push((item, (index > 0).then(|| seed.entry())));
    }
    items
}

proptest! {
    #[test]
    fn listings_round_trip_within_their_limit(
        seeds in proptest::collection::vec(seed(), 1..6), limit in 0..2000_usize, before in 0..9_usize, plus in any::<bool>(), dax in any::<bool>(),
    ) {
        let items = items(&seeds);
        let timeouts = seeds[0].timeouts();
        let mut buffer = vec![0xee; before];
        let mut listing = DirWriter::new(&mut buffer, limit, plus, timeouts, &FULL);
        listing.set_dax(dax);
        let mut wanted = Vec::new();
        for (item, entry) in &items {
            if !listing.fits(item.name) {
                break;
            }
            listing.push(item, entry.as_ref());
            let entry = entry.filter(|_| plus).map(|entry| (entry, timeouts, dax));
            wanted.push(Ok(DirEntry { item: *item, entry }));
        }
        prop_assert!(buffer.len() <= before + limit);
        prop_assert_eq!((buffer.len() - before) % 8, 0);
        prop_assert!(buffer[..before].iter().all(|byte| *byte == 0xee));
        let listing = &buffer[before..];
        prop_assert_eq!(DirEntries::new(listing, plus).collect::<Vec<_>>(), wanted.clone());
        for len in 0..listing.len() {
            let cut: Vec<_> = DirEntries::new(&listing[..len], plus).collect();
            prop_assert!(cut.len() <= wanted.len());
        }
    }

    #[test]
    fn parsing_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400), plus in any::<bool>()) {
        for entry in DirEntries::new(&bytes, plus).flatten() {
            prop_assert!(!entry.item.name.is_empty());
        }
    }
}

/// The bytes that Linux's readers expect.
#[test]
fn an_entry_has_the_layout_of_the_protocol() {
    let mut buffer = Vec::new();
    let mut listing = DirWriter::new(&mut buffer, 4096, false, Timeouts::default(), &FULL);
    listing.push(&DirItem { ino: 2, next: 3, kind: FileType::RegularFile, name: b"abc" }, None);
    let wanted =
        [&[2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 8, 0, 0, 0][..], b"abc\0\0\0\0\0"].concat();
    assert_eq!(buffer, wanted);
    let mut buffer = Vec::new();
    let mut listing = DirWriter::new(&mut buffer, 4096, false, Timeouts::default(), &FULL);
    listing.push(&DirItem { ino: 2, next: 3, kind: FileType::Unknown, name: b"a" }, None);
    assert_eq!(buffer[20..24], [0; 4], "DT_UNKNOWN");
}

#[test]
fn a_readdirplus_entry_has_all_attributes_or_none() {
    let mut buffer = Vec::new();
    let mut listing = DirWriter::new(&mut buffer, 4096, true, Timeouts::default(), &FULL);
    let dot = DirItem { ino: 2, next: 3, kind: FileType::Directory, name: b"." };
    listing.push(&dot, None);
    listing.push(&DirItem { name: b"x", ..dot }, Some(&Entry { ino: Ino(9), generation: 1, attr: Default::default() }));
    assert_eq!(buffer.len(), 2 * (128 + 24 + 8));
    assert!(buffer[..128].iter().all(|byte| *byte == 0));
    assert_eq!(buffer[160], 9);
}
