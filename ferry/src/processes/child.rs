//! A child: what it serves, and what it reports to the parent.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use anyhow::{Context, Result};
use ferry_control::Logging;
use ferry_isolation::BlockedSignals;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::unit::{Items, Unit};
use crate::disk;
use crate::new_files::{NewFiles, Success};
use crate::sandbox::SandboxFlags;
use crate::service_manager;
use crate::share::{self, Start};
use crate::socket::ListenSocket;

/// What every child needs.
pub struct ChildContext<'a> {
    pub signals: BlockedSignals,
    pub logging: &'a Logging,
    pub json: bool,
}

/// What a child has to do.
pub struct Task {
    pub unit: Unit,
    /// The socket of a disk.
    pub socket: Option<ListenSocket>,
    /// The inherited sockets of shares.
    pub inherited: HashMap<u16, ListenSocket>,
    pub report: ReportSender,
    pub new_files: NewFiles,
}

impl Task {
    /// Serves, and returns the exit status.
    pub fn run(self, context: &ChildContext<'_>) -> Result<u8> {
        service_manager::leave();
        let Self { unit, socket, inherited, report, new_files } = self;
        let Unit { items, sandbox_flags, metrics, trace, level, .. } = unit;
        let &ChildContext { signals, logging, json } = context;
        let logging = &level.map_or_else(|| Ok(logging.clone()), |level| logging.with_level(&level))?;
        let context = &ChildContext { signals, logging, json };
        let failure = report.clone();
        let outcome = match items {
            Items::Shares(shares) => {
                let (metrics, trace) = (metrics.as_ref(), trace.as_ref());
                let start = Start {
                    shares: &shares,
                    words: &[],
                    inherited,
                    sandbox_flags: Some(&sandbox_flags),
                    logging,
                    metrics,
                    trace,
                };
                start.run(signals, new_files, |up| {
                    let is_announced = report.send(share::statuses(up))?;
                    if is_announced && !json {
                        share::announce(&shares, up)?;
                    }
                    Ok(is_announced)
                })
            }
            Items::Disk(disk) => serve_disk(&disk, socket, (&sandbox_flags, context), (report, new_files)),
        };
        outcome.inspect_err(|error| failure.fail(&format!("{error:#}")))
    }
}

fn serve_disk(
    disk: &disk::Args,
    mut socket: Option<ListenSocket>,
    (sandbox_flags, context): (&SandboxFlags, &ChildContext<'_>),
    (report, new_files): (ReportSender, NewFiles),
) -> Result<u8> {
    service_manager::close_sockets();
    socket.as_mut().map_or(Ok(()), ListenSocket::take_over)?;
    let &ChildContext { signals, logging, json } = context;
    disk::serve(std::slice::from_ref(disk), vec![socket], (sandbox_flags, signals, logging), new_files, |opened| {
        let is_announced = report.send(opened.to_json().into_iter().next().unwrap_or_default())?;
        if is_announced && !json {
            opened.announce()?;
        }
        Ok(is_announced)
    })
}

/// What a child reports, once; a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Report {
    /// It is up, and serves this.
    Up(Value),
    /// Why it is not.
    Failed(String),
}

/// Sends a child's report to the parent. Clones share the pipe, which is closed when the report is sent.
#[derive(Clone)]
pub struct ReportSender {
    pipe: Rc<RefCell<Option<OwnedFd>>>,
    success: Rc<Success>,
}

impl ReportSender {
    pub fn new(pipe: OwnedFd, success: Success) -> Self {
        Self { pipe: Rc::new(RefCell::new(Some(pipe))), success: Rc::new(success) }
    }

    /// Sends what the child serves; waits for the start's outcome, and returns whether it has succeeded.
    ///
    /// # Errors
    /// The parent has ended.
    fn send(self, what: Value) -> Result<bool> {
        self.write(&Report::Up(what)).context("the parent process has ended")?;
        Ok(self.success.wait())
    }

    /// Sends why the child serves nothing, unless it has reported.
    fn fail(&self, why: &str) {
        // A parent that has ended needs no report.
        let _ = self.write(&Report::Failed(why.into()));
    }

    fn write(&self, report: &Report) -> Result<()> {
        let Some(pipe) = self.pipe.borrow_mut().take() else { return Ok(()) };
        Ok(File::from(pipe).write_all(format!("{}\n", serde_json::to_string(report)?).as_bytes())?)
    }
}
