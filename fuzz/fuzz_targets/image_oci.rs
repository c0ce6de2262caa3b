//! OCI image directories from anywhere: indexes, manifests, configurations, and what layers make together.
#![no_main]

mod build;

use std::fs;

use ferry_image::Layout;
use libfuzzer_sys::fuzz_target;
use sha2::{Digest, Sha256};

/// What stands between blobs; the last one is the index.
const END: u8 = 0xff;
/// Blobs of one input. Those before can be named: `@` and a digit is a digest, `#` and a digit a length.
const BLOBS_MAX: usize = 10;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, rest)) = bytes.split_first() else { return };
    let directory = build::directory().join("oci");
    let blobs = directory.join("blobs/sha256");
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&blobs).expect("directories can be made");
    fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).expect("files can be written");
    let mut known: Vec<(String, usize)> = Vec::new();
    let mut parts = rest.split(|byte| *byte == END).take(BLOBS_MAX + 1).peekable();
    while let Some(part) = parts.next() {
        let bytes = filled_in(part, &known);
        if parts.peek().is_none() {
            fs::write(directory.join("index.json"), bytes).expect("files can be written");
            break;
        }
        let name: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(blobs.join(&name), &bytes).expect("files can be written");
        known.push((name, bytes.len()));
    }
    let mut source = std::ffi::OsString::from("oci:");
    source.push(&directory);
    let layout = if choice & 1 == 0 { Layout::Flat } else { Layout::Composefs { version: None } };
    build::check_source(source.as_ref(), layout, None);
});

/// A blob that names others, where it is text.
fn filled_in(part: &[u8], known: &[(String, usize)]) -> Vec<u8> {
    let Ok(text) = std::str::from_utf8(part) else { return part.into() };
    if !text.starts_with('{') {
        return part.into();
    }
    let fill = |text: String, (at, (name, bytes)): (usize, &(String, usize))| {
        text.replace(&format!("@{at}"), &format!("sha256:{name}")).replace(&format!("#{at}"), &bytes.to_string())
    };
    known.iter().enumerate().fold(text.to_owned(), fill).into_bytes()
}
