//! A handler that blocks holds up no other request of its queue.

use crate::toy;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver, Ticket};
use toy::{GATED, HELD, HERE, PANICS, PARKED, Toy, answers, ask, config, serve};

const TIMEOUT: Duration = Duration::from_secs(30);
/// How long a gate stays shut where something is to wait for it.
const SHUT: Duration = Duration::from_millis(200);
const SPARES: usize = 4;
/// Handlers that leave a thread for others.
const BLOCKED: usize = SPARES - 1;

/// Numbers that were asked.
#[derive(Default)]
struct Asked(HashMap<Ticket, u64>);

impl Asked {
    fn ask(&mut self, driver: &mut Driver, number: u64) {
        self.0.insert(ask(driver, 0, number).unwrap(), number);
    }

    /// Waits for one answer; returns its number.
    fn wait(&mut self, driver: &mut Driver) -> u64 {
        let done =
            driver.queue(0).wait(TIMEOUT).unwrap_or_else(|error| panic!("{error}: {:x?} are not answered", self.0));
        let number = self.0.remove(&done.ticket).unwrap();
        assert!(number & PANICS != 0 || answers(number, &done.reply), "{number:#x}: {:?}", done.reply);
        number
    }

    fn wait_for_all(&mut self, driver: &mut Driver) {
        while !self.0.is_empty() {
            self.wait(driver);
        }
    }
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A toy with spare threads, and its driver.
fn started(packed: bool) -> (tempfile::TempDir, Toy, impl Drop, Driver) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let toy = Toy { spares: SPARES, ..Toy::default() };
    let server = serve(&path, toy.clone());
    let driver = Driver::connect(&path, Config { packed, inflight: true, ..config() }).unwrap();
    (directory, toy, Keep(server), driver)
}

struct Keep<T>(T);

impl<T> Drop for Keep<T> {
    fn drop(&mut self) {}
}

#[test]
fn blocked_handlers_do_not_stop_other_requests() {
    for packed in [false, true] {
        let (_directory, toy, _server, mut driver) = started(packed);
        for _ in 0..3 {
            let gate = toy.gate.lock().unwrap();
            let mut asked = Asked::default();
            for number in 0..BLOCKED as u64 {
                asked.ask(&mut driver, GATED | (2 * number));
            }
            // At once, later, and much later.
            for number in (0..200).chain(PARKED..PARKED + 2) {
                asked.ask(&mut driver, number);
                while asked.0.len() > BLOCKED + 8 {
                    assert_eq!(asked.wait(&mut driver) & GATED, 0);
                }
            }
            while asked.0.len() > BLOCKED {
                assert_eq!(asked.wait(&mut driver) & GATED, 0);
            }
            drop(gate);
            asked.wait_for_all(&mut driver);
        }
    }
}

#[test]
fn past_the_budget_requests_wait_for_each_other_but_not_those_that_never_wait() {
    let (_directory, toy, _server, mut driver) = started(false);
    let gate = toy.gate.lock().unwrap();
    let mut asked = Asked::default();
    let blocked = 2 * SPARES as u64;
    for number in 0..blocked {
        asked.ask(&mut driver, GATED | (2 * number));
    }
    wait_until("all threads are blocked", || toy.at_gate.load(Ordering::SeqCst) > SPARES);
    asked.ask(&mut driver, 1);
    for number in 0..100 {
        asked.ask(&mut driver, 2 * number);
        assert_eq!(asked.wait(&mut driver), 2 * number, "no thread is needed");
    }
    assert_eq!(asked.0.len(), usize::try_from(blocked).unwrap() + 1, "the odd one waits");
    drop(gate);
    asked.wait_for_all(&mut driver);
}

/// A guest that sends more requests that block the owner of the queue waits for its own.
#[test]
fn takeovers_of_a_queue_are_bounded() {
    const TAKEOVERS_MAX: usize = 64;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let toy = Toy { spares: SPARES, ..Toy::default() };
    let _server = serve(&path, toy.clone());
    let mut driver = Driver::connect(&path, Config { queue_size: 256, ..config() }).unwrap();
    let gate = toy.gate.lock().unwrap();
    let mut asked = Asked::default();
    for number in 0..2 * TAKEOVERS_MAX as u64 {
        asked.ask(&mut driver, GATED | HERE | (2 * number));
    }
    let at_gate = || toy.at_gate.load(Ordering::SeqCst);
    wait_until("all takeovers are used", || at_gate() > TAKEOVERS_MAX);
    std::thread::sleep(SHUT);
    assert_eq!(at_gate(), TAKEOVERS_MAX + 1, "and the first thread");
    drop(gate);
    asked.wait_for_all(&mut driver);
}

/// Requests that wait for others, as those for a lock do, leave most of a queue for these.
#[test]
fn a_quarter_of_a_queue_may_be_parked() {
    for packed in [false, true] {
        let (_directory, toy, _server, mut driver) = started(packed);
        let most = usize::from(config().queue_size / 4);
        let mut asked = Asked::default();
        for number in 0..most as u64 {
            asked.ask(&mut driver, HELD | PARKED | number);
        }
        wait_until("they are parked", || toy.held() == most);
        let more = HELD | PARKED | most as u64;
        asked.ask(&mut driver, more);
        assert_eq!(asked.wait(&mut driver), more, "it is not parked");
        toy.release();
        asked.wait_for_all(&mut driver);
        asked.ask(&mut driver, more);
        wait_until("there is room again", || toy.held() == 1);
        toy.release();
        asked.wait_for_all(&mut driver);
    }
}

/// The same for requests that wait for a thread before they wait for others.
#[test]
fn a_quarter_of_a_queue_may_be_parked_by_other_threads() {
    for packed in [false, true] {
        let (_directory, toy, _server, mut driver) = started(packed);
        let most = usize::from(config().queue_size / 4);
        let (mut asked, more) = (Asked::default(), 5);
        for _ in 0..2 {
            let gate = toy.gate.lock().unwrap();
            for number in 0..(most + more) as u64 {
                asked.ask(&mut driver, GATED | HELD | PARKED | number);
            }
            asked.ask(&mut driver, 2);
            assert_eq!(asked.wait(&mut driver), 2, "the queue is served");
            drop(gate);
            (0..more).for_each(|_| assert_ne!(asked.wait(&mut driver) & PARKED, 0, "it is not parked"));
            wait_until("they are parked", || toy.held() == most);
            toy.release();
            asked.wait_for_all(&mut driver);
        }
    }
}

#[test]
fn a_stopping_queue_waits_for_other_threads() {
    for packed in [false, true] {
        let (_directory, toy, _server, mut driver) = started(packed);
        let mut asked = Asked::default();
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let (told, shut) = std::sync::mpsc::channel();
            let gate = Arc::clone(&toy.gate);
            scope.spawn(move || {
                let gate = gate.lock().unwrap();
                told.send(()).unwrap();
                std::thread::sleep(SHUT);
                drop(gate);
            });
            shut.recv().unwrap();
            asked.ask(&mut driver, GATED | 2);
            asked.ask(&mut driver, GATED | 4);
            wait_until("another thread has taken over", || toy.at_gate.load(Ordering::SeqCst) >= 2);
            // Nothing is answered afterwards.
            let base = driver.stop(0).unwrap();
            assert!(begin.elapsed() >= SHUT, "stopped after {:?}", begin.elapsed());
            asked.wait_for_all(&mut driver);
            driver.start(0, base).unwrap();
        });
        asked.ask(&mut driver, 7);
        asked.wait_for_all(&mut driver);
    }
}

/// The index at which a ring stops may be that of a new one, after a lap of the indices.
#[test]
fn a_parked_request_stays_when_a_ring_stops_at_index_0() {
    let (_directory, toy, _server, mut driver) = started(false);
    let mut asked = Asked::default();
    asked.ask(&mut driver, HELD | PARKED | 1);
    for _ in 1..=u16::MAX {
        asked.ask(&mut driver, 2);
        assert_eq!(asked.wait(&mut driver), 2);
    }
    assert_eq!(driver.stop(0).unwrap(), 0);
    driver.start(0, 0).unwrap();
    asked.ask(&mut driver, 4);
    assert_eq!(asked.wait(&mut driver), 4);
    toy.release();
    asked.wait_for_all(&mut driver);
}

#[test]
fn a_reply_may_precede_the_return_of_its_handler() {
    let (_directory, toy, _server, mut driver) = started(false);
    for number in [GATED | HELD | 1, GATED | HELD | PARKED | 1, GATED | PANICS | 2, GATED | 6] {
        let gate = toy.gate.lock().unwrap();
        let mut asked = Asked::default();
        asked.ask(&mut driver, number);
        asked.ask(&mut driver, 8);
        assert_eq!(asked.wait(&mut driver), 8);
        drop(gate);
        if number & HELD != 0 {
            wait_until("it is held", || toy.held() > 0);
            toy.release();
        }
        asked.wait_for_all(&mut driver);
    }
}

#[test]
fn a_disconnecting_front_end_leaves_nothing_behind() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    let (directory, toy, server, mut driver) = started(false);
    for _ in 0..3 {
        let gate = toy.gate.lock().unwrap();
        let before = toy.at_gate.load(Ordering::SeqCst);
        let mut asked = Asked::default();
        (0..3).for_each(|number| asked.ask(&mut driver, GATED | number));
        wait_until("they are blocked", || toy.at_gate.load(Ordering::SeqCst) > before + 1);
        driver.hang_up();
        drop(driver);
        drop(gate);
        driver = Driver::connect(directory.path().join("s"), config()).unwrap();
        let mut asked = Asked::default();
        (0..50).for_each(|number| asked.ask(&mut driver, number));
        asked.wait_for_all(&mut driver);
    }
    drop(driver);
    // The server has one of its own.
    wait_until("threads of front ends are left", || threads() <= before + 1);
    drop(server);
    wait_until("threads are left", || threads() <= before);
}
