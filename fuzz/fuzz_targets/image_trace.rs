//! Lists of files, as they come beside images from a registry: what is read is written and read again the same.
#![no_main]

mod build;

use ferry_image::Trace;
use libfuzzer_sys::fuzz_target;

const BYTES_MAX: u64 = 1 << 12;

fuzz_target!(|bytes: &[u8]| {
    let list = build::directory().join("list");
    let read = |bytes: &[u8]| {
        std::fs::write(&list, bytes).expect("files can be written");
        Trace::read_within(&list, BYTES_MAX)
    };
    let Ok(trace) = read(bytes) else { return };
    assert!(bytes.len() as u64 <= BYTES_MAX && trace.paths().all(|path| path.starts_with(b"/")));
    let mut written = Vec::new();
    trace.write(&mut written).expect("memory takes all");
    std::fs::write(&list, &written).expect("files can be written");
    assert_eq!(Trace::read(&list).expect("it was written by us"), trace);
});
