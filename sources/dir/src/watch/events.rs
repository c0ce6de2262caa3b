//! The result of a read from fanotify: events with handles and a name (fanotify(7)).

use ferry_vfs::{Name, NameBuf};

/// `struct fanotify_event_metadata`.
const HEAD_BYTES: usize = 24;
/// The header of each information record: type, padding, length.
const RECORD_BYTES: usize = 4;
/// The identifier of the file system, before a handle.
const FSID_BYTES: usize = 8;
/// Length and type, before a handle's bytes.
const HANDLE_BYTES: usize = 8;

/// A handle's type and bytes.
pub(super) type Handle<'a> = (i32, &'a [u8]);

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Event<'a> {
    /// The events (`FAN_MODIFY` and so on); several if they were merged.
    pub(super) mask: u64,
    /// The process that did it.
    pub(super) pid: i32,
    /// The changed inode, or the one that a name refers to.
    pub(super) target: Option<Handle<'a>>,
    /// A directory and a name in it.
    pub(super) entry: Option<(Handle<'a>, NameBuf)>,
    /// The new directory and name, of a rename.
    pub(super) new_entry: Option<(Handle<'a>, NameBuf)>,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Calls `f` with each event. Malformed data ends the iteration without a panic.
pub(super) fn events<'a>(mut bytes: &'a [u8], mut f: impl FnMut(Event<'a>)) {
    while let Some((event, rest)) = split(bytes) {
        if let Some(event) = parse(event) {
            f(event);
        }
        bytes = rest;
    }
}

/// Returns the first event's bytes, and the rest.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let len = u32::from_ne_bytes(number(bytes, 0)?) as usize;
    if len < HEAD_BYTES { None } else { bytes.split_at_checked(len) }
}

fn parse(bytes: &[u8]) -> Option<Event<'_>> {
    let head = u16::from_ne_bytes(number(bytes, 6)?) as usize;
    let mask = u64::from_ne_bytes(number(bytes, 8)?);
    let pid = i32::from_ne_bytes(number(bytes, 20)?);
    let mut event = Event { mask, pid, target: None, entry: None, new_entry: None };
    let mut records = bytes.get(head..)?;
    while let Some([kind, _]) = number(records, 0) {
        let len = u16::from_ne_bytes(number(records, 2)?) as usize;
        if len < RECORD_BYTES {
            return None;
        }
        let (record, rest) = records.split_at_checked(len)?;
        record_of(&mut event, kind, record)?;
        records = rest;
    }
    Some(event)
}

fn record_of<'a>(event: &mut Event<'a>, kind: u8, record: &'a [u8]) -> Option<()> {
    let at = RECORD_BYTES + FSID_BYTES;
    match kind {
        libc::FAN_EVENT_INFO_TYPE_FID
        | libc::FAN_EVENT_INFO_TYPE_DFID
        | libc::FAN_EVENT_INFO_TYPE_DFID_NAME
        | libc::FAN_EVENT_INFO_TYPE_OLD_DFID_NAME
        | libc::FAN_EVENT_INFO_TYPE_NEW_DFID_NAME => {}
        // Other record types were not requested.
        _ => return Some(()),
    }
    let len = u32::from_ne_bytes(number(record, at)?) as usize;
    let handle_type = i32::from_ne_bytes(number(record, at + 4)?);
    let (handle, rest) = record.get(at + HANDLE_BYTES..)?.split_at_checked(len)?;
    let handle = (handle_type, handle);
    if matches!(kind, libc::FAN_EVENT_INFO_TYPE_FID | libc::FAN_EVENT_INFO_TYPE_DFID) {
        event.target = Some(handle);
        return Some(());
    }
    let name = rest.split(|byte| *byte == 0).next()?;
    match Name::new(name) {
        Ok(name) if kind == libc::FAN_EVENT_INFO_TYPE_NEW_DFID_NAME => {
            event.new_entry = Some((handle, name.to_buf()));
        }
        Ok(name) => event.entry = Some((handle, name.to_buf())),
        // `.`: the directory itself.
        Err(_) => event.target = Some(handle),
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: u8, handle: &[u8], name: Option<&[u8]>) -> Vec<u8> {
        let mut body = [0; FSID_BYTES].to_vec();
        body.extend(u32::try_from(handle.len()).unwrap().to_ne_bytes());
        body.extend(1_i32.to_ne_bytes());
        body.extend(handle);
        if let Some(name) = name {
            body.extend(name);
            body.push(0);
        }
        body.resize(body.len().next_multiple_of(4), 0);
        let mut record = vec![kind, 0];
        record.extend(u16::try_from(RECORD_BYTES + body.len()).unwrap().to_ne_bytes());
        record.extend(body);
        record
    }

    fn event(mask: u64, pid: i32, records: &[Vec<u8>]) -> Vec<u8> {
        let records = records.concat();
        let mut event = u32::try_from(HEAD_BYTES + records.len()).unwrap().to_ne_bytes().to_vec();
        event.extend([3, 0]);
        event.extend(24_u16.to_ne_bytes());
        event.extend(mask.to_ne_bytes());
        event.extend((-1_i32).to_ne_bytes());
        event.extend(pid.to_ne_bytes());
        event.extend(records);
        event
    }

    fn all(bytes: &[u8]) -> Vec<Event<'_>> {
        let mut all = Vec::new();
        events(bytes, |event| all.push(event));
        all
    }

    #[test]
    fn events_have_handles_and_names() {
        let name = |name| Name::new(name).unwrap().to_buf();
        let entry = record(libc::FAN_EVENT_INFO_TYPE_DFID_NAME, b"dir-dir-", Some(b"name"));
        let target = record(libc::FAN_EVENT_INFO_TYPE_FID, b"file", None);
        let itself = record(libc::FAN_EVENT_INFO_TYPE_DFID_NAME, b"dir-dir-", Some(b"."));
        let other = record(libc::FAN_EVENT_INFO_TYPE_PIDFD, b"", None);
        let bytes = [
            event(libc::FAN_CREATE, 7, &[entry.clone(), target.clone()]),
            event(libc::FAN_ATTRIB | libc::FAN_ONDIR, 8, &[other, itself]),
            event(libc::FAN_Q_OVERFLOW, 0, &[]),
        ]
        .concat();
        let (dir, file): (Handle<'_>, Handle<'_>) = ((1, b"dir-dir-"), (1, b"file"));
        let expected = [
            Event {
                mask: libc::FAN_CREATE,
                pid: 7,
                target: Some(file),
                entry: Some((dir, name(b"name"))),
                new_entry: None,
            },
            Event { mask: libc::FAN_ATTRIB | libc::FAN_ONDIR, pid: 8, target: Some(dir), entry: None, new_entry: None },
            Event { mask: libc::FAN_Q_OVERFLOW, pid: 0, target: None, entry: None, new_entry: None },
        ];
        assert_eq!(all(&bytes), expected);
    }

    #[test]
    fn renames_have_two_names() {
        let old = record(libc::FAN_EVENT_INFO_TYPE_OLD_DFID_NAME, b"old-dir-", Some(b"old"));
        let new = record(libc::FAN_EVENT_INFO_TYPE_NEW_DFID_NAME, b"new-dir-", Some(b"new"));
        let target = record(libc::FAN_EVENT_INFO_TYPE_FID, b"file", None);
        let bytes = event(libc::FAN_RENAME, 7, &[old, new, target]);
        let [event] = &all(&bytes)[..] else { panic!("one event") };
        let name = |name| Name::new(name).unwrap().to_buf();
        assert_eq!(event.entry, Some(((1, &b"old-dir-"[..]), name(b"old"))));
        assert_eq!(event.new_entry, Some(((1, &b"new-dir-"[..]), name(b"new"))));
        assert_eq!(event.target, Some((1, &b"file"[..])));
    }

    #[test]
    fn truncated_or_changed_events_are_ignored() {
        let entry = record(libc::FAN_EVENT_INFO_TYPE_DFID_NAME, b"dir-dir-", Some(b"name"));
        let target = record(libc::FAN_EVENT_INFO_TYPE_FID, b"file", None);
        let bytes = event(libc::FAN_CREATE, 7, &[entry, target]);
        for len in 0..bytes.len() {
            assert_eq!(all(&bytes[..len]), [], "{len}");
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut changed = bytes.clone();
                changed[at] = value;
                assert!(all(&changed).len() <= 2, "no panic, no endless walk");
            }
        }
    }
}
