//! A kernel that forbids io_uring.

use std::io;
use std::sync::Mutex;
use std::time::Duration;

use crate::common::{BLOCK, CopyPermit, OK, Offered, WITHIN, block, burst};
use ferry_blk::{IoMode, Options};
use ferry_disk::Cache;
use ferry_driver::{Config, Driver};

/// A block that no read uses.
const WRITTEN: u64 = 40;

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOG.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes `io_uring_setup` fail, as with `kernel.io_uring_disabled` 2, on this thread and those that it starts.
fn forbid_io_uring() {
    let load_number = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let end = libc::BPF_RET | libc::BPF_K;
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k };
    let mut steps = [
        step(load_number, 0, 0, 0),
        step(equal, 0, 1, u32::try_from(libc::SYS_io_uring_setup).unwrap()),
        step(end, 0, 0, libc::SECCOMP_RET_ERRNO | u32::try_from(libc::EPERM).unwrap()),
        step(end, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: steps.as_mut_ptr() };
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program and its steps are read during the call.
    let outcome = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(outcome, 0, "{}", io::Error::last_os_error());
}

fn options(io: IoMode) -> Options {
    Options { queues: 4, poll: Duration::from_micros(50).into(), pin_memory: true, io, ..Options::default() }
}

#[test]
fn without_io_uring_everything_works_and_one_line_reports_it() {
    if !ferry_alone::in_own_process() {
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).with_writer(|| Log).init();
    forbid_io_uring();
    for cache in [Cache::None, Cache::Writeback, Cache::Writethrough] {
        let disk = Offered::new(64, cache, options(IoMode::Auto));
        let config = Config { first_queues: 0, queues: 4, indirect: false, queue_size: 128, ..Config::default() };
        let mut driver = Driver::connect(&disk.socket, config).unwrap();
        for index in 0..4 {
            let queue = driver.queue(index);
            let rooms: Vec<_> = (0..32).map(|_| CopyPermit::new(queue)).collect();
            rooms.iter().zip(0..).for_each(|(room, number)| room.read(number));
            burst(queue, rooms.iter().map(|room| room.head));
            for (room, number) in rooms.iter().zip(0..) {
                assert!(room.status() == OK && room.data.to_vec(BLOCK) == block(number), "block {number}");
            }
            let header = [1u64.to_le_bytes(), (8 * WRITTEN).to_le_bytes()].concat();
            let ticket = queue.submit(&[&header, &[5; BLOCK]], &[1]).unwrap();
            assert_eq!(queue.wait_for(ticket, WITHIN).unwrap().reply, [OK]);
            let flush = [4u64.to_le_bytes(), [0; 8]].concat();
            let ticket = queue.submit(&[&flush], &[1]).unwrap();
            assert_eq!(queue.wait_for(ticket, WITHIN).unwrap().reply, [OK]);
        }
        assert_eq!(std::fs::read(&disk.file).unwrap()[BLOCK * 40..][..BLOCK], [5; BLOCK]);
    }
    let insists = Offered::new(64, Cache::Writeback, options(IoMode::Uring));
    let config = Config { first_queues: 0, ..Config::default() };
    assert!(Driver::connect(&insists.socket, config).is_err(), "who insists on io_uring gets nothing else");

    let log = String::from_utf8(LOG.lock().unwrap().clone()).unwrap();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("system call of its own")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("io_uring is not available") && lines[0].contains("kernel.io_uring_disabled"), "{log}");
    assert!(log.contains("ERROR") && log.contains("allow it"), "{log}");
}
