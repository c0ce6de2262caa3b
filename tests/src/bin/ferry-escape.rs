//! Enters a sandbox, as a server does, and tries to escape: `ferry-escape LAYERS DIR ATTEMPT [WHAT]`.
//!
//! LAYERS is a list of `namespaces`, `capabilities`, `landlock`, `landlock:PORT`, `seccomp`, `seccomp-log`,
//! `seccomp-trap`, of a role with less, `worker`, `disk`, `mapper`, `connector`, `supervisor`, `keeper`, or `none`; DIR is
//! the directory that stays accessible. Prints `worked`, or the number of the error.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::fs::{self, File};
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use ferry_isolation::{Access, Action, BlockedSignals, Capabilities, Filter, LandlockRules, Role, Root, Split, View};
use rustix::fs::{FileType, Mode, OFlags, makedev, mknodat, openat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use rustix::process::Pid;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let [_, layers, dir, attempt, what @ ..] = &args[..] else { panic!("ferry-escape LAYERS DIR ATTEMPT [WHAT]") };
    let layers: Vec<&str> = layers.split(',').collect();
    let mut dir = PathBuf::from(dir);
    // As a server has the files of its disks.
    let before = (attempt == "again").then(|| File::open(&what[0]).unwrap());
    if layers.contains(&"namespaces") {
        let held = BlockedSignals::hold().unwrap();
        ferry_isolation::is_possible(&View::default()).unwrap();
        let view = View { roots: vec![Root { path: dir, access: Access::ReadWrite }], ..View::default() };
        match ferry_isolation::split(&view).unwrap() {
            Split::Supervisor(supervisor) => return supervisor.wait(&held, |_| {}).unwrap().status().into(),
            Split::Server(places) => dir = places[0].clone(),
        }
        held.release().unwrap();
    }
    let share = File::open(dir).unwrap();
    if layers.contains(&"capabilities") {
        Capabilities::of_server(false).limit(Capabilities::NONE).unwrap();
    }
    if let Some(landlock) = layers.iter().find_map(|layer| layer.strip_prefix("landlock")) {
        // The only port that can be connected to.
        let ports: Vec<u16> = landlock.strip_prefix(':').map(|port| port.parse().unwrap()).into_iter().collect();
        let fenced =
            ferry_isolation::restrict_landlock(LandlockRules::Below(&[(share.as_fd(), false)]), &ports).unwrap();
        assert_ne!(fenced, ferry_isolation::LandlockStatus::None);
    }
    for (word, action) in [("seccomp", Action::Kill), ("seccomp-log", Action::Log), ("seccomp-trap", Action::Trap)] {
        if layers.contains(&word) {
            Filter::of(Role::Server, action).unwrap().apply().unwrap();
        }
    }
    let roles = [
        ("worker", Role::Worker),
        ("disk", Role::Disk),
        ("mapper", Role::Mapper),
        ("connector", Role::Connector),
        ("supervisor", Role::Supervisor),
        ("keeper", Role::Keeper),
    ];
    for (word, role) in roles {
        if layers.contains(&word) {
            Filter::of(role, Action::Kill).unwrap().apply().unwrap();
        }
    }
    let what = before.as_ref().map(|file| format!("/proc/self/fd/{}", file.as_raw_fd())).or(what.first().cloned());
    match try_to(attempt, &what.unwrap_or_default(), &share) {
        Ok(()) => println!("worked"),
        Err(error) => println!("errno {}", error.raw_os_error().unwrap()),
    }
    ExitCode::SUCCESS
}

fn try_to(attempt: &str, what: &str, share: &File) -> io::Result<()> {
    let done = |result: libc::c_long| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    let below = |name: &str, flags| openat(share, name, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR).map(drop);
    match attempt {
        "open" => File::open(what).map(drop),
        "again" => File::options().write(true).open(what).map(drop),
        "below" => Ok(below(what, OFlags::RDONLY)?),
        "create" => Ok(below(what, OFlags::WRONLY | OFlags::CREATE)?),
        "connect" => TcpStream::connect(what).map(drop),
        "fast open" => {
            use rustix::net::{AddressFamily, SendFlags, SocketType, sendto, socket};
            let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
            let flags = SendFlags::from_bits_retain(libc::MSG_FASTOPEN.cast_unsigned());
            Ok(sendto(socket, b"x", flags, &what.parse::<std::net::SocketAddr>().unwrap()).map(drop)?)
        }
        "path" => UnixStream::connect(what).map(drop),
        "netlink" => {
            use rustix::net::{AddressFamily, SocketType, socket};
            Ok(socket(AddressFamily::NETLINK, SocketType::RAW, None).map(drop)?)
        }
        "protocol" => {
            use rustix::net::{AddressFamily, SocketType, ipproto, socket};
            // Another protocol than the one that belongs to the kind, as far as the filter can tell.
            Ok(socket(AddressFamily::INET, SocketType::STREAM, Some(ipproto::TCP)).map(drop)?)
        }
        "listen" => std::net::TcpListener::bind("127.0.0.1:0").map(drop),
        "abstract" => UnixStream::connect_addr(&SocketAddr::from_abstract_name(what)?).map(drop),
        "signal" => {
            let pid = what.parse().ok().and_then(Pid::from_raw).unwrap();
            Ok(rustix::process::test_kill_process(pid)?)
        }
        // A directory of processes has numbers for names.
        "processes" => {
            let seen = fs::read_dir("/proc")?.filter_map(Result::ok);
            let numbers = seen.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok());
            if numbers.count() > 0 { Ok(()) } else { Err(Errno::NOENT.into()) }
        }
        "device" => {
            mknodat(share, what, FileType::CharacterDevice, Mode::RUSR, makedev(1, 3))?;
            Ok(below(what, OFlags::RDONLY)?)
        }
        "mount" => Ok(rustix::mount::fsopen("tmpfs", rustix::mount::FsOpenFlags::FSOPEN_CLOEXEC).map(drop)?),
        "chroot" => Ok(rustix::process::chroot(".")?),
        "execute" => Err(Command::new("/bin/echo").arg("worked").exec()),
        "thread" => std::thread::Builder::new().spawn(|| ()).map(|thread| thread.join().unwrap()),
        "code" => {
            const BYTES: usize = 4096;
            // SAFETY: a new private mapping, which nothing else uses, is created and its protection changed.
            unsafe {
                let page = mmap_anonymous(std::ptr::null_mut(), BYTES, ProtFlags::READ, MapFlags::PRIVATE)?;
                Ok(mprotect(page, BYTES, MprotectFlags::READ | MprotectFlags::EXEC)?)
            }
        }
        "memory" => Ok(rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).map(drop)?),
        // As far as the file, which is no socket, or as the name, which is not there.
        "accept" => came_to(rustix::net::accept(share).map(drop), Errno::NOTSOCK),
        "receive" => {
            let mut none = rustix::net::RecvAncillaryBuffer::default();
            let flags = rustix::net::RecvFlags::empty();
            came_to(rustix::net::recvmsg(share, &mut [], &mut none, flags).map(drop), Errno::NOTSOCK)
        }
        "unlink" => came_to(rustix::fs::unlinkat(share, "not there", rustix::fs::AtFlags::empty()), Errno::NOENT),
        // SAFETY: this process has one thread, and the child does nothing but end.
        "fork" => unsafe {
            match libc::fork() {
                0 => libc::_exit(0),
                pid => done(pid.into()),
            }
        },
        // SAFETY: PTRACE_TRACEME takes no pointers.
        "trace" => done(unsafe { libc::ptrace(libc::PTRACE_TRACEME) }),
        // SAFETY: CLONE_NEWUSER changes no memory.
        "users" => done(unsafe { libc::unshare(libc::CLONE_NEWUSER) }.into()),
        // SAFETY: TIOCSTI reads one byte, which lives for the call.
        "type" => match done(unsafe { libc::ioctl(share.as_raw_fd(), libc::TIOCSTI, c"x".as_ptr()) }.into()) {
            // It came as far as the file, which is no terminal.
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => Ok(()),
            other => other,
        },
        _ => panic!("no attempt {attempt}"),
    }
}

/// The kernel has carried out the call, as its result shows.
fn came_to(answer: rustix::io::Result<()>, expected: Errno) -> io::Result<()> {
    match answer {
        Err(errno) if errno == expected => Ok(()),
        other => Ok(other?),
    }
}
