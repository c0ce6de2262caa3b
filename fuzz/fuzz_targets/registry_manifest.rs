//! Manifests from any registry: what is taken says the same when it is written and read again.
#![no_main]

#[allow(dead_code, unused_imports, reason = "a part of a crate, by itself")]
#[path = "../../registry/src/manifest.rs"]
mod manifest;

use ferry_image::Digest;
use libfuzzer_sys::fuzz_target;
use manifest::Manifest;

fuzz_target!(|bytes: &[u8]| {
    let Ok(found) = Manifest::read(bytes) else { return };
    let order: Vec<Digest> = found.packs.keys().copied().collect();
    assert_eq!(Manifest::read(&found.write(&order)).as_ref(), Ok(&found));
    for pack in found.packs.values() {
        let bytes = pack.parts.iter().fold(0_u64, |sum, part| sum.saturating_add(part.bytes));
        for range in [0..bytes, bytes / 3..bytes / 2, bytes..bytes.saturating_add(1)] {
            let pieces = pack.pieces(&range);
            assert_eq!(pieces.is_some(), range.end <= bytes);
            let sum = pieces.into_iter().flatten().map(|(_, piece)| piece.end - piece.start).sum::<u64>();
            assert!(sum == 0 || sum == range.end - range.start);
        }
    }
});
