//! containerd's `hosts.toml`: what is taken has an URL that requests can be made of, and what is refused is one sentence.
#![no_main]

use std::path::Path;

use ferry_registry::parse_hosts;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match parse_hosts(text, "https://h.example", Path::new("/etc")) {
        Ok(hosts) => {
            assert!(!hosts.is_empty());
            for host in hosts {
                assert!(host.url.path().ends_with('/') && matches!(host.url.scheme(), "http" | "https"));
                assert!(host.url.username().is_empty() && host.url.password().is_none());
            }
        }
        Err(reason) => assert!(!reason.contains('\n'), "{reason}"),
    }
});
