//! A sync of everything: nothing is said to be durable that is not.
use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use common::fake::{Fake, reply};
use common::{CX, Served, name, write};
use ferry_9p_client::{Cache, Client, Options};
use ferry_vfs::*;
use ferry_wire::ninep::{Reply, Request};

/// A server of which writes and syncs fail when they are to.
#[derive(Clone, Default)]
struct Manners {
    fails_writes: Arc<AtomicBool>,
    fails_syncs: Arc<AtomicBool>,
    syncs: Arc<AtomicUsize>,
}

impl Manners {
    fn server(&self) -> Fake {
        let Self { fails_writes, fails_syncs, syncs } = self.clone();
        Fake::new(move |tag, request| {
            let errno = match request {
                Request::Write { .. } if fails_writes.load(Ordering::SeqCst) => Errno::NOSPC,
                Request::Fsync { .. } => {
                    syncs.fetch_add(1, Ordering::SeqCst);
                    fails_syncs.load(Ordering::SeqCst).then_some(Errno::DQUOT)?
                }
                _ => return None,
            };
            Some(reply(tag, &Reply::Error(errno)))
        })
    }

    fn syncs(&self) -> usize {
        self.syncs.load(Ordering::SeqCst)
    }
}

fn connect(fake: &Fake, cache: Cache) -> Client {
    fake.connect(Options { cache, ..Options::default() }).unwrap()
}

fn opened(client: &Client) -> (Ino, Handle) {
    let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
    (ino, client.open(&CX, ino, OFlags::RDWR).unwrap())
}

/// Writes, and closes.
fn written(client: &Client) -> Ino {
    let (ino, handle) = opened(client);
    write(client, ino, handle, 0, b"data").unwrap();
    client.flush(&CX, ino, handle, 0).unwrap();
    client.release(&CX, ino, handle);
    ino
}

fn sync(client: &Client) -> Result<()> {
    client.syncfs(&CX, Ino::ROOT)
}

#[test]
fn errors_of_open_files_are_returned_once() {
    let manners = Manners::default();
    let fake = manners.server();
    let client = connect(&fake, Cache::Auto);
    let (ino, handle) = opened(&client);
    for (fails, outcome) in [(&manners.fails_writes, Errno::NOSPC), (&manners.fails_syncs, Errno::DQUOT)] {
        fails.store(true, Ordering::SeqCst);
        write(&client, ino, handle, 0, b"data").unwrap();
        assert_eq!(sync(&client), Err(outcome));
        fails.store(false, Ordering::SeqCst);
        assert_eq!(sync(&client), Ok(()), "it was told");
        assert!(client.fsync(&CX, ino, handle, false).is_err(), "whoever has the file open is told, too");
    }
}

/// Also where the cache's thread has not yet seen that there is nothing left to be done.
#[test]
fn durable_files_are_not_synced_again() {
    for cache in [Cache::Auto, Cache::None] {
        let manners = Manners::default();
        let fake = manners.server();
        let client = connect(&fake, cache);
        let (ino, handle) = opened(&client);
        for round in 1..20 {
            write(&client, ino, handle, 0, b"data").unwrap();
            for _ in 0..3 {
                assert_eq!(sync(&client), Ok(()));
                assert_eq!(manners.syncs(), round, "{cache:?}");
            }
        }
    }
}

#[test]
fn an_error_that_the_writer_got_is_returned_by_syncfs() {
    let manners = Manners::default();
    let fake = manners.server();
    let client = connect(&fake, Cache::Auto);
    let (ino, handle) = opened(&client);
    manners.fails_writes.store(true, Ordering::SeqCst);
    write(&client, ino, handle, 0, b"data").unwrap();
    assert_eq!(client.flush(&CX, ino, handle, 0), Err(Errno::NOSPC));
    client.release(&CX, ino, handle);
    assert_eq!(sync(&client), Err(Errno::NOSPC));
    assert_eq!(sync(&client), Ok(()));
}

#[test]
fn closed_files_are_synced() {
    for (cache, is_forgotten) in [(Cache::Auto, false), (Cache::Auto, true), (Cache::None, false), (Cache::None, true)]
    {
        let manners = Manners::default();
        let fake = manners.server();
        let client = connect(&fake, cache);
        let ino = written(&client);
        if is_forgotten {
            client.forget(ino, 1);
        }
        assert_eq!((client.usage().inodes, manners.syncs()), (usize::from(!is_forgotten), 0));
        assert_eq!(sync(&client), Ok(()));
        assert_eq!(manners.syncs(), 1, "{cache:?}, forgotten: {is_forgotten}");
        assert_eq!(sync(&client), Ok(()));
        assert_eq!(manners.syncs(), 1, "{cache:?}, forgotten: {is_forgotten}: nothing was written since");
        assert_eq!(client.usage().inodes, usize::from(!is_forgotten));

        let again = written(&client);
        assert_eq!(again == ino, !is_forgotten, "what is durable is let go");
        manners.fails_syncs.store(true, Ordering::SeqCst);
        assert_eq!(sync(&client), Err(Errno::DQUOT), "{cache:?}, forgotten: {is_forgotten}");
    }
}

/// A file that is forgotten before it is durable, and found again, is the same.
#[test]
fn a_reopened_file_is_the_written_one() {
    let manners = Manners::default();
    let fake = manners.server();
    let client = connect(&fake, Cache::Auto);
    let ino = written(&client);
    client.forget(ino, 1);
    assert_eq!(client.getattr(&CX, ino, None).unwrap_err(), Errno::STALE);
    assert_eq!(client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino, ino);
    assert_eq!((client.usage().inodes, sync(&client)), (1, Ok(())));
    assert!(manners.syncs() >= 1);
    client.forget(ino, 1);
    assert_eq!(client.usage().inodes, 0);
}

#[test]
fn files_are_not_left_open_and_removed_ones_are_no_error() {
    for cache in [Cache::Auto, Cache::None] {
        let served = Served::new();
        let client = served.connect(Options { cache, ..Options::default() });
        for text in ["stays", "goes"] {
            let (made, handle) =
                client.create(&CX, Ino::ROOT, name(text), &common::file(0o600), OFlags::WRONLY).unwrap();
            write(&client, made.ino, handle, 0, b"data").unwrap();
            client.flush(&CX, made.ino, handle, 0).unwrap();
            client.release(&CX, made.ino, handle);
            client.forget(made.ino, 1);
        }
        client.unlink(&CX, Ino::ROOT, name("goes")).unwrap();
        // The server need not keep them meanwhile.
        served.settles(|usage| usage.fids <= 1);
        assert_eq!(sync(&client), Ok(()), "{cache:?}");
        served.settles(|usage| usage.fids <= 1);
        let before = client.usage().messages;
        assert_eq!((sync(&client), client.usage().messages), (Ok(()), before), "{cache:?}: nothing is left to be done");
    }
}

/// One that somebody refers to has its fid, and none that is open.
#[test]
fn known_files_are_not_kept_open() {
    for cache in [Cache::Auto, Cache::None] {
        let served = Served::new();
        let client = served.connect(Options { cache, ..Options::default() });
        let (made, handle) = client.create(&CX, Ino::ROOT, name("f"), &common::file(0o600), OFlags::WRONLY).unwrap();
        write(&client, made.ino, handle, 0, b"data").unwrap();
        client.flush(&CX, made.ino, handle, 0).unwrap();
        client.release(&CX, made.ino, handle);
        served.settles(|usage| usage.fids <= 2);
        let before = client.usage().messages;
        assert_eq!(sync(&client), Ok(()), "{cache:?}");
        assert!(client.usage().messages > before, "{cache:?}: it was opened");
        served.settles(|usage| usage.fids <= 2);
    }
}

/// By a name that another client has changed, the written data cannot be made durable any more.
#[test]
fn a_closed_file_that_others_renamed_is_an_error_once() {
    for cache in [Cache::Auto, Cache::None] {
        let served = Served::new();
        let [client, other] = [(), ()].map(|()| served.connect(Options { cache, ..Options::default() }));
        let make = |text| {
            let (made, handle) =
                client.create(&CX, Ino::ROOT, name(text), &common::file(0o600), OFlags::WRONLY).unwrap();
            write(&client, made.ino, handle, 0, b"data").unwrap();
            client.flush(&CX, made.ino, handle, 0).unwrap();
            client.release(&CX, made.ino, handle);
            client.forget(made.ino, 1);
        };
        // This client's own: removed, made again, renamed over.
        make("goes");
        client.unlink(&CX, Ino::ROOT, name("goes")).unwrap();
        ["goes", "new"].into_iter().for_each(make);
        client.rename(&CX, (Ino::ROOT, name("new")), (Ino::ROOT, name("goes")), RenameFlags::empty()).unwrap();
        assert_eq!(sync(&client), Ok(()), "{cache:?}");
        make("moved");
        // The name was another file's before.
        make("removed");
        client.unlink(&CX, Ino::ROOT, name("removed")).unwrap();
        make("removed");
        for text in ["moved", "removed"] {
            other.rename(&CX, (Ino::ROOT, name(text)), (Ino::ROOT, name("x")), RenameFlags::empty()).unwrap();
            assert_eq!(sync(&client), Err(Errno::IO), "{cache:?}");
            assert_eq!(sync(&client), Ok(()), "{cache:?}");
            make("removed");
        }
    }
}
