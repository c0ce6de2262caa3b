//! A window and a front end that answers, or does not.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::*;
use crate::memory::tests::memfd;

const PART: Part = Part { window_offset: 4096, file_offset: 8192, bytes: 4096, writable: true };
/// What never comes is not waited for any longer.
const NOT_LONG: Duration = Duration::from_millis(50);
/// A message of the back end: its header, and `VhostUserMMap`.
const MESSAGE_BYTES: usize = 12 + 40;

/// Reads one message; answers its code. The descriptor that comes along is lost.
fn receive(front: &mut UnixStream) -> u32 {
    let mut message = [0; MESSAGE_BYTES];
    front.read_exact(&mut message).unwrap();
    assert_eq!(message[8], 40, "the length of what follows");
    u32::from_ne_bytes(message[..4].try_into().unwrap())
}

fn reply(front: &mut UnixStream, code: u32, outcome: u64) {
    let header = [code, 1 | 4, 8].map(u32::to_ne_bytes).concat();
    front.write_all(&[header, outcome.to_ne_bytes().to_vec()].concat()).unwrap();
}

/// A window with a line to its front end, which takes so long at most.
fn window(reply_within: Duration, told_within: Duration) -> (Arc<Window>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let window = Arc::new(Window::with_timeouts(1 << 20, reply_within, told_within));
    window.attach(ours.into());
    (window, theirs)
}

/// A front end on a thread of its own.
fn front(mut line: UnixStream, mut answer: impl FnMut(&mut UnixStream, u32) + Send + 'static) {
    std::thread::spawn(move || {
        loop {
            let mut first = [0];
            if rustix::net::recv(&line, &mut first[..], rustix::net::RecvFlags::PEEK).map_or(0, |(_, bytes)| bytes) == 0
            {
                return;
            }
            let code = receive(&mut line);
            answer(&mut line, code);
        }
    });
}

#[test]
fn mappings_are_known_until_they_are_unmapped() {
    let (window, line) = window(REPLY_WITHIN, NOT_LONG);
    front(line, |line, code| reply(line, code, 0));
    let file = memfd(1 << 20);
    let id = file_id(&file).unwrap();
    assert!(!is_known(id));
    // This front end tells of no regions, and is waited for only once.
    window.map(file.as_fd(), PART).unwrap();
    assert!(is_known(id));
    assert_eq!(lock(&window.state).sends_regions, Some(false));
    window.map(file.as_fd(), Part { window_offset: 0, ..PART }).unwrap();
    window.unmap(PART).unwrap();
    assert!(is_known(id));
    window.unmap(Part { window_offset: 0, ..PART }).unwrap();
    assert!(!is_known(id));
}

#[test]
fn a_mapping_is_there_when_its_region_is() {
    let (window, line) = window(REPLY_WITHIN, REPLY_WITHIN);
    let file = memfd(1 << 20);
    let told = AddedRegion { file: file_id(&file).unwrap(), file_offset: PART.file_offset, bytes: PART.bytes };
    let mine = Arc::clone(&window);
    front(line, move |line, code| {
        reply(line, code, 0);
        // Another device's, and then ours.
        mine.memory_changed(2, Some(AddedRegion { bytes: 1, ..told }));
        assert!(lock(&mine.state).awaited.is_some());
        mine.memory_changed(3, Some(told));
    });
    window.map(file.as_fd(), PART).unwrap();
    assert_eq!(lock(&window.state).sends_regions, Some(true));
}

#[test]
fn a_front_end_with_late_regions_is_waited_for_afterwards() {
    let (window, line) = window(REPLY_WITHIN, NOT_LONG);
    let file = memfd(1 << 20);
    let told = AddedRegion { file: file_id(&file).unwrap(), file_offset: PART.file_offset, bytes: PART.bytes };
    let (mine, is_late) = (Arc::clone(&window), Arc::new(AtomicBool::new(true)));
    let (was_late, told_twice) = (Arc::clone(&is_late), Arc::new(AtomicBool::new(false)));
    let done = Arc::clone(&told_twice);
    front(line, move |line, code| {
        reply(line, code, 0);
        if !was_late.load(Ordering::SeqCst) {
            std::thread::sleep(4 * NOT_LONG);
            done.store(true, Ordering::SeqCst);
            mine.memory_changed(3, Some(told));
        }
    });
    window.map(file.as_fd(), PART).unwrap();
    assert_eq!(lock(&window.state).sends_regions, Some(false));
    // Memory that has nothing to do with it, and then the region, at last.
    window.memory_changed(1, Some(AddedRegion { file: file_id(memfd(1)).unwrap(), ..told }));
    assert_eq!(lock(&window.state).sends_regions, Some(false));
    window.memory_changed(2, Some(told));
    assert_eq!(lock(&window.state).sends_regions, Some(true));
    is_late.store(false, Ordering::SeqCst);
    window.map(file.as_fd(), Part { window_offset: 0, ..PART }).unwrap();
    assert!(told_twice.load(Ordering::SeqCst), "the guest does not see it yet");
}

/// QEMU on a busy host.
#[test]
fn a_front_end_that_adds_memory_by_regions_may_be_slow() {
    let (window, line) = window(REPLY_WITHIN, NOT_LONG);
    let file = memfd(1 << 20);
    let region = AddedRegion { file: file_id(&file).unwrap(), file_offset: PART.file_offset, bytes: PART.bytes };
    window.memory_changed(1, Some(AddedRegion { file: file_id(memfd(1)).unwrap(), ..region }));
    let mine = Arc::clone(&window);
    front(line, move |line, code| {
        reply(line, code, 0);
        std::thread::sleep(4 * NOT_LONG);
        mine.memory_changed(2, Some(region));
    });
    window.map(file.as_fd(), PART).unwrap();
    assert_eq!(lock(&window.state).sends_regions, Some(true), "the guest does not see it yet");
}

#[test]
fn a_wait_of_the_front_end_is_not_a_delay() {
    let (window, line) = window(REPLY_WITHIN, NOT_LONG);
    let file = memfd(1 << 20);
    let told = AddedRegion { file: file_id(&file).unwrap(), file_offset: PART.file_offset, bytes: PART.bytes };
    let mine = Arc::clone(&window);
    front(line, move |line, code| {
        // As a message about memory, with a queue in which somebody makes a file durable.
        mine.memory_change_begins();
        reply(line, code, 0);
        std::thread::sleep(4 * NOT_LONG);
        mine.memory_changed(2, None);
        mine.memory_changed(2, Some(told));
    });
    window.map(file.as_fd(), PART).unwrap();
    assert_eq!(lock(&window.state).sends_regions, Some(true));
}

#[test]
fn a_mapping_without_a_region_is_reverted() {
    let patience = Duration::from_millis(500);
    let (window, line) = window(patience, patience);
    let file = memfd(1 << 20);
    let told = AddedRegion { file: file_id(&file).unwrap(), file_offset: PART.file_offset, bytes: PART.bytes };
    let mine = Arc::clone(&window);
    let (asked, codes) = std::sync::mpsc::channel();
    front(line, move |line, code| {
        reply(line, code, 0);
        // Once.
        if lock(&mine.state).sends_regions.is_none() {
            mine.memory_changed(2, Some(told));
        }
        asked.send(code).unwrap();
    });
    let next = Part { window_offset: 0, ..PART };
    window.map(file.as_fd(), PART).unwrap();
    assert!(matches!(window.map(file.as_fd(), next), Err(WindowError::Lost)));
    assert_eq!(lock(&window.state).mapped.len(), 1);
    let codes: Vec<_> = codes.iter().take(3).collect();
    assert!(codes[0] == codes[1] && codes[1] != codes[2], "it is unmapped: {codes:?}");
}

#[test]
fn a_refusal_is_for_one_mapping_only() {
    let (window, line) = window(REPLY_WITHIN, NOT_LONG);
    let mut count = 0;
    front(line, move |line, code| {
        count += 1;
        reply(line, code, u64::from(count == 1));
    });
    let file = memfd(1 << 20);
    assert!(matches!(window.map(file.as_fd(), PART), Err(WindowError::Refused)));
    assert!(!is_known(file_id(&file).unwrap()));
    window.map(file.as_fd(), PART).unwrap();
}

#[test]
fn a_front_end_with_invalid_replies_gets_no_more_requests() {
    let file = memfd(1 << 20);
    let lost = |window: &Window| {
        assert!(matches!(window.map(file.as_fd(), PART), Err(WindowError::Lost)));
        assert!(matches!(window.map(file.as_fd(), PART), Err(WindowError::Lost)));
        assert!(matches!(window.unmap(PART), Err(WindowError::Lost)));
        assert!(!is_known(file_id(&file).unwrap()));
    };
    // No channel, a wrong code, rubbish, a closed line, and silence.
    lost(&Window::new(1 << 20));
    let (wrong, line) = window(REPLY_WITHIN, NOT_LONG);
    front(line, |line, code| reply(line, code + 1, 0));
    lost(&wrong);
    let (rubbish, line) = window(REPLY_WITHIN, NOT_LONG);
    front(line, |line, _| line.write_all(&[0xff; 20]).unwrap());
    lost(&rubbish);
    let (closed, line) = window(REPLY_WITHIN, NOT_LONG);
    drop(line);
    lost(&closed);
    let (silent, _line) = window(Duration::from_millis(50), NOT_LONG);
    lost(&silent);
    // What is no socket is no channel.
    let none = Window::new(1 << 20);
    none.attach(memfd(1).into());
    lost(&none);
}

#[test]
fn a_lost_front_end_ends_all_waits() {
    let (window, _line) = window(REPLY_WITHIN, NOT_LONG);
    let begun = Instant::now();
    let mine = Arc::clone(&window);
    let waits = std::thread::spawn(move || mine.map(memfd(1 << 20).as_fd(), PART));
    while window.turn.try_lock().is_ok() {
        std::thread::yield_now();
    }
    window.end();
    assert!(matches!(waits.join().unwrap(), Err(WindowError::Lost)));
    assert!(begun.elapsed() < REPLY_WITHIN);
}

#[test]
fn qemu_is_not_driven_past_its_limit() {
    let (window, line) = window(REPLY_WITHIN, NOT_LONG);
    front(line, |line, code| reply(line, code, 0));
    window.memory_changed(REGIONS_MAX, None);
    assert!(matches!(window.map(memfd(1 << 20).as_fd(), PART), Err(WindowError::TooMany(REGIONS_MAX))));
    window.memory_changed(REGIONS_MAX - 1, None);
    window.map(memfd(1 << 20).as_fd(), PART).unwrap();
}

/// A server that was killed while it waited for an answer leaves that to the next one.
#[test]
fn answers_to_the_server_before_are_passed_over() {
    const MAP: u32 = 9;
    const UNMAP: u32 = 10;
    for stale in [None, Some(MAP), Some(UNMAP)] {
        let (window, mut line) = window(REPLY_WITHIN, NOT_LONG);
        window.take_over();
        if let Some(code) = stale {
            reply(&mut line, code, 1);
        }
        front(line, |line, code| reply(line, code, 0));
        assert!(matches!(window.unmap(PART), Ok(()) | Err(WindowError::Refused)));
        window.catch_up(Some(PART.window_offset)).unwrap();
        let file = memfd(1 << 20);
        window.map(file.as_fd(), PART).unwrap();
        window.unmap(PART).unwrap();
    }
    // Nobody but who takes over passes anything over, and not for ever.
    for (taken_over, stale, good) in [(false, 1, false), (true, 2, true), (true, 100, false)] {
        let (window, mut line) = window(REPLY_WITHIN, NOT_LONG);
        if taken_over {
            window.take_over();
        }
        (0..stale).for_each(|_| reply(&mut line, MAP, 0));
        front(line, |line, code| reply(line, code, 0));
        assert_eq!(window.unmap(PART).is_ok(), good, "{stale}");
    }
}

#[test]
fn mappings_of_the_previous_server_are_known() {
    let (window, _line) = window(REPLY_WITHIN, NOT_LONG);
    let file = memfd(1 << 20);
    window.adopt(PART.window_offset, file.as_fd()).unwrap();
    assert!(is_known(file_id(&file).unwrap()));
    window.end();
    assert!(!is_known(file_id(&file).unwrap()));
}
