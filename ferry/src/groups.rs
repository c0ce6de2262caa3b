//! Reads the command line. With several shares or disks, flags belong to the source before them.
//!
//! The command line is split into one group per source, and each group is parsed by the same table of flags. So all rules of the
//! table (values, conflicts, repeated flags) apply group by group.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use clap::FromArgMatches;
use clap::error::ErrorKind;
use clap::parser::ValueSource;

use crate::cli::{self, Cli, Command, ShareArgs};
use crate::disk;
use crate::flags::Share;
use crate::help;
use crate::mount_options;
use crate::paths::start_dir;

/// The parsed command line.
#[derive(Debug)]
pub struct Invocation {
    pub cli: Cli,
    /// The sources of `ferry share` after the first, which is in `cli`.
    pub more: Vec<Share>,
    /// The disks of `ferry disk` after the first.
    pub more_disks: Vec<disk::Args>,
    /// The command line, and the index of the command in it.
    pub args: Vec<OsString>,
    pub at: usize,
}

/// Parses the whole command line. Help, version and errors are returned as clap's error.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Invocation, clap::Error> {
    parse_in(args, start_dir())
}

/// The same, with paths that are relative to `directory`.
pub fn parse_in(args: impl IntoIterator<Item = OsString>, directory: &Path) -> Result<Invocation, clap::Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let table = cli::table();
    let at = command_position(&table, &args).unwrap_or(args.len());
    let mut groups = match args.get(at).and_then(|name| name.to_str()) {
        Some(name @ ("share" | "disk")) => parse_groups(&table, &args, at, name)?,
        Some("mount") => vec![parse_mount(&table, &args, at)?],
        _ => vec![parse_one(args.clone())?],
    };
    let mut cli = groups.remove(0);
    let (mut more, mut more_disks) = (Vec::new(), Vec::new());
    for group in groups {
        match group.command {
            Command::Disk(args) => more_disks.push(*args),
            _ => more.push(share_of(group)?),
        }
    }
    more.iter_mut().for_each(|share| share.resolve_paths(directory));
    cli.command.resolve_paths(directory);
    Ok(Invocation { cli, more, more_disks, args, at })
}

/// Parses `ferry share` or `ferry disk`, group by group.
fn parse_groups(table: &clap::Command, args: &[OsString], at: usize, name: &str) -> Result<Vec<Cli>, clap::Error> {
    let (before, after) = args.split_at(at + 1);
    split(table, name, after)?
        .into_iter()
        .map(|group| {
            let cli = parse_one(before.iter().cloned().chain(group).collect())?;
            match &cli.command {
                Command::Share(ShareArgs { share: Some(share), .. }) => check_share(share)?,
                Command::Share(ShareArgs { config: Some(_), .. }) | Command::Disk(_) => {}
                _ => return Err(error(name, ErrorKind::MissingRequiredArgument, "<SOURCE> is missing")),
            }
            Ok(cli)
        })
        .collect()
}

/// Checks that a group has an export and no conflicting flags.
fn check_share(share: &Share) -> Result<(), clap::Error> {
    if share.source.as_os_str().is_empty() {
        return Err(error(
            "share",
            ErrorKind::MissingRequiredArgument,
            "<SOURCE> is missing: a directory, mem, pmem:PATH, image:PATH, layers:DIR, or 9p: with an address",
        ));
    }
    if !share.has_export() {
        let missing = "'--virtiofs <SOCKET>', '--9p <ADDRESS>' or '--mount <DIR>'";
        let text = format!("{missing} is missing after {}", share.source.display());
        return Err(error("share", ErrorKind::MissingRequiredArgument, &text));
    }
    match share.contradiction() {
        Some(text) => Err(error("share", ErrorKind::ArgumentConflict, &text)),
        None => Ok(()),
    }
}

/// Parses `ferry mount`, whose `-o` may contain flags.
fn parse_mount(table: &clap::Command, args: &[OsString], at: usize) -> Result<Cli, clap::Error> {
    let (before, after) = args.split_at(at + 1);
    let after =
        mount_options::expand(table, after).map_err(|text| error("mount", ErrorKind::UnknownArgument, &text))?;
    let matches = matches(before.iter().cloned().chain(after).collect())?;
    let cli = Cli::from_arg_matches(&matches)?;
    let Command::Mount(args) = &cli.command else { return Ok(cli) };
    let is_given = |flag: &&clap::Arg| {
        let given = matches.subcommand_matches("mount").and_then(|mount| mount.value_source(flag.get_id().as_str()));
        cli::is_share_only(flag) && given == Some(ValueSource::CommandLine)
    };
    if let Some(flag) = table.find_subcommand("mount").and_then(|mount| mount.get_arguments().find(is_given)) {
        let text = format!("unexpected argument '--{}': it is for ferry share", flag.get_long().unwrap_or_default());
        return Err(error("mount", ErrorKind::UnknownArgument, &text));
    }
    // The conflicts are those of a mount, even if there is no mount point yet.
    let share = Share { mount: Some("".into()), ..args.share.clone() };
    match share.contradiction() {
        Some(text) => Err(error("mount", ErrorKind::ArgumentConflict, &text)),
        None => Ok(cli),
    }
}

fn parse_one(args: Vec<OsString>) -> Result<Cli, clap::Error> {
    Cli::from_arg_matches(&matches(args)?)
}

fn matches(args: Vec<OsString>) -> Result<clap::ArgMatches, clap::Error> {
    let all = help::wants_all(&args);
    help::marked(cli::table(), all).try_get_matches_from(args)
}

fn share_of(cli: Cli) -> Result<Share, clap::Error> {
    match cli.command {
        Command::Share(ShareArgs { share: Some(share), .. }) => Ok(share),
        _ => Err(error("share", ErrorKind::MissingRequiredArgument, "<SOURCE> is missing")),
    }
}

/// Returns the index of the command on the command line.
fn command_position(table: &clap::Command, args: &[OsString]) -> Option<usize> {
    let mut at = 1;
    while at < args.len() {
        match token(table, None, &args[at]) {
            Token::Positional => return Some(at),
            Token::End => return None,
            Token::Flag { values, .. } => at += 1 + values,
        }
    }
    None
}

/// Splits the arguments after `share` or `disk` into one group per source. Flags of the whole call go to the first group.
fn split(table: &clap::Command, name: &str, args: &[OsString]) -> Result<Vec<Vec<OsString>>, clap::Error> {
    let command = table.find_subcommand(name);
    let mut whole = Vec::new();
    let mut early = Vec::new();
    let mut groups: Vec<Vec<OsString>> = Vec::new();
    let mut args: VecDeque<&OsString> = args.iter().collect();
    let mut only_directories = false;
    while let Some(arg) = args.pop_front() {
        match if only_directories { Token::Positional } else { token(table, command, arg) } {
            Token::End => only_directories = true,
            // `./-x` and the like: after `--` a directory may begin with a dash.
            Token::Positional if only_directories => groups.push(vec!["--".into(), arg.clone()]),
            Token::Positional => groups.push(vec![arg.clone()]),
            Token::Flag { values, whole_call } => {
                let group = match groups.last_mut() {
                    _ if whole_call => &mut whole,
                    Some(group) => group,
                    None => &mut early,
                };
                group.push(arg.clone());
                group.extend(args.drain(..values.min(args.len())).cloned());
            }
        }
    }
    if groups.len() > 1
        && let Some(flag) = early.first()
    {
        let text = format!(
            "the argument '{}' stands before the first source, but with several sources flags belong to the source \
             before them",
            flag.display()
        );
        return Err(error(name, ErrorKind::ArgumentConflict, &text));
    }
    match groups.first_mut() {
        Some(first) => {
            // Flags before the only source belong to it.
            first.splice(0..0, whole.into_iter().chain(early));
        }
        None => groups.push(whole.into_iter().chain(early).collect()),
    }
    Ok(groups)
}

fn error(command: &str, kind: ErrorKind, text: &str) -> clap::Error {
    let mut table = cli::table();
    table.build();
    match table.find_subcommand_mut(command) {
        Some(command) => command.error(kind, text),
        None => table.error(kind, text),
    }
}

enum Token {
    /// A flag, the number of following arguments that are its value, and whether it applies to the whole call.
    Flag {
        values: usize,
        whole_call: bool,
    },
    /// `--`: all later arguments are positional.
    End,
    Positional,
}

/// Classifies an argument by the tables of the program and the command. Unknown flags take no value; parsing the group will
/// reject them.
fn token(table: &clap::Command, command: Option<&clap::Command>, arg: &OsStr) -> Token {
    let bytes = arg.as_bytes();
    if bytes == b"--" {
        return Token::End;
    }
    if bytes.first() != Some(&b'-') || bytes == b"-" {
        return Token::Positional;
    }
    let name = bytes.split(|&byte| byte == b'=').next().unwrap_or_default();
    let is = |arg: &&clap::Arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long().iter().chain(&aliases).any(|long| name.strip_prefix(b"--") == Some(long.as_bytes()))
    };
    let own = command.and_then(|command| command.get_arguments().find(is));
    let found = own.or_else(|| table.get_arguments().find(is));
    let takes_value = found.is_some_and(|arg| arg.get_action().takes_values()) && name.len() == bytes.len();
    // Each disk has its own process, with its own metrics and trace.
    let has_processes = command.is_some_and(|command| command.get_name() == "disk");
    let of_share = own.is_some_and(|arg| match arg.get_id().as_str() {
        "config" | "json" | "sandbox" | "seccomp" | "modcaps" => false,
        "metrics" | "trace" => has_processes,
        _ => true,
    });
    Token::Flag { values: usize::from(takes_value), whole_call: found.is_none() || !of_share }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The shares that a command line means.
    pub fn shares(line: &str) -> Result<Vec<Share>, clap::Error> {
        let Invocation { cli, more, .. } = parse(line.split_whitespace().map(OsString::from))?;
        Ok(std::iter::once(share_of(cli)?).chain(more).collect())
    }

    fn shares_or_mount(line: &str) {
        if let Err(error) = parse(line.split(' ').map(OsString::from)) {
            panic!("{line}: {error}");
        }
    }

    fn refused(line: &str) -> String {
        shares(line).expect_err(line).to_string()
    }

    #[test]
    fn the_table_is_sound() {
        cli::table().debug_assert();
    }

    #[test]
    fn flags_belong_to_the_directory_before_them() {
        let shares =
            shares("ferry --log debug share /a --virtiofs 1.sock --tag=x --read-only /b --virtiofs=2.sock --queues 3")
                .expect("a good line");
        assert_eq!(shares.len(), 2);
        assert_eq!(shares[0].source, Path::new("/a"));
        assert_eq!(shares[0].virtiofs.as_deref(), Some(Path::new("1.sock")));
        assert_eq!(shares[0].tag_or_default().as_str(), "x");
        assert!(shares[0].read_only && !shares[1].read_only);
        assert_eq!(shares[1].source, Path::new("/b"));
        assert_eq!((shares[0].queues, shares[1].queues), (None, Some(3)));
    }

    #[test]
    fn one_directory_owns_every_flag() {
        let shares = shares("ferry share --virtiofs 1.sock --tag x /a --queues 2").expect("a good line");
        assert_eq!(shares[0].source, Path::new("/a"));
        assert_eq!(shares[0].queues, Some(2));
    }

    #[test]
    fn a_share_may_be_for_9p_alone() {
        let line = "ferry share mem --9p tcp:0.0.0.0:564 --9p-remote --9p-users 5:6 /b --9p unix:s --virtiofs v";
        let shares = shares(line).expect("a good line");
        assert_eq!(shares[0].ninep, Some("tcp:0.0.0.0:564".parse().unwrap()));
        assert_eq!(shares[0].ninep_users, Some("5:6".parse().unwrap()));
        assert!(shares[0].ninep_remote && !shares[1].ninep_remote);
        assert_eq!(shares[1].ninep, Some("unix:s".parse().unwrap()));
    }

    #[test]
    fn global_flags_are_accepted_anywhere() {
        let args = "ferry share /a --virtiofs 1.sock --json /b --virtiofs 2.sock --log warn";
        let Invocation { cli, more, .. } = parse(args.split(' ').map(OsString::from)).expect("a good line");
        assert_eq!(cli.log.as_deref(), Some("warn"));
        assert!(matches!(cli.command, Command::Share(args) if args.json));
        assert_eq!(more.len(), 1);
    }

    #[test]
    fn one_sandbox_confines_all_disks() {
        let line = "ferry disk /a --vhost-user 1.sock /b --vhost-user 2.sock --sandbox none --seccomp log";
        let Invocation { cli, more_disks, .. } = parse(line.split(' ').map(OsString::from)).expect("a good line");
        let Command::Disk(first) = cli.command else { panic!("not the disk command") };
        assert_eq!((first.sandbox_flags.sandbox, more_disks.len()), (Some(crate::sandbox::Sandbox::None), 1));
        assert_eq!(more_disks[0].sandbox_flags, crate::sandbox::SandboxFlags::default());
        let twice = format!("{line} --sandbox none");
        let error = parse(twice.split(' ').map(OsString::from)).expect_err("twice").to_string();
        assert!(error.contains("'--sandbox <KIND>' cannot be used multiple times"), "{error}");
    }

    #[test]
    fn directories_may_begin_with_a_dash() {
        let shares = shares("ferry share --virtiofs s -- -a").expect("a good line");
        assert_eq!(shares[0].source, start_dir().join("-a"));
    }

    /// Those that are used later, also by a server that has left the directory; sockets are made before.
    #[test]
    fn every_path_of_a_share_is_absolute_in_the_end() {
        use clap::builder::ValueParser;

        let table = <Share as clap::Args>::augment_args(clap::Command::new("share"));
        let path = ValueParser::path_buf().type_id();
        let flags: Vec<_> = table.get_arguments().filter(|arg| arg.get_value_parser().type_id() == path).collect();
        let flags = flags.iter().filter_map(|arg| arg.get_long()).filter(|name| *name != "9p-tree");
        let words: Vec<_> = flags.flat_map(|name| [format!("--{name}"), "seen".into()]).collect();
        assert!(words.len() > 20, "{words:?}");
        let line = ["share", "pmem:seen", "--9p", "unix:seen"].into_iter().chain(words.iter().map(String::as_str));
        let matches = table.try_get_matches_from(line).expect("all of them go together");
        let mut share = Share::from_arg_matches(&matches).expect("all of them go together");
        share.resolve_paths(Path::new("/here"));
        share.resolve_sockets(Path::new("/here"));
        let said = format!("{share:?}");
        assert!(!said.contains("\"seen\"") && !said.contains("pmem:seen"), "{said}");
        let line = "ferry share 9p:unix:s --mount m".split(' ').map(OsString::from);
        let Command::Share(args) = parse(line).expect("a good line").cli.command else {
            panic!("not the share command")
        };
        let share = args.share.expect("it has one");
        let expected = [format!("9p:unix:{}/s", start_dir().display()).into(), start_dir().join("m")];
        assert_eq!([share.source, share.mount.expect("given")], expected);
    }

    #[test]
    fn a_file_needs_no_directory() {
        let args = ["ferry", "share", "--config", "f.toml"].map(OsString::from);
        let Invocation { cli, more, .. } = parse(args).expect("a good line");
        let Command::Share(args) = cli.command else { panic!("not the share command") };
        assert!(args.share.is_none() && more.is_empty());
        assert_eq!(args.config.as_deref(), Some(Path::new("f.toml")));
    }

    #[test]
    fn mounts_take_the_same_flags() {
        let line = "ferry --log debug mount pmem:/x /m -o size=1G,ro,nosuid,cache=always,allow_other --depth 4";
        let Invocation { cli, at, .. } = parse(line.split(' ').map(OsString::from)).expect("a good line");
        assert_eq!(at, 3);
        let Command::Mount(args) = cli.command else { panic!("not the mount command") };
        assert_eq!(args.options, ["nosuid"]);
        let share = args.into_share();
        assert_eq!(share.source, Path::new("pmem:/x"));
        assert_eq!(share.mount.as_deref(), Some(Path::new("/m")));
        assert_eq!(share.size.map(|size| size.0), Some(1 << 30));
        assert!(share.read_only && share.allow_other && share.cache == crate::flags::Cache::Always);
        assert_eq!(share.depth, Some(4));
    }

    #[test]
    fn flags_are_taken_where_they_have_an_effect() {
        for line in [
            "ferry share /a --9p vhost-user:s --tag x --poll-us 0",
            "ferry share /a --mount m --9p unix:s --entry-timeout 1 --poll-us 0",
            "ferry share /a --mount m --virtiofs s --once",
            "ferry mount /a /m --allow-direct-io --attr-timeout 1",
        ] {
            shares_or_mount(line);
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (line, word) in [
            ("ferry share /a --virtiofs s --tag x --tag y", "'--tag <NAME>' cannot be used multiple times"),
            ("ferry share /a --virtiofs s /b --virtiofs t --read-only --read-only", "'--read-only' cannot be used"),
            ("ferry share --virtiofs s /a /b --virtiofs t", "'--virtiofs' stands before the first source"),
            ("ferry share /a --virtiofs s /b", "--virtiofs <SOCKET>"),
            ("ferry share /a --virtiofs s --fd 3", "'--fd <N>'"),
            ("ferry share /a --virtiofs s --fast", "--fast"),
            ("ferry share /a --virtiofs s --queues 0", "0"),
            ("ferry share /a --virtiofs s --cache sometimes", "sometimes"),
            ("ferry share /a --virtiofs", "--virtiofs"),
            ("ferry share /a --virtiofs s --json /b --virtiofs t --json", "'--json' cannot be used"),
            ("ferry share", "<SOURCE>"),
            ("ferry share mem --mount m --tier2 f", "tier2 is for pmem"),
            ("ferry share /a --virtiofs s --path uring", "path is for mounts"),
            ("ferry share /a --mount m --queues 2", "queues is for virtual machines"),
            ("ferry share /a --9p vhost-user:s --queues 2", "queues is for virtual machines"),
            ("ferry share /a --mount m --9p unix:s --tag x", "tag is for virtual machines"),
            ("ferry share /a --9p unix:s --migration-on-error guest-error", "migration-on-error is for virtual"),
            ("ferry share /a --mount m --migration-mode file-handles", "migration-mode is for virtual machines"),
            ("ferry share /a --9p unix:s --migration-verify-handles", "migration-verify-handles is for virtual"),
            ("ferry share /a --virtiofs s --9p unix:t --once", "once and --9p exclude each other"),
            ("ferry share /a --mount m --poll-us 0", "poll-us is for sockets, and /a has none"),
            ("ferry share /a --9p unix:s --entry-timeout 1", "entry-timeout is for virtual machines and mounts"),
            ("ferry share /a --9p unix:s --attr-timeout 1", "attr-timeout is for virtual machines and mounts"),
            ("ferry share /a --9p unix:s --negative-timeout 1", "negative-timeout is for virtual machines and"),
            ("ferry mount mem /m --allow-direct-io", "allow-direct-io is for directories, and mem"),
            ("ferry share 9p:unix:s --virtiofs v --allow-direct-io", "allow-direct-io is for directories"),
            ("ferry mount", "<SOURCE>"),
            ("ferry mount mem", "<MOUNTPOINT>"),
            ("ferry mount mem /m --queues 3", "unexpected argument '--queues'"),
            ("ferry mount mem /m --poll-us 3", "unexpected argument '--poll-us'"),
            ("ferry mount mem /m --virtiofs s", "unexpected argument '--virtiofs'"),
            ("ferry mount mem /m --state s", "unexpected argument '--state'"),
            ("ferry mount mem /m --migration-on-error guest-error", "unexpected argument '--migration-on-error'"),
            ("ferry mount mem /m --path fast", "fast"),
            ("ferry mount mem /m --9p unix:s", "unexpected argument '--9p'"),
            ("ferry mount mem /m --9p-remote", "unexpected argument '--9p-remote'"),
            ("ferry share mem --9p s", "not an address for 9P"),
            ("ferry share mem --9p unix:s --local-locks", "local-locks is for virtual machines and mounts"),
            ("ferry share mem --9p unix:s --allow-idmap", "allow-idmap is for virtual machines and mounts"),
            ("ferry share mem --9p tcp:localhost", "has no port"),
            ("ferry share mem --9p unix:s --9p-users root", "does not name users"),
            ("ferry share mem --virtiofs s --9p-remote", "9p-remote is for 9P"),
            ("ferry share mem --virtiofs s --9p-idle 5", "9p-idle is for 9P"),
            ("ferry share mem --9p tcp:[::1]:0 --socket-group kvm", "for unix sockets, and mem has none"),
            ("ferry share mem --9p unix:s --9p-idle 0", "0"),
            ("ferry share mem --9p unix:s --9p-connections 0", "0"),
            ("ferry share mem --9p unix:s --9p-msize 4095", "9p-msize = 4095 is not from 4K to 16M"),
            ("ferry share mem --9p unix:s --9p-msize 17M", "is not from 4K to 16M"),
            ("ferry share mem --9p vhost-user:s --9p-slow 5", "9p-slow is for clients that connect"),
            ("ferry mount mem /m --9p-msize 1M", "unexpected argument '--9p-msize'"),
            ("ferry mount /a /m --size 1G", "size is for the sources mem"),
            ("ferry mount mem /m --writeback --passthrough on", "exclude each other"),
            ("ferry mount 9p:unix:s /m --writeback --cache none", "--cache none caches none of 9p:unix:s"),
            ("ferry share 9p:unix:s --virtiofs v --writeback --cache metadata", "choose --cache auto or always"),
            ("ferry mount 9p:tcp:h:564/a /m --9p-tree b", "9p-tree and the address 9p:tcp:h:564/a both name a tree"),
            ("ferry mount mem /m --9p-tree b", "9p-tree is for 9p:SERVER"),
            ("ferry mount mem /m --patience 5", "patience is for 9p:SERVER"),
            ("ferry mount 9p:unix:s /m --patience 0", "0"),
            ("ferry mount 9p:unix:s /m --cache-size 15M", "cache-size = 15728640 is too little for 9p:unix:s"),
            ("ferry mount 9p:unix:s /m --cache-size 64M --cache none", "cache-size applies to cached data"),
            ("ferry mount mem /m --cache-size 64M", "cache-size applies to fetched data"),
            ("ferry mount mem /m -o size=1G,fast", "unknown mount option \"fast\""),
            ("ferry mount mem /m -o size=lots", "lots"),
            ("ferry mount mem /m /n", "/n"),
            ("ferry share /a --config f", "--virtiofs <SOCKET>"),
            ("ferry share /a --virtiofs s --config f /b", "--virtiofs <SOCKET>"),
            ("ferry share --tag x --config f", "source"),
        ] {
            let text = refused(line);
            assert!(text.contains(word), "{line}: {text}");
        }
    }
}
