//! 9P servers with many connections and many fids, and what they keep of clients that have gone.

use std::fs;
use std::io::{BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferry_dir::Dir;
use ferry_ninep::{Export, Limits, Options};

use super::case::{Case, Figure, Measure, STRAIGHT, resident_mib, us_each};
use super::place::{Place, allow_descriptors, wait_for};
use crate::procfs::kib;
use crate::server::Server;
use crate::session;

/// Fids of each connection, the one of the root beside them.
const FIDS: u64 = 25;
/// A server looks twice a second whether memory is to be given back.
const LATER: Duration = Duration::from_secs(2);
const RVERSION: u8 = 101;
const RATTACH: u8 = 105;
const RWALK: u8 = 111;
const RCLUNK: u8 = 121;
const RGETATTR: u8 = 25;
/// Requests that are sent together.
const BATCH: u64 = 64;
/// Files that the fids of one client are of.
const FILES: u64 = 1000;
/// Requests of one client among many.
const REQUESTS: u64 = 10_000;

pub const CASES: &[Case] = &[
    Case {
        name: "9P connections",
        of: "connections",
        // A process may have 20,000 descriptors on some machines, and each connection takes two.
        sizes: &[100, 1_000, 9_000],
        quick_max: 1_000,
        figures: &[
            Figure { name: "connect and attach", unit: "us", growth_max: STRAIGHT },
            Figure { name: "memory of one", unit: "KiB", growth_max: STRAIGHT },
            Figure { name: "a request on one of them", unit: "us", growth_max: STRAIGHT },
        ],
        prepare: prepare_connections,
    },
    Case {
        name: "9P fids of one connection",
        of: "fids",
        sizes: &[1_000, 10_000, 100_000, 1_000_000],
        quick_max: 100_000,
        figures: &[
            Figure { name: "walk to one", unit: "us", growth_max: STRAIGHT },
            Figure { name: "memory of one", unit: "bytes", growth_max: STRAIGHT },
            Figure { name: "clunk one", unit: "us", growth_max: STRAIGHT },
        ],
        prepare: prepare_fids,
    },
    Case {
        name: "memory that a 9P server keeps when its clients have gone, 25 fids for each connection",
        of: "fids",
        sizes: &[2_000, 20_000, 200_000],
        quick_max: 200_000,
        figures: &[Figure { name: "", unit: "MiB", growth_max: None }],
        prepare: prepare_gone,
    },
];

fn text(bytes: &str) -> Vec<u8> {
    [&u16::try_from(bytes.len()).unwrap_or(u16::MAX).to_le_bytes()[..], bytes.as_bytes()].concat()
}

/// A message of the kind whose reply is `kind`. No two that are under way may have the same tag.
fn request(kind: u8, tag: u16, body: &[u8]) -> Result<Vec<u8>> {
    let length = u32::try_from(7 + body.len())?;
    let tag = if kind == RVERSION { u16::MAX } else { tag };
    Ok([&length.to_le_bytes()[..], &[kind - 1], &tag.to_le_bytes(), body].concat())
}

/// Takes a reply, which is to be of this kind.
fn reply(stream: &mut impl Read, kind: u8) -> Result<()> {
    let mut head = [0; 7];
    stream.read_exact(&mut head)?;
    let [a, b, c, d, found, ..] = head;
    let mut rest = vec![0; usize::try_from(u32::from_le_bytes([a, b, c, d]))?.saturating_sub(head.len())];
    stream.read_exact(&mut rest)?;
    ensure!(found == kind, "a reply of the kind {found}, not {kind}");
    Ok(())
}

/// Sends a request and takes the reply.
fn ask(stream: &mut UnixStream, kind: u8, body: &[u8]) -> Result<()> {
    stream.write_all(&request(kind, 0, body)?)?;
    reply(stream, kind)
}

/// Sends so many requests of one kind, some together, and takes the replies.
fn ask_all(stream: &UnixStream, kind: u8, count: u64, body: impl Fn(u64) -> Result<Vec<u8>>) -> Result<()> {
    let mut replies = BufReader::new(stream);
    for first in (0..count).step_by(usize::try_from(BATCH)?) {
        let numbers = first..count.min(first + BATCH);
        let batch = numbers.clone().zip(0..).map(|(number, tag)| request(kind, tag, &body(number)?));
        let batch = batch.collect::<Result<Vec<_>>>()?;
        { stream }.write_all(&batch.concat())?;
        for _ in numbers {
            reply(&mut replies, kind)?;
        }
    }
    Ok(())
}

/// A client that has attached the root as fid 0.
fn attach(socket: &Path) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    let none = u32::MAX.to_le_bytes();
    ask(&mut stream, RVERSION, &[&8192_u32.to_le_bytes()[..], &text("9P2000.L")].concat())?;
    ask(&mut stream, RATTACH, &[&[0; 4][..], &none, &text(""), &text(""), &[0; 4]].concat())?;
    Ok(stream)
}

/// The body of a walk from the root to a file.
fn walk(fid: u64, file: u64) -> Result<Vec<u8>> {
    let name = text(&file.to_string());
    Ok([&[0; 4][..], &u32::try_from(fid)?.to_le_bytes(), &1_u16.to_le_bytes(), &name].concat())
}

/// A client with its fids, each of a file of its own.
fn client(socket: &Path) -> Result<UnixStream> {
    let mut stream = attach(socket)?;
    (1..=FIDS).try_for_each(|fid| ask(&mut stream, RWALK, &walk(fid, fid)?))?;
    Ok(stream)
}

/// A server of a directory with so many files, for so many connections.
fn serve(place: &Place, files: u64, connections: u64) -> Result<Server> {
    let tree = place.directory.join("tree");
    fs::create_dir(&tree)?;
    (0..files).try_for_each(|file| fs::write(tree.join(file.to_string()), ""))?;
    let (tree, address) = (place.word("tree")?, format!("unix:{}", place.word("socket")?));
    let words = ["share", &tree, "--9p", &address, "--9p-connections", &connections.to_string()];
    Server::spawn("ferry", &place.directory.join("socket"), &session::all_cpus()?, Place::command(&words)?)
}

#[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
fn prepare_connections(place: &Place, connections: u64) -> Result<Measure> {
    allow_descriptors(2 * connections + 1000)?;
    let place = place.clone();
    Ok(Box::new(move || {
        let server = serve(&place, 0, connections + 10)?;
        drop(attach(server.socket())?);
        let [before] = kib(server.pid(), ["VmRSS:"])?;
        let begin = Instant::now();
        let mut clients = (0..connections).map(|_| attach(server.socket())).collect::<Result<Vec<_>>>()?;
        let connected = us_each(begin, connections);
        let [after] = kib(server.pid(), ["VmRSS:"])?;
        let first = clients.first_mut().context("there is a client")?;
        let begin = Instant::now();
        // The basic attributes of the root.
        let body = [&[0; 4][..], &0x7ff_u64.to_le_bytes()].concat();
        (0..REQUESTS).try_for_each(|_| ask(first, RGETATTR, &body))?;
        let request = us_each(begin, REQUESTS);
        drop((clients, server));
        fs::remove_dir_all(place.directory.join("tree"))?;
        Ok(vec![connected, (after - before) / connections as f64, request])
    }))
}

#[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
fn prepare_fids(place: &Place, fids: u64) -> Result<Measure> {
    let place = place.clone();
    Ok(Box::new(move || {
        let server = serve(&place, FILES, 1)?;
        let stream = attach(server.socket())?;
        let [before] = kib(server.pid(), ["VmRSS:"])?;
        let begin = Instant::now();
        ask_all(&stream, RWALK, fids, |number| walk(number + 1, number % FILES))?;
        let walked = us_each(begin, fids);
        let [after] = kib(server.pid(), ["VmRSS:"])?;
        let begin = Instant::now();
        ask_all(&stream, RCLUNK, fids, |number| Ok(u32::try_from(number + 1)?.to_le_bytes().to_vec()))?;
        let clunked = us_each(begin, fids);
        drop((stream, server));
        fs::remove_dir_all(place.directory.join("tree"))?;
        Ok(vec![walked, (after - before) * 1024.0 / fids as f64, clunked])
    }))
}

fn prepare_gone(place: &Place, fids: u64) -> Result<Measure> {
    let directory = &place.directory;
    let connections = fids / FIDS;
    // Both ends of each connection are here.
    allow_descriptors(2 * connections + 1000)?;
    let (tree, socket) = (directory.join("tree"), directory.join("socket"));
    fs::create_dir(&tree)?;
    (1..=FIDS).try_for_each(|fid| fs::write(tree.join(fid.to_string()), ""))?;
    let source = Arc::new(Dir::open(&tree, ferry_dir::Options::default())?);
    let limits = Limits { connections_max: usize::try_from(connections)? + 10, ..Limits::default() };
    let options = Options { limits, ..Options::default() };
    let export = Export::start(vec![UnixListener::bind(&socket)?.into()], source, options)?;
    // What the first client costs is not what is measured.
    drop(client(&socket)?);
    wait_for("connections end", || Ok(export.usage().connections == 0))?;
    Ok(Box::new(move || {
        let begun = resident_mib()?;
        let clients = (0..connections).map(|_| client(&socket)).collect::<Result<Vec<_>>>()?;
        drop(clients);
        wait_for("connections end", || Ok(export.usage().connections == 0 && export.usage().fids == 0))?;
        std::thread::sleep(LATER);
        Ok(vec![(resident_mib()? - begun).max(0.0)])
    }))
}
