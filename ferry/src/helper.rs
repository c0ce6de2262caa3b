//! `mount.ferry`: this program under another name, as mount(8) starts it for `mount -t ferry` and lines of fstab(5).
//! See "External helpers" in mount(8).

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::flags::Kind;
use crate::mount_options::{self, Remount};

/// mount(8): incorrect invocation or permissions.
pub const USAGE_STATUS: u8 = 1;
/// mount(8): mount failure.
pub const FAILURE_STATUS: u8 = 32;

/// The parsed command line.
#[derive(Debug, PartialEq, Eq)]
pub enum HelperCommand {
    /// Run this command line of `ferry`.
    Mount(Vec<OsString>),
    /// Change an existing mount.
    Remount(PathBuf, Remount),
    /// Do nothing: `-f` skips the mount.
    Nothing,
}

/// Parses `SOURCE MOUNTPOINT [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE.SUBTYPE]`; an error is a sentence.
pub fn read(args: impl IntoIterator<Item = OsString>) -> Result<HelperCommand, String> {
    let mut args = args.into_iter();
    let mut line: Vec<OsString> = vec!["ferry".into(), "mount".into()];
    let mut places: Vec<OsString> = Vec::new();
    let mut options: Vec<OsString> = Vec::new();
    let mut fake = false;
    while let Some(arg) = args.next() {
        let bytes = arg.as_bytes();
        let Some(flags) = bytes.strip_prefix(b"-").filter(|flags| !flags.is_empty()) else {
            places.push(arg);
            continue;
        };
        for (at, flag) in flags.iter().enumerate() {
            let rest = std::ffi::OsStr::from_bytes(&flags[at + 1..]);
            let mut value = || match rest.is_empty() {
                true => args.next().ok_or_else(|| format!("-{} needs a value", char::from(*flag))),
                false => Ok(rest.to_owned()),
            };
            match flag {
                b'o' => options.push(value()?),
                // The name of the program implies the type.
                b't' => drop(value()?),
                b'N' => return Err("mounting in another namespace (-N) is not supported; use nsenter".into()),
                b'f' => fake = true,
                // There is no /etc/mtab, and unknown options are errors even with -s.
                b's' | b'n' | b'v' => continue,
                _ => {
                    return Err(format!(
                        "unknown flag {:?}; mount.ferry SOURCE MOUNTPOINT [-o OPTIONS]",
                        arg.display()
                    ));
                }
            }
            if matches!(flag, b'o' | b't') {
                break;
            }
        }
    }
    let [source, mountpoint]: [OsString; 2] = places.try_into().map_err(|places: Vec<_>| {
        format!("mount.ferry takes a source and a mount point, and got {} words", places.len())
    })?;
    let is_foreign = Kind::of(source.as_ref()).is_foreign();
    if let Some(remount) = mount_options::remount(&crate::cli::table(), &options, is_foreign)? {
        return Ok(if fake { HelperCommand::Nothing } else { HelperCommand::Remount(mountpoint.into(), remount) });
    }
    line.extend(options.into_iter().flat_map(|options| ["-o".into(), options]));
    // They are never flags.
    line.extend(["--".into(), source, mountpoint]);
    Ok(if fake { HelperCommand::Nothing } else { HelperCommand::Mount(line) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_mount_are_read() {
        let remount = |at: &str, read_only, unchanged: &[&str]| {
            let options = ferry_fuse::MountOptions { read_only, ..Default::default() };
            HelperCommand::Remount(
                at.into(),
                Remount { options, unchanged: unchanged.iter().map(|&word| word.into()).collect() },
            )
        };
        let mount = |line: &str| Ok(HelperCommand::Mount(line.split(' ').map(OsString::from).collect()));
        for (line, asked) in [
            ("mem /m", mount("ferry mount -- mem /m")),
            ("mem /m -o rw,size=1G", mount("ferry mount -o rw,size=1G -- mem /m")),
            ("mem /m -n -s -v -o rw", mount("ferry mount -o rw -- mem /m")),
            ("-nv mem /m -orw -t fuse.ferry", mount("ferry mount -o rw -- mem /m")),
            ("mem /m -f -o rw", Ok(HelperCommand::Nothing)),
            ("mem /m -f -o remount,ro", Ok(HelperCommand::Nothing)),
            ("mem /m -o remount -o ro", Ok(remount("/m", true, &[]))),
            ("mem /m -o rw,remount,ro,user_id=0,allow_other,cache=none", Ok(remount("/m", true, &["cache=none"]))),
            ("mem", Err("mount.ferry takes a source and a mount point, and got 1 words".into())),
            ("mem /m /n", Err("mount.ferry takes a source and a mount point, and got 3 words".into())),
            ("mem /m -o", Err("-o needs a value".into())),
        ] {
            assert_eq!(read(line.split(' ').map(OsString::from)), asked, "{line}");
        }
        for (line, words) in [("mem /m -x", "unknown flag"), ("mem /m -N 7", "namespace")] {
            let error = read(line.split(' ').map(OsString::from)).expect_err(line);
            assert!(error.contains(words), "{error}");
        }
    }
}
