//! The table of locks against one that looks at everything, at each step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use ferry_vfs::{
    Caller, Cancellation, Errno, Handle, Handles, Ino, Lock, LockKind, LockOutcome, LockOwner, Locks, OFlags, Result,
    SessionId, Waiter,
};
use proptest::prelude::*;

/// So few that they meet.
const BYTES: u64 = 12;
const FILES: u64 = 2;
const OWNERS: u64 = 5;

#[derive(Clone, Copy, Debug)]
struct Request {
    file: u64,
    owner: u64,
    kind: LockKind,
    start: u64,
    end: u64,
}

#[derive(Clone, Debug)]
enum Step {
    Set(Request, bool),
    /// A request that waits is interrupted.
    Interrupt(prop::sample::Index),
    /// An owner closes a file.
    Drop(u64, u64),
    /// The handle that an owner has for a file is closed, and another one opened.
    Release(u64, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kind = prop_oneof![3 => Just(LockKind::Read), 3 => Just(LockKind::Write), 2 => Just(LockKind::Unlock)];
    let set = (0..FILES, 0..OWNERS, kind, 0..BYTES, 0..BYTES, any::<bool>());
    let set = set.prop_map(|(file, owner, kind, one, other, waits)| {
        Step::Set(Request { file, owner, kind, start: one.min(other), end: one.max(other) }, waits)
    });
    let step = prop_oneof![
        12 => set,
        1 => any::<prop::sample::Index>().prop_map(Step::Interrupt),
        1 => (0..FILES, 0..OWNERS).prop_map(|(file, owner)| Step::Drop(file, owner)),
        1 => (0..FILES, 0..OWNERS).prop_map(|(file, owner)| Step::Release(file, owner)),
    ];
    prop::collection::vec(step, 1..80)
}

/// The kind of each byte of each file for each owner, and the requests that wait.
#[derive(Debug, Default)]
struct Model {
    bytes: BTreeMap<(u64, u64, u64), LockKind>,
    waits: BTreeMap<usize, Request>,
}

impl Model {
    /// The owners in the way of a request.
    fn blockers(&self, request: &Request) -> BTreeSet<u64> {
        if request.kind == LockKind::Unlock {
            return BTreeSet::new();
        }
        let others = self.bytes.iter().filter(|((file, owner, byte), kind)| {
            *file == request.file
                && *owner != request.owner
                && (request.start..=request.end).contains(byte)
                && (**kind == LockKind::Write || request.kind == LockKind::Write)
        });
        others.map(|((_, owner, _), _)| *owner).collect()
    }

    fn set(&mut self, request: &Request) {
        for byte in request.start..=request.end {
            let place = (request.file, request.owner, byte);
            match request.kind {
                LockKind::Unlock => self.bytes.remove(&place),
                kind => self.bytes.insert(place, kind),
            };
        }
    }

    fn unlock_all(&mut self, file: u64, owner: u64) {
        self.set(&Request { file, owner, kind: LockKind::Unlock, start: 0, end: BYTES });
    }

    fn is_deadlock(&self, request: &Request) -> bool {
        let (mut seen, mut next) = (BTreeSet::new(), self.blockers(request));
        while let Some(owner) = next.pop_first() {
            if owner == request.owner {
                return true;
            }
            if seen.insert(owner) {
                let waits = self.waits.values().filter(|wait| wait.owner == owner);
                next.extend(waits.flat_map(|wait| self.blockers(wait)));
            }
        }
        false
    }

    /// Lets the first that can go on go on, as long as there is one.
    fn settle(&mut self) -> Vec<usize> {
        let mut granted = Vec::new();
        while let Some(number) = self.waits.iter().find(|(_, wait)| self.blockers(wait).is_empty()).map(|(n, _)| *n) {
            let request = self.waits.remove(&number).unwrap();
            self.set(&request);
            granted.push(number);
        }
        granted
    }
}

type Ended = (usize, Result<()>);

struct Table {
    locks: Locks<OFlags>,
    handles: Handles<OFlags>,
    cx: Caller<'static>,
    open: BTreeMap<(u64, u64), Handle>,
    sender: Sender<Ended>,
    ended: Receiver<Ended>,
}

impl Table {
    fn new() -> Self {
        let cx = Caller { session: SessionId::unique(), ..Caller::default() };
        let (locks, handles, open, (sender, ended)) =
            (Locks::default(), Handles::default(), BTreeMap::new(), channel());
        let mut table = Self { locks, handles, cx, open, sender, ended };
        for file in 0..FILES {
            (0..OWNERS).for_each(|owner| table.open(file, owner));
        }
        table
    }

    fn open(&mut self, file: u64, owner: u64) {
        let handle = self.handles.insert(self.cx.session, Ino(file), OFlags::RDWR).unwrap();
        self.open.insert((file, owner), handle);
    }

    fn close(&mut self, file: u64, owner: u64) {
        let handle = self.open.remove(&(file, owner)).unwrap();
        let open = self.handles.remove(self.cx.session, Ino(file), handle).unwrap();
        self.locks.drop_handle(Ino(file), handle, &open);
    }

    fn request(&self, request: &Request) -> ((Ino, Handle), Lock) {
        let owner = LockOwner { session: self.cx.session, id: request.owner };
        let lock = Lock { kind: request.kind, owner, start: request.start, end: request.end, pid: 1, flock: false };
        ((Ino(request.file), self.open[&(request.file, request.owner)]), lock)
    }

    fn set(&self, request: &Request, waiter: Option<Waiter>) -> Result<LockOutcome> {
        let (at, lock) = self.request(request);
        self.locks.set(&self.handles, &self.cx, at, &lock, waiter, |_| Ok(()))
    }

    fn is_blocked(&self, request: &Request) -> bool {
        let (at, lock) = self.request(request);
        self.locks.get(&self.handles, &self.cx, at, &lock).unwrap().is_some()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn grants_refuses_and_wakes_as_one_that_looks_at_everything(steps in steps()) {
        let (mut table, mut model) = (Table::new(), Model::default());
        let mut gone: BTreeMap<usize, Arc<Cancellation>> = BTreeMap::new();
        for (number, step) in steps.into_iter().enumerate() {
            let mut interrupted = BTreeSet::new();
            match step {
                Step::Set(request, waits) => {
                    let waiter = waits.then(|| {
                        let (sender, flag) = (table.sender.clone(), Arc::<Cancellation>::default());
                        gone.insert(number, Arc::clone(&flag));
                        Waiter::new(move |outcome| sender.send((number, outcome)).unwrap_or(())).until(flag)
                    });
                    let expected = match () {
                        () if model.blockers(&request).is_empty() => {
                            model.set(&request);
                            Ok(LockOutcome::Done)
                        }
                        () if !waits => Err(Errno::AGAIN),
                        () if model.is_deadlock(&request) => Err(Errno::DEADLK),
                        () => {
                            model.waits.insert(number, request);
                            Ok(LockOutcome::Waiting)
                        }
                    };
                    prop_assert_eq!(table.set(&request, waiter), expected, "{} {:?}", number, request);
                }
                Step::Interrupt(index) => {
                    let waiting: Vec<usize> = model.waits.keys().copied().collect();
                    if !waiting.is_empty() {
                        let number = *index.get(&waiting);
                        model.waits.remove(&number);
                        gone[&number].cancel();
                    }
                }
                Step::Drop(file, owner) => {
                    model.unlock_all(file, owner);
                    table.locks.drop_owner(Ino(file), table.cx.session, owner);
                }
                Step::Release(file, owner) => {
                    table.close(file, owner);
                    table.open(file, owner);
                    model.unlock_all(file, owner);
                    let ended = model.waits.extract_if(.., |_, wait| wait.file == file && wait.owner == owner);
                    interrupted = ended.map(|(number, _)| number).collect();
                }
            }
            let granted = model.settle();
            // Nobody listens to those that were interrupted.
            let is_interrupted = |number: &usize| gone.get(number).is_some_and(|gone| gone.is_cancelled());
            let ended: Vec<Ended> = table.ended.try_iter().filter(|(number, _)| !is_interrupted(number)).collect();
            let of = |wanted: Result<()>| ended.iter().filter(move |(_, outcome)| *outcome == wanted).map(|(n, _)| *n);
            prop_assert_eq!(of(Ok(())).collect::<Vec<_>>(), granted, "{}", number);
            prop_assert_eq!(of(Err(Errno::INTR)).collect::<BTreeSet<_>>(), interrupted);
            for (file, owner) in table.open.keys().copied() {
                for (byte, kind) in (0..BYTES).flat_map(|byte| [(byte, LockKind::Read), (byte, LockKind::Write)]) {
                    let request = Request { file, owner, kind, start: byte, end: byte };
                    prop_assert_eq!(table.is_blocked(&request), !model.blockers(&request).is_empty());
                }
            }
        }
        for (file, owner) in table.open.keys().copied().collect::<Vec<_>>() {
            table.close(file, owner);
        }
        prop_assert!(!table.locks.retry(), "nothing waits any more");
    }
}
