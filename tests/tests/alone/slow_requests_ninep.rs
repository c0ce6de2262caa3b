//! Requests that wait hold up no others, by 9P: a share of a directory on a FUSE file system of delays, by one socket and as a
//! virtio-9p device. How answers are ordered is tested in `exports/ninep/tests/it/slow.rs`.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use ferry_driver::{Config, Driver};
use ferry_ninep::{DeviceOptions, Export, Options};
use ferry_tests::delays::{ALL, BYTES, Client, Mounted, SLOW_MAX, SlowCall, assert_undisturbed};
use ferry_tests::{Dir, Place, TIMEOUT, alone, directory};
use ferry_vfs::{FileSystem, Name, OFlags};
use ferry_wire::ninep::*;
use tempfile::TempDir;

const ROOT: Fid = Fid(0);
/// The fid of the fast file; those of the slow ones follow.
const FIRST: u32 = 1;
/// Fids that are not open yet come from here on.
const FIRST_CLOSED: u32 = 1000;
const MSIZE: u32 = 128 << 10;
/// Room for any reply to these requests.
const ROOM: usize = 2 * BYTES as usize;
/// More tags than there are requests at once.
const TAGS: u16 = 30_000;

enum Link {
    Socket(UnixStream),
    Device(Box<Driver>),
}

struct Guest {
    link: Link,
    next_tag: u16,
    /// Of each file, fids that are not open yet.
    closed: Vec<Vec<Fid>>,
    next_closed: u32,
    _export: Export,
    _directory: TempDir,
}

impl Guest {
    fn start(mounted: &Mounted, is_device: bool) -> Self {
        let directory = directory(Place::Memory);
        let dir = Dir::open(&mounted.path, ferry_dir::Options::default()).unwrap();
        let source = Arc::new(dir) as Arc<dyn FileSystem>;
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let options = Options::default();
        let export = match is_device {
            true => Export::vhost_user(listener, source, DeviceOptions::of("t"), options),
            false => Export::start(vec![listener.into()], source, options),
        };
        let export = export.unwrap();
        let link = if is_device {
            let config =
                Config { first_queues: 0, queues: 1, queue_size: 1024, device_features: 1, ..Config::default() };
            Link::Device(Box::new(Driver::connect(&socket, config).unwrap()))
        } else {
            let stream = UnixStream::connect(&socket).unwrap();
            stream.set_read_timeout(Some(TIMEOUT)).unwrap();
            Link::Socket(stream)
        };
        let (closed, next_closed) = (vec![Vec::new(); SLOW_MAX + 1], FIRST_CLOSED);
        let mut guest = Self { link, next_tag: 0, closed, next_closed, _export: export, _directory: directory };
        guest.ask(Tag::NONE, &Request::Version { msize: MSIZE, version: VERSION });
        let user = User { name: b"", uid: Some(0) };
        guest.ask(Tag(0), &Request::Attach { fid: ROOT, afid: Fid::NONE, user, tree: b"" });
        for (fid, file) in (FIRST..).map(Fid).zip(0..=SLOW_MAX) {
            guest.walk(fid, file);
            guest.ask(Tag(0), &Request::Open { fid, flags: OFlags::RDWR });
        }
        guest
    }

    fn walk(&mut self, new_fid: Fid, file: usize) {
        let name = if file == 0 { "fast".into() } else { format!("slow{}", file - 1) };
        let mut buffer = Vec::new();
        let steps = Steps::write(&mut buffer, [Step::Child(Name::new(name.as_bytes()).unwrap())]);
        self.ask(Tag(0), &Request::Walk { fid: ROOT, new_fid, steps });
    }

    fn ask(&mut self, tag: Tag, request: &Request<'_>) {
        self.post(tag, request);
        assert_eq!(self.next(), tag, "{request:?}");
    }

    fn post(&mut self, tag: Tag, request: &Request<'_>) {
        let mut message = Vec::new();
        request.encode(tag, &mut message);
        match &mut self.link {
            Link::Socket(stream) => stream.write_all(&message).unwrap(),
            Link::Device(driver) => {
                let queue = driver.queue(0);
                queue.submit(&[&message], &[ROOM]).unwrap();
                queue.publish();
                queue.kick();
            }
        }
    }

    /// The tag of the next answer.
    fn next(&mut self) -> Tag {
        let message = match &mut self.link {
            Link::Socket(stream) => {
                let mut message = vec![0; 4];
                stream.read_exact(&mut message).unwrap();
                let bytes = Frame::bytes(*message.first_chunk().unwrap()) as usize;
                message.resize(bytes, 0);
                stream.read_exact(&mut message[4..]).unwrap();
                message
            }
            Link::Device(driver) => driver.queue(0).wait(TIMEOUT).unwrap().reply,
        };
        let (tag, reply) = Reply::decode(&message).unwrap();
        assert!(!matches!(reply, Reply::Error(_)), "{reply:?}");
        tag
    }
}

impl Client for Guest {
    type Ticket = Tag;

    fn prepare(&mut self, opens: usize) {
        for file in 1..=SLOW_MAX {
            while self.closed[file].len() < opens {
                let fid = Fid(self.next_closed);
                self.next_closed += 1;
                self.walk(fid, file);
                self.closed[file].push(fid);
            }
        }
    }

    fn send(&mut self, what: SlowCall, file: usize) -> Tag {
        self.next_tag = (self.next_tag + 1) % TAGS;
        let tag = Tag(self.next_tag);
        let fid = Fid(FIRST + u32::try_from(file).unwrap());
        match what {
            SlowCall::Read => self.post(tag, &Request::Read { fid, offset: 0, bytes_max: BYTES }),
            SlowCall::Write => self.post(tag, &Request::Write { fid, offset: 0, data: &[7; BYTES as usize] }),
            SlowCall::Stat | SlowCall::Nothing => self.post(tag, &Request::Getattr { fid, mask: valid::BASIC }),
            SlowCall::Open => {
                let fid = self.closed[file].pop().expect("enough were prepared");
                self.post(tag, &Request::Open { fid, flags: OFlags::RDWR });
            }
        }
        tag
    }

    fn wait(&mut self) -> Tag {
        self.next()
    }
}

fn others_are_undisturbed(is_device: bool, counts: &[usize], times: (Duration, Duration)) {
    let _alone = alone();
    let Some(mounted) = Mounted::new() else { return };
    let mut guest = Guest::start(&mounted, is_device);
    for count in counts {
        ALL.into_iter().for_each(|what| assert_undisturbed((&mounted, &mut guest), what, *count, times));
    }
}

const SHORT: (Duration, Duration) = (Duration::from_millis(300), Duration::from_millis(600));
const LONG: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(4));

#[test]
fn slow_requests_do_not_delay_their_socket() {
    others_are_undisturbed(false, &[SLOW_MAX], SHORT);
}

#[test]
fn slow_requests_do_not_delay_their_device() {
    others_are_undisturbed(true, &[SLOW_MAX], SHORT);
}

#[test]
#[ignore = "takes a minute"]
fn slow_requests_delay_no_others_of_their_socket() {
    others_are_undisturbed(false, &[1, 8, SLOW_MAX], LONG);
}

#[test]
#[ignore = "takes a minute"]
fn slow_requests_delay_no_others_of_their_device() {
    others_are_undisturbed(true, &[1, 8, SLOW_MAX], LONG);
}
