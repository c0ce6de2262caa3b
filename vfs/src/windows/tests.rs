//! Windows that do as they are asked, and one that does nothing.

use super::*;

const FILE: FileId = FileId { dev: 1, ino: 2 };
const OTHER: FileId = FileId { dev: 1, ino: 3 };
static GUEST: LazyLock<SessionId> = LazyLock::new(SessionId::unique);
static WRITER: LazyLock<SessionId> = LazyLock::new(SessionId::unique);
const SHORT: Duration = Duration::from_millis(50);

/// What a window was asked, with what it is to drop.
type Asked = (FileId, u64, Option<Done>);

/// Keeps what it was asked, and what it is to drop.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<Asked>>>, Arc<AtomicBool>, bool);

impl Window for Notes {
    fn shorten(&self, file: FileId, end: u64, done: Done) {
        self.0.lock().unwrap().push((file, end, self.2.then_some(done)));
    }

    fn late(&self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

impl Notes {
    fn taken(&self) -> Vec<(FileId, u64)> {
        self.0.lock().unwrap().drain(..).map(|(file, end, _)| (file, end)).collect()
    }
}

#[test]
fn windows_are_asked_for_what_lies_behind_the_end_and_is_of_others() {
    let (windows, notes) = (Windows::default(), Notes::default());
    drop(windows.shortening(*WRITER, || unreachable!("nobody has a window"), 0));
    let member = windows.join(notes.clone());
    let claims = [0x20_0000, 0x40_0000].map(|end| windows.claim(&member, *GUEST, FILE, end));
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
        // One window, once, however many parts it has.
        assert_eq!(notes.taken(), Vec::from_iter(asked.then_some((file, end))), "{by:?} {file:?} {end:#x}");
    }
    let [first, last] = claims;
    drop(last);
    let first = first.up_to(0x1000);
    drop(windows.shortening(*WRITER, || Some(FILE), 0x1000));
    assert_eq!((notes.taken(), first.end(), first.by(), first.file()), (vec![], 0x1000, *GUEST, FILE));
    drop(first);
    assert!(windows.0.table().files.is_empty());
}

#[test]
fn nobody_maps_what_is_about_to_go() {
    let (windows, notes) = (Windows::default(), Notes::default());
    let member = windows.join(notes.clone());
    let claim = || windows.claim(&member, *GUEST, FILE, 0x20_0000);
    let (long, short) = (windows.shortening(*WRITER, || Some(FILE), 9), windows.shortening(*WRITER, || Some(FILE), 5));
    assert_eq!((claim().limit(), windows.limit(FILE), windows.limit(OTHER)), (5, 5, u64::MAX));
    drop(short);
    assert_eq!(claim().limit(), 9);
    drop(long);
    assert_eq!(claim().limit(), u64::MAX);
    assert!(notes.taken().is_empty() && windows.0.table().files.is_empty());
}

#[test]
fn a_window_that_does_nothing_is_waited_for_once() {
    let (windows, notes) = (Windows::default(), Notes(Arc::default(), Arc::default(), true));
    let member = windows.join(notes.clone());
    let _claim = windows.claim(&member, *GUEST, FILE, 0x20_0000);
    let shorten = || {
        let begun = Instant::now();
        drop(windows.shortening_within(*WRITER, || Some(FILE), 0, SHORT));
        begun.elapsed() >= SHORT
    };
    assert!(!notes.1.load(Ordering::SeqCst));
    assert!(shorten() && notes.1.load(Ordering::SeqCst));
    assert!(!shorten());
    assert_eq!(notes.taken().len(), 2, "it is asked once more, and then not");
    assert!(member.is_back() && !member.is_back());
    assert!(shorten(), "and is again from then on");
}
