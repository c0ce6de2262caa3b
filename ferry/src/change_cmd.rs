//! `ferry add`, `ferry remove` and `ferry reload`: change what a running process serves.

use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, Result};
use ferry_control::{FileName, ManagerRequest, printable};

use crate::cli::{AddArgs, ReloadArgs, RemoveArgs};
use crate::control::{Client, manager_of};
use crate::output::print;
use crate::paths::start_dir;
use crate::sandbox::SandboxFlags;
use crate::status::misuse;
use crate::{cli, groups, help, processes};

/// Runs `ferry add`.
pub fn add(args: &AddArgs) -> Result<()> {
    // Mistakes are found here, with the usual help; the manager checks it again.
    let line = std::iter::once("ferry".into()).chain(args.command.iter().cloned());
    groups::parse(line).unwrap_or_else(|error| help::exit(&error, &cli::table()));
    processes::units_of_command(&args.command, start_dir(), &SandboxFlags::default()).map_err(misuse)?;
    let (manager, _) = manager_of(&args.target)?;
    let words = args.command.iter().map(|word| FileName(word.as_bytes().to_vec())).collect();
    change(&manager, &ManagerRequest::Add { words, directory: FileName(start_dir().as_os_str().as_bytes().to_vec()) })
}

/// Runs `ferry remove`.
pub fn remove(args: &RemoveArgs) -> Result<()> {
    let (manager, server) = manager_of(&args.target)?;
    let of_process = || format!("{} is a process: name the socket or mount point to remove", args.target.display());
    let (pid, share) = server.with_context(of_process)?;
    change(&manager, &ManagerRequest::Remove { pid, share, force: args.force })
}

/// Runs `ferry reload`.
pub fn reload(args: &ReloadArgs) -> Result<()> {
    let (manager, _) = manager_of(&args.target)?;
    change(&manager, &ManagerRequest::Reload { force: args.force })
}

/// Asks for a change, and prints what holds then.
fn change(manager: &Client, request: &ManagerRequest) -> Result<()> {
    let outcomes = manager.change(request)?;
    // The manager may be another user's program.
    print(outcomes.iter().map(|outcome| format!("{}\n", printable(outcome))).collect::<String>())
}
