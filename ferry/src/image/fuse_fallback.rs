//! `ferry image mount`: by the kernel's EROFS, or else with `ferry mount` over FUSE.

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use clap::builder::PossibleValue;
use ferry_control::Logging;
use ferry_fuse::Mountpoint;
use ferry_image::{Image, Objects};
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

use super::kernel;
use super::lazy;
use super::mount::{self, MountArgs};
use super::registry::ImageObjects;
use super::watch::KernelMountError;
use crate::exports::RESTART_TIME;
use crate::guardian::WaitingGuardians;
use crate::recipes::shell_word;

/// Mounts an image. With a digest, the image must have it, and the kernel must verify the files of a composefs image. One
/// umount(8) ends all of it: the layers of overlayfs are not mounted anywhere.
pub fn mount(args: &MountArgs, line: &[OsString], common: &[OsString], logging: &Logging) -> Result<u8> {
    // Not by a request to a server: the last one of this mount may have been killed.
    let found = statx(CWD, &args.dir, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
    if !found.is_ok_and(|found| FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory) {
        bail!("{} is not a directory: create it first", args.dir.display());
    }
    let (args, pulled) = match &args.lazily.pull {
        None => (args.clone(), None),
        Some(options) => match lazy::pull(args, options)? {
            Some((args, objects)) => (args, Some(objects)),
            None => return Ok(0),
        },
    };
    if args.lazily.restart_time > 0 {
        let dir = args.dir.canonicalize().with_context(|| format!("cannot find {}", args.dir.display()))?;
        if WaitingGuardians::find(&dir).is_some() {
            return fall_back(&args, common, &"the mount of a killed server is resumed");
        }
        Mountpoint::remove_dead(&dir)?;
    }
    match by_kernel(&args, pulled, line, logging) {
        Err(error) => match error.downcast_ref::<KernelMountError>() {
            Some(why) => fall_back(&args, common, why),
            None => Err(error),
        },
        done => done,
    }
}

fn by_kernel(args: &MountArgs, pulled: Option<ImageObjects>, line: &[OsString], logging: &Logging) -> Result<u8> {
    // Checked first, because everything else depends on it.
    kernel::can_mount_erofs()?;
    if args.lazily.from.is_some() {
        return lazy::mount(args, pulled, line, logging);
    }
    let (image, file) = Image::open_with_file(&args.image.image, args.image.digest())?;
    // All packs exist and have the right length.
    Objects::open(&image, &args.store.store)?;
    mount::attach_file(args, &image, &file, &|_| None)?;
    Ok(0)
}

/// Replaces this process by `ferry mount` of the image, unless a flag needs the kernel's mount. `common` are the global flags.
fn fall_back(args: &MountArgs, common: &[OsString], why: &dyn Display) -> Result<u8> {
    let words = [common, &words(args)].concat();
    let shown = shown(&words);
    if let Some(flag) = args.only_by_kernel() {
        bail!("{why}; without {flag} ferry mount can: {shown}");
    }
    eprintln!("ferry: {why}; mounting over FUSE instead: {shown}");
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ferry").args(&words);
    if args.lazily.restart_time > 0 {
        command.env(RESTART_TIME, args.lazily.restart_time.to_string());
    }
    if args.lazily.detached {
        // The waiting process expects a line.
        command.arg("--json");
    }
    Err(command.exec()).context("cannot start ferry again")
}

/// Returns the command line of `ferry mount` for the same image and users.
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
    // As with a mount by the kernel.
    words.push("--nonempty".into());
    if rustix::process::geteuid().is_root() {
        words.extend(["--allow-other".into(), "--allow-idmap".into()]);
    }
    words
}

/// Returns the line for a shell.
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
    fn the_fallback_has_the_same_options() {
        let digest = format!("blake3:{}", "0".repeat(64));
        let line = "mount a.img /mnt --store s --from oci:h/n:1 --jobs 0 --fetch-ahead 1M --fetch-rate 2M --plain-http --foreground -o suid,nodev --digest";
        let args = Line::parse_from(line.split(' ').chain([digest.as_str()])).args;
        let expected = format!(
            "mount image:a.img /mnt --store s --digest {digest} --cache always -o suid,nodev --from oci:h/n:1 --jobs 0 --fetch-ahead 1048576 \
             --fetch-rate 2097152 --plain-http --foreground --nonempty"
        );
        let mut found = words(&args);
        found.retain(|word| word != "--allow-other" && word != "--allow-idmap");
        assert_eq!(found, expected.split(' ').map(OsString::from).collect::<Vec<_>>());
        // The result is a valid command line.
        let understood = crate::groups::parse([OsString::from("ferry")].into_iter().chain(found));
        assert!(understood.is_ok(), "{:?}", understood.err());
    }

    #[test]
    fn flags_of_the_kernel_mount_prevent_the_fallback() {
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
    fn command_lines_are_quoted_for_a_shell() {
        let words = ["mount", "image:a b", "it's", ""].map(OsString::from);
        assert_eq!(shown(&words), r"ferry mount 'image:a b' 'it'\''s' ''");
    }
}
