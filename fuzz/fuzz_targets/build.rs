//! Builds an image of what a fuzzer has thought of.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use ferry_image::{BuildOptions, Image, Layout, Store, Whiteouts};

thread_local! {
    /// In memory, where that can be had; the store stays, as stores do.
    static DIR: RefCell<Option<tempfile::TempDir>> = const { RefCell::new(None) };
}

/// Where files can be made.
pub fn directory() -> PathBuf {
    DIR.with_borrow_mut(|directory| {
        let made = || {
            let memory = Path::new("/dev/shm");
            if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }
                .expect("directories can be made")
        };
        directory.get_or_insert_with(made).path().into()
    })
}

/// Builds of a file with these bytes.
#[allow(dead_code, reason = "not every target has a file")]
pub fn check(bytes: &[u8], layout: Layout, whiteouts: Option<Whiteouts>) {
    let source = directory().join("source");
    std::fs::write(&source, bytes).expect("files can be written");
    check_source(&source, layout, whiteouts);
}

/// What is built of a source is clean, and what is refused leaves nothing.
pub fn check_source(source: &Path, layout: Layout, whiteouts: Option<Whiteouts>) {
    let directory = directory();
    let image = directory.join("image");
    let _ = std::fs::remove_file(&image);
    let store = Store::create(&directory.join("store")).expect("stores can be made");
    let platform = Some("linux/amd64".into());
    let options = BuildOptions { threads: 1, layout, whiteouts, platform, ..BuildOptions::default() };
    match ferry_image::build(source, &image, store, &options, &|_, _| {}) {
        Err(_) => assert!(!image.exists()),
        Ok(built) => {
            let image = Image::open(&image, Some(built.digest)).expect("it was built");
            let report = ferry_image::check(&image);
            assert!(report.findings.is_empty(), "{:?}", report.findings);
            // composefs's root has whiteouts of its own.
            assert!(layout != Layout::Flat || report.inodes == built.inodes as u64);
        }
    }
}
