//! Shared by the tests of 9P: a directory served over TCP, and guests whose kernel mounts it.
//!
//! User-mode Linux has a separate network, so a tap device of the host joins the two, which requires root. (9P over a
//! serial line fails with messages longer than 32 KiB.)

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_dir::Dir;
use ferry_guest::Tap;
use ferry_ninep::{Export, Options};
use ferry_vfs::FileSystem;
use tempfile::TempDir;

use crate::{Guest, GuestCache, GuestResult, Input, MOUNTPOINT, Output, Place, SETTLE, TIMEOUT, directory, run};

/// Joins the guest to the host, loads what Debian has as modules, mounts and runs what follows: by TCP, or, if there is a
/// program that forwards, by a unix socket of the guest's.
const SETUP: &str = r#"
modules=$1 guest=$2 host=$3 port=$4 options=$5 mountpoint=$6 forwards=$7
shift 7
for module in fs/netfs/netfs net/9p/9pnet net/9p/9pnet_fd fs/9p/9p; do
    /run/ferry/busybox insmod $modules/kernel/$module.ko
done
/run/ferry/busybox ip addr add $guest/30 dev vec0
/run/ferry/busybox ip link set vec0 up
mkdir -p $mountpoint
if [ -n "$forwards" ]; then
    socket=/tmp/9p.sock
    $forwards --role forward $socket $host:$port </dev/null >/dev/null 2>&1 &
    until [ -S $socket ]; do sleep 0.1; done
    mount -i -t 9p -o trans=unix,version=9p2000.L,$options $socket $mountpoint
else
    mount -i -t 9p -o trans=tcp,port=$port,version=9p2000.L,$options $host $mountpoint
fi
cd $mountpoint
exec "$@"
"#;

/// What is done with a tree `host` of 206 names that is mounted: it is copied to `guest`, changed there, and the sums of all files
/// are left in `sums`. It says 2.
pub const TREE: &str = r#"
    test "$(ls host | wc -l)" = 206
    cp -a host guest
    diff -r --no-dereference host guest
    test "$(stat -c %h guest/odd)" = 2
    mkfifo guest/fifo
    mv guest/small guest/moved
    rm guest/n1*
    chmod 6711 guest/moved
    truncate -s 12345 guest/large
    exec 7<guest/n2; rm guest/n2; cat <&7
    df . | tail -1 | grep -q /mnt/share
    find . -type f | xargs md5sum | sort -k 2 >/tmp/sums
    cp /tmp/sums sums
"#;

/// A server that guests reach.
#[derive(Debug)]
pub struct NinePServer {
    port: u16,
    export: Option<Export>,
    tap: Tap,
}

impl NinePServer {
    /// Serves a source; `None`, with a line that says so, where no guest can reach it.
    pub fn new(source: Arc<dyn FileSystem>, options: Options) -> Option<Self> {
        let tap = match Tap::new() {
            Ok(tap) => tap,
            Err(error) => {
                ferry_skip::skip!("a guest reaches a 9P server by a tap device: {error}");
                return None;
            }
        };
        let listener = TcpListener::bind((tap.host(), 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let export = Export::start(vec![listener.into()], source, Options { remote: true, ..options }).unwrap();
        Some(Self { port, export: Some(export), tap })
    }

    /// A User-mode Linux guest with the share as its working directory, mounted with these options; its output is
    /// collected. One guest at a time.
    pub fn guest<S: Into<OsString>>(&self, options: &str, command: impl IntoIterator<Item = S>) -> Guest {
        self.guest_by(None, options, command)
    }

    /// The same, whose kernel connects to a unix socket if there is a program that `forwards`. A guest shares none with its host:
    /// so this ferry-probe makes one in the guest, and carries what comes there to the server.
    pub fn guest_by<S: Into<OsString>>(
        &self,
        forwards: Option<&str>,
        options: &str,
        command: impl IntoIterator<Item = S>,
    ) -> Guest {
        let cache = GuestCache::from_env().unwrap();
        let modules = cache.uml().unwrap().modules.canonicalize().unwrap();
        let port = self.port.to_string();
        let mut words: Vec<OsString> = ["sh", "-euc", SETUP, "sh"].map(OsString::from).into();
        words.push(modules.into());
        let (guest, host) = (self.tap.guest(), self.tap.host());
        words.extend([&*guest, &*host, &*port, options, MOUNTPOINT, forwards.unwrap_or_default()].map(OsString::from));
        words.extend(command.into_iter().map(Into::into));
        let mut guest = Guest::new(cache, words);
        guest.kernel_args = vec![self.tap.kernel_arg()];
        guest.stdin = Input::Null;
        guest.stdout = Output::Piped;
        guest.stderr = Output::Piped;
        guest
    }
}

impl Drop for NinePServer {
    fn drop(&mut self) {
        if let Some(export) = self.export.take() {
            export.stop();
        }
    }
}

/// A directory and the server that shares it.
#[derive(Debug)]
pub struct NinePShare {
    /// The source, to ask what it holds.
    pub dir: Arc<Dir>,
    /// The shared directory.
    pub path: PathBuf,
    server: NinePServer,
    _directory: TempDir,
}

impl NinePShare {
    /// Shares a fresh directory; `None`, with a line that says so, where no guest can reach it.
    pub fn new(place: Place) -> Option<Self> {
        // Guests are mounted with `posixacl` where ACLs matter.
        Self::with(place, Options { posix_acl: true, ..Options::default() })
    }

    /// The same, offered in this way.
    pub fn with(place: Place, options: Options) -> Option<Self> {
        crate::log();
        let directory = directory(place);
        let path = directory.path().join("shared");
        std::fs::create_dir(&path).unwrap();
        let dir = Arc::new(Dir::open(&path, ferry_dir::Options::default()).unwrap());
        let server = NinePServer::new(Arc::clone(&dir) as Arc<dyn FileSystem>, options)?;
        Some(Self { dir, path, server, _directory: directory })
    }

    /// A guest on the share ([`NinePServer::guest`]).
    pub fn guest<S: Into<OsString>>(&self, options: &str, command: impl IntoIterator<Item = S>) -> Guest {
        self.server.guest(options, command)
    }

    /// The same by a unix socket ([`NinePServer::guest_by`]).
    pub fn guest_by<S: Into<OsString>>(
        &self,
        forwards: Option<&str>,
        options: &str,
        command: impl IntoIterator<Item = S>,
    ) -> Guest {
        self.server.guest_by(forwards, options, command)
    }

    /// Runs a shell script in a guest on the share.
    pub fn sh(&self, options: &str, script: &str) -> GuestResult {
        run(self.guest(options, ["sh", "-euc", script]), TIMEOUT)
    }

    /// How many bytes the host was asked to read ahead of guests.
    pub fn read_ahead_bytes(&self) -> u64 {
        self.server.export.as_ref().map_or(0, Export::read_ahead_bytes)
    }

    /// Waits until no guest holds anything any more.
    ///
    /// # Panics
    /// When something is still held after [`SETTLE`].
    pub fn assert_released(&self) {
        // A guest that is gone does not say so: its connection has to be taken from it.
        let connected = self.server.export.as_ref().map_or(0, |export| export.usage().connections);
        let end = Instant::now() + SETTLE;
        loop {
            let usage = self.dir.usage();
            if usage.inodes <= 1 && usage.handles == 0 {
                return;
            }
            assert!(Instant::now() < end, "still held, by {connected} connections: {usage:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
