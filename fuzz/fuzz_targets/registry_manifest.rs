//! Manifests from any registry: what is taken says the same when it is written and read again.
#![no_main]

#[allow(dead_code, reason = "a part of a crate, by itself")]
#[path = "../../registry/src/frames.rs"]
mod frames;
#[allow(dead_code, unused_imports, reason = "a part of a crate, by itself")]
#[path = "../../registry/src/manifest.rs"]
mod manifest;

use std::io;
use std::ops::Range;

use ferry_image::Digest;
use libfuzzer_sys::fuzz_target;
use manifest::Manifest;

fuzz_target!(|bytes: &[u8]| {
    let Ok(found) = Manifest::read(bytes) else { return };
    let order: Vec<Digest> = found.packs.keys().copied().collect();
    assert_eq!(Manifest::read(&found.write(&order)).as_ref(), Ok(&found));
    for pack in found.packs.values() {
        let all = pack.parts.iter().fold(0_u64, |sum, part| sum.saturating_add(part.bytes()));
        for range in [0..all, all / 3..all / 2, all..all.saturating_add(1)] {
            let pieces = pack.pieces(&range);
            assert_eq!(pieces.is_some(), range.end <= all);
            let sum = pieces.into_iter().flatten().map(|(_, piece)| piece.end - piece.start).sum::<u64>();
            assert!(sum == 0 || sum == range.end - range.start);
        }
        for frames in pack.parts.iter().filter_map(|part| part.frames.as_ref()).filter(|frames| frames.bytes < 1 << 20) {
            let mut found = 0;
            let mut sink = |piece: &[u8]| {
                found += piece.len() as u64;
                Ok(())
            };
            let any = |range: &Range<u64>, sink: &mut dyn FnMut(&[u8]) -> io::Result<()>| {
                let length = usize::try_from(range.end - range.start).unwrap_or_default();
                sink(&bytes.iter().copied().cycle().take(length).collect::<Vec<_>>())
            };
            frames.read(&(frames.bytes / 3..frames.bytes), any, &mut sink).expect("the sink takes all");
            assert_eq!(found, frames.bytes - frames.bytes / 3);
        }
    }
});
