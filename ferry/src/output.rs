//! Writes to standard output and standard error.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};
use serde_json::Value;

/// Prints text. A reader that has closed the pipe is no error.
pub fn print(text: impl AsRef<[u8]>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    ignore_closed_pipe(out.write_all(text.as_ref()).and_then(|()| out.flush()).map_err(Into::into))
        .context("cannot write to standard output")
}

/// Prints a line of JSON for a program. A closed pipe is an error.
pub fn print_json(line: &Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot write to standard output")
}

/// Prints a message on standard error. A failed write is ignored, so that a server continues.
pub fn say(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "ferry: {text}");
}

/// Turns a closed pipe into success: a pager may end early.
pub fn ignore_closed_pipe(outcome: Result<()>) -> Result<()> {
    outcome.or_else(|error| match error.downcast_ref::<std::io::Error>() {
        Some(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        _ => Err(error),
    })
}
