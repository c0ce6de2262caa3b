//! Requests at the same time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ferry_vfs::*;

use crate::common::*;
use crate::tree::*;

const CLIENTS: u64 = 4;
const FILES: u64 = 30;

/// Several clients fill and empty the tree, while it is counted again and again.
#[test]
fn clients_at_once_never_pass_the_limit() {
    // ext4 allocates blocks of its own later, when it writes data back.
    let tree = Tree::in_directory("/dev/shm".as_ref(), 400 * K, Some(FILES));
    let limit = disk_usage(tree.dir.path()).bytes + 400 * K;
    let shared = tree.create("shared").unwrap();
    let mut fullest = 0;
    for part in 0..20 {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let (tree, is_over) = (&tree, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    tree.quota.recount();
                    assert!(tree.quota.usage().files <= FILES);
                }
            });
            let rounds = part * 20..(part + 1) * 20;
            let client = |client| {
                let rounds = rounds.clone();
                scope.spawn(move || rounds.for_each(|round| work(tree, shared, client, round)))
            };
            let clients: Vec<_> = (0..CLIENTS).map(client).collect();
            clients.into_iter().for_each(|client| client.join().unwrap());
            is_over.store(true, Ordering::Relaxed);
        });
        tree.assert_exact();
        let usage = tree.quota.usage();
        assert!(usage.bytes <= limit && usage.files <= FILES, "{usage:?}, of {limit}");
        fullest = usage.bytes.max(fullest);
    }
    assert!(fullest > limit / 2, "{fullest}");
    tree.close(shared);
    assert!(tree.quota.recount());
    tree.assert_exact();
}

fn work(tree: &Tree, shared: (Ino, Handle), client: u64, round: u64) {
    let Tree { quota, cx, .. } = tree;
    let text = format!("{}", (client + round) % 5);
    let text = name(&text);
    let at = (round * 37 + client * 11) % 100 * 4096;
    // Full, or another client was first.
    let _ = tree.write(shared, at, 40_000);
    if let Ok((entry, handle)) = quota.create(cx, Ino::ROOT, text, &new(0o644), OFlags::RDWR) {
        let _ = tree.write((entry.ino, handle), 0, 60_000);
        if round.is_multiple_of(2) {
            let _ = quota.unlink(cx, Ino::ROOT, text);
        }
        tree.close((entry.ino, handle));
    }
    match round % 6 {
        0 => drop(tree.set_size(shared, at)),
        1 => {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = quota.fallocate(cx, shared.0, shared.1, at, 100_000, flags);
        }
        2 => drop(quota.rename(cx, (Ino::ROOT, text), (Ino::ROOT, name("other")), RenameFlags::empty())),
        3 => drop(quota.unlink(cx, Ino::ROOT, text)),
        4 => {
            let made = quota.mkdir(cx, Ino::ROOT, name("d"), &new(0o755));
            let _ = quota.rmdir(cx, Ino::ROOT, name("d"));
            if let Ok(made) = made {
                quota.forget(made.ino, 1);
            }
        }
        _ => {
            if let Ok(linked) = quota.link(cx, shared.0, Ino::ROOT, name("link")) {
                quota.forget(linked.ino, 1);
                let _ = quota.unlink(cx, Ino::ROOT, name("link"));
            }
        }
    }
}
