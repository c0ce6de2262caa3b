//! The program `ferry`: which directories to share, and through what, comes in on the command line or from a file;
//! the libraries beside it do the work.

mod cli;
mod config;
mod documents;
mod groups;
mod logging;
mod recipes;
mod share;
mod signals;
mod socket;
mod trial;

use std::process::ExitCode;

use anyhow::Result;

use crate::cli::Command;
use crate::groups::Invocation;

fn main() -> ExitCode {
    let invocation = groups::parse(std::env::args_os()).unwrap_or_else(|error| error.exit());
    match run(invocation) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("ferry: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(Invocation { cli, more }: Invocation) -> Result<u8> {
    let quiet = matches!(&cli.command, Command::Try(args) if !args.verbose);
    logging::start(cli.log.as_deref().unwrap_or(if quiet { "warn" } else { "info" }))?;
    match cli.command {
        Command::Share(args) => {
            let mut shares = Vec::new();
            if let Some(file) = &args.config {
                shares.extend(config::read(file)?);
            }
            shares.extend(args.share.into_iter().chain(more));
            share::run(&shares, args.json)?;
            Ok(0)
        }
        Command::Try(args) => trial::run(args),
        Command::Man { command } => documents::man(command.as_deref()).map(|()| 0),
        Command::Completions { shell } => documents::completions(shell).map(|()| 0),
    }
}
