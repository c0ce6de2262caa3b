//! Buffers and tables at the edges of memory, across them, and outside.

use ferry_wire::fuse::abi::{Opcode, ReadIn};
use zerocopy::IntoBytes;

use super::subject::at;
use super::{Answer, Case, Expect, Subject};
use crate::ring::{DESCRIPTOR_BYTES, Descriptor, INDIRECT, NEXT, WRITE};
use crate::{Error, Result};

const GETATTR: usize = 56;
const REPLY: usize = 120;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = across();
    cases.extend(outside());
    cases
}

/// The guest address where the second region begins, right behind the first.
fn edge(subject: &Subject) -> u64 {
    subject.driver.memory().regions()[1].guest()
}

/// Writes bytes that may cross the boundary of regions.
fn write_across(subject: &Subject, guest: u64, bytes: &[u8]) -> Result<()> {
    for (&byte, addr) in bytes.iter().zip(guest..) {
        let window = subject.driver.memory().window(addr, 1).ok_or(Error::Memory(bytes.len()))?;
        window.write(0, &[byte]);
    }
    Ok(())
}

fn across() -> Vec<Case> {
    let mut cases = Vec::new();
    for before in [1, 8, 39, 40, 48] {
        // The regions are adjacent for the guest, but not for the server.
        cases.push(Case::new(
            format!("memory/request-{before}-bytes-before-the-edge"),
            Expect::Clean,
            move |subject| {
                let start = edge(subject) - before;
                let bytes = subject.getattr();
                write_across(subject, start, &bytes)?;
                subject.send_chain(&mut [at(start, bytes.len(), 0), subject.writable(0, REPLY)])
            },
        ));
    }
    for before in [1, 8, 16, 64] {
        cases.push(Case::new(format!("memory/reply-{before}-bytes-before-the-edge"), Expect::Clean, move |subject| {
            let start = edge(subject) - before;
            let bytes = subject.getattr();
            subject.request.write(0, &bytes);
            write_across(subject, start, &[0; REPLY])?;
            let answer = subject.send_chain(&mut [subject.readable(0, GETATTR), at(start, REPLY, WRITE)])?;
            // The reply is checked in place, because the usual area for replies is unused.
            Ok(if matches!(answer, Answer::Malformed(_)) { reply_across(subject, start) } else { answer })
        }));
    }
    cases.push(Case::new("memory/read-data-across-the-edge", Expect::Clean, |subject| {
        let args = ReadIn { fh: subject.fh, size: 4096, ..ReadIn::ZERO };
        let bytes = subject.bytes(Opcode::Read.as_raw(), subject.file, args.as_bytes());
        subject.request.write(0, &bytes);
        let start = edge(subject) - 2048;
        let mut chain = [subject.readable(0, bytes.len()), subject.writable(0, 16), at(start, 4096, WRITE)];
        match subject.send_chain(&mut chain)? {
            // The header is in the usual area for replies, the data elsewhere.
            Answer::Reply(_) => Ok(data_across(subject, start)),
            answer => Ok(answer),
        }
    }));
    cases.push(Case::new("memory/table-across-the-edge", Expect::Clean, |subject| {
        let bytes = subject.getattr();
        subject.request.write(0, &bytes);
        let edge = edge(subject);
        let chain = [subject.readable(0, GETATTR), subject.writable(0, REPLY)];
        for (offset, descriptor) in [(-16, chain[0]), (0, chain[1])] {
            let descriptor = Descriptor { flags: if offset < 0 { NEXT } else { WRITE }, next: 1, ..descriptor };
            let window = subject.driver.memory().window(edge.wrapping_add_signed(offset), DESCRIPTOR_BYTES);
            descriptor.store(&window.ok_or(Error::Memory(DESCRIPTOR_BYTES))?, 0);
        }
        subject.send_chain(&mut [at(edge - 16, 2 * DESCRIPTOR_BYTES, INDIRECT)])
    }));
    cases.push(Case::new("memory/table-entry-across-the-edge", Expect::Clean, |subject| {
        let start = edge(subject) - 8;
        subject.send_chain(&mut [at(start, 2 * DESCRIPTOR_BYTES, INDIRECT)])
    }));
    cases
}

/// Checks a reply that crosses the boundary of regions.
fn reply_across(subject: &Subject, start: u64) -> Answer {
    let byte = |addr| subject.driver.memory().window(addr, 1).map_or(0, |window| window.to_vec(1)[0]);
    let bytes: Vec<u8> = (start..start + REPLY as u64).map(byte).collect();
    match crate::session::parse_reply(&bytes, u32::try_from(REPLY).unwrap_or(0)) {
        Ok((header, body)) if header.unique == subject.unique => Answer::Reply(body.to_vec()),
        Ok((header, _)) => Answer::Malformed(format!("it answers request {:#x}", header.unique)),
        Err(Error::Errno(errno)) => Answer::Errno(errno),
        Err(error) => Answer::Malformed(format!("across the edge: {error}")),
    }
}

/// Checks data that crosses the boundary of regions.
fn data_across(subject: &Subject, start: u64) -> Answer {
    let byte = |addr| subject.driver.memory().window(addr, 1).map_or(0, |window| window.to_vec(1)[0]);
    match (start..start + 4096).all(|addr| byte(addr) == super::subject::CONTENT) {
        true => Answer::Reply(Vec::new()),
        false => Answer::Malformed("the data across the edge is not the file's".into()),
    }
}

/// Addresses outside of guest memory, for the request, the reply and the table.
fn outside() -> Vec<Case> {
    // Returns address and length of the buffer for the end of memory.
    type Place = fn(u64) -> (u64, u32);
    let places: [(&str, Place); 9] = [
        ("at-null", |_| (0, 64)),
        ("below-memory", |_| (crate::memory::GUEST_BASE - 64, 64)),
        ("half-below-memory", |_| (crate::memory::GUEST_BASE - 32, 64)),
        ("behind-memory", |end| (end, 64)),
        ("half-behind-memory", |end| (end - 32, 64)),
        ("far-away", |_| (1 << 48, 64)),
        ("wraps", |_| (u64::MAX - 8, 64)),
        ("wraps-to-zero", |_| (u64::MAX - 63, 64)),
        ("4g-behind-memory", |end| (end - 32, u32::MAX)),
    ];
    let mut cases = Vec::new();
    for (name, place) in places {
        cases.push(Case::new(format!("memory/request-{name}"), Expect::ErrorOrDrop, move |subject| {
            let (addr, len) = place(subject.driver.memory().end());
            let request = Descriptor { addr, len, ..Descriptor::default() };
            subject.getattr();
            subject.send_chain(&mut [request, subject.writable(0, REPLY)])
        }));
        cases.push(Case::new(format!("memory/reply-{name}"), Expect::ErrorOrDrop, move |subject| {
            let (addr, len) = place(subject.driver.memory().end());
            let bytes = subject.getattr();
            subject.request.write(0, &bytes);
            let reply = Descriptor { addr, len, flags: WRITE, next: 0 };
            match subject.send_chain(&mut [subject.readable(0, GETATTR), reply])? {
                // An error header may fit before the end of memory, outside of the usual area for replies.
                Answer::Malformed(_) => Ok(Answer::Empty),
                answer => Ok(answer),
            }
        }));
        cases.push(Case::new(format!("memory/read-data-{name}"), Expect::ErrorOrDrop, move |subject| {
            let (addr, len) = place(subject.driver.memory().end());
            let args = ReadIn { fh: subject.fh, size: 64, ..ReadIn::ZERO };
            let bytes = subject.bytes(Opcode::Read.as_raw(), subject.file, args.as_bytes());
            subject.request.write(0, &bytes);
            let data = Descriptor { addr, len, flags: WRITE, next: 0 };
            subject.send_chain(&mut [subject.readable(0, bytes.len()), subject.writable(0, 16), data])
        }));
        cases.push(Case::new(format!("memory/table-{name}"), Expect::ErrorOrDrop, move |subject| {
            let (addr, len) = place(subject.driver.memory().end());
            subject.getattr();
            let len = len & !15;
            subject.send_chain(&mut [Descriptor { addr, len, flags: INDIRECT, next: 0 }])
        }));
    }
    cases
}
