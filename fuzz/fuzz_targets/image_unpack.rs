//! Layers from a registry, packed in any way: what is unpacked gives an image that fsck calls clean and the archive's digest, and so
//! does the merged image of two; what is not is refused.
#![no_main]

mod archive;
mod build;

use std::io::Write;
use std::path::Path;

use ferry_image::{Digest, Image, LayerRules, Store, Whiteouts, check, merge, unpack_layer};
use libfuzzer_sys::fuzz_target;
use sha2::Sha256;

fuzz_target!(|bytes: &[u8]| {
    let Some(([packing, split], archives)) = bytes.split_first_chunk() else { return };
    let (lower, upper) = archives.split_at(archives.len().min(usize::from(*split) * archive::BLOCK));
    let directory = build::directory();
    let layers = [("upper", upper), ("lower", lower)].map(|(name, archive)| {
        let image = directory.join(name);
        unpack(&archive::summed(archive.to_vec()), *packing, &image).map(|digest| (image, digest))
    });
    let [Some(upper), Some(lower)] = layers else { return };
    let merged = directory.join("merged");
    let _ = std::fs::remove_file(&merged);
    match merge(&[upper, lower], &merged, true) {
        Ok(digest) => assert_clean(&merged, digest),
        Err(_) => assert!(!merged.exists()),
    }
});

/// Returns the digest of a layer's image, if it can be unpacked.
fn unpack(archive: &[u8], packing: u8, image: &Path) -> Option<Digest> {
    let _ = std::fs::remove_file(image);
    let store = Store::create(&build::directory().join("store")).expect("stores can be made");
    let rules = LayerRules { whiteouts: Whiteouts::Overlay, lower: &|_| Ok(None), file_bytes_max: 1 << 20, inode_share: true };
    let unpacked = unpack_layer(&*packed(archive, packing), Path::new("layer"), image, store, &rules);
    let Ok(unpacked) = unpacked else {
        assert!(!image.exists());
        return None;
    };
    let (bytes, sha256) = (archive.len() as u64, <[u8; 32]>::from(<Sha256 as sha2::Digest>::digest(archive)));
    assert_eq!((unpacked.bytes, unpacked.sha256), (bytes, sha256));
    assert_clean(image, unpacked.image.digest);
    Some(unpacked.image.digest)
}

fn assert_clean(image: &Path, digest: Digest) {
    let report = check(&Image::open(image, Some(digest)).expect("it was built"));
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

fn packed(archive: &[u8], packing: u8) -> Vec<u8> {
    match packing % 3 {
        0 => archive.to_vec(),
        1 => {
            let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            out.write_all(archive).and_then(|()| out.finish()).expect("memory takes all")
        }
        _ => zstd::encode_all(archive, 1).expect("memory takes all"),
    }
}
