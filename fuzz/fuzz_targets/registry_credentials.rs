//! Files with credentials: what is taken is a user and a password, and what is refused is one sentence.
#![no_main]

use ferry_registry::parse_credentials;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    match parse_credentials(text, &["a".into(), "h.example".into()]) {
        Ok(Some(basic)) => assert!(basic.is_ascii() && !basic.contains(char::is_whitespace)),
        Ok(None) => {}
        Err(reason) => assert!(!reason.contains('\n'), "{reason}"),
    }
});
