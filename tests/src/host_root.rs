//! Stock kernels in QEMU, with the host's own root, read-only below a layer of memory.

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use crate::{Cache, Kind, Options, Place, Share, directory, guest_on, run};

/// A guest without KVM on a machine that has other things to do.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Runs a script of bash with these arguments, which must succeed; returns its output.
#[track_caller]
pub fn run_on_host_root<const N: usize>(script: &str, args: [&Path; N]) -> String {
    let words = ["bash", "-euxc", script, "bash"].into_iter().map(OsStr::new).chain(args.map(Path::as_os_str));
    let options = Options { cache: Cache::Auto, queues: 1, tag: Some("t".parse().unwrap()), ..Options::default() };
    let dir = ferry_dir::Options { read_only: true, ..ferry_dir::Options::default() };
    let programs = Share::of(Path::new("/"), directory(Place::Disk), dir, options);
    let mut guest = guest_on(&programs.socket, words);
    guest.kind = Kind::Qemu { cpus: 2, root: Some("t".into()) };
    guest.mounts.clear();
    guest.cwd = "/".into();
    guest.memory_mib = 1024;
    let ran = run(guest, TIMEOUT);
    println!("{:?}, {}", ran.took, ran.out);
    ran.ok()
}
