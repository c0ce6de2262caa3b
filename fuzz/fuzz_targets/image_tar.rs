//! Archives from anywhere: what is taken gives an image that fsck calls clean, whatever becomes of whiteouts; what is not is refused.
#![no_main]

mod archive;
mod build;

use ferry_image::{Layout, Whiteouts};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, archive)) = bytes.split_first() else { return };
    let layout = if choice & 1 == 0 { Layout::Flat } else { Layout::Composefs { version: None } };
    let whiteouts = [None, Some(Whiteouts::Drop), Some(Whiteouts::Overlay), Some(Whiteouts::Keep)];
    build::check(&archive::summed(archive.to_vec()), layout, whiteouts[usize::from(choice >> 1) % whiteouts.len()]);
});
