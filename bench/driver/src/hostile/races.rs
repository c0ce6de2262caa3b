//! Memory that changes while the server reads it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferry_wire::fuse::abi::Opcode;

use super::subject::QUEUE_SIZE;
use super::{Answer, Case, Expect, Recovery, Subject};
use crate::memory::{Buffer, Window};
use crate::queue::link;
use crate::ring::{DESCRIPTOR_BYTES, Descriptor, INDIRECT, NEXT, WRITE};
use crate::{Error, Result};

/// Chains available at a time.
const BATCH: u16 = 16;
/// How long a batch may take; chains that are not used by then have been dropped.
const BATCH_TIME: Duration = Duration::from_millis(50);
const REQUEST: usize = 80;
const REPLY: usize = 4096;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("race/header", Expect::Clean, |subject| race(subject, scribble_header)),
        Case::new("race/arguments", Expect::Clean, |subject| race(subject, scribble_arguments)),
        Case::new("race/table", Expect::Clean, |subject| race(subject, scribble_table)),
        Case::new("race/ring-descriptors", Expect::Clean, |subject| race(subject, scribble_ring)),
        Case::new("race/available-ring", Expect::Clean, |subject| race(subject, scribble_avail))
            .recovering(Recovery::QueueRestart),
    ]
}

/// What a scribbling thread may write to.
struct ScribbleTarget {
    request: Window,
    reply: Window,
    table: Window,
    ring_table: Window,
    avail: Window,
    heads: Vec<u16>,
    /// Opcodes that neither change the file nor end the session.
    opcodes: [u32; 6],
    nodes: [u64; 4],
}

/// A generator of nonsense (xorshift).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        let index = usize::try_from(self.next() >> 33).unwrap_or(0) % from.len();
        from[index]
    }

    fn u32(&mut self) -> u32 {
        u32::try_from(self.next() >> 32).unwrap_or(0)
    }

    fn u16(&mut self) -> u16 {
        u16::try_from(self.next() >> 48).unwrap_or(0)
    }
}

fn scribble_header(paper: &ScribbleTarget, noise: &mut Noise) {
    let lengths = [0, 39, 40, 55, 56, 79, 80, 81, u32::MAX];
    match noise.next() % 4 {
        0 => paper.request.store_u32(0, noise.pick(&lengths)),
        1 => paper.request.store_u32(4, noise.pick(&paper.opcodes)),
        2 => paper.request.store_u64(16, noise.pick(&paper.nodes)),
        _ => paper.request.store_u16(36, noise.u16(), Ordering::Relaxed),
    }
    paper.request.store_u32(0, 80);
}

fn scribble_arguments(paper: &ScribbleTarget, noise: &mut Noise) {
    // READ's size and offset, LOOKUP's name. Handles stay: there must be no other.
    paper.request.store_u64(48, noise.next());
    paper.request.store_u32(56, noise.u32());
    paper.request.store_u32(4, noise.pick(&paper.opcodes));
}

fn nonsense(paper: &ScribbleTarget, noise: &mut Noise) -> Descriptor {
    // Addresses where a stray reply does no harm to the test itself.
    let addresses = [paper.request.guest(), paper.reply.guest(), 0, u64::MAX - 20, paper.reply.guest() + 17];
    let lengths = [0, 1, 40, 80, 4096, 0x10000, u32::MAX];
    Descriptor {
        addr: noise.pick(&addresses),
        len: noise.pick(&lengths),
        flags: noise.pick(&[0, NEXT, WRITE, NEXT | WRITE, INDIRECT, INDIRECT | NEXT]),
        next: noise.pick(&[0, 1, 2, 7, QUEUE_SIZE, u16::MAX]),
    }
}

fn scribble_table(paper: &ScribbleTarget, noise: &mut Noise) {
    let index = noise.pick(&[0, 1]);
    nonsense(paper, noise).store(&paper.table, index);
    good_chain(paper)[index].store(&paper.table, index);
}

fn scribble_ring(paper: &ScribbleTarget, noise: &mut Noise) {
    let head = noise.pick(&paper.heads);
    nonsense(paper, noise).store(&paper.ring_table, head.into());
    good_outer(paper).store(&paper.ring_table, head.into());
}

fn scribble_avail(paper: &ScribbleTarget, noise: &mut Noise) {
    let slot = noise.pick(&[0, 1, 5, 17, usize::from(QUEUE_SIZE) - 1]);
    paper.avail.store_u16(4 + 2 * slot, noise.u16(), Ordering::Relaxed);
    paper.avail.store_u16(2, noise.u16(), Ordering::Release);
    // Not all the time, or the server would do nothing but drop.
    for _ in 0..1000 {
        std::hint::spin_loop();
    }
}

fn good_chain(paper: &ScribbleTarget) -> [Descriptor; 2] {
    let len = |bytes: usize| u32::try_from(bytes).unwrap_or(0);
    let mut chain = [
        Descriptor { addr: paper.request.guest(), len: len(REQUEST), ..Descriptor::default() },
        Descriptor { addr: paper.reply.guest(), len: len(REPLY), flags: WRITE, next: 0 },
    ];
    link(&mut chain, |position| u16::try_from(position).unwrap_or(0));
    chain
}

fn good_outer(paper: &ScribbleTarget) -> Descriptor {
    let len = u32::try_from(2 * DESCRIPTOR_BYTES).unwrap_or(0);
    Descriptor { addr: paper.table.guest(), len, flags: INDIRECT, next: 0 }
}

fn paper(subject: &mut Subject, table: &Buffer) -> Result<ScribbleTarget> {
    let heads = subject.queue().take_descriptors(BATCH.into())?;
    let opcodes = [Opcode::Lookup, Opcode::Getattr, Opcode::Read, Opcode::Readlink, Opcode::Statfs].map(Opcode::as_raw);
    let ring = subject.queue().ring();
    let (ring_table, avail) = (ring.table().clone(), ring.avail().clone());
    let mut all = [u32::MAX; 6];
    all[..5].copy_from_slice(&opcodes);
    Ok(ScribbleTarget {
        request: subject.request.part(0, 4096),
        reply: subject.reply.part(0, 0x10000 + 4096),
        table: table.part(0, 4096),
        ring_table,
        avail,
        heads,
        opcodes: all,
        nodes: [crate::ROOT, subject.file, subject.directory, u64::MAX],
    })
}

/// Sends chains as fast as they come back, while another thread writes into what they are made of.
fn race(subject: &mut Subject, scribble: fn(&ScribbleTarget, &mut Noise)) -> Result<Answer> {
    let table = subject.driver.memory().alloc(4096, 4096).ok_or(Error::Memory(4096))?;
    let (file, fh) = (subject.file, subject.fh);
    let args = [&fh.to_le_bytes()[..], &[0; 8], &64_u32.to_le_bytes(), &[0; 20]].concat();
    let bytes = subject.bytes(Opcode::Read.as_raw(), file, &args);
    subject.request.write(0, &bytes);
    let paper = paper(subject, &table)?;
    for (index, descriptor) in good_chain(&paper).into_iter().enumerate() {
        descriptor.store(&paper.table, index);
    }
    for &head in &paper.heads {
        good_outer(&paper).store(&paper.ring_table, head.into());
    }
    let (stop, end) = (AtomicBool::new(false), Instant::now() + subject.options.race);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut noise = Noise(0x9E37_79B9_7F4A_7C15);
            while !stop.load(Ordering::Relaxed) {
                scribble(&paper, &mut noise);
            }
        });
        let answer = batches(subject, &paper.heads, end);
        stop.store(true, Ordering::Relaxed);
        answer
    })
}

fn batches(subject: &mut Subject, heads: &[u16], end: Instant) -> Result<Answer> {
    let (mut sent, mut used) = (0, 0);
    while Instant::now() < end {
        for &head in heads {
            subject.queue().ring_mut().push(head);
            sent += 1;
        }
        subject.queue().ring_mut().publish();
        subject.queue().kick();
        for _ in heads {
            match subject.queue().wait_used(BATCH_TIME) {
                Ok(_) => used += 1,
                Err(Error::TimedOut(_)) => break,
                Err(error) => return Err(error),
            }
        }
    }
    Ok(Answer::Raced { sent, used })
}
