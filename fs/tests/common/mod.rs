//! Starts the examples as a user does.
#![allow(dead_code, missing_docs, reason = "each test file uses a part")]

pub mod suites;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferry_fs::{Attr, Caller, Data, Entry, Errno, FileSystem, FileType, Handle, Ino, IoRange, Name, Output, Result};
use rustix::process::{Pid, Signal};

/// Far longer than any step takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the program of an example, which cargo builds before it runs the tests.
pub fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this program has a path");
    let profile = test.parent().and_then(Path::parent).expect("tests are in target/PROFILE/deps");
    let program = profile.join("examples").join(name);
    assert!(program.is_file(), "{} is missing; run `cargo build -p ferry-fs --examples`", program.display());
    program
}

/// A running example.
pub struct Server {
    child: Child,
    /// Its first line, once clients could connect.
    pub line: String,
}

impl Server {
    /// Starts an example and waits until it is ready.
    pub fn start(name: &str, word: &str, place: &Path, flags: &[&str]) -> Self {
        let mut command = Command::new(example(name));
        command.arg(word).arg(place).args(flags).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the example starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("it is piped");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        assert!(!line.is_empty(), "{command:?} ended before it was ready: {:?}", child.wait());
        Self { child, line }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("it runs");
    }

    /// Waits for the end; returns the exit status, unless a signal ended it.
    #[track_caller]
    pub fn status(&mut self) -> Option<i32> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child of ours") {
                return status.code();
            }
            assert!(begin.elapsed() < PATIENCE, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A shell script that reads the greeting, wherever it is mounted.
pub const GREET: &str = r#"
test "$(cat hello)" = "Hello from a file system of your own!"
test "$(ls -a | tr '\n' ' ')" = ". .. hello "
test "$(stat -c '%s %A %h' hello)" = "38 -r--r--r-- 1"
! cat nobody 2>/dev/null
! rm hello 2>/dev/null
test "$(tail -c 5 hello)" = "own!"
"#;

/// A shell script that works with files.
pub const WORK: &str = r#"
mkdir -p a/b && echo one >a/b/file && echo two >>a/b/file
test "$(cat a/b/file)" = "one
two"
ln a/b/file a/hard && test "$(stat -c %h a/hard)" = 2
ln -s b/file a/soft && test "$(readlink a/soft)" = b/file && cmp a/soft a/hard
mv a/b/file a/moved && ! test -e a/b/file && test "$(cat a/soft 2>/dev/null)" = ""
echo other >a/other && mv a/other a/hard && test "$(stat -c %h a/moved)" = 1
! rmdir a 2>/dev/null
! mv a a/b/below 2>/dev/null
truncate -s 10000 a/moved && test "$(stat -c %s a/moved)" = 10000
head -c 3000000 /dev/urandom >big && cp big copy && cmp big copy
fallocate -l 4000000 copy && test "$(stat -c %s copy)" = 4000000
fallocate -p -o 0 -l 4096 big && test "$(head -c 4096 big | tr -d '\0' | wc -c)" = 0
mkfifo fifo && test -p fifo
for i in $(seq 1 300); do : >many$i; done && test "$(ls | grep -c many)" = 300
rm -r a many* big copy fifo && test -z "$(ls)"
"#;

/// A file system with a good file, and one whose read panics.
pub struct Mistaken;

const GOOD: Ino = Ino(2);
const BAD: Ino = Ino(3);

impl FileSystem for Mistaken {
    fn lookup(&self, cx: &Caller<'_>, _dir: Ino, name: Name<'_>) -> Result<Entry> {
        let ino = match name.as_bytes() {
            b"good" => GOOD,
            b"bad" => BAD,
            _ => return Err(Errno::NOENT),
        };
        Ok(Entry::new(ino, self.getattr(cx, ino, None)?))
    }

    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        match ino {
            Ino::ROOT => Ok(Attr::new(ino, FileType::Directory, 0o755)),
            _ => Ok(Attr::new(ino, FileType::RegularFile, 0o644).with_size(5)),
        }
    }

    fn read(&self, _: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        assert!(at.ino == GOOD, "the mistake");
        Ok(at.read_from(b"fine\n", out))
    }
}

/// A shell script that reads both files: the bad one gives EIO, and the good one still works.
pub const MISTAKE: &str = r#"
for i in 1 2 3; do cat bad 2>&1 | grep -q 'Input/output error'; test "$(cat good)" = fine; done
"#;
