//! The reply to Tevents.

use ferry_vfs::{Event, Ino};
use ferry_wire::events::{Kind, Message};

/// The events of a reply. Inodes are paths of qids.
#[derive(Debug)]
pub(crate) struct EventBatch {
    /// Events were lost.
    pub(crate) is_lossy: bool,
    /// What is not valid any more.
    pub(crate) stale: Vec<(Kind, Ino)>,
    /// With their numbers.
    pub(crate) events: Vec<(u64, Event)>,
}

impl EventBatch {
    /// Decodes it; `None` if it is none.
    pub(crate) fn decode(data: &[u8]) -> Option<Self> {
        let message = Message::decode(data).ok()?;
        let mut batch = Self { is_lossy: message.is_lossy(), stale: Vec::new(), events: Vec::new() };
        for record in message.records() {
            let record = record.ok()?;
            match record.event() {
                Some(event) => batch.events.push((record.number, event)),
                None => batch.stale.push((record.kind, record.ino)),
            }
        }
        Some(batch)
    }
}
