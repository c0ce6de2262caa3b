//! `-o` in the syntax of mount(8) and fstab(5): flags of the command become those flags, mount options stay, and options for
//! mount(8) itself are dropped.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use ferry_control::nearest;
use ferry_fuse::MountOptions;

/// Options that are the default, or only for mount(8), systemd and the like.
const IGNORED: [&str; 29] = [
    "defaults",
    "rw",
    "exec",
    "async",
    "atime",
    "relatime",
    "diratime",
    "nostrictatime",
    "nolazytime",
    "auto",
    "noauto",
    "nofail",
    "_netdev",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "loud",
    "silent",
    "iversion",
    "noiversion",
    "mand",
    "nomand",
    "comment",
    "norelatime",
    "_rnetdev",
    // Permissions are always checked by the kernel.
    "default_permissions",
    // A permission to keep times in memory, which the kernel does not do for these mounts.
    "lazytime",
];

/// Options of other file systems, with their replacement.
const UNSUPPORTED: [(&str, &str); 15] = [
    ("allow_root", "allow_other admits other users, including root"),
    ("kernel_cache", "cache=always caches data until a notification of a change"),
    ("auto_cache", "cache=auto, the default, does that"),
    ("direct_io", "cache=none caches no data of files"),
    ("writeback_cache", "writeback does that"),
    ("no_remote_lock", "local_locks does that"),
    ("max_read", "the kernel limits READs to 1 MiB; omit it"),
    ("max_write", "the kernel limits WRITEs to 1 MiB; omit it"),
    ("max_background", "the number is fixed; omit it"),
    ("uid", "map_user=UID:GID maps one user to root, translate_uid translates ids"),
    ("gid", "map_user=UID:GID maps one user to root, translate_gid translates ids"),
    ("umask", "modes come from the source; omit it"),
    ("context", "labels come from the source (security.selinux); omit it"),
    ("noforget", "inodes stay valid while the kernel references them; omit it"),
    ("remount", "mount -o remount,ro MOUNTPOINT changes an existing mount"),
];

/// An option, and the earlier option that it cancels.
const OPPOSITES: [(&str, &str); 12] = [
    ("rw", "read-only"),
    ("suid", "nosuid"),
    ("nosuid", "suid"),
    ("dev", "nodev"),
    ("nodev", "dev"),
    ("exec", "noexec"),
    ("atime", "noatime"),
    ("diratime", "nodiratime"),
    ("nostrictatime", "strictatime"),
    ("relatime", "noatime"),
    ("relatime", "strictatime"),
    ("async", "sync"),
];

/// Options whose values have commas, and the names that stand after these: what follows is a part of the value, not an option.
const LISTS: [(&str, &[&str]); 3] =
    [("limit", &["iops", "bps", "burst", "group"]), ("quota", &["files"]), ("trace", &["seconds"])];

/// Access to a field of [`MountOptions`].
type Field = fn(&mut MountOptions) -> &mut bool;

/// The options of mounts of any type.
const MOUNT_WORDS: [(&str, Field); 9] = [
    ("nosuid", |options| &mut options.nosuid),
    ("nodev", |options| &mut options.nodev),
    ("noexec", |options| &mut options.noexec),
    ("noatime", |options| &mut options.noatime),
    ("nodiratime", |options| &mut options.nodiratime),
    ("strictatime", |options| &mut options.strictatime),
    ("sync", |options| &mut options.sync),
    ("dirsync", |options| &mut options.dirsync),
    ("auto_unmount", |options| &mut options.auto_unmount),
];

/// Permissions that foreign files get only by these options.
const PERMISSION_WORDS: [(&str, Field); 2] =
    [("suid", |options| &mut options.nosuid), ("dev", |options| &mut options.nodev)];

/// Returns the mount options in the words that [`expand`] left in `-o`. `foreign`: owners and types of files come from outside
/// this host.
pub fn of_mount(words: &[String], foreign: bool) -> MountOptions {
    let mut options = MountOptions::default();
    let is_given = |name: &str| words.iter().any(|word| word == name);
    for (_, field) in MOUNT_WORDS.iter().filter(|(name, _)| is_given(name)) {
        *field(&mut options) = true;
    }
    for (_, field) in PERMISSION_WORDS.iter().filter(|(name, _)| foreign && !is_given(name)) {
        *field(&mut options) = true;
    }
    options
}

/// Whether a word is an option of mounts of any type.
fn is_mount_word(name: &str) -> bool {
    MOUNT_WORDS.iter().chain(&PERMISSION_WORDS).any(|(word, _)| *word == name)
}

/// Options that the kernel lists for FUSE mounts, and mount(8) repeats in a remount.
const KERNEL_WORDS: [&str; 5] = ["user_id", "group_id", "max_read", "blksize", "remount"];

/// The changes of a remount.
#[derive(Debug, PartialEq, Eq)]
pub struct Remount {
    /// The new mount options.
    pub options: MountOptions,
    /// Options that a remount cannot change.
    pub unchanged: Vec<String>,
}

/// Parses the values of `-o` if they contain `remount`. mount(8) adds the current options of the mount. `foreign`: as for
/// [`of_mount`].
pub fn remount(table: &clap::Command, values: &[OsString], foreign: bool) -> Result<Option<Remount>, String> {
    let words: Vec<_> = values.iter().flat_map(|value| split(value.as_bytes())).collect();
    if !words.iter().any(|word| word == b"remount") {
        return Ok(None);
    }
    let mount = table.find_subcommand("mount").expect("the table has the command");
    let mut flags = Flags { mount, words: BTreeMap::new() };
    for word in words {
        let (name, value) = name_and_value(&word);
        if !KERNEL_WORDS.contains(&&*name) {
            flags.word(&name, value)?;
        }
    }
    let read_only = flags.words.remove("read-only").is_some();
    flags.words.remove("allow-other");
    let (of_mount, others): (Vec<_>, Vec<_>) = flags.words.into_iter().partition(|(name, _)| is_mount_word(name));
    let of_mount: Vec<String> = of_mount.into_iter().map(|(name, _)| name).collect();
    let options = MountOptions { read_only, ..self::of_mount(&of_mount, foreign) };
    let said = |(name, value): (String, Option<OsString>)| match value {
        Some(value) => format!("{name}={}", value.display()),
        None => name,
    };
    Ok(Some(Remount { options, unchanged: others.into_iter().map(said).collect() }))
}

/// Rewrites the arguments of `ferry mount`: replaces every `-o`.
pub fn expand(table: &clap::Command, args: &[OsString]) -> Result<Vec<OsString>, String> {
    let mount = table.find_subcommand("mount").expect("the table has the command");
    let mut flags = Flags { mount, words: BTreeMap::new() };
    let mut rest = Vec::new();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_bytes() {
            b"--" => {
                rest.push(arg.clone());
                rest.extend(args.by_ref().cloned());
            }
            b"-o" => flags.read(args.next().ok_or("-o is given without options after it")?)?,
            [b'-', b'o', options @ ..] => flags.read(OsStr::from_bytes(options))?,
            // No flag has the value `-o`.
            _ => rest.push(arg.clone()),
        }
    }
    // These go first, so that clap reports repeated flags.
    Ok(flags.into_args().chain(rest).collect())
}

/// The parsed options; the last one of each name wins.
struct Flags<'a> {
    mount: &'a clap::Command,
    words: BTreeMap<String, Option<OsString>>,
}

impl Flags<'_> {
    fn read(&mut self, options: &OsStr) -> Result<(), String> {
        for option in split(options.as_bytes()) {
            let (name, value) = name_and_value(&option);
            self.word(&name, value)?;
        }
        Ok(())
    }

    fn word(&mut self, name: &str, value: Option<OsString>) -> Result<(), String> {
        for (_, flag) in OPPOSITES.iter().filter(|(word, _)| *word == name) {
            self.words.remove(*flag);
        }
        if let (Some((list, _)), Some(value)) = (LISTS.iter().find(|(_, names)| names.contains(&name)), &value)
            && let Some(Some(text)) = self.words.get_mut(*list)
        {
            text.push(format!(",{name}="));
            text.push(value);
            return Ok(());
        }
        let own = if name == "ro" { "read-only".to_owned() } else { name.replace('_', "-") };
        if name.is_empty() || IGNORED.contains(&name) || name.starts_with("x-") || name.starts_with("X-") {
            return Ok(());
        }
        if is_mount_word(name) {
            return match value {
                None => {
                    self.words.insert(name.into(), None);
                    Ok(())
                }
                Some(value) => Err(format!("the mount option {name:?} takes no value, but has {value:?}")),
            };
        }
        if let Some((_, instead)) = UNSUPPORTED.iter().find(|(word, _)| *word == name) {
            return Err(format!("ferry does not support the mount option {name:?}: {instead}"));
        }
        let Some(flag) = self.mount.get_arguments().find(|arg| arg.get_long() == Some(&own) && !arg.is_hide_set())
        else {
            let flags = self.mount.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(clap::Arg::get_long);
            let words = flags.chain(MOUNT_WORDS.iter().chain(&PERMISSION_WORDS).map(|(word, _)| *word));
            let meant = nearest(&own, words).map(|word| format!(": did you mean {:?}?", word.replace('-', "_")));
            let meant = meant.unwrap_or_else(|| "; see ferry mount --help".into());
            return Err(format!("unknown mount option {name:?}{meant}"));
        };
        match (flag.get_action().takes_values(), value) {
            (true, None) => Err(format!("the mount option {name:?} needs a value: {name}=VALUE")),
            (false, Some(value)) => Err(format!("the mount option {name:?} takes no value, but has {value:?}")),
            (_, value) => {
                self.words.insert(own, value);
                Ok(())
            }
        }
    }

    fn into_args(self) -> impl Iterator<Item = OsString> {
        self.words.into_iter().flat_map(|(name, value)| {
            if is_mount_word(&name) {
                return vec!["-o".into(), name.into()];
            }
            let mut arg = OsString::from(format!("--{name}"));
            if let Some(value) = value {
                arg.push("=");
                arg.push(value);
            }
            vec![arg]
        })
    }
}

fn name_and_value(option: &[u8]) -> (String, Option<OsString>) {
    let mut parts = option.splitn(2, |&byte| byte == b'=');
    let name = String::from_utf8_lossy(parts.next().unwrap_or_default()).into_owned();
    (name, parts.next().map(|value| OsString::from_vec(value.to_vec())))
}

/// Splits at commas; a backslash escapes a comma or a backslash.
fn split(options: &[u8]) -> Vec<Vec<u8>> {
    let mut parts = vec![Vec::new()];
    let mut bytes = options.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        let last = parts.last_mut().expect("the list starts with one part");
        match (byte, bytes.peek()) {
            (b'\\', Some(b',' | b'\\')) => last.extend(bytes.next()),
            (b',', _) => parts.push(Vec::new()),
            _ => last.push(byte),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(line: &str) -> Result<String, String> {
        let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let args = expand(&crate::cli::table(), &args)?;
        Ok(args.iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn options_become_flags() {
        for (line, args) in [
            ("mem /m", "mem /m"),
            ("mem /m -o size=1G,allow_other,allow-direct-io", "--allow-direct-io --allow-other --size=1G mem /m"),
            ("mem /m -oro -o noatime", "-o noatime --read-only mem /m"),
            ("mem /m -o ro,rw", "mem /m"),
            ("mem /m -o rw,ro", "--read-only mem /m"),
            ("mem /m -o nosuid,suid,nodev", "-o nodev -o suid mem /m"),
            ("mem /m -o suid,dev,nosuid", "-o dev -o nosuid mem /m"),
            ("mem /m -o size=1G,size=2G", "--size=2G mem /m"),
            ("mem /m -o defaults,_netdev,nofail,x-systemd.automount,user=joe,,noauto", "mem /m"),
            ("mem /m -o default_permissions,lazytime,ro", "--read-only mem /m"),
            ("/s /m -o limit=iops=5,bps=1M,ro,group=g", "--limit=iops=5,bps=1M,group=g --read-only /s /m"),
            ("/s /m -o quota=1G,files=5 -o limit=bps=1M,iops=5", "--limit=bps=1M,iops=5 --quota=1G,files=5 /s /m"),
            (r"/s /m -o quota=1G\,files=5,limit=iops=1,limit=iops=2", "--limit=iops=2 --quota=1G,files=5 /s /m"),
            ("/s /m -o trace=f,seconds=3", "--trace=f,seconds=3 /s /m"),
            // An option of mount(8), for users.
            ("/s /m -o limit=iops=5,group", "--limit=iops=5 /s /m"),
            (r"mem /m -o fsname=a\,b\\c=d", r"--fsname=a,b\c=d mem /m"),
            ("-o ro -- -o /m", "--read-only -- -o /m"),
        ] {
            assert_eq!(expanded(line).as_deref(), Ok(args), "{line}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (line, words) in [
            ("mem /m -o", "without options"),
            ("mem /m -o fast", "unknown mount option \"fast\""),
            ("mem /m -o allow_others", "unknown mount option \"allow_others\": did you mean \"allow_other\"?"),
            ("mem /m -o files=5,quota=1G", "unknown mount option \"files\""),
            ("mem /m -o limit=iops=5,files=1", "unknown mount option \"files\""),
            ("mem /m -o noatimes", "did you mean \"noatime\"?"),
            ("mem /m -o virtiofs=s", "unknown mount option \"virtiofs\""),
            ("mem /m -o detached", "unknown mount option \"detached\""),
            ("mem /m -o allow_root", "\"allow_root\": allow_other"),
            ("mem /m -o kernel_cache", "cache=always"),
            ("mem /m -o max_read=4096", "to 1 MiB"),
            ("mem /m -o uid=1000", "map_user=UID:GID"),
            ("mem /m -o umask=022", "omit it"),
            ("mem /m -o context=system_u:object_r:x:s0", "security.selinux"),
            ("mem /m -o remount,ro", "mount -o remount,ro MOUNTPOINT"),
            ("mem /m -o size", "\"size\" needs a value"),
            ("mem /m -o ro=1", "\"ro\" takes no value"),
            ("mem /m -o nosuid=1", "\"nosuid\" takes no value"),
        ] {
            let error = expanded(line).expect_err(line);
            assert!(error.contains(words), "{line}: {error}");
        }
    }

    /// The advice names options that exist.
    #[test]
    fn suggested_options_exist() {
        for line in
            ["allow_other", "cache=always", "cache=auto", "cache=none", "writeback", "local_locks", "map_user=1:1"]
        {
            expanded(&format!("mem /m -o {line}")).expect(line);
        }
        for word in ["translate_uid", "translate_gid"] {
            expanded(&format!("mem /m -o {word}=map:0:1000:1")).expect(word);
        }
        for (word, _) in UNSUPPORTED {
            assert!(expanded(&format!("mem /m -o {word}")).is_err() && !IGNORED.contains(&word), "{word}");
        }
    }

    #[test]
    fn a_remount_separates_changed_from_unchanged_options() {
        let read = |line: &str| remount(&crate::cli::table(), &[line.into()], false);
        assert_eq!(read("ro,noatime"), Ok(None));
        for (line, options, unchanged) in [
            ("remount,ro", MountOptions { read_only: true, ..MountOptions::default() }, &[][..]),
            ("ro,remount,rw", MountOptions::default(), &[]),
            ("noatime,nosuid,remount,relatime", MountOptions { nosuid: true, ..MountOptions::default() }, &[]),
            ("user_id=0,group_id=0,default_permissions,allow_other,blksize=4096,remount", MountOptions::default(), &[]),
            ("size=8G,remount,cache=always", MountOptions::default(), &["cache=always", "size=8G"]),
        ] {
            let unchanged = unchanged.iter().map(|&word| word.into()).collect();
            assert_eq!(read(line), Ok(Some(Remount { options, unchanged })), "{line}");
        }
        let foreign =
            |line: &str| remount(&crate::cli::table(), &[line.into()], true).expect("no mistake").expect("one").options;
        let is_kept = MountOptions { nosuid: true, nodev: true, read_only: true, ..MountOptions::default() };
        assert_eq!(foreign("remount,ro"), is_kept, "fstab need not say it");
        assert_eq!(foreign("remount,ro,suid"), MountOptions { nosuid: false, ..is_kept });
        assert!(read("remount,fast").expect_err("a mistake").contains("unknown mount option"));
    }

    #[test]
    fn mount_options_are_parsed() {
        let words = |words: &str| words.split_whitespace().map(String::from).collect::<Vec<_>>();
        for (given, foreign, nosuid, nodev) in [
            ("", false, false, false),
            ("nosuid", false, true, false),
            ("suid dev", false, false, false),
            ("", true, true, true),
            ("suid", true, false, true),
            ("dev nosuid", true, true, false),
            ("suid dev", true, false, false),
        ] {
            let options = of_mount(&words(&format!("sync {given}")), foreign);
            assert_eq!(options, MountOptions { nosuid, nodev, sync: true, ..MountOptions::default() }, "{given}");
        }
    }
}
