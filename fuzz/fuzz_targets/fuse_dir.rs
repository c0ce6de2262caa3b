//! Directory listings: what parses, written again within the same limit, parses to the same.
#![no_main]

use ferry_driver::fuse::{DirEntries, DirEntry};
use ferry_vfs::DirOutput;
use ferry_wire::fuse::*;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, listing)) = bytes.split_first() else { return };
    let plus = choice & 1 == 1;
    let session = Negotiated { flags: InitFlags::ALL, ..Negotiated::BEFORE_INIT };
    let mut used = Vec::new();
    for entry in DirEntries::new(listing, plus) {
        let Ok(DirEntry { item, entry }) = entry else { break };
        let (timeouts, dax) = entry.map_or_else(Default::default, |(_, timeouts, dax)| (timeouts, dax));
        let mut again = Vec::new();
        let mut writer = DirWriter::new(&mut again, listing.len(), plus, timeouts, &session);
        writer.set_dax(dax);
        assert!(writer.fits(item.name), "it was in a listing of this length");
        writer.push(&item, entry.as_ref().map(|(entry, ..)| entry));
        assert_eq!(DirEntries::new(&again, plus).collect::<Vec<_>>(), [Ok(DirEntry { item, entry })]);
        used.extend_from_slice(&again);
    }
    assert!(used.len() <= listing.len());
});
