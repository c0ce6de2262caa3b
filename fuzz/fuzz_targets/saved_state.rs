//! The state of a guest that comes from another host, and how inodes are found by it.
#![no_main]

use ferry_state::SavedSession;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    ferry_dir::fuzz_identity(bytes);
    if let Ok(saved) = SavedSession::decode(bytes) {
        let mut again = Vec::new();
        saved.encode(&mut again);
        assert_eq!(SavedSession::decode(&again).as_ref(), Ok(&saved));
        saved.nodes.iter().for_each(|node| ferry_dir::fuzz_identity(&node.identity));
    }
});
