//! Messages of events and announcements: what is read, written again, is the same bytes.
#![no_main]

use ferry_wire::events::*;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(announcement) = Announcement::decode(bytes) {
        assert_eq!(announcement.encode(), bytes);
    }
    let Ok(message) = Message::decode(bytes) else { return };
    let mut again = MessageWriter::new(message.is_lossy());
    if message.is_leased() {
        again = again.leased();
    }
    for record in message.records() {
        let Ok(record) = record else { return };
        assert!(again.push(&record), "it was in a message of this length");
    }
    let again = again.finish();
    assert_eq!(again, bytes[..again.len()]);
});
