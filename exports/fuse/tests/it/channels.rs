//! Each reader of /dev/fuse has a descriptor of its own. Alone in its process, whose descriptors it looks at.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::sources::Null;
use common::{mount, paths, plain, threads_named, wait_until};
use ferry_fuse::{Cache, Options, Path};

/// Clients whose handlers do not come back, so that there is a reader for each.
const CLIENTS: u64 = 3;

/// This process's descriptors of /dev/fuse.
fn descriptors() -> Vec<i32> {
    let of_us = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let of_fuse = of_us.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to.ends_with("dev/fuse")));
    of_fuse.map(|fd| fd.file_name().to_str().unwrap().parse().unwrap()).collect()
}

/// Whether two descriptors are one open file, as copies of a descriptor are. `None` where the kernel does not tell
/// (it is built without kcmp).
fn is_same(one: i32, other: i32) -> Option<bool> {
    /// `KCMP_FILE`.
    const FILE: libc::c_long = 0;
    let pid = libc::c_long::from(std::process::id().cast_signed());
    // SAFETY: compares numbers, touches no memory.
    match unsafe { libc::syscall(libc::SYS_kcmp, pid, pid, FILE, libc::c_long::from(one), libc::c_long::from(other)) } {
        0 => Some(true),
        1.. => Some(false),
        _ => None,
    }
}

/// One for each open file among them.
fn apart(descriptors: &[i32]) -> Option<Vec<i32>> {
    let mut apart: Vec<i32> = Vec::new();
    for &descriptor in descriptors {
        let copies = apart.iter().map(|&other| is_same(descriptor, other)).collect::<Option<Vec<_>>>()?;
        if !copies.contains(&true) {
            apart.push(descriptor);
        }
    }
    Some(apart)
}

#[test]
fn each_reader_has_its_own() {
    if !ferry_alone::in_own_process() {
        return;
    }
    if paths().is_empty() {
        return;
    }
    let null = Arc::new(Null::default());
    let mounted = mount(Arc::clone(&null) as _, Options { cache: Cache::None, ..plain(Path::Devfuse) });
    let hangs = File::open(mounted.path("hangs")).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| hangs.read_at(&mut [0; 512], 0).unwrap());
        }
        wait_until("all handlers are blocked, and somebody reads", || {
            null.held.load(Ordering::SeqCst) == CLIENTS && threads_named("fuse-reader") as u64 > CLIENTS
        });
        let (found, readers) = (apart(&descriptors()), threads_named("fuse-reader"));
        null.let_go.store(true, Ordering::SeqCst);
        match found {
            // And the one that the mount was made with.
            Some(found) => assert!(found.len() > readers, "{readers} readers have {found:?}"),
            None => ferry_skip::skip!("this kernel does not say which descriptors are copies"),
        }
    });
    drop(hangs);
    mounted.stop();
}
