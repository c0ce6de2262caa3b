//! `ferry image mount` where this kernel, or this user, cannot mount images: the same image by Ferry's own mount.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use clap::builder::PossibleValue;

use super::mount::MountArgs;
use crate::recipes::shell_word;

/// Why the kernel mounts no image here, whichever it is.
#[derive(Debug)]
pub struct KernelMountError(pub String);

impl fmt::Display for KernelMountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for KernelMountError {}

/// Becomes the program that mounts the image by our own export, unless something was asked for that only the kernel's mount has.
/// `common` are the flags that all commands have.
pub fn mount(args: &MountArgs, common: &[OsString], why: &KernelMountError) -> Result<u8> {
    let words = [common, &words(args)].concat();
    let shown = shown(&words);
    if let Some(flag) = args.only_by_kernel() {
        bail!("{why}; without {flag} Ferry's own mount does: {shown}");
    }
    eprintln!("ferry: {why}; to be mounted by Ferry's own export instead: {shown}");
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ferry").args(&words);
    if args.lazily.is_detached() {
        // Whoever waits for this process wants a line.
        command.arg("--json");
    }
    Err(command.exec()).context("cannot start ferry again")
}

/// `ferry mount` of the same image on the same place, seen by the same users.
fn words(args: &MountArgs) -> Vec<OsString> {
    let mut source = OsString::from("image:");
    source.push(&args.image.image);
    let mut words = vec!["mount".into(), source, args.dir.clone().into_os_string()];
    let mut add = |flag: &str, value: &OsStr| words.extend([flag.into(), value.into()]);
    add("--store", args.store.store.as_os_str());
    if let Some(digest) = args.image.digest() {
        add("--digest", digest.to_string().as_ref());
    }
    add("--cache", "always".as_ref());
    let options: Vec<_> = args.options.iter().filter_map(ValueEnum::to_possible_value).collect();
    if !options.is_empty() {
        let names: Vec<_> = options.iter().map(PossibleValue::get_name).collect();
        words.extend(["-o".into(), names.join(",").into()]);
    }
    args.lazily.add_to(&mut words);
    // As mounts by the kernel have it.
    words.push("--nonempty".into());
    if rustix::process::geteuid().is_root() {
        words.push("--allow-other".into());
    }
    words
}

/// The line for a shell.
fn shown(words: &[OsString]) -> String {
    words.iter().fold(String::from("ferry"), |line, word| format!("{line} {}", shell_word(&word.to_string_lossy())))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: MountArgs,
    }

    #[test]
    fn the_same_is_asked_of_our_own_mount() {
        let digest = format!("blake3:{}", "0".repeat(64));
        let line = "mount a.img /mnt --store s --from oci:h/n:1 --jobs 0 --fetch-ahead 1M --plain-http --foreground -o suid,nodev --digest";
        let args = Line::parse_from(line.split(' ').chain([digest.as_str()])).args;
        let expected = format!(
            "mount image:a.img /mnt --store s --digest {digest} --cache always -o suid,nodev --from oci:h/n:1 --jobs 0 --fetch-ahead 1048576 \
             --plain-http --foreground --nonempty"
        );
        let mut found = words(&args);
        found.retain(|word| word != "--allow-other");
        assert_eq!(found, expected.split(' ').map(OsString::from).collect::<Vec<_>>());
        // And it is understood there.
        let understood = crate::groups::parse([OsString::from("ferry")].into_iter().chain(found));
        assert!(understood.is_ok(), "{:?}", understood.err());
    }

    #[test]
    fn what_the_kernel_alone_can_do_is_not_replaced() {
        for (flags, expected) in [
            ("", None),
            ("--upper u", Some("--upper")),
            ("--loop", Some("--loop")),
            (
                "--digest 0000000000000000000000000000000000000000000000000000000000000000 --verity require",
                Some("--verity require"),
            ),
        ] {
            let words = "mount a.img /mnt --store s".split(' ').chain(flags.split_whitespace());
            assert_eq!(Line::parse_from(words).args.only_by_kernel(), expected, "{flags}");
        }
    }

    #[test]
    fn lines_are_for_a_shell() {
        let words = ["mount", "image:a b", "it's", ""].map(OsString::from);
        assert_eq!(shown(&words), r"ferry mount 'image:a b' 'it'\''s' ''");
    }
}
