//! A toy device, served to the driver of the benchmarks over a socket.

use crate::toy;

use std::collections::HashMap;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ferry_driver::memory::{Buffer, Memory};
use ferry_driver::{Config, Driver, Error};
use toy::{FATAL, GATED, HELD, PANICS, PARKED, QUEUES, Toy, WRITABLE_AT, answers, ask, config, serve};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures as Protocol};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const TIMEOUT: Duration = Duration::from_secs(10);
/// Where a process started by [`killed_servers`] serves, and notes what it does.
const SOCKET_VARIABLE: &str = "FERRY_TOY_SOCKET";
const JOURNAL_VARIABLE: &str = "FERRY_TOY_JOURNAL";

/// Asks `count` numbers, as many at a time as there is room for, and checks all answers.
fn converse(driver: &mut Driver, queue: usize, count: u64) {
    let mut asked = HashMap::new();
    let (mut next, mut answered) = (0, 0);
    while answered < count {
        while next < count
            && let Ok(ticket) = ask(driver, queue, next)
        {
            asked.insert(ticket, next);
            next += 1;
        }
        let done = driver.queue(queue).wait(TIMEOUT).unwrap();
        let number = asked.remove(&done.ticket).unwrap();
        assert!(answers(number, &done.reply), "{number}: {:?}", done.reply);
        answered += 1;
    }
}

#[test]
fn every_ring_serves() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, _server) = serve(&path, Toy::default());
    for (packed, queue_size) in [(false, 64), (false, 1024), (true, 64), (true, 7), (true, 1000)] {
        for (event_idx, indirect, inflight) in
            [(true, true, false), (true, false, true), (false, true, true), (false, false, false)]
        {
            let config = Config { packed, queue_size, event_idx, indirect, inflight, ..config() };
            let mut driver = Driver::connect(&path, config).unwrap();
            for queue in 0..QUEUES {
                converse(&mut driver, queue, 300);
            }
        }
    }
}

#[test]
fn a_ring_continues_after_a_stop_and_restarts_after_a_reboot() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let toy = Toy::default();
    let features = Arc::clone(&toy.features);
    let (_socket, _server) = serve(&path, toy);
    for packed in [false, true] {
        let mut driver = Driver::connect(&path, Config { packed, inflight: true, ..config() }).unwrap();
        assert_eq!(features.load(Ordering::SeqCst), driver.features());
        for _ in 0..5 {
            converse(&mut driver, 1, 77);
            let base = driver.stop(1).unwrap();
            driver.start(1, base).unwrap();
            converse(&mut driver, 1, 13);
            converse(&mut driver, 0, 13);
            driver.reboot().unwrap();
        }
        converse(&mut driver, 1, 77);
        // Another connection, while the device was in the middle of something.
        for number in 0..40 {
            ask(&mut driver, 2, number).unwrap();
        }
        let mut driver = driver.reconnect().unwrap();
        converse(&mut driver, 2, 77);
    }
}

/// Asks `count` even numbers, which are answered at once, with `depth` of them under way, and takes a while over each
/// answer, as an emulated guest does. Returns how many kicks that took.
fn converse_slowly(driver: &mut Driver, depth: u64, count: u64) -> u64 {
    const WHILE: Duration = Duration::from_micros(60);
    let before = driver.queue(0).counters().kicks;
    for number in 0..count + depth {
        if number >= depth {
            driver.queue(0).wait(TIMEOUT).unwrap();
            let start = Instant::now();
            while start.elapsed() < WHILE {
                std::hint::spin_loop();
            }
        }
        if number < count {
            ask(driver, 0, 2 * number).unwrap();
        }
    }
    driver.queue(0).counters().kicks - before
}

#[test]
fn a_slow_driver_with_deep_queues_kicks_rarely() {
    const COUNT: u64 = 4000;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, _server) = serve(&path, Toy::default());
    // Other work on this machine may keep either side from its CPU.
    let deadline = Instant::now() + Duration::from_secs(60);
    for packed in [false, true] {
        let mut driver = Driver::connect(&path, Config { packed, queue_size: 128, ..config() }).unwrap();
        loop {
            let kicks = converse_slowly(&mut driver, 16, COUNT);
            if kicks < COUNT / 3 {
                break;
            }
            assert!(Instant::now() < deadline, "packed {packed}: {kicks} kicks for {COUNT} requests");
        }
    }
}

/// The rings lie in the first region. Fills it, so that buffers come from the second.
fn fill_first(driver: &Driver) -> Vec<Buffer> {
    let end = driver.memory().regions()[1].guest();
    let is_first = |buffer: &Buffer| buffer.guest() < end;
    std::iter::from_fn(|| driver.memory().alloc(4096, 4096).filter(is_first)).collect()
}

#[test]
fn memory_is_exchanged_while_a_request_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let toy = Toy::default();
    let (_socket, _server) = serve(&path, toy.clone());
    for packed in [false, true] {
        let config = Config { packed, regions: 2, memory_bytes: 4 << 20, indirect: false, ..config() };
        let mut driver = Driver::connect(&path, config).unwrap();
        let _filling = fill_first(&driver);
        let region = Arc::clone(&driver.memory().regions()[1]);
        let other = tempfile::tempfile().unwrap();
        other.write_all_at(&6u64.to_le_bytes().repeat(region.len() / 8), 0).unwrap();
        let before = toy.at_gate.load(Ordering::SeqCst);
        let gate = toy.gate.lock().unwrap();
        let served = ask(&mut driver, 0, GATED).unwrap();
        until(|| toy.at_gate.load(Ordering::SeqCst) > before);
        // The front end is answered, though the worker is not done.
        driver.share_region(1, false).unwrap();
        driver.share_file(region.guest(), region.len() as u64, other.as_fd()).unwrap();
        // What is made available from now on lies in the other file, which has another number there.
        let behind = ask(&mut driver, 0, 8).unwrap();
        drop(gate);
        assert!(answers(GATED, &driver.queue(0).wait_for(served, TIMEOUT).unwrap().reply), "where it was taken from");
        assert_eq!(driver.queue(0).wait_for(behind, TIMEOUT).unwrap().used_len, 8);
        let mut has = vec![0; region.len()];
        other.read_exact_at(&mut has, 0).unwrap();
        assert_eq!(has.chunks(8).filter(|number| answers(6, number)).count(), 1);
        driver.share_region(1, false).unwrap();
        driver.share_region(1, true).unwrap();
        converse(&mut driver, 0, 40);
    }
}

#[test]
fn memory_comes_and_goes_under_load() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, _server) = serve(&path, Toy::default());
    for packed in [false, true] {
        let config = Config { packed, regions: 2, memory_bytes: 4 << 20, ..config() };
        let mut driver = Driver::connect(&path, config).unwrap();
        let _filling = fill_first(&driver);
        for _ in 0..20 {
            let tickets: Vec<_> = (0..32).map(|number| ask(&mut driver, 0, number).unwrap()).collect();
            driver.share_region(1, false).unwrap();
            for (number, ticket) in (0..).zip(tickets) {
                // Either it was taken before, and then its answer is right, or its memory is not there.
                let done = driver.queue(0).wait_for(ticket, TIMEOUT).unwrap();
                assert!(done.used_len == 0 || answers(number, &done.reply), "{number}: {done:?}");
            }
            let lost = ask(&mut driver, 0, 8).unwrap();
            assert_eq!(driver.queue(0).wait_for(lost, TIMEOUT).unwrap().used_len, 0);
            driver.share_region(1, true).unwrap();
            converse(&mut driver, 0, 40);
            // Whoever is waited for still has the memory that the answer goes to.
            let parked = ask(&mut driver, 0, PARKED + 1).unwrap();
            let behind = ask(&mut driver, 0, 2).unwrap();
            assert!(answers(2, &driver.queue(0).wait_for(behind, TIMEOUT).unwrap().reply));
            driver.share_region(1, false).unwrap();
            assert!(answers(PARKED + 1, &driver.queue(0).wait_for(parked, TIMEOUT).unwrap().reply));
            driver.share_region(1, true).unwrap();
        }
        // The memory that the rings are in goes, and comes back.
        driver.share_region(0, false).unwrap();
        let waiting = ask(&mut driver, 0, 5).unwrap();
        assert!(matches!(driver.queue(0).wait_for(waiting, Duration::from_millis(50)), Err(Error::TimedOut(_))));
        driver.share_region(0, true).unwrap();
        assert!(answers(5, &driver.queue(0).wait_for(waiting, TIMEOUT).unwrap().reply));
        converse(&mut driver, 3, 40);
    }
}

/// Waits until something is so.
#[track_caller]
fn until(mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < end, "it does not come to that");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_queue_may_have_as_many_requests_out_as_it_has_entries() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let toy = Toy::default();
    let (_socket, _server) = serve(&path, toy.clone());
    for packed in [false, true] {
        let config = Config { packed, queue_size: 1024, indirect: true, ..config() };
        let mut driver = Driver::connect(&path, config).unwrap();
        let tickets: Vec<_> = (0..1024).map(|number| ask(&mut driver, 0, HELD + number).unwrap()).collect();
        until(|| toy.held() == 1024);
        // For the worker to look again, and see that nothing is left.
        driver.queue(0).kick();
        std::thread::sleep(Duration::from_millis(20));
        toy.release();
        for (number, ticket) in (HELD..).zip(tickets) {
            assert!(answers(number, &driver.queue(0).wait_for(ticket, TIMEOUT).unwrap().reply), "{number}");
        }
        converse(&mut driver, 0, 10);
    }
}

#[test]
fn a_new_call_descriptor_gets_pending_signals() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let toy = Toy::default();
    let (_socket, _server) = serve(&path, toy.clone());
    for packed in [false, true] {
        let mut driver = Driver::connect(&path, Config { packed, ..config() }).unwrap();
        let before = toy.at_gate.load(Ordering::SeqCst);
        let gate = toy.gate.lock().unwrap();
        let ticket = ask(&mut driver, 0, GATED).unwrap();
        until(|| toy.at_gate.load(Ordering::SeqCst) > before);
        // The worker is about to answer, and reads what it is told after that.
        driver.renew_signals(0).unwrap();
        let calls = driver.queue(0).counters().calls;
        drop(gate);
        until(|| driver.queue(0).counters().calls > calls);
        assert!(answers(GATED, &driver.queue(0).wait_for(ticket, TIMEOUT).unwrap().reply));
    }
}

#[test]
fn errors_are_signalled_on_the_latest_descriptor() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, _server) = serve(&path, Toy::default());
    let mut driver = Driver::connect(&path, config()).unwrap();
    converse(&mut driver, 0, 10);
    driver.renew_signals(0).unwrap();
    let queue = driver.queue(0);
    // More than the ring has.
    (0..65).for_each(|_| queue.ring_mut().push(0));
    queue.publish();
    queue.kick();
    until(|| queue.take_error());
}

#[test]
fn a_ring_with_a_reset_index_keeps_parked_chains() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let toy = Toy::default();
    let (_socket, _server) = serve(&path, toy.clone());
    let config = Config { regions: 2, queue_size: 1024, ..config() };
    let mut driver = Driver::connect(&path, config).unwrap();
    for _ in 0..1 << 16 >> 9 {
        let tickets: Vec<_> = (0..512 - 1).map(|number| ask(&mut driver, 0, 2 * number).unwrap()).collect();
        for ticket in tickets {
            driver.queue(0).wait_for(ticket, TIMEOUT).unwrap();
        }
    }
    for _ in 0..(1 << 16 >> 9) - 1 {
        let ticket = ask(&mut driver, 0, 2).unwrap();
        driver.queue(0).wait_for(ticket, TIMEOUT).unwrap();
    }
    // This is number 65,536: the index of the next is that of a fresh ring.
    let waits = ask(&mut driver, 0, PARKED + HELD).unwrap();
    until(|| toy.held() == 1);
    for share in [false, true] {
        driver.share_region(1, share).unwrap();
        driver.enable(0, share).unwrap();
    }
    toy.release();
    assert!(answers(PARKED + HELD, &driver.queue(0).wait_for(waits, TIMEOUT).unwrap().reply));
    converse(&mut driver, 0, 10);
}

#[test]
fn a_panicking_handler_fails_one_request_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, server) = serve(&path, Toy::default());
    let mut driver = Driver::connect(&path, config()).unwrap();
    let panics = ask(&mut driver, 0, PANICS + 1).unwrap();
    assert_eq!(driver.queue(0).wait_for(panics, TIMEOUT).unwrap().used_len, 0);
    converse(&mut driver, 0, 10);
    let fatal = ask(&mut driver, 0, PANICS + FATAL + 1).unwrap();
    assert!(matches!(driver.queue(0).wait_for(fatal, Duration::from_millis(50)), Err(Error::TimedOut(_))));
    driver.stop(0).unwrap();
    converse(&mut driver, 1, 10);
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        server.stop();
        tell.send(()).unwrap();
    });
    told.recv_timeout(TIMEOUT).unwrap();
}

#[test]
fn the_configuration_is_read_written_and_reset() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, _server) = serve(&path, Toy::default());
    let mut driver = Driver::connect(&path, config()).unwrap();
    assert_eq!(driver.read_config(0, 8).unwrap(), [1, 2, 3, 4, 0, 0, 0, 0], "nothing is behind its end");
    assert_eq!(driver.read_config(2, 3).unwrap(), [3, 4, 0]);
    driver.write_config(WRITABLE_AT, &[9]).unwrap();
    assert!(driver.write_config(0, &[9]).is_err(), "it is read-only there");
    assert_eq!(driver.read_config(0, 5).unwrap(), [1, 2, 3, 4, 9]);
    driver.reboot().unwrap();
    assert_eq!(driver.read_config(0, 5).unwrap(), [1, 2, 3, 4, 0]);
    // The offsets of cloud-hypervisor up to version 50.
    assert_eq!(driver.read_config(0x100 + 2, 3).unwrap(), [3, 4, 0]);
    driver.write_config(0x100 + WRITABLE_AT, &[9]).unwrap();
    assert_eq!(driver.read_config(0x100, 5).unwrap(), [1, 2, 3, 4, 9]);
    converse(&mut driver, 0, 10);
}

/// A front end that takes messages, as far as it must say what it is.
fn front_end(path: &Path) -> Frontend {
    let mut frontend = Frontend::connect(path, QUEUES as u64).unwrap();
    frontend.set_owner().unwrap();
    let features = frontend.get_features().unwrap();
    frontend.set_features(features).unwrap();
    let offered = frontend.get_protocol_features().unwrap();
    assert!(offered.contains(Protocol::BACKEND_REQ | Protocol::INFLIGHT_SHMFD | Protocol::CONFIGURE_MEM_SLOTS));
    frontend.set_protocol_features(offered).unwrap();
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    frontend
}

#[test]
fn configuration_changes_are_sent_to_the_front_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, server) = serve(&path, Toy::default());
    server.config_changed();
    for early in [true, false] {
        let mut frontend = front_end(&path);
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(TIMEOUT)).unwrap();
        if early {
            server.config_changed();
        }
        frontend.set_backend_request_fd(&theirs).unwrap();
        assert_eq!(frontend.get_queue_num().unwrap(), QUEUES as u64, "the conversation goes on");
        // It may have changed since this front end has read it from a server before this one.
        let times = if early { 1 } else { 2 };
        let mut message = [0; 12];
        for time in 0..times {
            if time == 1 {
                server.config_changed();
            }
            (&ours).read_exact(&mut message).unwrap();
            // CONFIG_CHANGE_MSG, the version, no payload.
            assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        }
        ours.set_nonblocking(true).unwrap();
        assert!((&ours).read(&mut message).is_err(), "once");
    }
}

/// Starts queue 0 at the beginning of the memory.
fn start_queue(frontend: &mut Frontend, memory: &Memory) {
    let host = memory.regions()[0].host();
    let ring = VringConfigData {
        queue_max_size: 4,
        queue_size: 4,
        flags: 0,
        desc_table_addr: host,
        avail_ring_addr: host + 0x100,
        used_ring_addr: host + 0x200,
        log_addr: None,
    };
    frontend.set_vring_num(0, 4).unwrap();
    frontend.set_vring_addr(0, &ring).unwrap();
    frontend.set_vring_base(0, 0).unwrap();
    frontend.set_vring_kick(0, &EventFd::new(EFD_NONBLOCK).unwrap()).unwrap();
    frontend.set_vring_enable(0, true).unwrap();
}

/// QEMU drops the message while the device is stopped.
#[test]
fn a_configuration_change_is_repeated_until_it_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, server) = serve(&path, Toy::default());
    let mut frontend = front_end(&path);
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let received = || (&ours).read(&mut [0; 120]).map_or(0, |bytes| bytes / 12);
    frontend.set_backend_request_fd(&theirs).unwrap();
    let memory = Memory::new(1 << 20, 1).unwrap();
    let region = &memory.regions()[0];
    let info = VhostUserMemoryRegionInfo {
        guest_phys_addr: region.guest(),
        memory_size: region.len() as u64,
        userspace_addr: region.host(),
        mmap_offset: 0,
        mmap_handle: region.file().as_raw_fd(),
    };
    frontend.set_mem_table(&[info]).unwrap();
    for _ in 0..2 {
        assert_eq!(received(), 1);
        start_queue(&mut frontend, &memory);
        assert_eq!(received(), 1, "it was not read");
        frontend.get_config(0, 5, VhostUserConfigFlags::WRITABLE, &[0; 5]).unwrap();
        frontend.get_vring_base(0).unwrap();
        start_queue(&mut frontend, &memory);
        assert_eq!(received(), 0, "it was read");
        frontend.get_vring_base(0).unwrap();
        server.config_changed();
    }
}

/// As crosvm does.
#[test]
fn a_front_end_without_backend_send_fd_gets_a_window() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, _server) = serve(&path, Toy { window_bytes: Some(2 << 20), ..Toy::default() });
    let mut frontend = front_end(&path);
    let offered = frontend.get_protocol_features().unwrap();
    frontend.set_protocol_features(offered - Protocol::BACKEND_SEND_FD).unwrap();
    assert_eq!(frontend.get_shmem_config().unwrap().memory_sizes[0], 2 << 20);
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, _server) = serve(&path, Toy::default());
    let mut frontend = front_end(&path);
    assert!(frontend.set_protocol_features(Protocol::all()).is_err());
    // The next front end is served all the same.
    converse(&mut Driver::connect(&path, config()).unwrap(), 0, 10);
}

/// Serves in a process of its own, if it is one that [`killed_servers`] started.
#[test]
fn serve_if_asked() {
    let Some(path) = std::env::var_os(SOCKET_VARIABLE) else { return };
    let toy = Toy { journal: std::env::var_os(JOURNAL_VARIABLE).map(Into::into), ..Toy::default() };
    let _serving = serve(Path::new(&path), toy);
    loop {
        std::thread::park();
    }
}

fn start_server(directory: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["server::serve_if_asked", "--exact", "--nocapture"])
        .env(SOCKET_VARIABLE, directory.join("s"))
        .env(JOURNAL_VARIABLE, directory.join("journal"))
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

/// Kills the server again and again under load. Every request is answered once, and carried out at least once.
fn killed_servers(packed: bool, queue_size: u16) {
    let directory = tempfile::tempdir().unwrap();
    let mut server = start_server(directory.path());
    let config = Config { packed, queue_size, inflight: true, timeout: TIMEOUT, connect_within: TIMEOUT, ..config() };
    let mut driver = Driver::connect(directory.path().join("s"), config).unwrap();
    let mut asked: HashMap<_, u64> = HashMap::new();
    let (mut next, mut answered) = (0, 0);
    for round in 0..25_u64 {
        // It goes at another moment every time.
        let enough = answered + 40 + round * 7;
        while answered < enough || asked.is_empty() {
            for queue in 0..QUEUES {
                while let Ok(ticket) = ask(&mut driver, queue, next) {
                    asked.insert(ticket, next);
                    next += 1;
                }
            }
            for queue in 0..QUEUES {
                while let Some(done) = driver.queue(queue).poll().unwrap() {
                    let number = asked.remove(&done.ticket).unwrap();
                    assert!(answers(number, &done.reply), "{number}: {done:?}");
                    answered += 1;
                }
            }
        }
        let set = round.to_le_bytes()[0] + 1;
        driver.write_config(WRITABLE_AT, &[set]).unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
        server = start_server(directory.path());
        driver.reattach().unwrap();
        assert_eq!(driver.read_config(WRITABLE_AT, 1).unwrap(), [set], "what the driver has set stays");
    }
    for (ticket, number) in asked {
        let queue = (0..QUEUES).find(|queue| ticket.unique() >> 48 == *queue as u64).unwrap();
        let done = driver.queue(queue).wait_for(ticket, TIMEOUT).unwrap();
        assert!(answers(number, &done.reply), "{number}: {done:?}");
    }
    for queue in 0..QUEUES {
        assert_eq!(driver.queue(queue).in_flight(), 0);
        assert_eq!(driver.queue(queue).poll().unwrap(), None, "nothing is answered twice");
        converse(&mut driver, queue, 100);
    }
    server.kill().unwrap();
    server.wait().unwrap();
    let journal = std::fs::read(directory.path().join("journal")).unwrap();
    let mut done = vec![0u32; usize::try_from(next).unwrap()];
    for number in journal.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap())) {
        done[usize::try_from(number).unwrap()] += 1;
    }
    assert!(done.iter().all(|times| *times > 0), "every request was carried out");
}

#[test]
fn servers_are_killed_under_split_rings() {
    killed_servers(false, 32);
}

#[test]
fn servers_are_killed_under_packed_rings() {
    killed_servers(true, 29);
}
