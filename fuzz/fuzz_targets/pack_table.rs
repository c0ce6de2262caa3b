//! Tables of packs: what is read of any bytes is written to the same bytes again, or refused.
#![no_main]

use ferry_image::pack_table::{read, write};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok((packs, entries)) = read(bytes) else { return };
    assert_eq!(write(&packs, entries).as_deref(), Some(bytes));
});
