//! The program `ferry`: it reads the command line and configuration files, and runs the libraries.

mod background;
mod change_cmd;
mod cli;
mod config;
mod control;
mod detached_mounts;
mod disk;
mod doctor;
mod documents;
mod exports;
mod flags;
mod fsck;
mod groups;
mod guardian;
mod help;
mod helper;
mod image;
mod launch;
mod logcmd;
mod metrics_cmd;
mod mount;
mod mount_options;
mod new_files;
mod ninep;
mod output;
mod paths;
mod processes;
mod recipes;
mod remote;
mod sandbox;
mod service_manager;
mod set_cmd;
mod share;
mod size;
mod socket;
mod source;
mod state;
mod status;
mod status_cmd;
#[cfg(test)]
mod tests;
mod top_cmd;
mod try_cmd;
mod virtiofsd;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use ferry_control::{Logging, Syslog, printable};
use ferry_fuse::Mountpoint;

use crate::cli::Command;
use crate::groups::Invocation;
use crate::helper::HelperCommand;
use crate::mount_options::Remount;

fn main() -> ExitCode {
    ferry_isolation::expect_children();
    let mut args: Vec<OsString> = std::env::args_os().collect();
    if args.first().is_some_and(|program| guardian::is_guardian(program)) {
        return guardian::run(&args);
    }
    if args.first().is_some_and(|program| state::is_keeper(program)) {
        return state::run(&args);
    }
    if args.first().is_some_and(|program| disk::is_back_end(program)) {
        args.insert(1, "disk".into());
    }
    if args.first().is_some_and(|program| mount::is_helper(program)) {
        return as_helper(args);
    }
    let mut setup = None;
    if args.first().is_some_and(|program| virtiofsd::is_virtiofsd(program)) {
        args = match virtiofsd::read(args) {
            Ok(virtiofsd::VirtiofsdCommand::Share(process_setup, line)) => {
                setup = Some(process_setup);
                without_syslog(line)
            }
            Ok(virtiofsd::VirtiofsdCommand::Capabilities) => {
                println!("{}", virtiofsd::CAPABILITIES);
                return ExitCode::SUCCESS;
            }
            Err(error) => error.exit(),
        };
    }
    let invocation = groups::parse(args).unwrap_or_else(|error| help::exit(&error, &cli::table()));
    if let Some(Err(error)) = setup.map(|setup| setup.apply()) {
        eprintln!("virtiofsd: {error}");
        return ExitCode::FAILURE;
    }
    let status = run_and_report(invocation);
    if status != status::DONE {
        virtiofsd::remove_pid_file();
    }
    ExitCode::from(status)
}

/// virtiofsd logs on standard error if the system has no log.
fn without_syslog(mut line: Vec<OsString>) -> Vec<OsString> {
    if let Some(at) = line.iter().position(|word| word == "--syslog")
        && let Err(error) = Syslog::connect("ferry", sandbox::pid)
    {
        eprintln!("virtiofsd: {error}");
        line.remove(at);
    }
    line
}

/// Runs as the helper of mount(8), with its exit statuses.
fn as_helper(args: Vec<OsString>) -> ExitCode {
    let line = match helper::read(args.into_iter().skip(1)) {
        Ok(HelperCommand::Mount(line)) => line,
        Ok(HelperCommand::Nothing) => return ExitCode::SUCCESS,
        Ok(HelperCommand::Remount(mountpoint, Remount { options, unchanged })) => {
            if let Err(error) = Mountpoint::remount(&mountpoint, &options) {
                eprintln!("mount.ferry: {error}");
                return ExitCode::from(helper::FAILURE_STATUS);
            }
            if !unchanged.is_empty() {
                eprintln!("mount.ferry: a remount does not change these options: {}", unchanged.join(", "));
            }
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("mount.ferry: {error}");
            return ExitCode::from(helper::USAGE_STATUS);
        }
    };
    match groups::parse(line) {
        Ok(invocation) => match run_and_report(invocation) {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::from(helper::FAILURE_STATUS),
        },
        Err(error) => {
            let text = error.to_string();
            let sentence = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            eprintln!("mount.ferry: {sentence}");
            ExitCode::from(helper::USAGE_STATUS)
        }
    }
}

fn run_and_report(invocation: Invocation) -> u8 {
    match run(invocation) {
        Ok(status) => status,
        Err(error) => {
            let text = format!("{error:#}");
            // The text may contain file names and answers of other users' servers.
            eprintln!("ferry: {}{}", printable(&text), advice(&text));
            status::of(&error)
        }
    }
}

/// Returns advice for an error of the system: most errors hide the number that would tell EMFILE.
fn advice(text: &str) -> &'static str {
    let too_many_files = text.contains(&*rustix::io::Errno::MFILE.to_string());
    if too_many_files && !text.contains("ulimit -n") { "; raise the limit of file descriptors (ulimit -n)" } else { "" }
}

fn run(Invocation { cli, more, more_disks, args: line, at }: Invocation) -> Result<u8> {
    let default_level = match &cli.command {
        Command::Try(args) if !args.verbose => "warn",
        // Its report says what would be logged.
        Command::Doctor(_) => "off",
        _ => "info",
    };
    let plain = matches!(&cli.command, Command::Mount(args) if args.detached || args.log_file.is_some());
    let common = cli.common();
    // Not with clap's `env`, which would show the flag in every usage line.
    // Its level, and errors in it, come before the log.
    let file = match &cli.command {
        Command::Share(args) => args.config.as_deref().map(config::read).transpose()?,
        _ => None,
    };
    let of_environment = || std::env::var("FERRY_LOG").ok().filter(|level| !level.is_empty());
    let given = cli.log.or_else(of_environment);
    let of_file = file.as_ref().and_then(|file| file.log.as_ref()).map(|level| level.as_str().to_owned());
    let level = given.clone().or(of_file).unwrap_or_else(|| default_level.into());
    let syslog = if cli.syslog { Some(Syslog::connect("ferry", sandbox::pid)?) } else { None };
    let logging = Logging::start(&level, plain, syslog)?;
    // For `bench/run costs` only, which measures what counting costs.
    if std::env::var_os("FERRY_METRICS").is_some_and(|word| word == "off") {
        ferry_engine::metrics::disable();
    }
    if matches!(&cli.command, Command::Share(_) | Command::Disk(_) | Command::Mount(_)) {
        service_manager::connect();
    }
    match cli.command {
        Command::Share(args) => {
            let shares: Vec<_> = args.share.into_iter().chain(more).collect();
            let (Some(path), Some(file)) = (args.config, file) else {
                let watched = (args.metrics.as_ref(), args.trace.as_ref());
                return processes::run_shares(&shares, (&args.sandbox_flags, args.json), watched, &logging);
            };
            let sandbox_flags = args.sandbox_flags.or(file.sandbox_flags());
            let watched = (args.metrics, args.trace);
            let logged = (&logging, given.is_some());
            processes::run_file((&path, file), shares, (sandbox_flags, args.json), watched, logged)
        }
        Command::Disk(args) => {
            let disks: Vec<disk::Args> = std::iter::once(*args).chain(more_disks).collect();
            processes::run_disks(disks, &logging)
        }
        Command::Mount(args) => mount::run(args, &line, at, &logging),
        Command::Image(command) => image::run(&command, &line, &common, &logging),
        Command::Log(args) => logcmd::run(&args).map(|()| 0),
        Command::Set(args) => set_cmd::run(&args).map(|()| 0),
        Command::Add(args) => change_cmd::add(&args).map(|()| 0),
        Command::Remove(args) => change_cmd::remove(&args).map(|()| 0),
        Command::Reload(args) => change_cmd::reload(&args).map(|()| 0),
        Command::Status(args) => status_cmd::run(&args),
        Command::Metrics(args) => metrics_cmd::run(&args),
        Command::Top(args) => top_cmd::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Agent(args) => Ok(ferry_agent::run("ferry", &args)),
        Command::Fsck(args) => fsck::run(&args),
        Command::Try(args) => try_cmd::run(args),
        Command::Man { all: Some(directory), .. } => documents::man_pages(&directory).map(|()| 0),
        Command::Man { command, .. } => documents::man(&command).map_err(status::misuse).map(|()| 0),
        Command::Completions { shell, program } => documents::completions(shell, program).map(|()| 0),
    }
}
