//! `virtiofsd`, or `ferry-virtiofsd`: under these names the program takes the options of virtiofsd 1.14, also in the older form `-o a=b,c` that
//! libvirt passes, and does what `ferry share` does with its own for them.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use clap::Parser;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::process::{Resource, Rlimit, getegid, geteuid, getrlimit, setrlimit};

use crate::sandbox::{Modcaps, Sandbox, Seccomp};
use crate::socket;

/// The name of the program that this stands in for.
const NAME: &str = "virtiofsd";
/// The name that `make install` gives it beside that one.
const INSTALLED: &str = "ferry-virtiofsd";

/// Linux's number for whoever cannot be named (`/proc/sys/kernel/overflowuid`).
const OVERFLOW: u64 = 65_534;
/// One more than the highest number of a user or group.
const IDS: u64 = u32::MAX as u64;
/// Open files that are asked for without a word, if the host has so many for a process.
const NOFILE_USUAL: u64 = 1_000_000;
/// Where the host says how many a process may have at most.
const NR_OPEN: &str = "/proc/sys/fs/nr_open";

/// The file with this process's number, which is locked as long as it is open: until this process ends.
static PID_FILE: Mutex<Option<(PathBuf, File)>> = Mutex::new(None);

/// Whether the program was started under that name.
pub fn is_one(program: &OsStr) -> bool {
    Path::new(program).file_name().is_some_and(|name| name == NAME || name == INSTALLED)
}

/// What the command line comes to.
#[derive(Debug, PartialEq, Eq)]
pub enum VirtiofsdCommand {
    /// To share, after some preparations, by a command line of Ferry's own.
    Share(ProcessSetup, Vec<OsString>),
    /// To print what this back end can do.
    Capabilities,
}

/// What a back end of the kind "fs" says of itself (QEMU, docs/interop/vhost-user.json): what virtiofsd 1.14 says.
pub const CAPABILITIES: &str = r#"{
  "type": "fs",
  "features": [
    "migrate-precopy",
    "posix-acl-negotiation-mode",
    "security-label-negotiation-mode",
    "separate-options"
  ]
}"#;

/// What this process does before it shares.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ProcessSetup {
    /// The limit of open files.
    nofile: Option<u64>,
    /// A file for the number of this process.
    pid_file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum When {
    Never,
    Auto,
    Always,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Cache {
    Auto,
    Always,
    #[value(alias = "none")]
    Never,
    Metadata,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum FileHandles {
    Never,
    #[value(alias = "fallback")]
    Prefer,
    Mandatory,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Level {
    Error,
    #[value(alias = "warning")]
    Warn,
    Info,
    Debug,
    Trace,
    Off,
}

/// Shares a directory with a virtual machine by virtio-fs: Ferry, in the place of virtiofsd.
#[derive(Debug, Parser)]
#[command(name = NAME, version, args_override_self = true, after_help = "More options are in: ferry share --help-all")]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of virtiofsd")]
struct Args {
    /// The directory.
    #[arg(long, value_name = "DIR")]
    shared_dir: Option<PathBuf>,
    /// The tag that the device tells.
    #[arg(long)]
    tag: Option<String>,
    /// The socket to listen on.
    #[arg(long, value_name = "SOCKET", alias = "socket")]
    socket_path: Option<PathBuf>,
    /// The group that may connect, too.
    #[arg(long, value_name = "GROUP", conflicts_with = "fd")]
    socket_group: Option<String>,
    /// An inherited descriptor, a listening socket, instead.
    #[arg(long, value_name = "N", conflicts_with = "socket_path")]
    fd: Option<u16>,
    /// Without effect: threads for requests that wait are started when some do, up to 128.
    #[arg(long, value_name = "N", default_value_t = 0)]
    thread_pool_size: usize,
    /// Extended attributes.
    #[arg(long)]
    xattr: bool,
    /// POSIX ACLs; implies --xattr.
    #[arg(long, value_enum, default_value = "never", default_missing_value = "auto", num_args = 0..=1, require_equals = true)]
    posix_acl: When,
    /// Rules for the names of extended attributes; implies --xattr.
    #[arg(long, value_name = "RULES")]
    xattrmap: Option<String>,
    /// How the process is confined [default: namespace, or what of it can be had here].
    #[arg(long, value_enum)]
    sandbox: Option<Sandbox>,
    /// Mount the directories read-only in the guest.
    #[arg(long)]
    readonly: bool,
    /// What becomes of it if it makes a system call that is none of its own [default: kill].
    #[arg(long, value_enum, value_name = "ACTION")]
    seccomp: Option<Seccomp>,
    /// Show mounts below the directory as such (the default).
    #[arg(long, overrides_with = "no_announce_submounts")]
    announce_submounts: bool,
    /// Show them as directories.
    #[arg(long)]
    no_announce_submounts: bool,
    /// Whether to remember files by file handles.
    #[arg(long, value_enum, default_value = "prefer", value_name = "WHEN")]
    inode_file_handles: FileHandles,
    /// What the guest may keep.
    #[arg(long, value_enum, default_value = "auto")]
    cache: Cache,
    /// Shared mappings with --cache=never and metadata.
    #[arg(long)]
    allow_mmap: bool,
    /// Let listings bring no attributes along.
    #[arg(long)]
    no_readdirplus: bool,
    /// Let the guest hold writes back.
    #[arg(long)]
    writeback: bool,
    /// Open files with `O_DIRECT` where the guest does.
    #[arg(long)]
    allow_direct_io: bool,
    /// POSIX locks need not be met by others (`-o no_posix_lock`).
    #[arg(skip)]
    no_posix_lock: bool,
    /// But those of flock(2) must (`-o flock`).
    #[arg(skip)]
    flock: bool,
    /// Print what this back end can do, in JSON.
    #[arg(long)]
    print_capabilities: bool,
    /// Capabilities to keep or drop besides: +sys_admin:-mknod.
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    modcaps: Option<Modcaps>,
    /// What to log.
    #[arg(long, value_enum, default_value = "info")]
    log_level: Level,
    /// Log to the system's log (/dev/log) instead of standard error.
    #[arg(long)]
    syslog: bool,
    /// The limit of open files; 0 leaves it [default: min(1000000, /proc/sys/fs/nr_open), or what may be had].
    #[arg(long, value_name = "N")]
    rlimit_nofile: Option<u64>,
    /// Options in the older form.
    #[arg(short = 'o', value_name = "OPTIONS")]
    compat_options: Vec<String>,
    /// Log at level debug.
    #[arg(short = 'd')]
    debug: bool,
    /// Without effect.
    #[arg(short = 'f')]
    foreground: bool,
    /// Without effect: it is always offered.
    #[arg(long, overrides_with = "no_killpriv_v2")]
    killpriv_v2: bool,
    /// Without effect: it is always offered.
    #[arg(long)]
    no_killpriv_v2: bool,
    /// Labels of security modules, given to files when they are made; implies --xattr.
    #[arg(long, value_enum, default_value = "never", default_missing_value = "auto", num_args = 0..=1, require_equals = true)]
    security_label: When,
    /// Users of the guest and their numbers here: `:GUEST:HOST:COUNT:`; all others are nobody. With --sandbox=namespace only; for
    /// users other than root, their own number is all that there is.
    #[arg(long, value_name = "MAP")]
    uid_map: Vec<String>,
    /// The same for groups.
    #[arg(long, value_name = "MAP")]
    gid_map: Vec<String>,
    /// Rules for the numbers of users: `TYPE:FROM:TO:COUNT`.
    #[arg(long, value_name = "RULE", conflicts_with = "uid_map")]
    translate_uid: Vec<String>,
    /// The same for groups.
    #[arg(long, value_name = "RULE", conflicts_with = "gid_map")]
    translate_gid: Vec<String>,
    /// Without effect: `O_NOATIME` is kept wherever it is allowed.
    #[arg(long)]
    preserve_noatime: bool,
    /// How files are found after a migration. `file-handles` is to be said on both sides.
    #[arg(long, value_name = "MODE", value_parser = ["find-paths", "file-handles"])]
    migration_mode: Option<String>,
    /// What to do about files that are not found after a migration.
    #[arg(long, value_name = "WHAT", value_parser = ["abort", "guest-error"])]
    migration_on_error: Option<String>,
    /// Have the other side make sure that files are the same.
    #[arg(long)]
    migration_verify_handles: bool,
    /// Without effect: paths are always confirmed.
    #[arg(long)]
    migration_confirm_paths: bool,
}

/// The table of virtiofsd's options.
#[cfg(test)]
pub fn table() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

/// Reads a command line of virtiofsd's. Help, version and mistakes come back as clap's error.
pub fn read(args: impl IntoIterator<Item = OsString>) -> Result<VirtiofsdCommand, clap::Error> {
    let mut args = Args::try_parse_from(args)?;
    let wrong = |text: String| clap::Error::raw(clap::error::ErrorKind::InvalidValue, format!("{text}\n"));
    for options in std::mem::take(&mut args.compat_options) {
        for option in options.split(',').filter(|option| !option.is_empty()) {
            args.compat(option).map_err(wrong)?;
        }
    }
    if args.print_capabilities {
        return Ok(VirtiofsdCommand::Capabilities);
    }
    args.into_share().map_err(wrong)
}

impl Args {
    /// One of the older options.
    fn compat(&mut self, option: &str) -> Result<(), String> {
        let (name, value) = option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
        let needed = || value.map(str::to_owned).ok_or_else(|| format!("-o {name} needs a value: -o {name}=..."));
        fn one_of<T: clap::ValueEnum>(name: &str, word: &str) -> Result<T, String> {
            T::from_str(word, false).map_err(|_| format!("-o {name}={word}: there is no such value"))
        }
        match (name, value) {
            ("source", _) => self.shared_dir = Some(needed()?.into()),
            ("cache", _) => self.cache = one_of(name, &needed()?)?,
            ("sandbox", _) => self.sandbox = Some(one_of(name, &needed()?)?),
            ("loglevel" | "log_level", Some("err")) => self.log_level = Level::Error,
            ("loglevel" | "log_level", _) => self.log_level = one_of(name, &needed()?)?,
            ("modcaps", _) => self.modcaps = Some(needed()?.parse()?),
            ("xattrmap", _) => self.xattrmap = Some(needed()?),
            ("announce_submounts", None) => self.no_announce_submounts = false,
            ("no_announce_submounts", None) => self.no_announce_submounts = true,
            ("xattr", None) => self.xattr = true,
            ("no_xattr", None) => self.xattr = false,
            ("posix_acl", None) => self.posix_acl = When::Auto,
            ("no_posix_acl", None) => self.posix_acl = When::Never,
            ("security_label", None) => self.security_label = When::Auto,
            ("no_security_label", None) => self.security_label = When::Never,
            ("writeback", None) => self.writeback = true,
            ("no_writeback", None) => self.writeback = false,
            ("readdirplus", None) => self.no_readdirplus = false,
            ("no_readdirplus", None) => self.no_readdirplus = true,
            ("allow_direct_io", None) => self.allow_direct_io = true,
            ("no_allow_direct_io", None) => self.allow_direct_io = false,
            ("debug", None) => self.debug = true,
            ("posix_lock", None) => self.no_posix_lock = false,
            ("no_posix_lock", None) => self.no_posix_lock = true,
            ("flock", None) => self.flock = true,
            ("no_flock", None) => self.flock = false,
            // What is so anyway, or was never in virtiofsd 1.
            ("killpriv_v2" | "no_killpriv_v2" | "norace" | "allow_root" | "default_permissions", None)
            | ("timeout", Some(_)) => {}
            _ => return Err(format!("-o {option}: there is no such option")),
        }
        Ok(())
    }

    fn into_share(self) -> Result<VirtiofsdCommand, String> {
        let (has_map, has_acl) = (self.xattrmap.is_some(), self.posix_acl != When::Never);
        let dir = self.shared_dir.as_ref().ok_or("--shared-dir is missing: the directory to share")?;
        let mut line: Vec<OsString> = vec!["ferry".into(), "--log".into()];
        let level = if self.debug { Level::Debug } else { self.log_level };
        line.push(
            clap::ValueEnum::to_possible_value(&level).map_or_else(String::new, |value| value.get_name().into()).into(),
        );
        line.extend(self.syslog.then(|| "--syslog".into()));
        line.extend(["share".into(), dir.into(), "--once".into()]);
        let mut give = |flag: &str, value: OsString| {
            let mut word = OsString::from(flag);
            word.push("=");
            word.push(value);
            line.push(word);
        };
        let mut preparations = ProcessSetup { nofile: self.rlimit_nofile, pid_file: None };
        match (self.socket_path, self.fd) {
            (Some(socket), _) => {
                let mut pid_file = OsString::from(&socket);
                pid_file.push(".pid");
                preparations.pid_file = Some(pid_file.into());
                give("--virtiofs", socket.into());
            }
            (None, Some(fd)) => give("--fd", fd.to_string().into()),
            (None, None) => return Err("--socket-path or --fd is missing: where to listen".into()),
        }
        if let Some(group) = self.socket_group {
            give("--socket-group", group.into());
        }
        if let Some(tag) = self.tag {
            give("--tag", tag.into());
        }
        let cache = match self.cache {
            Cache::Auto => "auto",
            Cache::Always => "always",
            Cache::Never => "none",
            Cache::Metadata => "metadata",
        };
        give("--cache", cache.into());
        let handles = match self.inode_file_handles {
            FileHandles::Never => "never",
            FileHandles::Prefer => "prefer",
            FileHandles::Mandatory => "mandatory",
        };
        give("--inode-file-handles", handles.into());
        for (flag, when) in [("--posix-acl", self.posix_acl), ("--security-label", self.security_label)] {
            let when = match when {
                When::Never => "never",
                When::Auto => "auto",
                When::Always => "always",
            };
            give(flag, when.into());
        }
        if let Some(rules) = self.xattrmap {
            give("--xattrmap", rules.into());
        }
        let word = |value: Option<clap::builder::PossibleValue>| value.map(|value| value.get_name().to_owned());
        for (flag, value) in [
            ("--sandbox", self.sandbox.and_then(|kind| word(clap::ValueEnum::to_possible_value(&kind)))),
            ("--seccomp", self.seccomp.and_then(|action| word(clap::ValueEnum::to_possible_value(&action)))),
            ("--modcaps", self.modcaps.map(|list| list.to_string())),
        ] {
            value.into_iter().for_each(|value| give(flag, value.into()));
        }
        let has_maps = !(self.uid_map.is_empty() && self.gid_map.is_empty());
        if has_maps && self.sandbox.is_some_and(|kind| kind != Sandbox::Namespace) {
            return Err("--uid-map and --gid-map are maps of a namespace, and --sandbox leaves it out: take --translate-uid and \
                        --translate-gid"
                .into());
        }
        let only = |id: u32| (!geteuid().is_root()).then_some(id);
        for (flag, rules, map, maps, only) in [
            ("--translate-uid", self.translate_uid, "--uid-map", self.uid_map, only(geteuid().as_raw())),
            ("--translate-gid", self.translate_gid, "--gid-map", self.gid_map, only(getegid().as_raw())),
        ] {
            let maps = maps.iter().map(|map| Map::parse(map)).collect::<Result<Vec<Map>, String>>()?;
            if let Some(only) = only {
                maps.iter().try_for_each(|one| one.is_for(only).map_err(|why| format!("{map} {why}")))?;
            }
            rules.into_iter().chain(namespace_rules(&maps)).for_each(|rule| give(flag, rule.into()));
        }
        let flags = [
            (self.readonly, "--read-only"),
            (!self.no_announce_submounts, "--announce-submounts"),
            (!(self.xattr || has_map || has_acl || self.security_label != When::Never), "--no-xattr"),
            (!self.allow_mmap && matches!(self.cache, Cache::Never | Cache::Metadata), "--no-mmap"),
            (self.no_readdirplus, "--no-readdirplus"),
            (self.writeback, "--writeback"),
            (self.allow_direct_io, "--allow-direct-io"),
            (self.no_posix_lock && !self.flock, "--local-locks"),
            (self.migration_verify_handles, "--migration-verify-handles"),
        ];
        line.extend(flags.iter().filter(|(on, _)| *on).map(|(_, flag)| flag.into()));
        if let Some(what) = self.migration_on_error {
            line.extend(["--migration-on-error".into(), what.into()]);
        }
        if let Some(mode) = self.migration_mode {
            line.extend(["--migration-mode".into(), mode.into()]);
        }
        Ok(VirtiofsdCommand::Share(preparations, line))
    }
}

impl ProcessSetup {
    /// Carries them out. A limit that may not be raised so far is raised as far as it may.
    ///
    /// # Errors
    /// What cannot be had, in a sentence.
    pub fn make(&self) -> Result<(), String> {
        match self.nofile {
            Some(0) => {}
            Some(limit) => {
                if let Err(error) = set_limit(limit) {
                    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
                    eprintln!(
                        "virtiofsd: --rlimit-nofile {limit}: {error}; it is {most}, the most that this user may have"
                    );
                }
            }
            None => {
                let host = std::fs::read_to_string(NR_OPEN).ok().and_then(|number| number.trim().parse().ok());
                let limit = NOFILE_USUAL.min(host.unwrap_or(NOFILE_USUAL));
                if getrlimit(Resource::Nofile).maximum.is_some_and(|most| most < limit) {
                    // What may be had is no less than before.
                    let _ = set_limit(limit);
                }
            }
        }
        let Some(path) = &self.pid_file else { return Ok(()) };
        let is_locked = |error: &std::io::Error| error.kind() == ErrorKind::WouldBlock;
        let file = socket::retry_in_use(|| write_pid(path), is_locked).map_err(|error| {
            if is_locked(&error) {
                let owner = std::fs::read_to_string(path).unwrap_or_default();
                return format!(
                    "{} is locked by a server that runs, process {}: end that one, or choose another --socket-path",
                    path.display(),
                    owner.trim()
                );
            }
            format!("{} cannot be written: {error}", path.display())
        })?;
        *PID_FILE.lock().unwrap_or_else(PoisonError::into_inner) = Some((path.clone(), file));
        Ok(())
    }
}

/// Lets go of the file with the number of the process that was started, in another one: it is still locked by that one, and a
/// server behind walls has no file outside of them.
pub fn leave_pid_file() {
    *PID_FILE.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

/// Removes the file with this process's number, if it has one and that still has its name: nobody runs whose number it is.
pub fn remove_pid_file() {
    let Some((path, file)) = PID_FILE.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
    if is_at(&path, &file).unwrap_or_default() {
        // Where it cannot be removed it is as it was.
        let _ = std::fs::remove_file(&path);
    }
}

/// Whether a path leads to this file.
fn is_at(path: &Path, file: &File) -> rustix::io::Result<bool> {
    let (file, named) = (rustix::fs::fstat(file)?, rustix::fs::lstat(path)?);
    Ok((named.st_dev, named.st_ino) == (file.st_dev, file.st_ino))
}

/// Sets the limit, and what it can be raised to: a source raises it as far as it may.
fn set_limit(limit: u64) -> rustix::io::Result<()> {
    setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) })
}

/// Writes this process's number down, for its user alone, and not through a link. The file is locked until it is closed, as virtiofsd
/// has it, so that none that is started later takes it.
///
/// # Errors
/// [`ErrorKind::WouldBlock`]: somebody else has locked it, and it is as it was. The system's.
fn write_pid(path: &Path) -> std::io::Result<File> {
    // Not blocking: a FIFO there has nobody who reads.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let mut file = loop {
        let file = File::from(rustix::fs::open(path, flags, mode)?);
        // What is written to is changed: it must be no other file of ours, by another name, and nobody else's.
        let found = rustix::fs::fstat(&file)?;
        let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        if !is_file || found.st_nlink > 1 || found.st_uid != rustix::process::geteuid().as_raw() {
            return Err(std::io::Error::other("it is no regular file of this user's with one name; remove it"));
        }
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        // Between the two somebody may have removed or replaced it.
        if is_at(path, &file).unwrap_or_default() {
            break file;
        }
    };
    file.set_len(0)?;
    rustix::fs::fchmod(&file, mode)?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}

/// A map of a user namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Map {
    guest: u64,
    host: u64,
    count: u64,
}

impl Map {
    fn parse(map: &str) -> Result<Self, String> {
        let wrong = || format!("{map:?} is no map: :GUEST:HOST:COUNT:, as in :0:100000:65536:");
        let separator = map.chars().next().ok_or_else(wrong)?;
        let body = map.strip_prefix(separator).and_then(|map| map.strip_suffix(separator)).ok_or_else(wrong)?;
        let numbers: Vec<u64> = body
            .split(separator)
            .map(str::parse::<u32>)
            .map(|number| number.map(u64::from))
            .collect::<Result<_, _>>()
            .map_err(|_| wrong())?;
        let [guest, host, count] = numbers[..] else { return Err(wrong()) };
        Ok(Self { guest, host, count })
    }

    /// Whether a server that can make files of this number only can go by it.
    fn is_for(self, id: u32) -> Result<(), String> {
        let Self { guest, host, count } = self;
        if host == u64::from(id) && count == 1 {
            return Ok(());
        }
        Err(format!(
            ":{guest}:{host}:{count}:: a server without privileges can make files of its own number only, {id}: start it as root, \
             or with that number alone, as in :0:{id}:1:"
        ))
    }
}

/// The maps of a user namespace as rules for numbers: those of no map are nobody's.
fn namespace_rules(maps: &[Map]) -> Vec<String> {
    if maps.is_empty() {
        return Vec::new();
    }
    let mut rules: Vec<String> =
        maps.iter().map(|Map { guest, host, count }| format!("map:{guest}:{host}:{count}")).collect();
    let inside = maps.iter().map(|map| (map.guest, map.count)).collect();
    let outside = maps.iter().map(|map| (map.host, map.count)).collect();
    rules.extend(gaps(inside).map(|(base, count)| format!("forbid-guest:{base}:{count}")));
    rules.extend(gaps(outside).map(|(base, count)| format!("squash-host:{base}:{OVERFLOW}:{count}")));
    rules
}

/// The ranges of numbers that are in none of these.
fn gaps(mut ranges: Vec<(u64, u64)>) -> impl Iterator<Item = (u64, u64)> {
    ranges.sort_unstable();
    ranges.push((IDS, 0));
    let mut from = 0;
    ranges.into_iter().filter_map(move |(base, count)| {
        let gap = (from, base.saturating_sub(from));
        from = from.max(base + count);
        (gap.1 > 0).then_some(gap)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(args: &str) -> Result<String, String> {
        let words = std::iter::once("virtiofsd").chain(args.split_whitespace()).map(OsString::from);
        match read(words) {
            Ok(VirtiofsdCommand::Share(_, line)) => {
                // What all of them must be able to be read as.
                crate::groups::parse(line.clone()).map_err(|error| error.to_string())?;
                Ok(line.join(OsStr::new(" ")).into_string().expect("text"))
            }
            Ok(VirtiofsdCommand::Capabilities) => Ok("capabilities".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn options_become_flags() {
        let plain = "ferry --log info share /d --once --virtiofs=/s --cache=auto --inode-file-handles=prefer \
                     --posix-acl=never --security-label=never --announce-submounts --no-xattr";
        for args in [
            "--shared-dir /d --socket-path /s",
            "--shared-dir=/d --socket=/s -f --xattr -o no_xattr",
            "-o source=/d,cache=auto,flock,no_posix_lock --socket-path=/s",
            "-o source=/d,cache=auto,no_posix_lock,posix_lock,no_flock --socket-path=/s",
        ] {
            assert_eq!(line(args).as_deref(), Ok(plain), "{args}");
        }
        for (args, word) in [
            ("--cache never", "--cache=none --"),
            ("--cache never", "--no-mmap"),
            ("-o cache=none", "--cache=none"),
            ("--posix-acl", "--posix-acl=auto"),
            ("--posix-acl=always", "--posix-acl=always"),
            ("--security-label", "--security-label=auto"),
            ("-o security_label", "--security-label=auto"),
            ("--security-label=always", "--security-label=always"),
            ("-o log_level=err", "--log error"),
            ("-o loglevel=err", "--log error"),
            ("-o loglevel=debug", "--log debug"),
            ("-d", "--log debug"),
            ("--syslog", "--log info --syslog share /d"),
            ("--xattrmap :map::user.v.:", "--xattrmap=:map::user.v.:"),
            ("--translate-uid map:0:1000:1", "--translate-uid=map:0:1000:1"),
            ("--tag work", "--tag=work"),
            ("--sandbox chroot", "--sandbox=chroot"),
            ("-o sandbox=none,modcaps=+sys_admin", "--sandbox=none --modcaps=+sys_admin"),
            ("--modcaps=-mknod:+LEASE --seccomp log", "--seccomp=log --modcaps=-mknod:+LEASE"),
            ("--inode-file-handles=fallback", "--inode-file-handles=prefer"),
            ("--migration-mode=file-handles", "--migration-mode file-handles"),
            ("--migration-verify-handles", "--migration-verify-handles"),
            ("--migration-on-error=guest-error", "--migration-on-error guest-error"),
            ("--socket-group kvm", "--socket-group=kvm"),
            ("--readonly", "--read-only"),
            ("--no-readdirplus", "--no-readdirplus"),
            ("-o no_readdirplus", "--no-readdirplus"),
            ("--writeback", "--writeback"),
            ("-o writeback", "--writeback"),
            ("--allow-direct-io", "--allow-direct-io"),
            ("-o posix_lock,no_posix_lock,flock,no_flock", "--local-locks"),
            ("-o allow_direct_io", "--allow-direct-io"),
            ("--no-announce-submounts --announce-submounts", "--announce-submounts"),
            ("--inode-file-handles=never", "--inode-file-handles=never"),
            ("--inode-file-handles=mandatory", "--inode-file-handles=mandatory"),
            // Of what is said twice the last holds; lists are added to.
            ("--cache=never --cache always", "--cache=always --"),
            ("--xattr --xattr --readonly --readonly", "--read-only"),
            ("--socket-path /t --shared-dir /e --socket-path /s --shared-dir /d", "share /d --once --virtiofs=/s "),
            ("--tag one --tag two", "--tag=two"),
            ("--posix-acl=always --posix-acl", "--posix-acl=auto"),
            ("--sandbox none --sandbox chroot --seccomp none --seccomp=trap", "--sandbox=chroot --seccomp=trap"),
            ("-d -d -f -f --log-level error --log-level info", "--log debug"),
            ("--xattrmap :ok:all::: --xattrmap :map::user.v.:", "--xattrmap=:map::user.v.:"),
            ("--modcaps -mknod --modcaps +lease", "--modcaps=+lease"),
            (
                "--translate-uid map:0:1000:1 --translate-uid map:5:5:1",
                "--translate-uid=map:0:1000:1 --translate-uid=map:5:5:1",
            ),
        ] {
            let line = line(&format!("--shared-dir /d --socket-path /s {args}")).expect(args);
            assert!(line.contains(word), "{args}: {line}");
        }
        assert!(!line("--shared-dir /d --fd 5 --xattr --cache=never --allow-mmap").expect("fd").contains("--no-"));
        let without = line("--shared-dir /d --fd 5 --announce-submounts --no-announce-submounts").expect("submounts");
        assert!(!without.contains("--announce-submounts"), "{without}");
        assert_eq!(line("--print-capabilities").as_deref(), Ok("capabilities"));
    }

    #[test]
    fn what_cannot_be_is_said() {
        for (args, words) in [
            ("--socket-path /s", "--shared-dir is missing"),
            ("--shared-dir /d", "--socket-path or --fd is missing"),
            ("--shared-dir /d --socket-path /s -o nonsense", "nonsense: there is no such option"),
            ("--shared-dir /d --socket-path /s -o cache=some", "cache=some: there is no such value"),
            ("--shared-dir /d --socket-path /s -o source", "needs a value"),
            ("--shared-dir /d --socket-path /s -o modcaps=all", "no list of capabilities"),
            ("--shared-dir /d --socket-path /s --sandbox=jail", "jail"),
            ("--shared-dir /d --socket-path /s --uid-map 0:1:2", "is no map"),
            ("--shared-dir /d --socket-path /s --uid-map :0:x:2:", "is no map"),
            ("--shared-dir /d --socket-path /s --uid-map :0:1:2: --sandbox none", "--translate-uid"),
            ("--shared-dir /d --socket-path /s --gid-map :0:1:2: --sandbox=chroot", "maps of a namespace"),
        ] {
            let error = line(args).expect_err(args);
            assert!(error.contains(words), "{args}: {error}");
        }
    }

    #[test]
    fn maps_of_a_namespace_leave_all_others_out() {
        let maps = [":0:100000:65536:", "/70000/5/1/"].map(|map| Map::parse(map).expect(map));
        let rules = namespace_rules(&maps);
        let expected = [
            "map:0:100000:65536",
            "map:70000:5:1",
            "forbid-guest:65536:4464",
            "forbid-guest:70001:4294897294",
            "squash-host:0:65534:5",
            "squash-host:6:65534:99994",
            "squash-host:165536:65534:4294801759",
        ];
        assert_eq!(rules, expected);
        let rules: Vec<ferry_idmap::Rule> = rules.iter().map(|rule| rule.parse().expect(rule)).collect();
        ferry_idmap::Ids::new(&rules).expect("no two of one number");
    }

    #[test]
    fn a_map_that_takes_privileges_is_refused_without_them() {
        let map = |map| Map::parse(map).expect(map).is_for(1000);
        assert_eq!(map(":0:1000:1:"), Ok(()));
        assert_eq!(map(":5:1000:1:"), Ok(()));
        for refused in [":0:1000:2:", ":1:100000:65536:", ":0:0:1:"] {
            let said = map(refused).expect_err(refused);
            assert!(said.starts_with(refused) && said.ends_with("as in :0:1000:1:"), "{said}");
        }
    }

    /// The file's place is known beforehand: somebody may have put there what is to be overwritten.
    #[test]
    fn a_process_number_is_written_to_a_file_of_its_own_alone() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("precious"), "precious").expect("a file");
        std::fs::hard_link(at("precious"), at("linked")).expect("a link");
        symlink(at("precious"), at("symlink")).expect("a link");
        rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a FIFO");
        for name in ["linked", "symlink", "fifo"] {
            write_pid(&at(name)).expect_err(name);
        }
        let found = std::fs::metadata(at("precious")).expect("it is there");
        assert_eq!(std::fs::read(at("precious")).expect("it is there"), b"precious");
        assert_ne!(found.permissions().mode() & 0o777, 0o600);
        let file = write_pid(&at("pid")).expect("a free path");
        assert_eq!(write_pid(&at("pid")).expect_err("it is locked").kind(), ErrorKind::WouldBlock);
        drop(file);
        let _again = write_pid(&at("pid")).expect("it was left");
        assert_eq!(std::fs::read_to_string(at("pid")).expect("it is there").trim(), std::process::id().to_string());
    }

    #[test]
    fn capabilities_are_json() {
        let found: serde_json::Value = serde_json::from_str(CAPABILITIES).expect("JSON");
        assert_eq!(found["type"], "fs");
    }
}
