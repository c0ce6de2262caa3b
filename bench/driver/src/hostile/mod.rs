//! Malformed input, case by case, against any server.
//!
//! Each case gets its own connection with a directory and a file in it (the share must be writable), sends malformed
//! input, and then a valid request: the server must reply with an error or drop the chain, and continue.

mod chains;
mod headers;
mod memory;
mod messages;
mod names;
mod races;
mod rings;
mod subject;

use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::{Error, Result};
pub use subject::Subject;

/// How long to wait before a failed connection is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// How cases are run.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long a chain may stay unanswered before it counts as dropped.
    pub drop_after: Duration,
    /// How long each race between a writing thread and the server lasts.
    pub race: Duration,
    /// For how long a connection that fails is tried again: not zero for servers that end with their client, and are
    /// started again.
    pub retry: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { drop_after: Duration::from_millis(400), race: Duration::from_secs(2), retry: Duration::ZERO }
    }
}

/// What became of the nonsense.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind", content = "detail")]
pub enum Answer {
    /// A good reply with this body.
    Reply(Vec<u8>),
    /// An error reply.
    Errno(i32),
    /// The chain was used with no byte written.
    Empty,
    /// The chain was never used.
    Dropped,
    /// A vhost-user message was refused.
    Refused(String),
    /// The server closed the connection.
    Disconnected,
    /// Something that is no FUSE reply to the request.
    Malformed(String),
    /// A race: this many chains, of which so many were used.
    Raced {
        /// Chains made available.
        sent: u64,
        /// Chains used.
        used: u64,
    },
}

/// What a case lets pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Expect {
    /// A good reply: the input is strange, but valid.
    Works,
    /// An error reply.
    Error,
    /// An error reply, or a chain that is used without a reply or dropped.
    ErrorOrDrop,
    /// Like [`Expect::Error`], or a good LOOKUP reply that leads to the root: `..` of the root is itself.
    ErrorOrRoot,
    /// Whatever is no breach of the protocol.
    Clean,
    /// Whatever, the end of the connection included: the next connection must work.
    Reconnects,
}

/// After what the next good request worked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Recovery {
    /// At once, on the same queue.
    AtOnce,
    /// After the queue was stopped and started.
    QueueRestart,
    /// After a new connection.
    Reconnect,
    /// Never.
    None,
}

type Session = Box<dyn Fn(&mut Subject) -> Result<Answer> + Send + Sync>;
type Bare = Box<dyn Fn(&Path, &Options) -> Result<Answer> + Send + Sync>;

enum Action {
    /// With a session that is set up.
    Session(Session),
    /// Before there is one.
    Bare(Bare),
}

/// One piece of malformed input.
pub struct Case {
    /// Its name: the group, a slash, and what is wrong.
    pub name: String,
    /// What it lets pass.
    pub expect: Expect,
    /// The most recovery that the server may need before a valid request works.
    pub recovery: Recovery,
    action: Action,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Case {{ {}: {:?}, {:?} }}", self.name, self.expect, self.recovery)
    }
}

impl Case {
    /// A case within a session, after which the same queue goes on working.
    fn new(
        name: impl Into<String>,
        expect: Expect,
        run: impl Fn(&mut Subject) -> Result<Answer> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), expect, recovery: Recovery::AtOnce, action: Action::Session(Box::new(run)) }
    }

    /// A case that breaks a queue or a connection.
    fn recovering(mut self, recovery: Recovery) -> Self {
        self.recovery = recovery;
        self
    }

    /// A case that makes its own connection.
    fn bare(name: impl Into<String>, run: impl Fn(&Path, &Options) -> Result<Answer> + Send + Sync + 'static) -> Self {
        let (expect, recovery) = (Expect::Reconnects, Recovery::Reconnect);
        Self { name: name.into(), expect, recovery, action: Action::Bare(Box::new(run)) }
    }
}

/// What a case found.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// The case.
    pub name: String,
    /// What it lets pass.
    pub expect: Expect,
    /// What became of the nonsense.
    pub answer: Option<Answer>,
    /// After what the next good request worked.
    pub recovery: Recovery,
    /// Whether the server did what is expected of it.
    pub passed: bool,
    /// Why not.
    pub problem: Option<String>,
}

/// All cases.
pub fn cases() -> Vec<Case> {
    let mut all = headers::cases();
    all.extend(names::cases());
    all.extend(chains::cases());
    all.extend(memory::cases());
    all.extend(rings::cases());
    all.extend(races::cases());
    all.extend(messages::cases());
    all
}

/// Runs one case against the server that listens at `socket`.
pub fn run(case: &Case, socket: &Path, options: &Options) -> Outcome {
    let (answer, recovery) = match &case.action {
        Action::Session(action) => in_session(action, socket, options),
        Action::Bare(action) => (action(socket, options).or_else(disconnected), reconnect(socket, options)),
    };
    let problem = match (&answer, &recovery) {
        (Err(error), _) => Some(format!("the case could not be run: {error}")),
        (Ok(answer), _) if !allows(case.expect, answer) => {
            Some(format!("{answer:?} is not what {:?} means", case.expect))
        }
        (_, Err(error)) => Some(format!("no good request works afterwards: {error}")),
        (_, Ok(recovery)) if *recovery > case.recovery => Some(format!("the next good request needs {recovery:?}")),
        _ => None,
    };
    Outcome {
        name: case.name.clone(),
        expect: case.expect,
        answer: answer.ok(),
        recovery: recovery.unwrap_or(Recovery::None),
        passed: problem.is_none(),
        problem,
    }
}

fn in_session(action: &Session, socket: &Path, options: &Options) -> (Result<Answer>, Result<Recovery>) {
    let mut subject = match connect(socket, options) {
        Ok(subject) => subject,
        Err(error) => return (Err(error), Ok(Recovery::None)),
    };
    let answer = action(&mut subject).or_else(disconnected);
    if subject.good_request().is_ok() {
        return (answer, Ok(Recovery::AtOnce));
    }
    if subject.restart().and_then(|()| subject.good_request()).is_ok() {
        return (answer, Ok(Recovery::QueueRestart));
    }
    drop(subject);
    (answer, reconnect(socket, options))
}

fn reconnect(socket: &Path, options: &Options) -> Result<Recovery> {
    connect(socket, options)?.good_request()?;
    Ok(Recovery::Reconnect)
}

fn connect(socket: &Path, options: &Options) -> Result<Subject> {
    let end = Instant::now() + options.retry;
    loop {
        match Subject::connect(socket, options) {
            Err(_) if Instant::now() < end => {}
            result => return result,
        }
        std::thread::sleep(RETRY_PAUSE);
    }
}

/// A connection that ends is an answer, not a failure of the case.
fn disconnected(error: Error) -> Result<Answer> {
    match error {
        Error::Disconnected => Ok(Answer::Disconnected),
        Error::Vhost { .. } => Ok(Answer::Refused(error.to_string())),
        error => Err(error),
    }
}

fn allows(expect: Expect, answer: &Answer) -> bool {
    let error = matches!(answer, Answer::Errno(_));
    let dropped = matches!(answer, Answer::Empty | Answer::Dropped);
    match expect {
        Expect::Works => matches!(answer, Answer::Reply(_)),
        Expect::Error => error,
        Expect::ErrorOrDrop => error || dropped,
        Expect::ErrorOrRoot => {
            error || matches!(answer, Answer::Reply(body) if body.starts_with(&crate::ROOT.to_le_bytes()))
        }
        Expect::Clean => !matches!(answer, Answer::Disconnected | Answer::Malformed(_) | Answer::Refused(_)),
        Expect::Reconnects => true,
    }
}
