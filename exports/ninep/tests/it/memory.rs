//! The memory of clients that have gone is the system's again.

use crate::common;

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::{Client, DirServer, ROOT, Stream};
use ferry_ninep::{Limits, Options};
use ferry_vfs::Name;
use ferry_wire::ninep::{Fid, Reply, Request, Step, Steps, Tag};

/// What may stay, in bytes, beside a quarter: tables' least sizes, and the end of each thread's arena, which glibc trims only when something is
/// freed there.
const LEFT_MAX: u64 = 8 << 20;
/// The memory is that of all tests of this process.
static ALONE: Mutex<()> = Mutex::new(());
const LONG: Duration = Duration::from_secs(60);

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

fn server(files: u32) -> DirServer {
    let limits = Limits { connections_max: 20_000, ..Limits::default() };
    let server = DirServer::new(Options { limits, ..Options::default() });
    for number in 0..files {
        std::fs::write(server.path.join(format!("file-{number}")), "").unwrap();
    }
    server
}

/// So many requests are sent before their replies are read.
const TOGETHER: u16 = 50;

/// The tag of one of those.
fn tag(number: u32) -> Tag {
    Tag(u16::try_from(number % u32::from(TOGETHER)).unwrap())
}

/// Makes fids from 1 on; each of the first `files` is of a file of its own.
fn walk_all<S: Stream>(client: &mut Client<S>, fids: u32, files: u32) {
    together(client, fids, |client, number| {
        let name = format!("file-{}", if number < files { number } else { 0 });
        let mut buffer = Vec::new();
        let steps = Steps::write(&mut buffer, [Step::Child(Name::new(name.as_bytes()).unwrap())]);
        client.send(tag(number), &Request::Walk { fid: ROOT, new_fid: Fid(number + 1), steps });
    });
}

fn together<S: Stream>(client: &mut Client<S>, count: u32, ask: impl Fn(&mut Client<S>, u32)) {
    for from in (0..count).step_by(TOGETHER.into()) {
        let numbers = from..count.min(from + u32::from(TOGETHER));
        numbers.clone().for_each(|number| ask(client, number));
        for _ in numbers {
            let (_, message) = client.receive();
            assert!(matches!(Reply::decode(&message).unwrap().1, Reply::Walk(_) | Reply::Clunk));
        }
    }
}

#[track_caller]
fn goes_down_to(bytes: u64) {
    let end = Instant::now() + LONG;
    while resident_bytes() > bytes {
        assert!(Instant::now() < end, "{} bytes stay, of which {bytes} would be right", resident_bytes());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Connections with so many fids each come and go, and then one that stays gives up as many as all of those had.
fn memory_is_given_back(connections: usize, fids: u32, files: u32) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let server = server(files);
    // What the first clients cost stays.
    drop(server.server.attached(0));
    server.server.settles(|usage| usage.connections == 0);
    let before = resident_bytes();
    let mut clients: Vec<_> = (0..connections).map(|_| server.server.attached(0)).collect();
    clients.iter_mut().for_each(|client| walk_all(client, fids, files));
    let most = resident_bytes();
    assert!(most > before + 3 * LEFT_MAX, "{before} and {most}: too little to tell");
    let enough = before + (most - before) / 4 + LEFT_MAX;
    drop(clients);
    server.server.settles(|usage| usage.connections == 0 && usage.fids == 0);
    goes_down_to(enough);

    let mut client = server.server.attached(0);
    let most = u32::try_from(connections).unwrap() * fids;
    walk_all(&mut client, most, files);
    together(&mut client, most, |client, number| client.send(tag(number), &Request::Clunk { fid: Fid(number + 1) }));
    server.server.settles(|usage| usage.fids == 1);
    goes_down_to(enough);
}

#[test]
fn memory_of_closed_clients_and_fids_is_released() {
    if !ferry_alone::in_own_process() {
        return;
    }
    // A device has one client, and threads of its own.
    let (connections, fids) = if common::is_by_device() { (2, 50_000) } else { (80, 1000) };
    memory_is_given_back(connections, fids, 1000);
}

#[test]
#[ignore = "long: make test-all"]
fn memory_of_two_hundred_thousand_fids_is_released() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let (connections, fids) = if common::is_by_device() { (2, 100_000) } else { (200, 1000) };
    memory_is_given_back(connections, fids, 1000);
}
