//! The source `9p:` on servers that others wrote, mounted on this host: diod, and `p9ufs` of the Go package `hugelgupf/p9`.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_tests::mounts::{Cell, MountOptions, Mounted, NinePServer, ServerVendor, Site};
use ferry_tests::{Place, directory, on_cells};
use rustix::fs::{FlockOperation, XattrFlags, fcntl_lock};
use rustix::io::Errno;

/// Longer than any script here takes that does not hang.
const LIMIT: Duration = Duration::from_secs(120);

/// What every server can: making, writing, reading, renaming, linking. It ends with the sums of all files.
const COMMON: &str = r#"
mkdir -p a/deep/er
seq 1 200000 >a/numbers
for n in $(seq 1 150); do echo $n >a/deep/f$n; done
: >a/empty
ln -s ../numbers a/deep/link
test "$(readlink a/deep/link)" = ../numbers
cp -r a b
diff -r a b
ln a/numbers a/hard
test "$(stat -c %h a/numbers)" = 2
mv b/numbers b/moved
mv b/deep c
test ! -e b/deep
test "$(ls c | wc -l)" = 152
printf new >c/over
mv c/over c/f1
test "$(cat c/f1)" = new
echo more >>c/f2
test "$(cat c/f2 | tr '\n' ' ')" = '2 more '
exec 7<c/f3
mv c d
test "$(cat <&7)" = 3
test "$(cat d/f3)" = 3
echo end >>d/f3
truncate -s 12345 b/moved
test "$(stat -c %s b/moved)" = 12345
seq 1 1000 >d/er/new
cd d/er && ln new ../linked && cd ../..
dd if=/dev/urandom of=big bs=100k count=40 status=none conv=fsync
cp big copy && cmp big copy
"#;

/// What diod can, too.
const MORE: &str = r#"
chmod 640 b/moved && chown 7:8 b/moved && touch -d '2001-02-03 04:05:06.789 UTC' b/moved
test "$(TZ=UTC stat -c '%a %u %g %y' b/moved)" = '640 7 8 2001-02-03 04:05:06.789000000 +0000'
mkfifo b/pipe && test -p b/pipe
mknod b/null c 1 3 && test "$(stat -c %t:%T b/null)" = 1:3
if rmdir d 2>/dev/null; then exit 1; fi
exec 8<>copy
rm copy
test "$(head -c 100 <&8 | wc -c)" = 100
exec 8<&-
rm b/pipe b/null
rm -r d/er a/deep
test ! -e d/er
df . | grep -q /mnt
"#;

const SUMS: &str = "find . -type f | LC_ALL=C sort | xargs md5sum; find . -type l | LC_ALL=C sort";

/// Mounts, runs a script, and compares all files with what the server has.
fn tree(cell: &Cell, script: &str) -> Option<Mounted> {
    let mounted = Mounted::with(cell, &MountOptions::default())?;
    mounted.site.sh(script, LIMIT).ok();
    let here = mounted.site.sh(SUMS, LIMIT).ok();
    let there = Site::on_host(&mounted.remote.as_ref().unwrap().shared()).sh(SUMS, LIMIT).ok();
    assert!(here == there && here.lines().count() > 300, "{cell}: here\n{here}\nthere\n{there}");
    Some(mounted)
}

fn on_diod(cell: &Cell) {
    let Some(mounted) = tree(cell, COMMON) else { return };
    mounted.site.sh(MORE, LIMIT).ok();
    let path = mounted.site.path.join("big");
    rustix::fs::setxattr(&path, "user.x", b"value", XattrFlags::empty()).unwrap();
    let mut value = [0; 16];
    assert_eq!(rustix::fs::getxattr(&path, "user.x", &mut value), Ok(5));
    rustix::fs::removexattr(&path, "user.x").unwrap();
    assert_eq!(rustix::fs::getxattr(&path, "user.x", &mut value), Err(Errno::NODATA));
    let shared = mounted.remote.as_ref().unwrap().shared();
    mounted.site.sh("rm -r a b d big", LIMIT).ok();
    assert_eq!(fs::read_dir(shared).unwrap().count(), 0, "{cell}: what was removed is there");
    mounted.finish();
}

on_cells!(on_diod: quick [diod_devfuse, diod_devfuse_none] long [diod_devfuse_always]);

/// Its files cannot be removed or changed but for their bytes: that is said, and nothing else is lost by it.
fn on_p9ufs(cell: &Cell) {
    let Some(mounted) = tree(cell, COMMON) else { return };
    for refused in
        ["rm big", "rmdir a/deep/er", "chmod 600 big", "chown 7 big", "touch -d yesterday big", "mkfifo pipe"]
    {
        let ran = mounted.site.sh(refused, LIMIT);
        assert_eq!(ran.status, 1, "{cell}: {refused}: {ran:?}");
        assert!(ran.err.contains("Function not implemented"), "{cell}: {refused}: {ran:?}");
    }
    mounted.site.sh("test -e big -a -d a/deep/er; cmp big copy", LIMIT).ok();
    mounted.finish();
}

on_cells!(on_p9ufs: quick [p9ufs_devfuse] long [p9ufs_devfuse_none, p9ufs_devfuse_always]);

/// Two mounts of one diod: POSIX locks exclude each other, and what one closes the other sees.
#[test]
fn two_mounts_of_diod() {
    let directory = directory(Place::Disk);
    let Some(server) = NinePServer::start(ServerVendor::Diod, directory.path()) else { return };
    let cell: Cell = "diod_devfuse".parse().unwrap();
    let mount = || Mounted::of_server(&server, &cell, &MountOptions::default());
    let (Some(one), Some(two)) = (mount(), mount()) else { return };
    fs::write(one.site.path.join("file"), "by the one").unwrap();
    assert_eq!(fs::read_to_string(two.site.path.join("file")).unwrap(), "by the one");
    let open = |mounted: &Mounted| File::options().read(true).write(true).open(mounted.site.path.join("file")).unwrap();
    let (first, second) = (open(&one), open(&two));
    fcntl_lock(&first, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(fcntl_lock(&second, FlockOperation::NonBlockingLockExclusive), Err(Errno::AGAIN));
    first.write_all_at(b"under its lock", 0).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            while fcntl_lock(&second, FlockOperation::LockExclusive) == Err(Errno::INTR) {}
            let mut bytes = [0; 14];
            second.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        });
        std::thread::sleep(Duration::from_millis(100));
        fcntl_lock(&first, FlockOperation::Unlock).unwrap();
        assert_eq!(waits.join().unwrap(), *b"under its lock");
    });
    drop((first, second));
    one.finish();
    two.finish();
}

/// As `rm -r` and `cp -r` meet it: a listing that has looked ahead names nothing that this client has removed since, be it read on, be it
/// begun again, and names what was made.
#[test]
fn names_that_were_removed_are_not_listed_again_on_diod() {
    const FILES: usize = 2500;
    /// Names that getdents(2) has in hand, in a buffer of 32 KiB.
    const IN_HAND: usize = 32768 / 24;
    for cell in ["diod_devfuse", "diod_devfuse_none"] {
        let Some(mounted) = Mounted::with(&cell.parse().unwrap(), &MountOptions::default()) else { return };
        let dir = mounted.site.path.join("dir");
        fs::create_dir(&dir).unwrap();
        (0..FILES).for_each(|number| fs::write(dir.join(format!("{number}")), "text").unwrap());
        let mut listing = fs::read_dir(&dir).unwrap();
        let first: Vec<_> = listing.by_ref().take(10).map(|entry| entry.unwrap().file_name()).collect();
        let gone: Vec<_> =
            (0..FILES).map(|number| number.to_string().into()).filter(|name| !first.contains(name)).collect();
        gone.iter().for_each(|name| fs::remove_file(dir.join(name)).unwrap());
        fs::write(dir.join("new"), "text").unwrap();
        let rest: Vec<_> = listing.map(|entry| entry.unwrap().file_name()).collect();
        assert!(rest.len() <= IN_HAND, "{cell}: {} names are listed", rest.len());
        for name in rest {
            let found = fs::read_to_string(dir.join(&name));
            assert!(gone.contains(&name) == found.is_err(), "{cell}: {name:?}: {found:?}");
        }
        let mut names: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        let mut expected = [first, vec!["new".into()]].concat();
        names.sort();
        expected.sort();
        assert_eq!(names, expected, "{cell}");
        mounted.site.sh("rm -r dir && test ! -e dir", LIMIT).ok();
        mounted.finish();
    }
}

/// As in a local directory with setgid: a directory, a device, a link and a file have its group, and directories its bit.
#[test]
fn files_in_a_setgid_directory_on_diod_have_its_group() {
    const MADE: &str = "mkdir d && chgrp 4242 d && chmod 2777 d && cd d && umask 022 && mkdir dir && mkfifo pipe && ln -s a link && \
                        echo text >file && stat -c '%n %g %a' dir pipe link file";
    for cell in ["diod_devfuse", "diod_devfuse_none"] {
        let Some(mounted) = Mounted::with(&cell.parse().unwrap(), &MountOptions::default()) else { return };
        let local = directory(Place::Disk);
        let expected = Site::on_host(local.path()).sh(MADE, LIMIT).ok();
        assert_eq!(expected, "dir 4242 2755\npipe 4242 644\nlink 4242 777\nfile 4242 644\n");
        assert_eq!(mounted.site.sh(MADE, LIMIT).ok(), expected, "{cell}");
        let shared = mounted.remote.as_ref().unwrap().shared();
        let there = Site::on_host(&shared).sh("cd d && stat -c '%n %g %a' dir pipe link file", LIMIT).ok();
        assert_eq!(there, expected, "{cell}");
        mounted.site.sh("rm -r d", LIMIT).ok();
        mounted.finish();
    }
}

/// A way to a TCP server on which bytes to the server are counted and connections can be cut.
struct Way {
    address: SocketAddr,
    taken: Arc<Mutex<Vec<ProxiedConnection>>>,
}

/// A connection that came this way.
struct ProxiedConnection {
    client: TcpStream,
    sent: Arc<AtomicU64>,
}

impl Way {
    fn to(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (server, taken) = (server.to_owned(), Arc::<Mutex<Vec<ProxiedConnection>>>::default());
        let kept = Arc::clone(&taken);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                // One that has ended is told apart by who cuts.
                let Ok(server) = TcpStream::connect(&server) else { continue };
                let (sent, received) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
                carry(client.try_clone().unwrap(), server.try_clone().unwrap(), Arc::clone(&sent));
                carry(server, client.try_clone().unwrap(), received);
                kept.lock().unwrap().push(ProxiedConnection { client, sent });
            }
        });
        Self { address, taken }
    }

    /// What each connection that there ever was has sent, in bytes.
    fn sent(&self) -> Vec<u64> {
        self.taken.lock().unwrap().iter().map(|taken| taken.sent.load(Ordering::SeqCst)).collect()
    }

    /// Waits until there were so many connections.
    #[track_caller]
    fn wait_for(&self, connections: usize) {
        let end = Instant::now() + LIMIT;
        while self.sent().len() < connections {
            assert!(Instant::now() < end, "{} connections of {connections}", self.sent().len());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(self.sent().len(), connections);
    }

    fn cut(&self, index: usize) {
        let _ = self.taken.lock().unwrap()[index].client.shutdown(Shutdown::Both);
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, count: Arc<AtomicU64>) {
    std::thread::spawn(move || {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(read @ 1..) = from.read(&mut bytes) {
            count.fetch_add(read as u64, Ordering::SeqCst);
            if to.write_all(&bytes[..read]).is_err() {
                break;
            }
        }
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    });
}

/// Three connections to diod. Each in turn is cut while a file is written: all are made again, and the file is right.
/// diod itself has ended after it once in some ten runs; then another one is tried.
#[test]
fn one_of_three_connections_to_diod_is_cut() {
    const TRIES: usize = 3;
    assert!((0..TRIES).any(|_| is_written_over_cuts()), "diod ended each time");
}

/// Whether diod was there to the end.
fn is_written_over_cuts() -> bool {
    const CONNECTIONS: usize = 3;
    const FILE_BYTES: u64 = 48 << 20;
    let directory = directory(Place::Disk);
    let Some(server) = NinePServer::start(ServerVendor::Diod, directory.path()) else { return true };
    let (host, tree) = server.address().trim_start_matches("tcp:").split_once('/').unwrap();
    let way = Way::to(host);
    let cell: Cell = "diod_devfuse".parse().unwrap();
    let options = MountOptions {
        args: vec!["--connections".into(), CONNECTIONS.to_string(), "--patience".into(), "10".into()],
        ..MountOptions::default()
    };
    let address = format!("tcp:{}/{tree}", way.address);
    let Some(mounted) = Mounted::of_address(&address, &cell, &options) else { return true };
    way.wait_for(CONNECTIONS);
    let wanted = directory.path().join("wanted");
    let mut noise = vec![0; usize::try_from(FILE_BYTES).unwrap()];
    File::open("/dev/urandom").unwrap().read_exact(&mut noise).unwrap();
    fs::write(&wanted, &noise).unwrap();
    for round in 0..CONNECTIONS {
        let before = way.sent();
        let first = before.len() - CONNECTIONS;
        let ran = std::thread::scope(|scope| {
            scope.spawn(|| {
                let end = Instant::now() + LIMIT;
                while way.sent().iter().sum::<u64>() < before.iter().sum::<u64>() + FILE_BYTES / 4 {
                    assert!(Instant::now() < end, "nothing is written: {:?}", way.sent());
                    std::thread::sleep(Duration::from_millis(1));
                }
                way.cut(first + round);
            });
            let script = format!("dd if={} of=file bs=256k conv=fsync status=none", wanted.display());
            mounted.site.sh(&script, LIMIT)
        });
        if TcpStream::connect(host).is_err() {
            eprintln!("diod has ended");
            return false;
        }
        ran.ok();
        let there = fs::read(server.shared().join("file")).unwrap();
        assert!(there == noise, "round {round}: the server has something else");
        mounted.site.sh(&format!("cmp {} file", wanted.display()), LIMIT).ok();
        // All are new, at the latest soon after the cut.
        way.wait_for(before.len() + CONNECTIONS);
    }
    // The last ones are not cut: each has its share, once the file was opened by it.
    let end = Instant::now() + LIMIT;
    let first = way.sent().len() - CONNECTIONS;
    while way.sent()[first..].iter().any(|sent| *sent < 2 << 20) {
        assert!(Instant::now() < end, "some send nothing: {:?}", way.sent());
        mounted.site.sh(&format!("dd if={} of=file bs=256k conv=fsync status=none", wanted.display()), LIMIT).ok();
    }
    mounted.finish();
    true
}
