//! Descriptor chains that loop, have invalid addresses, mix directions, or nest.

use ferry_wire::fuse::abi::{Opcode, ReadIn, WriteIn};
use zerocopy::IntoBytes;

use super::subject::{AREA_BYTES, QUEUE_SIZE, at};
use super::{Answer, Case, Expect, Subject};
use crate::memory::Buffer;
use crate::queue::link;
use crate::ring::{DESCRIPTOR_BYTES, Descriptor, INDIRECT, NEXT, WRITE};
use crate::{Error, Result};

/// The length of the GETATTR that the chains carry.
const GETATTR: usize = 56;
/// Room for its reply.
const REPLY: usize = 120;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = links();
    cases.extend(lengths());
    cases.extend(directions());
    cases.extend(indirect());
    cases
}

/// Puts a GETATTR into the request area.
fn prepare(subject: &mut Subject) {
    let bytes = subject.getattr();
    subject.request.write(0, &bytes);
}

/// Chains that do not end.
fn links() -> Vec<Case> {
    let drop = Expect::ErrorOrDrop;
    let mut cases = vec![
        Case::new("chain/self-loop", drop, |subject| {
            prepare(subject);
            let head = subject.queue().take_descriptors(1)?[0];
            let looped = Descriptor { flags: NEXT, next: head, ..subject.readable(0, GETATTR) };
            subject.send_as_is(&[looped], &[head])
        }),
        Case::new("chain/loop-of-two", drop, |subject| {
            prepare(subject);
            let heads = subject.queue().take_descriptors(2)?;
            let first = Descriptor { flags: NEXT, next: heads[1], ..subject.readable(0, GETATTR) };
            let second = Descriptor { flags: NEXT | WRITE, next: heads[0], ..subject.writable(0, REPLY) };
            subject.send_as_is(&[first, second], &heads)
        }),
        Case::new("chain/loop-back-to-the-reply", drop, |subject| {
            prepare(subject);
            let heads = subject.queue().take_descriptors(3)?;
            let first = Descriptor { flags: NEXT, next: heads[1], ..subject.readable(0, GETATTR) };
            let second = Descriptor { flags: NEXT | WRITE, next: heads[2], ..subject.writable(0, REPLY) };
            let third = Descriptor { flags: NEXT | WRITE, next: heads[1], ..subject.writable(REPLY, REPLY) };
            subject.send_as_is(&[first, second, third], &heads)
        }),
        Case::new("chain/through-the-whole-ring-and-round", drop, |subject| {
            prepare(subject);
            let piece = Descriptor { flags: NEXT, ..subject.readable(0, 1) };
            for index in 0..QUEUE_SIZE {
                let next = (index + 1) % QUEUE_SIZE;
                Descriptor { next, ..piece }.store(subject.queue().ring().table(), index.into());
            }
            subject.send_head(0)
        }),
    ];
    for next in [QUEUE_SIZE, QUEUE_SIZE + 1, 0x7fff, u16::MAX] {
        cases.push(Case::new(format!("chain/next-is-{next}"), drop, move |subject| {
            prepare(subject);
            let head = subject.queue().take_descriptors(1)?[0];
            let astray = Descriptor { flags: NEXT, next, ..subject.readable(0, GETATTR) };
            subject.send_as_is(&[astray], &[head])
        }));
    }
    cases
}

/// Descriptors of zero bytes, of one byte, of very many.
fn lengths() -> Vec<Case> {
    let mut cases = vec![
        Case::new("chain/bytes-direct", Expect::Works, |subject| {
            let mut chain = in_bytes(subject);
            subject.send_chain(&mut chain)
        }),
        Case::new("chain/bytes-indirect", Expect::Works, |subject| {
            let mut chain = in_bytes(subject);
            // Here there is room to take the whole reply apart.
            chain.truncate(GETATTR);
            chain.extend((0..REPLY).map(|at| subject.writable(at, 1)));
            send_indirect(subject, &mut chain)
        }),
        Case::new("chain/zero-length-in-the-request", Expect::Clean, |subject| {
            prepare(subject);
            let mut chain = [
                subject.readable(0, 40),
                subject.readable(40, 0),
                subject.readable(40, GETATTR - 40),
                subject.writable(0, REPLY),
            ];
            subject.send_chain(&mut chain)
        }),
        Case::new("chain/zero-length-in-the-reply", Expect::Clean, |subject| {
            prepare(subject);
            let mut chain = [
                subject.readable(0, GETATTR),
                subject.writable(0, 16),
                subject.writable(16, 0),
                subject.writable(16, 104),
            ];
            subject.send_chain(&mut chain)
        }),
        Case::new("chain/zero-length-only", Expect::ErrorOrDrop, |subject| {
            let mut chain = [subject.readable(0, 0)];
            subject.send_chain(&mut chain)
        }),
        Case::new("chain/zero-length-both", Expect::ErrorOrDrop, |subject| {
            let mut chain = [subject.readable(0, 0), subject.writable(0, 0)];
            subject.send_chain(&mut chain)
        }),
        Case::new("chain/all-zero-descriptor", Expect::ErrorOrDrop, |subject| {
            let mut chain = [Descriptor::default()];
            subject.send_chain(&mut chain)
        }),
    ];
    for (name, flags) in [("request", 0), ("reply", WRITE)] {
        cases.push(Case::new(format!("chain/4g-{name}"), Expect::Clean, move |subject| {
            prepare(subject);
            let (mut request, mut reply) = (subject.readable(0, GETATTR), subject.writable(0, REPLY));
            if flags == WRITE {
                reply.len = u32::MAX
            } else {
                request.len = u32::MAX
            }
            subject.send_chain(&mut [request, reply])
        }));
    }
    cases.push(aliased("chain/aliased-read", Opcode::Read));
    cases.push(aliased("chain/aliased-write", Opcode::Write));
    cases.push(Case::new("chain/more-than-4g-in-all", Expect::Clean, |subject| {
        prepare(subject);
        let mut chain = vec![subject.readable(0, GETATTR)];
        chain.resize(1 + 100, Descriptor { len: u32::MAX, ..subject.writable(0, REPLY) });
        subject.send_chain(&mut chain)
    }));
    cases
}

/// A GETATTR in descriptors of one byte, and a reply header in descriptors of one byte.
fn in_bytes(subject: &mut Subject) -> Vec<Descriptor> {
    prepare(subject);
    let mut chain: Vec<_> = (0..GETATTR).map(|at| subject.readable(at, 1)).collect();
    chain.extend((0..16).map(|at| subject.writable(at, 1)));
    chain.push(subject.writable(16, 104));
    chain
}

/// A READ or WRITE of as many bytes as fit into many descriptors, all of which have the same memory: far more than was agreed on.
fn aliased(name: &str, opcode: Opcode) -> Case {
    const TIMES: usize = 1000;
    Case::new(name, Expect::ErrorOrDrop, move |subject| {
        let size = u32::try_from(TIMES * AREA_BYTES).unwrap_or(u32::MAX);
        let (fh, file) = (subject.fh, subject.file);
        let is_read = opcode == Opcode::Read;
        let mut request = match is_read {
            true => subject.bytes(opcode.as_raw(), file, ReadIn { fh, size, ..ReadIn::ZERO }.as_bytes()),
            false => subject.bytes(opcode.as_raw(), file, WriteIn { fh, size, ..WriteIn::ZERO }.as_bytes()),
        };
        let message_bytes = u32::try_from(request.len()).unwrap_or(u32::MAX) + if is_read { 0 } else { size };
        request[..4].copy_from_slice(&message_bytes.to_le_bytes());
        subject.request.write(0, &request);
        let mut chain = vec![subject.readable(0, request.len())];
        let data = if is_read { subject.writable(0, AREA_BYTES) } else { subject.readable(0, AREA_BYTES) };
        chain.resize(1 + TIMES, data);
        if !is_read {
            chain.push(subject.writable(0, REPLY));
        }
        send_indirect(subject, &mut chain)
    })
}

/// Parts for the wrong direction, in the wrong order, or missing.
fn directions() -> Vec<Case> {
    let drop = Expect::ErrorOrDrop;
    vec![
        Case::new("chain/writable-before-readable", drop, |subject| {
            prepare(subject);
            let mut chain = [subject.writable(0, REPLY), subject.readable(0, GETATTR)];
            subject.send_chain(&mut chain)
        }),
        Case::new("chain/readable-behind-writable", Expect::Clean, |subject| {
            prepare(subject);
            let mut chain = [subject.readable(0, GETATTR), subject.writable(0, REPLY), subject.readable(0, GETATTR)];
            subject.send_chain(&mut chain)
        }),
        Case::new("chain/directions-mixed", drop, |subject| {
            prepare(subject);
            let mut chain =
                [subject.readable(0, 40), subject.writable(0, 16), subject.readable(40, 16), subject.writable(16, 104)];
            subject.send_chain(&mut chain)
        }),
        Case::new("chain/nothing-writable", drop, |subject| {
            prepare(subject);
            let mut chain = [subject.readable(0, GETATTR)];
            subject.send_chain(&mut chain)
        }),
        Case::new("chain/nothing-readable", drop, |subject| {
            prepare(subject);
            let mut chain = [subject.writable(0, REPLY)];
            subject.send_chain(&mut chain)
        }),
        Case::new("chain/request-in-the-reply-area", Expect::Clean, |subject| {
            prepare(subject);
            let mut chain = [subject.readable(0, GETATTR), at(subject.request.guest(), REPLY, WRITE)];
            subject.send_chain(&mut chain)?;
            // The reply went where the request was: only the next request can be judged.
            Ok(Answer::Empty)
        }),
        Case::new("chain/unknown-flags", Expect::Clean, |subject| {
            prepare(subject);
            let mut request = subject.readable(0, GETATTR);
            request.flags = 0xfff0;
            subject.send_chain(&mut [request, subject.writable(0, REPLY)])
        }),
    ]
}

fn table(subject: &mut Subject, bytes: usize) -> Result<Buffer> {
    subject.driver.memory().alloc(bytes, 4096).ok_or(Error::Memory(bytes))
}

/// Links a chain in a table of its own and sends it.
fn send_indirect(subject: &mut Subject, chain: &mut [Descriptor]) -> Result<Answer> {
    let bytes = chain.len() * DESCRIPTOR_BYTES;
    let table = table(subject, bytes)?;
    link(chain, |position| u16::try_from(position).unwrap_or(u16::MAX));
    for (index, descriptor) in chain.iter().enumerate() {
        descriptor.store(&table, index);
    }
    subject.send_chain(&mut [at(table.guest(), bytes, INDIRECT)])
}

/// A good chain in a table, of which the ring's descriptor says what `change` makes of it.
fn send_changed(subject: &mut Subject, change: impl Fn(&mut Descriptor, &mut [Descriptor])) -> Result<Answer> {
    prepare(subject);
    let mut chain = [subject.readable(0, GETATTR), subject.writable(0, REPLY)];
    link(&mut chain, |position| u16::try_from(position).unwrap_or(u16::MAX));
    let table = table(subject, 4096)?;
    let mut outer = at(table.guest(), chain.len() * DESCRIPTOR_BYTES, INDIRECT);
    change(&mut outer, &mut chain);
    for (index, descriptor) in chain.iter().enumerate() {
        descriptor.store(&table, index);
    }
    let head = subject.queue().take_descriptors(1)?[0];
    subject.send_as_is(&[outer], &[head])
}

fn indirect() -> Vec<Case> {
    let drop = Expect::ErrorOrDrop;
    let mut cases = vec![
        Case::new("indirect/good", Expect::Works, |subject| send_changed(subject, |_, _| {})),
        // Virtio 1.3, 2.7.5.3.2: the device ignores the write-only flag of a descriptor that refers to a table.
        Case::new("indirect/write-flag", Expect::Works, |subject| {
            send_changed(subject, |outer, _| outer.flags |= WRITE)
        }),
        Case::new("indirect/inside-indirect", drop, |subject| {
            send_changed(subject, |outer, chain| chain[0] = Descriptor { flags: INDIRECT | NEXT, next: 1, ..*outer })
        }),
        Case::new("indirect/inside-indirect-last", drop, |subject| {
            send_changed(subject, |outer, chain| chain[1] = *outer)
        }),
        Case::new("indirect/with-next", Expect::Clean, |subject| {
            send_changed(subject, |outer, _| {
                outer.flags |= NEXT;
                outer.next = 3;
            })
        }),
        Case::new("indirect/self-loop", drop, |subject| send_changed(subject, |_, chain| chain[0].next = 0)),
        Case::new("indirect/loop", drop, |subject| {
            send_changed(subject, |_, chain| {
                chain[1].flags |= NEXT;
                chain[1].next = 0;
            })
        }),
        Case::new("indirect/behind-others", Expect::Clean, |subject| {
            prepare(subject);
            let table = table(subject, 4096)?;
            subject.writable(0, REPLY).store(&table, 0);
            let mut chain = [subject.readable(0, GETATTR), at(table.guest(), DESCRIPTOR_BYTES, INDIRECT)];
            subject.send_chain(&mut chain)
        }),
        Case::new("indirect/longer-than-the-ring", Expect::Clean, |subject| {
            prepare(subject);
            let mut chain: Vec<_> = (0..GETATTR).map(|at| subject.readable(at, 1)).collect();
            chain.extend((0..1000).map(|at| subject.writable(at, 1)));
            send_indirect(subject, &mut chain)
        }),
        Case::new("indirect/65536-entries", Expect::Clean, |subject| {
            prepare(subject);
            let mut chain = vec![subject.readable(0, GETATTR)];
            chain.extend((0..65535).map(|index| subject.writable(index % AREA_BYTES, 1)));
            send_indirect(subject, &mut chain)
        }),
    ];
    for len in [0, 1, 8, 15, 17, 24, 31, 33, 0xffff_fff0, u32::MAX] {
        let expect = if len > 32 { Expect::Clean } else { drop };
        cases.push(Case::new(format!("indirect/table-of-{len}-bytes"), expect, move |subject| {
            send_changed(subject, |outer, _| outer.len = len)
        }));
    }
    for next in [2, 3, QUEUE_SIZE, u16::MAX] {
        cases.push(Case::new(format!("indirect/next-is-{next}"), drop, move |subject| {
            send_changed(subject, |_, chain| chain[0].next = next)
        }));
    }
    for shift in [1, 4, 8] {
        cases.push(Case::new(format!("indirect/table-at-{shift}-past-its-start"), Expect::Clean, move |subject| {
            send_changed(subject, |outer, _| outer.addr += shift)
        }));
    }
    cases
}
