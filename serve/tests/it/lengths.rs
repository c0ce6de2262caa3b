//! Where clients believe a file to end, when they open it.

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{Answer, Client};
use ferry_serve::{Cache, SessionSlot, ShareOptions};
use ferry_vfs::*;
use ferry_wire::fuse::{InitFlags, Operation};

const FILE: Ino = Ino(2);

/// One file of so many bytes, which others make longer.
#[derive(Default)]
struct Growing {
    bytes: AtomicU64,
    /// What is open.
    opens: AtomicU64,
    features: Features,
    /// Grows with each open.
    restless: bool,
}

impl Growing {
    fn attr(&self) -> Attr {
        Attr::new(FILE, FileType::RegularFile, 0o644).with_size(self.bytes.load(Ordering::Relaxed))
    }

    fn grow(&self) {
        self.bytes.fetch_add(1, Ordering::Relaxed);
    }
}

impl FileSystem for Growing {
    fn features(&self) -> Features {
        self.features
    }
    fn lookup(&self, _: &Caller<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        Ok(Entry::new(FILE, self.attr()))
    }
    fn getattr(&self, _: &Caller<'_>, _: Ino, _: Option<Handle>) -> Result<Attr> {
        Ok(self.attr())
    }
    fn setattr(&self, _: &Caller<'_>, _: Ino, _: Option<Handle>, _: &SetAttr) -> Result<Attr> {
        self.grow();
        Ok(self.attr())
    }
    fn readdir(&self, _: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        if at.offset == 0 {
            let item = DirItem { ino: FILE.0, next: 1, kind: FileType::RegularFile, name: b"file" };
            out.push(&item, Some(&Entry::new(FILE, self.attr())));
        }
        Ok(())
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        self.opens.fetch_add(1, Ordering::Relaxed);
        if self.restless {
            self.grow();
        }
        Ok(Handle(1))
    }
    fn release(&self, _: &Caller<'_>, _: Ino, _: Handle) {
        self.opens.fetch_sub(1, Ordering::Relaxed);
    }
    fn write(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Input) -> Result<Data> {
        self.grow();
        Ok(Data::Bytes(at.len as usize))
    }
    fn fallocate(&self, _: &Caller<'_>, _: Ino, _: Handle, _: u64, _: u64, _: FallocateFlags) -> Result<()> {
        self.grow();
        Ok(())
    }
}

/// A client of it that has looked it up.
fn client(source: Growing, options: &ShareOptions) -> (Client, Arc<Growing>) {
    let source = Arc::new(source);
    let mut client = Client::new(Arc::clone(&source) as _, options, SessionSlot::default());
    look_up(&mut client);
    (client, source)
}

fn look_up(client: &mut Client) {
    let name = Name::new(b"file").unwrap();
    assert!(matches!(client.ask(Ino::ROOT, Operation::Lookup { name }), Answer::Reply(_)));
}

fn open(client: &mut Client, flags: OFlags) -> Answer {
    client.ask(FILE, Operation::Open { flags, clear_privileges: false })
}

fn is_opened(client: &mut Client) -> bool {
    match open(client, OFlags::RDONLY | OFlags::LARGEFILE) {
        Answer::Reply(_) => true,
        Answer::Error(Errno::STALE) => false,
        other => panic!("{other:?}"),
    }
}

fn options(cache: Cache) -> ShareOptions {
    ShareOptions { cache, ..ShareOptions::default() }
}

#[test]
fn a_client_with_a_stale_length_must_look_up_before_open() {
    let (mut client, source) = client(Growing::default(), &options(Cache::Auto));
    assert!(is_opened(&mut client), "it was told so");
    for tell in [look_up as fn(&mut Client), ask_for_attributes, list] {
        source.grow();
        assert!(!is_opened(&mut client), "it would read too little");
        tell(&mut client);
        assert!(is_opened(&mut client), "it knows now");
        assert!(is_opened(&mut client), "and still does");
    }
    assert_eq!(source.opens.load(Ordering::Relaxed), 7, "what was refused is closed");
}

fn ask_for_attributes(client: &mut Client) {
    assert!(matches!(client.ask(FILE, Operation::Getattr { handle: None }), Answer::Reply(_)));
}

fn list(client: &mut Client) {
    let at = DirRange { ino: Ino::ROOT, handle: Handle(0), offset: 0, plus: true };
    // Twice: the first listing omits one file, to detect requests for files.
    for _ in 0..2 {
        let listed = client.ask(Ino::ROOT, Operation::Readdir { at, bytes_max: 4096 });
        assert!(matches!(listed, Answer::Reply(_)), "{listed:?}");
    }
}

/// Or a program would see the error.
#[test]
fn a_file_that_grows_all_the_time_is_opened_at_the_second_try() {
    let (mut client, _) = client(Growing { restless: true, ..Growing::default() }, &options(Cache::Auto));
    for _ in 0..100 {
        assert!(!is_opened(&mut client));
        look_up(&mut client);
        assert!(is_opened(&mut client));
    }
}

/// As Linux opens it for an ioctl, which would fail: it looks for no path again.
#[test]
fn opens_without_a_path_are_never_refused() {
    let (mut client, source) = client(Growing::default(), &options(Cache::Auto));
    source.grow();
    assert!(matches!(open(&mut client, OFlags::empty()), Answer::Reply(_)));
    assert!(!is_opened(&mut client), "and programs are, as before");
}

#[test]
fn own_length_changes_need_no_lookup() {
    let (mut client, source) = client(Growing::default(), &options(Cache::Auto));
    let write = |client: &mut Client| {
        let (handle, flags) = (Handle(1), OFlags::WRONLY);
        let range = IoRange { ino: FILE, handle, offset: 0, len: 1, flags, clear_privileges: false, owner: None };
        let written = client.ask_and_write(FILE, Operation::Write { range, cached: false }, b"x");
        assert!(matches!(written, Answer::Reply(_)), "{written:?}");
    };
    let allocate = |client: &mut Client| {
        let flags = FallocateFlags::empty();
        client.ask(FILE, Operation::Fallocate { handle: Handle(1), offset: 0, len: 9, flags });
    };
    let truncate = |client: &mut Client| {
        client.ask(FILE, Operation::Setattr { handle: None, owner: None, set: SetAttr::default() });
    };
    let empty = |client: &mut Client| {
        source.grow();
        assert!(matches!(open(client, OFlags::WRONLY | OFlags::TRUNC), Answer::Reply(_)), "the length is its own");
        source.grow();
    };
    for change in [&write as &dyn Fn(&mut Client), &allocate, &truncate, &empty] {
        change(&mut client);
        assert!(is_opened(&mut client));
        look_up(&mut client);
    }
    assert!(source.bytes.load(Ordering::Relaxed) >= 5, "all of them did something");
}

#[test]
fn others_are_never_refused() {
    let asked = |options: &ShareOptions, features: Features, offered: InitFlags| {
        let source = Arc::new(Growing { features, ..Growing::default() });
        let mut client = Client::offering(offered, Arc::clone(&source) as _, options, SessionSlot::default()).unwrap();
        look_up(&mut client);
        source.grow();
        !is_opened(&mut client)
    };
    let (auto, plain, all) = (options(Cache::Auto), Features::default(), InitFlags::ALL);
    assert!(asked(&auto, plain, all));
    for cache in [Cache::None, Cache::Metadata, Cache::Always] {
        assert!(!asked(&options(cache), plain, all), "{cache:?}");
    }
    let asks_anyway = ShareOptions { attr_timeout: Some(Duration::ZERO), ..auto.clone() };
    assert!(!asked(&asks_anyway, plain, all));
    let writes_back = ShareOptions { writeback: true, ..auto.clone() };
    assert!(!asked(&writes_back, plain, all), "it believes itself only");
    assert!(asked(&writes_back, plain, all - InitFlags::WRITEBACK_CACHE), "where it can");
    for features in [Features { waits: true, ..plain }, Features { constant: true, ..plain }] {
        assert!(!asked(&auto, features, all - InitFlags::NO_OPEN_SUPPORT), "{features:?}");
    }
}
