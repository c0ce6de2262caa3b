//! Rings with inconsistent indexes, and rings outside of memory.

use std::sync::atomic::Ordering;

use super::subject::{QUEUE, QUEUE_SIZE, config};
use super::{Answer, Case, Expect, Recovery, Subject};
use crate::{Config, Driver, Error, Result, RingParameters};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = indices();
    cases.extend(entries());
    cases.extend(set_up());
    cases
}

/// Publishes, kicks, and classifies the reply.
fn publish(subject: &mut Subject) -> Result<Answer> {
    subject.queue().ring_mut().publish();
    subject.queue().kick();
    // The results of the old entries do not matter, only later requests.
    let answer = subject.answer()?;
    if answer != Answer::Dropped {
        // The server may still return old heads: wait for that before they head new chains.
        let patience = subject.options.drop_after;
        while subject.queue().wait_used(patience).is_ok() {}
    }
    match answer {
        Answer::Malformed(_) | Answer::Reply(_) => Ok(Answer::Empty),
        answer => Ok(answer),
    }
}

fn indices() -> Vec<Case> {
    let mut cases = Vec::new();
    // More entries than the ring has: its contents are invalid.
    for jump in [QUEUE_SIZE + 1, 2 * QUEUE_SIZE, 0x7fff, 0x8000, u16::MAX] {
        let case = Case::new(format!("ring/index-jumps-by-{jump}"), Expect::Clean, move |subject| {
            subject.queue().ring_mut().jump(jump);
            publish(subject)
        });
        cases.push(case.recovering(Recovery::QueueRestart));
    }
    // Within the ring's size, old entries are served again or dropped. A whole lap also serves the entry of the next
    // request.
    for jump in [1, 2, QUEUE_SIZE] {
        let case = Case::new(format!("ring/index-jumps-by-{jump}"), Expect::Clean, move |subject| {
            subject.queue().ring_mut().jump(jump);
            publish(subject)
        });
        cases.push(if jump == QUEUE_SIZE { case.recovering(Recovery::QueueRestart) } else { case });
    }
    cases.push(
        Case::new("ring/index-goes-back", Expect::Clean, |subject| {
            subject.queue().ring_mut().jump(u16::MAX - 3);
            publish(subject)
        })
        .recovering(Recovery::QueueRestart),
    );
    cases.push(Case::new("ring/kicks-for-nothing", Expect::Clean, |subject| {
        for _ in 0..1000 {
            subject.queue().kick();
        }
        let bytes = subject.getattr();
        subject.send(&bytes, 120)
    }));
    for event in [0, 1, 0x7fff, u16::MAX] {
        cases.push(Case::new(format!("ring/used-event-{event}"), Expect::Works, move |subject| {
            let at = 4 + 2 * usize::from(QUEUE_SIZE);
            subject.queue().ring().avail().store_u16(at, event, Ordering::SeqCst);
            let bytes = subject.getattr();
            subject.send(&bytes, 120)
        }));
    }
    cases
}

fn entries() -> Vec<Case> {
    let mut cases = Vec::new();
    for head in [QUEUE_SIZE, QUEUE_SIZE + 1, 0x7fff, u16::MAX] {
        cases.push(Case::new(format!("ring/entry-is-{head}"), Expect::ErrorOrDrop, move |subject| {
            subject.queue().ring_mut().push(head);
            publish(subject)
        }));
    }
    cases.push(Case::new("ring/same-head-many-times", Expect::Clean, |subject| {
        let bytes = subject.getattr();
        subject.request.write(0, &bytes);
        let heads = subject.queue().take_descriptors(2)?;
        let mut chain = [subject.readable(0, bytes.len()), subject.writable(0, 120)];
        crate::queue::link(&mut chain, |position| heads[position]);
        for (descriptor, &index) in chain.iter().zip(&heads) {
            descriptor.store(subject.queue().ring().table(), index.into());
        }
        for _ in 0..QUEUE_SIZE {
            subject.queue().ring_mut().push(heads[0]);
        }
        publish(subject)
    }));
    cases
}

/// Rings at unaligned or unmapped addresses, or with invalid sizes.
fn set_up() -> Vec<Case> {
    type Change = fn(&mut RingParameters, &Driver);
    let changes: [(&str, Change); 17] = [
        ("table-off-by-1", |ring, _| ring.addresses.table += 1),
        ("table-off-by-8", |ring, _| ring.addresses.table += 8),
        ("avail-off-by-1", |ring, _| ring.addresses.avail += 1),
        ("used-off-by-1", |ring, _| ring.addresses.used += 1),
        ("used-off-by-2", |ring, _| ring.addresses.used += 2),
        ("table-at-null", |ring, _| ring.addresses.table = 0),
        ("avail-at-null", |ring, _| ring.addresses.avail = 0),
        ("used-at-null", |ring, _| ring.addresses.used = 0),
        ("table-outside", |ring, _| ring.addresses.table = 1 << 60),
        ("used-outside", |ring, _| ring.addresses.used = u64::MAX - 7),
        ("used-half-outside", |ring, driver| ring.addresses.used = last_page(driver) + 4096 - 64),
        ("table-half-outside", |ring, driver| ring.addresses.table = last_page(driver) + 4096 - 64),
        ("all-in-one-place", |ring, _| {
            (ring.addresses.avail, ring.addresses.used) = (ring.addresses.table, ring.addresses.table);
        }),
        ("size-0", |ring, _| ring.size = 0),
        ("size-3", |ring, _| ring.size = 3),
        ("size-32769", |ring, _| ring.size = 32769),
        ("base-65535", |ring, _| ring.base = u16::MAX),
    ];
    let case = |(name, change): (&str, Change)| {
        Case::bare(format!("set-up/{name}"), move |socket, options| {
            let mut driver = Driver::negotiate(socket, Config { timeout: options.drop_after, ..config() })?;
            let mut parameters = driver.parameters(QUEUE, 0);
            change(&mut parameters, &driver);
            driver.start_with(QUEUE, parameters)?;
            match driver.init() {
                Ok(_) => Ok(Answer::Reply(Vec::new())),
                Err(Error::Errno(errno)) => Ok(Answer::Errno(errno)),
                Err(Error::TimedOut(_)) => Ok(Answer::Dropped),
                Err(Error::BadReply(text)) => Ok(Answer::Malformed(text)),
                Err(Error::BadUsed(id)) => Ok(Answer::Malformed(format!("descriptor {id} used"))),
                Err(error) => Err(error),
            }
        })
    };
    changes.into_iter().map(case).collect()
}

/// The last page of the guest's memory, which is unused.
fn last_page(driver: &Driver) -> u64 {
    driver.memory().regions().last().map_or(0, |region| region.host() + region.len() as u64 - 4096)
}
