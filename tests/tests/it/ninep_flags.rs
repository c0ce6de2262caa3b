//! What the flags of the source `9p:` come to, as a server meets it that answers what it takes to begin, and nothing else.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use ferry_9p_client::{Cache, Client, Options, Unix};
use ferry_tests::mounts::{NinePServer, RunningProgram, ServerVendor, ferry, missing};
use ferry_tests::{Place, directory};
use ferry_vfs::{Attr, Caller, Entry, Errno, FileSystem, FileType, Ino, IoRange, Name, OFlags, Statfs};
use ferry_wire::ninep::{Fid, Frame, Getattr, Qid, QidKind, Reply, Request, VERSION};
use tempfile::TempDir;

/// Longer than anything here takes that does not hang.
const SOON: Duration = Duration::from_secs(30);
/// Long enough for requests that should not come.
const MOMENT: Duration = Duration::from_millis(500);
const ROOT: Qid = Qid { kind: QidKind::DIR, version: 1, path: 1 };

/// What the server was told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ServerRecord {
    msize: u32,
    /// User and tree of each connection.
    attached: Vec<(Option<u32>, String)>,
    /// Requests that it has not answered, and will not.
    held: usize,
}

/// The server, and the program that shares its tree again, at the socket `again`.
struct Shared {
    directory: TempDir,
    heard: Arc<Mutex<ServerRecord>>,
    streams: Arc<Mutex<Vec<UnixStream>>>,
    program: RunningProgram,
}

impl Shared {
    fn with(flags: &str) -> Self {
        let directory = directory(Place::Disk);
        let listener = UnixListener::bind(directory.path().join("s")).unwrap();
        let heard = Arc::<Mutex<ServerRecord>>::default();
        let kept = Arc::clone(&heard);
        let streams = Arc::<Mutex<Vec<UnixStream>>>::default();
        let open = Arc::clone(&streams);
        // They end with the test.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, heard) = (stream.unwrap(), Arc::clone(&kept));
                open.lock().unwrap().push(stream.try_clone().unwrap());
                std::thread::spawn(move || serve(stream, &heard));
            }
        });
        let program = again(directory.path(), flags);
        let shared = Self { directory, heard, streams, program };
        shared.wait_until("it serves", |shared| shared.program.said().0.ends_with('\n'));
        shared
    }

    /// The server goes, and nobody comes in its place.
    fn leave(&self) {
        fs::remove_file(self.directory.path().join("s")).unwrap();
        for stream in self.streams.lock().unwrap().iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn heard(&self) -> ServerRecord {
        self.heard.lock().unwrap().clone()
    }

    #[track_caller]
    fn wait_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + SOON;
        while !is_so(self) {
            assert!(Instant::now() < end, "not that {what}: {:?}, {:?}", self.heard(), self.program.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The program, which shares the tree of the server at the socket `s` again.
fn again(directory: &Path, flags: &str) -> RunningProgram {
    let mut command = ferry(["share", "9p:unix:s", "--9p", "unix:again", "--json"]);
    RunningProgram::new(command.args(flags.split_whitespace()).current_dir(directory))
}

/// A client of the program that keeps nothing.
fn client(directory: &Path) -> Client {
    let options = Options { cache: Cache::None, patience: Duration::ZERO, ..Options::default() };
    Client::connect(Arc::new(Unix(directory.join("again"))), options).unwrap()
}

fn lookup(client: &Client, name: &str) -> Result<Entry, Errno> {
    client.lookup(&Caller::default(), Ino::ROOT, Name::new(name.as_bytes()).unwrap())
}

fn serve(mut stream: UnixStream, heard: &Mutex<ServerRecord>) {
    let mut root = Fid::NONE;
    loop {
        let mut message = vec![0; 4];
        if stream.read_exact(&mut message).is_err() {
            return;
        }
        message.resize(Frame::bytes(*message.first_chunk().unwrap()) as usize, 0);
        if stream.read_exact(&mut message[4..]).is_err() {
            return;
        }
        let (tag, request) = Request::decode(&message).unwrap();
        let reply = match request {
            Request::Version { msize, .. } => {
                heard.lock().unwrap().msize = msize;
                Reply::Version { msize, version: VERSION }
            }
            Request::Attach { fid, user, tree, .. } => {
                root = fid;
                heard.lock().unwrap().attached.push((user.uid, String::from_utf8(tree.into()).unwrap()));
                Reply::Attach(ROOT)
            }
            Request::Getattr { fid, .. } if fid == root => {
                let attr = Attr::new(Ino(1), FileType::Directory, 0o755);
                Reply::Getattr(Getattr { qid: ROOT, attr, generation: 0 })
            }
            Request::Statfs { .. } => Reply::Statfs { totals: Statfs::default(), id: 0 },
            Request::Clunk { .. } => Reply::Clunk,
            Request::Flush { .. } => Reply::Flush,
            _ => {
                heard.lock().unwrap().held += 1;
                continue;
            }
        };
        let mut bytes = Vec::new();
        reply.encode(tag, &mut bytes);
        if stream.write_all(&bytes).is_err() {
            return;
        }
    }
}

#[test]
fn the_server_receives_users_and_open_flags() {
    let own = rustix::process::geteuid().as_raw();
    for (flags, msize, attached) in [
        ("", 1 << 20, vec![(own, "")]),
        ("--msize 64K --9p-user 1234", 64 << 10, vec![(1234, "")]),
        ("--connections 3", 1 << 20, vec![(own, ""); 3]),
        ("--9p-tree /export/a", 1 << 20, vec![(own, "/export/a")]),
    ] {
        let shared = Shared::with(flags);
        let attached: Vec<_> = attached.into_iter().map(|(uid, tree)| (Some(uid), tree.to_owned())).collect();
        assert_eq!((shared.heard().msize, shared.heard().attached), (msize, attached), "{flags}");
    }
}

/// Of many lookups at once only so many requests are under way.
#[test]
fn the_number_of_requests_in_flight_is_the_configured_one() {
    const CALLERS: usize = 12;
    for in_flight in [1, 3, 7] {
        let mut shared = Shared::with(&format!("--in-flight {in_flight}"));
        let client = client(shared.directory.path());
        std::thread::scope(|scope| {
            for number in 0..CALLERS {
                let client = &client;
                scope.spawn(move || assert!(lookup(client, &format!("f{number}")).is_err(), "nobody answered"));
            }
            shared.wait_until("requests come", |shared| shared.heard().held >= in_flight);
            std::thread::sleep(MOMENT);
            let held = shared.heard().held;
            shared.program.kill();
            assert_eq!(held, in_flight);
        });
    }
}

/// The default is longer than this waits.
#[test]
fn the_wait_for_a_lost_server_is_the_configured_one() {
    let shared = Shared::with("--patience 2");
    let client = client(shared.directory.path());
    shared.leave();
    let begin = Instant::now();
    assert_eq!(lookup(&client, "f").unwrap_err(), Errno::IO);
    let took = begin.elapsed();
    assert!((Duration::from_secs(1)..SOON).contains(&took), "{took:?}");
}

/// A file that fits into the memory that there is by default is read again without the server; of one that does not, some has to be
/// asked for again.
#[test]
fn the_cache_size_is_the_configured_one() {
    const MIB: u64 = 1 << 20;
    const FILE_BYTES: u64 = 48 * MIB;
    if let Some(why) = missing() {
        ferry_skip::skip!("{why}");
        return;
    }
    for (flags, is_kept) in [("--cache always", true), ("--cache always --cache-size 16M", false)] {
        let directory = directory(Place::Disk);
        let server = NinePServer::start(ServerVendor::Ferry, directory.path()).unwrap();
        fs::write(server.shared().join("f"), vec![1; usize::try_from(FILE_BYTES).unwrap()]).unwrap();
        let program = again(directory.path(), flags);
        let end = Instant::now() + SOON;
        while !program.said().0.ends_with('\n') {
            assert!(Instant::now() < end, "it does not serve: {:?}", program.said());
            std::thread::sleep(Duration::from_millis(5));
        }
        let client = client(directory.path());
        let ino = lookup(&client, "f").unwrap().ino;
        let handle = client.open(&Caller::default(), ino, OFlags::RDONLY).unwrap();
        let read = |offset| {
            let (len, flags) = (1 << 20, OFlags::RDONLY);
            let at = IoRange { ino, handle, offset, len, flags, clear_privileges: false, owner: None };
            let mut out = Vec::new();
            let _data = client.read(&Caller::default(), &at, &mut out).unwrap();
            assert!(out == vec![1; 1 << 20], "at {offset}");
        };
        let read_all = || (0..FILE_BYTES / MIB).for_each(|number| read(number * MIB));
        read_all();
        server.hold_up();
        let answered = std::thread::scope(|scope| {
            let (told, answer) = mpsc::channel();
            scope.spawn(move || {
                read_all();
                told.send(()).unwrap();
            });
            let answered = answer.recv_timeout(if is_kept { SOON } else { MOMENT }).is_ok();
            server.go_on();
            // Else it comes now.
            assert!(answered || answer.recv_timeout(SOON).is_ok(), "{flags:?}");
            answered
        });
        assert_eq!(answered, is_kept, "{flags:?}");
        drop(client);
        drop(program);
    }
}
