//! A ring taken over with any contents of the in-flight memory: an error, or chains that end.
#![no_main]

use libfuzzer_sys::fuzz_target;

/// The in-flight memory of the target's one queue.
const LOG_BYTES: usize = 320;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, contents)) = bytes.split_first() else { return };
    ferry_vhost::fuzzing::recovery(contents, LOG_BYTES, choice & 1 == 1);
});
