//! The control socket of a running share or mount: `ferry log` and `ferry mount --explain` talk to it.
//!
//! Each server listens on a socket named after its process id, in a folder that only its user can enter. A client
//! sends one line of JSON and gets one line back; after a request to follow the log, lines of text.

mod client;
mod place;
mod served;
mod server;

use serde::{Deserialize, Serialize};

pub use client::{Target, is_in_mount};
pub use served::{Served, Shown};
pub use server::Control;

/// A request; one line.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// What is served, and what is logged: answers [`Status`].
    Status,
    /// By which paths the requests of a mount travel: answers [`Explained`].
    Explain {
        /// Which share of [`Status::shares`].
        share: usize,
    },
    /// Changes what is logged: answers [`Status`].
    Log {
        /// A level, a list, or one of the words of [`crate::logcmd`].
        level: String,
        /// Which share of [`Status::shares`]; all of them if there is none.
        share: Option<usize>,
        /// The file in it, from its root.
        file: Option<FileName>,
        /// Send the log's lines, and log as before when the client hangs up.
        follow: bool,
    },
}

/// A path, byte by byte: JSON has only text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FileName(pub Vec<u8>);

/// The answer to any request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer<T> {
    /// It was done.
    Ok(T),
    /// Why not, in a sentence.
    Error(String),
}

/// What a server serves and logs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Its process.
    pub pid: u32,
    /// What it serves.
    pub shares: Vec<Shown>,
    /// The level of its log.
    pub log: String,
    /// Whose requests are logged, if any are.
    pub requests: Option<String>,
}

/// How the requests of a mount travel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Explained {
    /// For people.
    pub text: String,
    /// For programs.
    pub json: serde_json::Value,
}
