//! Real servers of images, and what stands between them and us.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::fs::FlockOperation;

/// The bucket that the S3 server begins with, and who may use it.
pub const BUCKET: &str = "images";
pub const S3_KEY: &str = "S3RVER";
pub const S3_SECRET: &str = "S3RVER";
/// The user that a registry lets in, and the password's hash by bcrypt (`word`).
pub const USER: &str = "me:word";
const HTPASSWD: &str = "me:$2b$04$bIR0LGyWL2XsTC7zmyI9yeS3XwkngcQ1AfaBBuvXQAPY8MRCq7NI.\n";

fn cache() -> PathBuf {
    ferry_guest::Cache::from_env().unwrap().path().into()
}

/// A server program, which is killed at the end.
pub struct Program {
    child: Child,
    pub address: SocketAddr,
    /// What it has said since it listens.
    said: Arc<Mutex<String>>,
}

impl Program {
    /// Starts it and waits for the line with the address.
    fn start(command: &mut Command, is_stderr: bool) -> Self {
        command.stdin(Stdio::null());
        if is_stderr {
            command.stderr(Stdio::piped()).stdout(Stdio::null())
        } else {
            command.stdout(Stdio::piped()).stderr(Stdio::null())
        };
        let mut child = command.spawn().unwrap();
        let out: Box<dyn Read + Send> =
            if is_stderr { Box::new(child.stderr.take().unwrap()) } else { Box::new(child.stdout.take().unwrap()) };
        let mut lines = BufReader::new(out).lines();
        let mut before = String::new();
        let address = loop {
            let line = lines.next().unwrap_or_else(|| panic!("{command:?} does not listen: {before}")).unwrap();
            if let Some((_, rest)) = line.split_once("listening on ") {
                break rest.trim_end().split([' ', ',', '"']).next().unwrap().parse().unwrap();
            }
            before += &line;
        };
        let said = Arc::new(Mutex::new(String::new()));
        let more = Arc::clone(&said);
        // A server blocks if its output is not read.
        thread::spawn(move || lines.map_while(Result::ok).for_each(|line| *more.lock().unwrap() += &(line + "\n")));
        Self { child, address, said }
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// How many lines of what it said hold a word.
    pub fn said(&self, word: &str) -> usize {
        self.said.lock().unwrap().lines().filter(|line| line.contains(word)).count()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Debian's docker-registry with its data in a directory; with `user` it admits only that user.
pub fn registry(directory: &Path, user: bool) -> Option<Program> {
    registry_at(directory, "127.0.0.1", user, None)
}

/// One that listens at an address, by TLS with a certificate and its key, `NAME.pem` and `NAME.key`.
pub fn registry_by_tls(directory: &Path, address: &str, certificate: &Path) -> Option<Program> {
    registry_at(directory, address, false, Some(certificate))
}

fn registry_at(directory: &Path, address: &str, user: bool, certificate: Option<&Path>) -> Option<Program> {
    let program = cache().join("registry/bin/docker-registry");
    if !program.exists() {
        ferry_skip::skip!("no docker-registry: guest/fetch registry brings it");
        return None;
    }
    fs::create_dir_all(directory).unwrap();
    let mut config = format!(
        "version: 0.1\nlog: {{level: info}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp:\n  addr: \"{address}:0\"\n  secret: x\n",
        directory.join("data").display()
    );
    if let Some(certificate) = certificate {
        let (certificate, key) = (certificate.display(), certificate.with_extension("key"));
        config += &format!("  tls: {{certificate: {certificate}, key: {}}}\n", key.display());
    }
    if user {
        fs::write(directory.join("users"), HTPASSWD).unwrap();
        config += &format!("auth: {{htpasswd: {{realm: r, path: {}}}}}\n", directory.join("users").display());
    }
    let file = directory.join("config.yml");
    fs::write(&file, config).unwrap();
    Some(Program::start(Command::new(program).arg("serve").arg(file), true))
}

/// The package s3rver, which checks who asks, installed into the cache at first use.
pub fn s3(directory: &Path) -> Option<Program> {
    let home = cache().join("s3rver");
    let program = home.join("node_modules/s3rver/bin/s3rver.js");
    fs::create_dir_all(&home).unwrap();
    let lock = File::create(home.join("lock")).unwrap();
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
    if !home.join("complete").exists() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients/s3");
        for file in ["package.json", "package-lock.json"] {
            fs::copy(source.join(file), home.join(file)).unwrap();
        }
        let npm =
            Command::new("npm").args(["ci", "--no-audit", "--no-fund", "--ignore-scripts"]).current_dir(&home).output();
        match npm {
            Ok(output) if output.status.success() => drop(File::create(home.join("complete")).unwrap()),
            Ok(output) => {
                ferry_skip::skip!("s3rver cannot be installed: {}", String::from_utf8_lossy(&output.stderr));
                return None;
            }
            Err(_) => {
                ferry_skip::skip!("no npm here: apt-get install npm");
                return None;
            }
        }
    }
    drop(lock);
    let mut command = Command::new("node");
    command.arg(program).arg("-d").arg(directory).args(["-a", "127.0.0.1", "-p", "0", "--configure-bucket", BUCKET]);
    Some(Program::start(&mut command, false))
}

const SEND_BUFFER_BYTES: usize = 64 << 10;

/// Carries connections to a server, counts what comes back, and can have the server die in the middle.
pub struct Proxy {
    pub address: SocketAddr,
    state: Arc<State>,
}

struct State {
    upstream: Mutex<Option<SocketAddr>>,
    /// Bytes of answers and of requests.
    down: AtomicU64,
    up: AtomicU64,
    /// After so many bytes, both ways together, `end` is called, once.
    limit: AtomicU64,
    end: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    open: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    pub fn to(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            upstream: Mutex::new(Some(upstream)),
            down: AtomicU64::new(0),
            up: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
            end: Mutex::new(None),
            open: Mutex::default(),
        });
        let shared = Arc::clone(&state);
        thread::spawn(move || listener.incoming().flatten().for_each(|near| State::carry(&shared, near)));
        Self { address, state }
    }

    /// Bytes of answers so far, headers too.
    pub fn answered(&self) -> u64 {
        self.state.down.load(Ordering::SeqCst)
    }

    /// Has the server go after so many more bytes.
    pub fn die_after(&self, bytes: u64, end: impl FnOnce() + Send + 'static) {
        *self.state.end.lock().unwrap() = Some(Box::new(end));
        let now = self.state.down.load(Ordering::SeqCst) + self.state.up.load(Ordering::SeqCst);
        self.state.limit.store(now + bytes, Ordering::SeqCst);
    }

    /// Whether it has gone.
    pub fn is_dead(&self) -> bool {
        self.state.upstream.lock().unwrap().is_none()
    }

    /// Goes on with a server.
    pub fn revive(&self, upstream: SocketAddr) {
        *self.state.upstream.lock().unwrap() = Some(upstream);
    }

    pub fn cut(&self) {
        self.state.cut();
    }
}

impl State {
    fn carry(state: &Arc<Self>, near: TcpStream) {
        let Some(upstream) = *state.upstream.lock().unwrap() else { return };
        let Ok(far) = TcpStream::connect(upstream) else { return };
        // What is in here when somebody is killed is lost: not more than has to be.
        rustix::net::sockopt::set_socket_send_buffer_size(&near, SEND_BUFFER_BYTES).unwrap();
        state.open.lock().unwrap().extend([near.try_clone().unwrap(), far.try_clone().unwrap()]);
        let (near2, far2) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let (up, down) = (Arc::clone(state), Arc::clone(state));
        thread::spawn(move || up.pump(near, far, true));
        thread::spawn(move || down.pump(far2, near2, false));
    }

    fn pump(&self, mut from: TcpStream, mut to: TcpStream, is_up: bool) {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let (own, other) = if is_up { (&self.up, &self.down) } else { (&self.down, &self.up) };
            let all = own.fetch_add(count as u64, Ordering::SeqCst) + count as u64 + other.load(Ordering::SeqCst);
            if all > self.limit.load(Ordering::SeqCst) {
                self.cut();
                return;
            }
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    }

    fn cut(&self) {
        *self.upstream.lock().unwrap() = None;
        self.limit.store(u64::MAX, Ordering::SeqCst);
        if let Some(end) = self.end.lock().unwrap().take() {
            end();
        }
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
