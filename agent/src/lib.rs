//! The agent in a guest. It requests from the server of a mount the changes that others make to files that the guest
//! knows, and replays each event as the same system call on the mount. The server recognizes these calls and changes
//! nothing. The guest's kernel raises the events for every watcher and corrects its caches.
//!
//! [`run`] is the command `ferry agent` and the program `ferry-agent`. An [`Agent`] serves one mount:
//!
//! ```no_run
//! use ferry_agent::{Agent, AgentEnd, Shutdown};
//!
//! let shutdown = std::sync::Arc::new(Shutdown::new()?);
//! let agent = Agent::open("/mnt/work".as_ref(), &shutdown)?;
//! // Another thread may call `shutdown.end()`.
//! let end: AgentEnd = agent.run(&mut || println!("events are replayed"))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod agent;
mod command;
mod guard;
mod mounts;
mod notify;
mod replay;
mod shutdown;
mod sys;

pub use agent::{Agent, AgentEnd, AgentError};
pub use command::{Args, main, run, table};
pub use notify::notification_socket;
pub use shutdown::Shutdown;
