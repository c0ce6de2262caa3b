//! 9P messages: what decodes is the same again after another round trip, in either direction.
#![no_main]

use ferry_wire::events::Message;
use ferry_wire::ninep::{DirEntries, Reply, Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // The first byte chooses the direction, and whether the length is made true: without that, hardly any input would
    // get past it.
    let Some((choice, message)) = bytes.split_first() else { return };
    let mut message = message.to_vec();
    if choice & 2 == 0 && message.len() >= 4 {
        let len = u32::try_from(message.len()).expect("the fuzzer's inputs are short");
        message[..4].copy_from_slice(&len.to_le_bytes());
    }
    let mut again = Vec::new();
    if choice & 1 == 0 {
        match Request::decode(&message) {
            Ok((tag, request)) => {
                if let Request::Walk { steps, .. } = request {
                    assert_eq!(steps.iter().count(), steps.len());
                }
                request.encode(tag, &mut again);
                assert_eq!(Request::decode(&again), Ok((tag, request)));
            }
            Err(flaw) => drop(flaw.to_string()),
        }
    } else if let Ok((tag, reply)) = Reply::decode(&message) {
        if let Reply::Readdir(data) = reply {
            DirEntries::new(data).for_each(drop);
        }
        if let Reply::Events(data) = reply
            && let Ok(message) = Message::decode(data)
        {
            message.records().flatten().for_each(|record| assert_eq!(record.event().is_none(), record.kind.is_stale()));
        }
        reply.encode(tag, &mut again);
        assert_eq!(Reply::decode(&again), Ok((tag, reply)));
    }
});
