//! What the program says on standard error.

use std::io::IsTerminal;

use anyhow::{Result, bail};
use tracing_subscriber::EnvFilter;

/// Starts logging at a level, or by a list of `crate=level`. There are no times: who keeps logs (journald) adds them.
pub fn start(level: &str) -> Result<()> {
    let Ok(filter) = EnvFilter::builder().parse(level) else {
        bail!(
            "cannot log at {level:?}; use error, warn, info, debug or trace, or a list like info,ferry_virtiofs=debug"
        );
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time()
        .init();
    Ok(())
}
