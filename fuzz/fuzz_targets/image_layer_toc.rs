//! Tables of contents of containers' layers, in both formats, and ends of blobs: what is taken gives an image that fsck calls clean, whose files
//! can be asked for.
#![no_main]

mod build;
#[allow(dead_code, reason = "the target uses a part")]
#[path = "../../sources/image/tests/common/toc_layers.rs"]
mod toc_layers;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ferry_image::{ByteSink, Digest, Fetch, FetchOptions, LayerRef, Source, Store, build_layers};
use libfuzzer_sys::fuzz_target;
use toc_layers::{FORMATS, Writer, footer};

/// The blob of the layer.
#[derive(Debug)]
struct Blob(Vec<u8>);

impl Blob {
    fn get(&self, range: Range<u64>) -> io::Result<&[u8]> {
        let at = |offset: u64| usize::try_from(offset).map_err(io::Error::other);
        self.0.get(at(range.start)?..at(range.end)?).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

impl Fetch for Blob {
    fn index(&self, _: Digest, _: u64) -> io::Result<Vec<u8>> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn read(&self, _: Digest, _: Range<u64>, _: &mut ByteSink<'_>) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn blob(&self, _: [u8; 32], _: u64, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
        sink(self.get(range)?)
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, rest)) = bytes.split_first() else { return };
    let mut writer = Writer::new(FORMATS[usize::from(choice & 1)], &[100]);
    // Streams that entries can name.
    for number in 0..8 {
        writer.file(&format!("{number}"), &vec![number; 300]);
    }
    let mut layer = match choice >> 1 & 1 {
        0 => writer.finish_with(|_| rest.to_vec()),
        _ => writer.finish(),
    };
    if choice >> 1 & 1 == 1 {
        // An end of the blob that is the fuzzer's, behind a table that is right.
        layer.blob.truncate(layer.blob.len().saturating_sub(rest.len()));
        layer.blob.extend_from_slice(rest);
        if choice & 4 != 0 {
            layer.blob.extend(footer(rest.len()));
        }
    }
    let annotation = |key: &str| layer.annotations.get(key).map(String::as_str);
    let Ok(reference) = LayerRef::parse(layer.name(), layer.blob.len() as u64, layer.media_type, annotation) else { return };
    let blob = Blob(layer.blob);
    let Ok(table) = reference.fetch(&|range| blob.get(range).map(<[u8]>::to_vec)) else { return };
    let directory = build::directory();
    let (image, directory) = (directory.join("image"), directory.join("store"));
    let _ = std::fs::remove_dir_all(&directory);
    let store = Store::create(&directory).expect("stores can be made");
    let first: Vec<_> = table.first().collect();
    if build_layers(&[table], &[7; 32], &image, &store).is_err() {
        return;
    }
    let missing = FetchOptions { from: Arc::new(blob), ahead_bytes: 0, cache_bytes: None };
    let source = Source::open_with(&image, &directory, None, Some(missing)).expect("it was built");
    let report = ferry_image::check(source.image());
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    let found = source.shared_objects().put_first(source.image(), first.iter().map(Vec::as_slice));
    assert!(found.files + found.unknown <= first.len());
    let _ = source.shared_objects().fetch_all(1, &AtomicBool::new(false), &|_, _| {});
});
