//! vhost-user messages that no VMM sends, and connections that end at the wrong moment.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::subject::{QUEUE, config};
use super::{Answer, Case, Expect, Options, Recovery, Subject};
use crate::frontend::connect;
use crate::ring::SplitRing;
use crate::{Driver, Error, ROOT, Result};

const GET_FEATURES: u32 = 1;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_KICK: u32 = 12;
/// The version in a message's flags.
const VERSION: u32 = 1;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = messages();
    cases.extend(connections());
    cases
}

/// A message (vhost-user: request, flags, size of the payload, payload).
fn message(request: u32, flags: u32, size: u32, payload: &[u8]) -> Vec<u8> {
    [&request.to_le_bytes()[..], &flags.to_le_bytes(), &size.to_le_bytes(), payload].concat()
}

fn knock(socket: &Path) -> Result<UnixStream> {
    connect(socket, config().connect_within)
}

/// Sends bytes and takes whatever comes.
fn tell(socket: &Path, options: &Options, bytes: &[u8]) -> Result<Answer> {
    let mut stream = knock(socket)?;
    stream.set_read_timeout(Some(options.drop_after))?;
    // The server may have closed the connection already.
    let _ = stream.write_all(bytes);
    let mut reply = [0; 64];
    match stream.read(&mut reply) {
        Ok(0) => Ok(Answer::Disconnected),
        Ok(len) => Ok(Answer::Reply(reply[..len].to_vec())),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(Answer::Dropped),
        Err(_) => Ok(Answer::Disconnected),
    }
}

fn messages() -> Vec<Case> {
    let table = |regions: u32| [regions.to_le_bytes(), [0; 4]].concat();
    let all: [(&str, Vec<u8>); 12] = [
        ("nothing", Vec::new()),
        ("half-a-header", message(GET_FEATURES, VERSION, 0, &[])[..6].to_vec()),
        ("request-0", message(0, VERSION, 0, &[])),
        ("request-255", message(255, VERSION, 0, &[])),
        ("request-4g", message(u32::MAX, VERSION, 0, &[])),
        ("version-0", message(GET_FEATURES, 0, 0, &[])),
        ("payload-of-4g", message(GET_FEATURES, VERSION, u32::MAX, &[0; 64])),
        ("payload-that-does-not-come", message(SET_VRING_NUM, VERSION, 8, &[0; 4])),
        ("payload-too-short", message(SET_VRING_NUM, VERSION, 4, &[0; 4])),
        ("queue-200", message(SET_VRING_NUM, VERSION, 8, &[200, 0, 0, 0, 0, 1, 0, 0])),
        ("33-regions-without-descriptors", message(SET_MEM_TABLE, VERSION, 8, &table(33))),
        ("kick-without-a-descriptor", message(SET_VRING_KICK, VERSION, 8, &[1, 0, 0, 0, 0, 0, 0, 0])),
    ];
    let case = |(name, bytes): (&str, Vec<u8>)| {
        Case::bare(format!("message/{name}"), move |socket, options| tell(socket, options, &bytes))
    };
    all.into_iter().map(case).collect()
}

fn connections() -> Vec<Case> {
    vec![
        Case::bare("connection/closed-at-once", |socket, _| {
            drop(knock(socket)?);
            Ok(Answer::Disconnected)
        }),
        Case::bare("connection/closed-before-the-queues-start", |socket, _| {
            drop(Driver::negotiate(socket, config())?);
            Ok(Answer::Disconnected)
        }),
        Case::bare("connection/closed-with-requests-in-flight", |socket, options| {
            let mut subject = Subject::connect(socket, options)?;
            for _ in 0..32 {
                let (file, fh) = (subject.file, subject.fh);
                let args = [&fh.to_le_bytes()[..], &[0; 8], &65536_u32.to_le_bytes(), &[0; 20]].concat();
                let opcode = ferry_wire::fuse::abi::Opcode::Read;
                subject.driver.send(opcode, file, &[&args], &[], 65536)?;
            }
            drop(subject);
            Ok(Answer::Disconnected)
        }),
        Case::new("connection/stopped-with-requests-in-flight", Expect::Clean, |subject| {
            let tickets: Vec<_> = (0..16)
                .map(|_| subject.driver.send(ferry_wire::fuse::abi::Opcode::Getattr, ROOT, &[&[0; 16]], &[], 104))
                .collect::<Result<_>>()?;
            // What the server has taken must be answered before it says where it stopped; the rest comes later.
            let base = subject.driver.stop(QUEUE)?;
            let done = subject.queue().ring().waiting_used();
            if done != base.wrapping_sub(subject.queue().ring().next_used()) {
                return Ok(Answer::Malformed(format!("stopped at {base} with {done} of 16 requests answered")));
            }
            drop(tickets);
            Ok(Answer::Empty)
        })
        .recovering(Recovery::QueueRestart),
        Case::bare("connection/memory-shorter-than-it-says", |socket, options| {
            // Rings that lie beyond the end of what is mapped.
            let mut driver = Driver::negotiate(socket, config())?;
            let mut parameters = driver.parameters(QUEUE, 0);
            let region = &driver.memory().regions()[1];
            parameters.addresses.used = region.host() + region.len() as u64 - SplitRing::used_bytes(16) as u64 / 4 * 4;
            driver.start_with(QUEUE, parameters)?;
            match driver.queue(QUEUE).wait_used(options.drop_after) {
                Err(Error::TimedOut(_)) => Ok(Answer::Dropped),
                Err(error) => Err(error),
                Ok(_) => Ok(Answer::Malformed("something was used".into())),
            }
        }),
    ]
}
