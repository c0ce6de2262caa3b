//! A server that answers as a test says.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use ferry_9p_client::{Client, Error, Options, Unix};
use ferry_vfs::{Attr, FileType, Ino};
use ferry_wire::ninep::*;
use tempfile::TempDir;

/// What is done about a request.
pub enum Act {
    /// The bytes are sent.
    Send(Vec<u8>),
    /// The connection is ended.
    HangUp,
    /// Nothing.
    Silence,
}

type Behaviour = dyn Fn(Tag, &Request<'_>) -> Option<Act> + Send + Sync;

/// Serves a root directory that has everything; what the behaviour answers goes before that.
pub struct Fake {
    socket: PathBuf,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _directory: TempDir,
}

impl Fake {
    pub fn new(behaviour: impl Fn(Tag, &Request<'_>) -> Option<Act> + Send + Sync + 'static) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let (is_over, behaviour): (_, Arc<Behaviour>) = (Arc::clone(&over), Arc::new(behaviour));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                let behaviour = Arc::clone(&behaviour);
                // It ends with its connection, which the client ends.
                std::thread::spawn(move || serve(stream.unwrap(), &*behaviour));
            }
        });
        Self { socket, over, thread: Some(thread), _directory: directory }
    }

    pub fn connect(&self, options: Options) -> Result<Client, Error> {
        Client::connect(Arc::new(Unix(self.socket.clone())), options)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let _ = UnixStream::connect(&self.socket);
        let _ = self.thread.take().unwrap().join();
    }
}

fn serve(mut stream: UnixStream, behaviour: &Behaviour) {
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
        match behaviour(tag, &request).unwrap_or_else(|| usual(tag, &request)) {
            Act::Send(bytes) => {
                if stream.write_all(&bytes).is_err() {
                    return;
                }
            }
            Act::HangUp => return,
            Act::Silence => {}
        }
    }
}

/// A reply.
pub fn reply(tag: Tag, reply: &Reply<'_>) -> Act {
    let mut bytes = Vec::new();
    reply.encode(tag, &mut bytes);
    Act::Send(bytes)
}

/// The file that every name leads to.
pub const FILE: Qid = Qid { kind: QidKind::FILE, version: 1, path: 2 };
const ROOT: Qid = Qid { kind: QidKind::DIR, version: 1, path: 1 };

/// The attributes of [`FILE`].
pub fn file_attr() -> Getattr {
    // A new one would have another time of birth each time.
    let attr = Attr { btime: None, ..Attr::new(Ino(2), FileType::RegularFile, 0o600).with_size(1000) };
    Getattr { qid: FILE, attr, generation: 0 }
}

fn usual(tag: Tag, request: &Request<'_>) -> Act {
    let mut qids = Qids::default();
    let answer = match *request {
        Request::Version { msize, .. } => Reply::Version { msize, version: VERSION_OF_FERRY },
        Request::Attach { .. } => Reply::Attach(ROOT),
        Request::Walk { steps, .. } => {
            steps.iter().for_each(|_| qids.push(FILE));
            Reply::Walk(qids)
        }
        Request::Getattr { fid: Fid(1), .. } => {
            let attr = Attr::new(Ino(1), FileType::Directory, 0o755);
            Reply::Getattr(Getattr { qid: ROOT, attr, generation: 0 })
        }
        Request::Getattr { .. } => Reply::Getattr(file_attr()),
        Request::Open { .. } => Reply::Open { qid: FILE, iounit: 0 },
        Request::Clunk { .. } => Reply::Clunk,
        Request::Flush { .. } => Reply::Flush,
        Request::Mkdir { .. } => Reply::Mkdir(ROOT),
        Request::Fsync { .. } => Reply::Fsync,
        Request::Write { data, .. } => Reply::Write { bytes: u32::try_from(data.len()).unwrap() },
        _ => Reply::Error(ferry_vfs::Errno::OPNOTSUPP),
    };
    reply(tag, &answer)
}
