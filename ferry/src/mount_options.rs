//! `-o`, as mount(8) and fstab(5) have it: what is a flag of the command becomes that flag, what a mount knows stays,
//! what only mount(8) itself understands goes.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use ferry_control::nearest;
use ferry_fuse::MountOptions;

/// Words of mount(8) that say what is so anyway, or that are for mount(8), systemd and the like alone.
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
    // Every mount of ours has the kernel check permissions.
    "default_permissions",
    // Leave for whoever keeps times in memory; the kernel keeps none of a mount's.
    "lazytime",
];

/// Words that other file systems have, and what there is in their place.
const ELSEWHERE: [(&str, &str); 15] = [
    ("allow_root", "allow_other lets other users in, root among them"),
    ("kernel_cache", "cache=always keeps data until they change, as far as Ferry is told of changes"),
    ("auto_cache", "cache=auto, which is the default, does that"),
    ("direct_io", "cache=none keeps nothing of files' data"),
    ("writeback_cache", "writeback does that"),
    ("no_remote_lock", "local_locks does that"),
    ("max_read", "READs are as long as the kernel's, 1 MiB at most; leave it out"),
    ("max_write", "WRITEs are as long as the kernel's, 1 MiB at most; leave it out"),
    ("max_background", "the number is fixed; leave it out"),
    ("uid", "map_user=UID:GID shows root's files as somebody's, translate_uid other numbers"),
    ("gid", "map_user=UID:GID shows root's files as somebody's, translate_gid other numbers"),
    ("umask", "modes are what the source says; leave it out"),
    ("context", "labels are files' own (security.selinux); leave it out"),
    ("noforget", "inodes are kept as long as the kernel knows them; leave it out"),
    ("remount", "mount -o remount,ro MOUNTPOINT changes a mount that is there"),
];

/// What a later word takes back.
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

/// A word of a mount, and where [`MountOptions`] has it.
type Field = fn(&mut MountOptions) -> &mut bool;

/// The words that mounts of any type know.
const OF_MOUNTS: [(&str, Field); 9] = [
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

/// What files of other people's making may do on this host only if these words say so.
const GRANTS: [(&str, Field); 2] = [("suid", |options| &mut options.nosuid), ("dev", |options| &mut options.nodev)];

/// The mount's own options, out of what [`expand`] left in `-o`. `foreign`: somebody else says whose the files are and what they are.
pub fn of_mount(words: &[String], foreign: bool) -> MountOptions {
    let mut options = MountOptions::default();
    let is_given = |name: &str| words.iter().any(|word| word == name);
    for (_, field) in OF_MOUNTS.iter().filter(|(name, _)| is_given(name)) {
        *field(&mut options) = true;
    }
    for (_, field) in GRANTS.iter().filter(|(name, _)| foreign && !is_given(name)) {
        *field(&mut options) = true;
    }
    options
}

/// Whether a word is one of mounts of any type.
fn is_of_mounts(name: &str) -> bool {
    OF_MOUNTS.iter().chain(&GRANTS).any(|(word, _)| *word == name)
}

/// What the kernel has in its table for a mount of FUSE, and mount(8) repeats when it remounts.
const OF_KERNEL: [&str; 5] = ["user_id", "group_id", "max_read", "blksize", "remount"];

/// What is to become of a mount that is there.
#[derive(Debug, PartialEq, Eq)]
pub struct Remount {
    /// Its flags from now on.
    pub options: MountOptions,
    /// Options that a mount keeps until it is unmounted.
    pub unchanged: Vec<String>,
}

/// What the values of `-o` say if one of the options is `remount`. mount(8) adds those that the mount has, so the rest of them
/// may be what is so already. `foreign`: as for [`of_mount`].
pub fn remount(table: &clap::Command, values: &[OsString], foreign: bool) -> Result<Option<Remount>, String> {
    let words: Vec<_> = values.iter().flat_map(|value| split(value.as_bytes())).collect();
    if !words.iter().any(|word| word == b"remount") {
        return Ok(None);
    }
    let mount = table.find_subcommand("mount").expect("the table has it");
    let mut flags = Flags { mount, words: BTreeMap::new() };
    for word in words {
        let (name, value) = name_and_value(&word);
        if !OF_KERNEL.contains(&&*name) {
            flags.word(&name, value)?;
        }
    }
    let read_only = flags.words.remove("read-only").is_some();
    flags.words.remove("allow-other");
    let (of_mount, others): (Vec<_>, Vec<_>) = flags.words.into_iter().partition(|(name, _)| is_of_mounts(name));
    let of_mount: Vec<String> = of_mount.into_iter().map(|(name, _)| name).collect();
    let options = MountOptions { read_only, ..self::of_mount(&of_mount, foreign) };
    let said = |(name, value): (String, Option<OsString>)| match value {
        Some(value) => format!("{name}={}", value.display()),
        None => name,
    };
    Ok(Some(Remount { options, unchanged: others.into_iter().map(said).collect() }))
}

/// Rewrites the arguments of `ferry mount`: every `-o` is taken apart.
pub fn expand(table: &clap::Command, args: &[OsString]) -> Result<Vec<OsString>, String> {
    let mount = table.find_subcommand("mount").expect("the table has it");
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
            // Not a look-ahead into a flag's value: no value of ours can be `-o`.
            _ => rest.push(arg.clone()),
        }
    }
    // A flag that was also given as such is clap's to refuse, so these go first.
    Ok(flags.into_args().chain(rest).collect())
}

/// What the options say, the last word on each thing.
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
        let own = if name == "ro" { "read-only".to_owned() } else { name.replace('_', "-") };
        if name.is_empty() || IGNORED.contains(&name) || name.starts_with("x-") || name.starts_with("X-") {
            return Ok(());
        }
        if is_of_mounts(name) {
            return match value {
                None => {
                    self.words.insert(name.into(), None);
                    Ok(())
                }
                Some(value) => Err(format!("the mount option {name:?} takes no value, and has {value:?}")),
            };
        }
        if let Some((_, instead)) = ELSEWHERE.iter().find(|(word, _)| *word == name) {
            return Err(format!("mounts of ferry do not know the option {name:?}: {instead}"));
        }
        let Some(flag) = self.mount.get_arguments().find(|arg| arg.get_long() == Some(&own) && !arg.is_hide_set())
        else {
            let flags = self.mount.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(clap::Arg::get_long);
            let words = flags.chain(OF_MOUNTS.iter().chain(&GRANTS).map(|(word, _)| *word));
            let meant = nearest(&own, words).map(|word| format!(": did you mean {:?}?", word.replace('-', "_")));
            let meant = meant.unwrap_or_else(|| "; ferry mount --help has those there are".into());
            return Err(format!("unknown mount option {name:?}{meant}"));
        };
        match (flag.get_action().takes_values(), value) {
            (true, None) => Err(format!("the mount option {name:?} needs a value: {name}=VALUE")),
            (false, Some(value)) => Err(format!("the mount option {name:?} takes no value, and has {value:?}")),
            (_, value) => {
                self.words.insert(own, value);
                Ok(())
            }
        }
    }

    fn into_args(self) -> impl Iterator<Item = OsString> {
        self.words.into_iter().flat_map(|(name, value)| {
            if is_of_mounts(&name) {
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

/// Cuts at commas; a backslash before a comma or a backslash makes it part of a value.
fn split(options: &[u8]) -> Vec<Vec<u8>> {
    let mut parts = vec![Vec::new()];
    let mut bytes = options.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        let last = parts.last_mut().expect("there is one from the beginning");
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
            ("mem /m -o noatimes", "did you mean \"noatime\"?"),
            ("mem /m -o virtiofs=s", "unknown mount option \"virtiofs\""),
            ("mem /m -o detached", "unknown mount option \"detached\""),
            ("mem /m -o allow_root", "\"allow_root\": allow_other"),
            ("mem /m -o kernel_cache", "cache=always"),
            ("mem /m -o max_read=4096", "1 MiB at most"),
            ("mem /m -o uid=1000", "map_user=UID:GID"),
            ("mem /m -o umask=022", "leave it out"),
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

    /// Whoever follows the advice is understood.
    #[test]
    fn what_is_named_instead_is_there() {
        for line in
            ["allow_other", "cache=always", "cache=auto", "cache=none", "writeback", "local_locks", "map_user=1:1"]
        {
            expanded(&format!("mem /m -o {line}")).expect(line);
        }
        for word in ["translate_uid", "translate_gid"] {
            expanded(&format!("mem /m -o {word}=map:0:1000:1")).expect(word);
        }
        for (word, _) in ELSEWHERE {
            assert!(expanded(&format!("mem /m -o {word}")).is_err() && !IGNORED.contains(&word), "{word}");
        }
    }

    #[test]
    fn what_a_remount_changes_is_told_from_what_stays() {
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
    fn mounts_know_their_words() {
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
