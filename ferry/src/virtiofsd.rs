//! `virtiofsd`, or `ferry-virtiofsd`: under these names the program takes the options of virtiofsd 1.14, including the older form
//! `-o a=b,c` that libvirt passes, and runs `ferry share` with the corresponding flags.

mod maps;
mod process;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::Parser;
use ferry_control::MetricsAddress;
use rustix::process::{getegid, geteuid};

use crate::flags::Acl;
use crate::sandbox::{Modcaps, Sandbox, Seccomp};
use maps::{Map, namespace_rules};
pub use process::{ProcessSetup, leave_pid_file, remove_pid_file};

/// The name of the program that this replaces.
const NAME: &str = "virtiofsd";
/// The other name that `make install` gives it.
const INSTALLED: &str = "ferry-virtiofsd";

/// Whether the program was started under one of these names.
pub fn is_virtiofsd(program: &OsStr) -> bool {
    Path::new(program).file_name().is_some_and(|name| name == NAME || name == INSTALLED)
}

/// The parsed command line.
#[derive(Debug, PartialEq, Eq)]
pub enum VirtiofsdCommand {
    /// Run this command line of `ferry`, after the setup of the process.
    Share(ProcessSetup, Vec<OsString>),
    /// Print the capabilities of this back end.
    Capabilities,
}

/// The capabilities of a back end of type "fs" (QEMU, docs/interop/vhost-user.json): those of virtiofsd 1.14.
pub const CAPABILITIES: &str = r#"{
  "type": "fs",
  "features": [
    "migrate-precopy",
    "posix-acl-negotiation-mode",
    "security-label-negotiation-mode",
    "separate-options"
  ]
}"#;

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

/// Share a directory with a virtual machine over virtio-fs: Ferry as a replacement for virtiofsd.
#[derive(Debug, Parser)]
#[command(name = NAME, version, args_override_self = true, after_help = "More options are in: ferry share --help-all")]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of virtiofsd")]
struct Args {
    /// The directory.
    #[arg(long, value_name = "DIR")]
    shared_dir: Option<PathBuf>,
    /// The tag that the device offers.
    #[arg(long)]
    tag: Option<String>,
    /// The socket to listen on.
    #[arg(long, value_name = "SOCKET", alias = "socket")]
    socket_path: Option<PathBuf>,
    /// A group that may also connect.
    #[arg(long, value_name = "GROUP", conflicts_with = "fd")]
    socket_group: Option<String>,
    /// An inherited descriptor of a listening socket.
    #[arg(long, value_name = "N", conflicts_with = "socket_path")]
    fd: Option<u16>,
    /// No effect: threads for blocking requests are started on demand, up to 128.
    #[arg(long, value_name = "N", default_value_t = 0)]
    thread_pool_size: usize,
    /// Enable extended attributes.
    #[arg(long)]
    xattr: bool,
    /// Enable POSIX ACLs; implies --xattr.
    #[arg(long, value_enum, default_value = "never", default_missing_value = "auto", num_args = 0..=1, require_equals = true)]
    posix_acl: Acl,
    /// Rules that rename extended attributes; implies --xattr.
    #[arg(long, value_name = "RULES")]
    xattrmap: Option<String>,
    /// The confinement of the process [default: namespace, or the available part of it].
    #[arg(long, value_enum)]
    sandbox: Option<Sandbox>,
    /// Mount the directories read-only in the guest.
    #[arg(long)]
    readonly: bool,
    /// The action on a system call that the server does not need [default: kill].
    #[arg(long, value_enum, value_name = "ACTION")]
    seccomp: Option<Seccomp>,
    /// Show mounts below the directory as mounts (the default).
    #[arg(long, overrides_with = "no_announce_submounts")]
    announce_submounts: bool,
    /// Show mounts below the directory as directories.
    #[arg(long)]
    no_announce_submounts: bool,
    /// Whether to refer to files by file handles.
    #[arg(long, value_enum, default_value = "prefer", value_name = "WHEN")]
    inode_file_handles: FileHandles,
    /// What the guest may cache.
    #[arg(long, value_enum, default_value = "auto")]
    cache: Cache,
    /// Allow shared mappings with --cache=never and metadata.
    #[arg(long)]
    allow_mmap: bool,
    /// List directories without attributes.
    #[arg(long)]
    no_readdirplus: bool,
    /// Let the guest cache writes.
    #[arg(long)]
    writeback: bool,
    /// Open files with `O_DIRECT` if the guest does.
    #[arg(long)]
    allow_direct_io: bool,
    /// POSIX locks may stay in the guest (`-o no_posix_lock`).
    #[arg(skip)]
    no_posix_lock: bool,
    /// Locks of flock(2) must not stay in the guest (`-o flock`).
    #[arg(skip)]
    flock: bool,
    /// Print the capabilities of this back end, in JSON.
    #[arg(long)]
    print_capabilities: bool,
    /// Additional capabilities to keep or drop: +sys_admin:-mknod.
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    modcaps: Option<Modcaps>,
    /// What to log.
    #[arg(long, value_enum, default_value = "info")]
    log_level: Level,
    /// Log to the system's log (/dev/log) instead of standard error.
    #[arg(long)]
    syslog: bool,
    /// The limit of open files; 0: unchanged [default: min(1000000, /proc/sys/fs/nr_open), or the possible maximum].
    #[arg(long, value_name = "N")]
    rlimit_nofile: Option<u64>,
    /// Options in the older syntax.
    #[arg(short = 'o', value_name = "OPTIONS")]
    compat_options: Vec<String>,
    /// Log at level debug.
    #[arg(short = 'd')]
    debug: bool,
    /// No effect.
    #[arg(short = 'f')]
    foreground: bool,
    /// No effect: it is always offered.
    #[arg(long, overrides_with = "no_killpriv_v2")]
    killpriv_v2: bool,
    /// No effect: it is always offered.
    #[arg(long)]
    no_killpriv_v2: bool,
    /// Give new files the labels of security modules; implies --xattr.
    #[arg(long, value_enum, default_value = "never", default_missing_value = "auto", num_args = 0..=1, require_equals = true)]
    security_label: Acl,
    /// Map user ids of the guest to host ids: `:GUEST:HOST:COUNT:`; all others belong to nobody. Only with --sandbox=namespace;
    /// users other than root can map only their own id.
    #[arg(long, value_name = "MAP")]
    uid_map: Vec<String>,
    /// The same for groups.
    #[arg(long, value_name = "MAP")]
    gid_map: Vec<String>,
    /// Translate user ids: `TYPE:FROM:TO:COUNT`.
    #[arg(long, value_name = "RULE", conflicts_with = "uid_map")]
    translate_uid: Vec<String>,
    /// The same for groups.
    #[arg(long, value_name = "RULE", conflicts_with = "gid_map")]
    translate_gid: Vec<String>,
    /// No effect: `O_NOATIME` is used wherever it is allowed.
    #[arg(long)]
    preserve_noatime: bool,
    /// How the destination of a migration finds files. Both sides must use `file-handles`, or neither.
    #[arg(long, value_name = "MODE", value_parser = ["find-paths", "file-handles"])]
    migration_mode: Option<String>,
    /// What happens to files that the destination of a migration does not find.
    #[arg(long, value_name = "WHAT", value_parser = ["abort", "guest-error"])]
    migration_on_error: Option<String>,
    /// Let the destination of a migration verify files by file handle.
    #[arg(long)]
    migration_verify_handles: bool,
    /// No effect: paths are always confirmed.
    #[arg(long)]
    migration_confirm_paths: bool,
    /// Serve metrics over HTTP at 127.0.0.1:PORT, [::1]:PORT or unix:PATH, as /metrics. Only Ferry has this option.
    #[allow(rustdoc::broken_intra_doc_links, reason = "an address, in the text of the help")]
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<MetricsAddress>,
}

/// Returns the table of virtiofsd's options.
pub fn table() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

/// Parses a command line of virtiofsd. Help, version and errors are returned as clap's error.
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
    /// Applies an option of the older syntax.
    fn compat(&mut self, option: &str) -> Result<(), String> {
        let (name, value) = option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
        let needed = || value.map(str::to_owned).ok_or_else(|| format!("-o {name} needs a value: -o {name}=..."));
        fn parse_value<T: clap::ValueEnum>(name: &str, word: &str) -> Result<T, String> {
            T::from_str(word, false).map_err(|_| format!("-o {name}={word}: there is no such value"))
        }
        let unknown = || format!("-o {option}: there is no such option");
        match (name, value) {
            ("source", _) => self.shared_dir = Some(needed()?.into()),
            ("cache", _) => self.cache = parse_value(name, &needed()?)?,
            ("sandbox", _) => self.sandbox = Some(parse_value(name, &needed()?)?),
            ("loglevel" | "log_level", Some("err")) => self.log_level = Level::Error,
            ("loglevel" | "log_level", _) => self.log_level = parse_value(name, &needed()?)?,
            ("modcaps", _) => self.modcaps = Some(needed()?.parse()?),
            ("xattrmap", _) => self.xattrmap = Some(needed()?),
            // The default, or never in virtiofsd 1.
            ("norace" | "allow_root" | "default_permissions", None) | ("timeout", Some(_)) => {}
            ("debug", None) => self.debug = true,
            (name, None) => {
                let (name, is_on) = name.strip_prefix("no_").map_or((name, true), |name| (name, false));
                let acl = if is_on { Acl::Auto } else { Acl::Never };
                match name {
                    "announce_submounts" => self.no_announce_submounts = !is_on,
                    "xattr" => self.xattr = is_on,
                    "posix_acl" => self.posix_acl = acl,
                    "security_label" => self.security_label = acl,
                    "writeback" => self.writeback = is_on,
                    "readdirplus" => self.no_readdirplus = !is_on,
                    "allow_direct_io" => self.allow_direct_io = is_on,
                    "posix_lock" => self.no_posix_lock = !is_on,
                    "flock" => self.flock = is_on,
                    // Always on.
                    "killpriv_v2" => {}
                    _ => return Err(unknown()),
                }
            }
            _ => return Err(unknown()),
        }
        Ok(())
    }

    fn into_share(self) -> Result<VirtiofsdCommand, String> {
        let (has_map, has_acl) = (self.xattrmap.is_some(), self.posix_acl != Acl::Never);
        let dir = self.shared_dir.as_ref().ok_or("--shared-dir is missing: the directory to share")?;
        let mut line: Vec<OsString> = vec!["ferry".into(), "--log".into()];
        let level = if self.debug { Level::Debug } else { self.log_level };
        line.push(word(&level));
        line.extend(self.syslog.then(|| "--syslog".into()));
        line.extend(["share".into(), dir.into(), "--once".into()]);
        let mut give = |flag: &str, value: OsString| {
            let mut word = OsString::from(flag);
            word.push("=");
            word.push(value);
            line.push(word);
        };
        let mut setup = ProcessSetup { nofile: self.rlimit_nofile, pid_file: None };
        match (self.socket_path, self.fd) {
            (Some(socket), _) => {
                let mut pid_file = OsString::from(&socket);
                pid_file.push(".pid");
                setup.pid_file = Some(pid_file.into());
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
        give("--inode-file-handles", word(&self.inode_file_handles));
        give("--posix-acl", word(&self.posix_acl));
        give("--security-label", word(&self.security_label));
        if let Some(rules) = self.xattrmap {
            give("--xattrmap", rules.into());
        }
        for (flag, value) in [
            ("--sandbox", self.sandbox.as_ref().map(word)),
            ("--seccomp", self.seccomp.as_ref().map(word)),
            ("--modcaps", self.modcaps.map(|list| list.to_string().into())),
        ] {
            value.into_iter().for_each(|value| give(flag, value));
        }
        let has_maps = !(self.uid_map.is_empty() && self.gid_map.is_empty());
        if has_maps && self.sandbox.is_some_and(|kind| kind != Sandbox::Namespace) {
            return Err(
                "--uid-map and --gid-map are maps of a namespace, which --sandbox disables: use --translate-uid and \
                        --translate-gid"
                    .into(),
            );
        }
        let only = |id: u32| (!geteuid().is_root()).then_some(id);
        for (flag, rules, map, maps, only) in [
            ("--translate-uid", self.translate_uid, "--uid-map", self.uid_map, only(geteuid().as_raw())),
            ("--translate-gid", self.translate_gid, "--gid-map", self.gid_map, only(getegid().as_raw())),
        ] {
            let maps = maps.iter().map(|map| Map::parse(map)).collect::<Result<Vec<Map>, String>>()?;
            if let Some(only) = only {
                maps.iter().try_for_each(|one| one.check_id(only).map_err(|why| format!("{map} {why}")))?;
            }
            rules.into_iter().chain(namespace_rules(&maps)).for_each(|rule| give(flag, rule.into()));
        }
        let flags = [
            (self.readonly, "--read-only"),
            (!self.no_announce_submounts, "--announce-submounts"),
            (!(self.xattr || has_map || has_acl || self.security_label != Acl::Never), "--no-xattr"),
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
        if let Some(metrics) = self.metrics {
            line.extend(["--metrics".into(), metrics.to_string().into()]);
        }
        Ok(VirtiofsdCommand::Share(setup, line))
    }
}

/// Returns the word that the command line has for a value.
fn word<T: clap::ValueEnum>(value: &T) -> OsString {
    value.to_possible_value().map(|value| value.get_name().into()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(args: &str) -> Result<String, String> {
        let words = std::iter::once("virtiofsd").chain(args.split_whitespace()).map(OsString::from);
        match read(words) {
            Ok(VirtiofsdCommand::Share(_, line)) => {
                // The result is a valid command line.
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
            ("--metrics=127.0.0.1:9100", "--metrics 127.0.0.1:9100"),
            ("--metrics unix:/m", "--metrics unix:/m"),
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
            // The last value wins; lists are extended.
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
    fn impossible_options_are_reported() {
        for (args, words) in [
            ("--socket-path /s", "--shared-dir is missing"),
            ("--shared-dir /d", "--socket-path or --fd is missing"),
            ("--shared-dir /d --socket-path /s -o nonsense", "nonsense: there is no such option"),
            ("--shared-dir /d --socket-path /s -o cache=some", "cache=some: there is no such value"),
            ("--shared-dir /d --socket-path /s -o source", "needs a value"),
            ("--shared-dir /d --socket-path /s -o modcaps=all", "not a list of capabilities"),
            ("--shared-dir /d --socket-path /s --sandbox=jail", "jail"),
            ("--shared-dir /d --socket-path /s --uid-map 0:1:2", "is not a map"),
            ("--shared-dir /d --socket-path /s --uid-map :0:x:2:", "is not a map"),
            ("--shared-dir /d --socket-path /s --uid-map :0:1:2: --sandbox none", "--translate-uid"),
            ("--shared-dir /d --socket-path /s --gid-map :0:1:2: --sandbox=chroot", "maps of a namespace"),
        ] {
            let error = line(args).expect_err(args);
            assert!(error.contains(words), "{args}: {error}");
        }
    }

    #[test]
    fn capabilities_are_json() {
        let found: serde_json::Value = serde_json::from_str(CAPABILITIES).expect("JSON");
        assert_eq!(found["type"], "fs");
    }
}
