//! DAX windows: guests with one, and a front end that checks the server's requests.

use std::ffi::OsString;
use std::fs::File;
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::Path;

use ferry_guest::{Device, DeviceKind, Guest, Kind, Mount};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::{Cache, MOUNTPOINT, Options, Place, Share, directory, guest_on};

/// The host's root, for the programs in it.
pub fn programs() -> Share {
    let options = Options { cache: Cache::Auto, queues: 1, tag: Some("t".parse().unwrap()), ..Options::default() };
    let dir = ferry_dir::Options { read_only: true, ..ferry_dir::Options::default() };
    Share::of(Path::new("/"), directory(Place::Disk), dir, options)
}

/// A stock QEMU guest with the host's programs and a window on a share, whose tag is `d`, mounted with these options; what it runs.
pub fn guest<S: Into<OsString>>(
    programs: &Share,
    share: &Share,
    options: &str,
    command: impl IntoIterator<Item = S>,
) -> Guest {
    let mut guest = guest_on(&programs.socket, command);
    guest.kind = Kind::Qemu { cpus: 2, root: Some("t".into()) };
    let kind = DeviceKind::Fs { tag: "d".into(), queues: 1, dax: true };
    guest.devices.push(Device { socket: share.socket.clone(), kind });
    guest.mounts = vec![Mount::virtiofs("d", MOUNTPOINT)];
    guest.mounts[0].options = options.into();
    guest.cwd = MOUNTPOINT.into();
    guest
}

/// A request of the server's: its code, the five numbers behind it, and the descriptor that came along.
#[derive(Debug)]
pub struct FrontEndRequest {
    /// Its code.
    pub code: u32,
    /// Number of the region, offset in the file, offset in the window, length, flags.
    pub numbers: [u64; 5],
    /// What is to be mapped.
    pub file: Option<File>,
}

/// Waits for the next request; `None`: the server has hung up.
pub fn next_wish(line: &UnixStream) -> Option<FrontEndRequest> {
    let mut message = [0; 52];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [IoSliceMut::new(&mut message)];
    let bytes = loop {
        match recvmsg(line, parts, &mut control, RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC) {
            // Calls of sockets with a timeout are never restarted after a signal for the process.
            Err(Errno::INTR) => {}
            got => break got.map_or(0, |got| got.bytes),
        }
    };
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next().map(File::from),
        _ => None,
    });
    if bytes != message.len() {
        return None;
    }
    let number = |at: usize| u64::from_ne_bytes(message[at..at + 8].try_into().unwrap());
    let code = u32::from_ne_bytes(message[..4].try_into().unwrap());
    Some(FrontEndRequest { code, numbers: [12, 20, 28, 36, 44].map(number), file })
}

/// Answers a request; 0 for success.
pub fn answer(mut line: &UnixStream, code: u32, outcome: u64) {
    let header = [code, 1 | 4, 8].map(u32::to_ne_bytes).concat();
    line.write_all(&[header, outcome.to_ne_bytes().to_vec()].concat()).unwrap();
}
