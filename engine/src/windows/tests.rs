//! Windows that follow requests, and one that ignores them.

use super::*;

const FILE: FileId = FileId { dev: 1, ino: 2 };
const OTHER: FileId = FileId { dev: 1, ino: 3 };
static GUEST: LazyLock<SessionId> = LazyLock::new(SessionId::unique);
static WRITER: LazyLock<SessionId> = LazyLock::new(SessionId::unique);
const SHORT: Duration = Duration::from_millis(50);

/// A request to a window, and the signal that it drops when it is done.
type ShortenCall = (FileId, u64, Option<CompletionSignal>);

/// Records requests and keeps their signals.
#[derive(Clone, Default)]
struct FakeWindow(Arc<Mutex<Vec<ShortenCall>>>, Arc<AtomicBool>, bool);

impl Window for FakeWindow {
    fn shorten(&self, file: FileId, end: u64, done: CompletionSignal) {
        self.0.lock().unwrap().push((file, end, self.2.then_some(done)));
    }

    fn late(&self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

impl FakeWindow {
    fn taken(&self) -> Vec<(FileId, u64)> {
        self.0.lock().unwrap().drain(..).map(|(file, end, _)| (file, end)).collect()
    }
}

#[test]
fn a_truncation_asks_other_windows_for_the_range_past_the_end() {
    let (windows, notes) = (Windows::default(), FakeWindow::default());
    drop(windows.shortening(*WRITER, || unreachable!("there are no windows"), 0));
    let member = windows.join(notes.clone());
    let claims = [0x20_0000, 0x40_0000].map(|end| windows.claim(&member, *GUEST, FILE, 0..end));
    for (by, file, end, asked) in [
        (*WRITER, FILE, 0, true),
        (*WRITER, FILE, 0x3f_f000, true),
        (*WRITER, FILE, 0x40_0000 - 1, false),
        (*WRITER, FILE, 0x40_0000, false),
        (*WRITER, FILE, u64::MAX, false),
        (*WRITER, OTHER, 0, false),
        (*GUEST, FILE, 0, false),
    ] {
        drop(windows.shortening(by, || Some(file), end));
        // Each window is asked once, however many parts it has.
        assert_eq!(notes.taken(), Vec::from_iter(asked.then_some((file, end))), "{by:?} {file:?} {end:#x}");
    }
    let [first, last] = claims;
    drop(last);
    let first = first.up_to(0x1000);
    drop(windows.shortening(*WRITER, || Some(FILE), 0x1000));
    assert_eq!((notes.taken(), first.end(), first.by(), first.file()), (vec![], 0x1000, *GUEST, FILE));
    drop(first);
    assert!(lock(&windows.0.table).files.is_empty());
}

#[test]
fn ranges_that_windows_may_store_to_are_not_punched() {
    const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
    const ZERO: FallocateFlags = FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE);
    const FILL: FallocateFlags = FallocateFlags::KEEP_SIZE;
    let (windows, notes) = (Windows::default(), FakeWindow::default());
    let punch = |windows: &Windows, lacks: FallocateFlags| {
        let done = Mutex::new(Vec::new());
        let change = |flags: FallocateFlags, part| {
            if flags == lacks {
                return Err(Errno::OPNOTSUPP);
            }
            done.lock().unwrap().push((flags, part));
            Ok(())
        };
        let outcome = windows.punch(|| Some(FILE), 5..90, change);
        outcome.map(|()| done.into_inner().unwrap())
    };
    assert_eq!(punch(&windows, ZERO), Ok(vec![(PUNCH, 5..90)]));
    let member = windows.join(notes);
    let mut claims = [0..10, 20..40, 30..50, 35..38, 50..60, 85..100, 200..300].map(|part| {
        let mut claim = windows.claim(&member, *GUEST, FILE, part);
        claim.stores();
        claim
    });
    // These parts are read-only, or of another file.
    let _reads = windows.claim(&member, *GUEST, FILE, 60..70);
    windows.claim(&member, *GUEST, OTHER, 0..100).stores();
    let zeroed = [5..10, 20..40, 40..50, 50..60, 85..90];
    let filled = [5..10, 20..40, 30..50, 35..38, 50..60, 85..90].map(|part| (FILL, part));
    let holes = [10..20, 60..85];
    let (zeroed, holes) = (zeroed.map(|part| (ZERO, part)), holes.map(|part| (PUNCH, part)));
    assert_eq!(punch(&windows, FallocateFlags::empty()), Ok([&zeroed[..], &holes, &filled].concat()));
    // A range that cannot be zeroed does not become a hole, and nothing else has changed.
    assert_eq!(punch(&windows, ZERO), Err(Errno::OPNOTSUPP));
    // ENOSPC is an error, and so are all others.
    let refused =
        windows.punch(|| Some(FILE), 5..90, |flags, _| if flags == FILL { Err(Errno::NOSPC) } else { Ok(()) });
    assert_eq!(refused, Err(Errno::NOSPC));
    // Released ranges are punched again.
    claims.iter_mut().for_each(|claim| claim.stores());
    drop(claims);
    assert_eq!(punch(&windows, ZERO), Ok(vec![(PUNCH, 5..90)]));
}

#[test]
fn zeroed_ranges_keep_their_blocks_and_the_size() {
    let file = rustix::fs::memfd_create("zeroed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let bytes = vec![7; 200_000];
    assert_eq!(pwrite(&file, &bytes, 0), Ok(bytes.len()));
    Windows::zero(&file, 5000..300_000).unwrap();
    let mut read = vec![1; 300_000];
    assert_eq!(rustix::io::pread(&file, &mut read, 0), Ok(bytes.len()));
    assert!(read[..5000] == bytes[..5000] && read[5000..bytes.len()].iter().all(|byte| *byte == 0));
    assert!(fstat(&file).unwrap().st_blocks * 512 >= 300_000, "also beyond the end");
}

#[test]
fn a_range_being_cut_off_cannot_be_mapped() {
    let (windows, notes) = (Windows::default(), FakeWindow::default());
    let member = windows.join(notes.clone());
    let claim = || windows.claim(&member, *GUEST, FILE, 0..0x20_0000);
    let (long, short) = (windows.shortening(*WRITER, || Some(FILE), 9), windows.shortening(*WRITER, || Some(FILE), 5));
    assert_eq!((claim().limit(), windows.limit(FILE), windows.limit(OTHER)), (5, 5, u64::MAX));
    drop(short);
    assert_eq!(claim().limit(), 9);
    drop(long);
    assert_eq!(claim().limit(), u64::MAX);
    assert!(notes.taken().is_empty() && lock(&windows.0.table).files.is_empty());
}

#[test]
fn the_wait_for_a_stuck_window_happens_once() {
    let (windows, notes) = (Windows::default(), FakeWindow(Arc::default(), Arc::default(), true));
    let member = windows.join(notes.clone());
    let _claim = windows.claim(&member, *GUEST, FILE, 0..0x20_0000);
    let shorten = || {
        let begun = Instant::now();
        drop(windows.shortening_within(*WRITER, || Some(FILE), 0, SHORT));
        begun.elapsed() >= SHORT
    };
    assert!(!notes.1.load(Ordering::SeqCst));
    assert!(shorten() && notes.1.load(Ordering::SeqCst));
    assert!(!shorten());
    assert_eq!(notes.taken().len(), 2, "it is asked once more, and not again");
    assert!(member.take_missed() && !member.take_missed());
    assert!(shorten(), "it is asked again afterwards");
}
