//! `ferry agent`: replays in a guest what happens to the files of its mounts.

use std::path::PathBuf;

use anyhow::{Context, Error, Result};
use ferry_agent::Agent;
use ferry_control::printable;

use crate::status;

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Mount points of shares in this guest.
    #[arg(value_name = "MOUNT", required = true)]
    pub mounts: Vec<PathBuf>,
}

/// Runs an agent for each mount; returns when none can go on.
pub fn run(args: &Args) -> Result<u8> {
    // A wrong path is an error at once, also if the others are right.
    let agents = args.mounts.iter().map(|mount| Agent::open(mount)).collect::<Result<Vec<_>, _>>()?;
    let threads = agents.into_iter().map(|agent| {
        std::thread::Builder::new()
            .name("agent".into())
            .spawn(move || {
                let Err(error) = agent.run();
                eprintln!("ferry: {}", printable(&format!("{:#}", Error::from(error))));
            })
            .context("cannot start a thread")
    });
    for thread in threads.collect::<Result<Vec<_>>>()? {
        // A thread that has panicked has said so.
        let _ = thread.join();
    }
    Ok(status::FAILED)
}
