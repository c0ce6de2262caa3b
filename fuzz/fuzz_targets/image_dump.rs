//! composefs's dump files from anywhere: what is taken gives an image that fsck calls clean, and whose own dump gives the same image.
#![no_main]

mod build;

use ferry_image::{Image, Layout};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, dump)) = bytes.split_first() else { return };
    let layout = Layout::Composefs { version: Some(u32::from(choice & 1)) };
    build::check(dump, layout, None);
    let path = build::directory().join("image");
    let Ok(image) = Image::open(&path, None) else { return };
    let mut again = Vec::new();
    ferry_image::dump(&image, &mut again).expect("what was built has a dump");
    build::check(&again, layout, None);
    let rebuilt = Image::open(&path, None).expect("a dump can be built");
    assert_eq!(rebuilt.digest(), image.digest(), "{}", String::from_utf8_lossy(&again));
});
