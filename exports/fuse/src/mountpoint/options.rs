//! Mount options, and their form for the kernel and for `fusermount3`.

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::mount::MountFlags;

use super::MountError;

/// Options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "each is a mount option of its own")]
pub struct MountOptions {
    /// Nothing can be changed.
    pub read_only: bool,
    /// Users other than the mount's owner have access.
    pub allow_other: bool,
    /// The kernel checks permissions by mode and owner. Sources expect it.
    pub default_permissions: bool,
    /// The source in the mount table.
    pub fsname: String,
    /// The type in the mount table, after `fuse.`.
    pub subtype: String,
    /// Ignore suid and sgid. Always set for unprivileged users.
    pub nosuid: bool,
    /// Ignore device nodes. Always set for unprivileged users.
    pub nodev: bool,
    /// Programs cannot be executed.
    pub noexec: bool,
    /// Reading changes no access time.
    pub noatime: bool,
    /// Listing a directory does not change its access time.
    pub nodiratime: bool,
    /// Access times always change; otherwise the kernel's default, relatime.
    pub strictatime: bool,
    /// Every write is synchronous.
    pub sync: bool,
    /// Every change of a directory is synchronous.
    pub dirsync: bool,
    /// The longest READ, in bytes.
    pub max_read: Option<u32>,
    /// Let `fusermount3` wait for the end of this process, in any way, and unmount then.
    pub auto_unmount: bool,
    /// Allow a directory with entries, which the mount hides.
    pub nonempty: bool,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            allow_other: false,
            default_permissions: true,
            fsname: "ferry".into(),
            subtype: "ferry".into(),
            nosuid: false,
            nodev: false,
            noexec: false,
            noatime: false,
            nodiratime: false,
            strictatime: false,
            sync: false,
            dirsync: false,
            max_read: None,
            auto_unmount: false,
            nonempty: false,
        }
    }
}

impl MountOptions {
    /// Returns the options with a bit for `mount(2)` and a name for `fusermount3`.
    fn flags(&self) -> [(bool, MountFlags, &'static str); 9] {
        [
            (self.read_only, MountFlags::RDONLY, "ro"),
            (self.nosuid, MountFlags::NOSUID, "nosuid"),
            (self.nodev, MountFlags::NODEV, "nodev"),
            (self.noexec, MountFlags::NOEXEC, "noexec"),
            (self.noatime, MountFlags::NOATIME, "noatime"),
            (self.nodiratime, MountFlags::NODIRATIME, "nodiratime"),
            (self.strictatime, MountFlags::STRICTATIME, "strictatime"),
            (self.sync, MountFlags::SYNCHRONOUS, "sync"),
            (self.dirsync, MountFlags::DIRSYNC, "dirsync"),
        ]
    }

    /// The flags for `mount(2)`.
    pub(super) fn kernel_flags(&self) -> MountFlags {
        let set = self.flags().into_iter().filter(|(on, ..)| *on);
        set.fold(MountFlags::empty(), |all, (_, flag, _)| all | flag)
    }

    /// Returns the flags for `mount(2)` of an existing mount. An explicit atime flag replaces the current one.
    pub(super) fn remount_flags(&self) -> MountFlags {
        let relatime = if self.noatime || self.strictatime { MountFlags::empty() } else { MountFlags::RELATIME };
        self.kernel_flags() | relatime
    }

    /// The type for `mount(2)`.
    pub(super) fn kernel_type(&self) -> String {
        format!("fuse.{}", self.subtype)
    }

    /// Returns the data for `mount(2)`. It contains no text of the user, so no option can be injected.
    pub(super) fn kernel_data(&self, device: &OwnedFd) -> CString {
        /// The type of the root inode, in octal: a directory.
        const ROOT_MODE: &str = "40000";
        let mut data = format!(
            "fd={},rootmode={ROOT_MODE},user_id={},group_id={}",
            device.as_raw_fd(),
            rustix::process::getuid().as_raw(),
            rustix::process::getgid().as_raw()
        );
        for option in self.fuse_options() {
            data.push(',');
            data.push_str(&option);
        }
        CString::new(data).expect("digits and words hold no NUL")
    }

    /// The options for `fusermount3 -o`.
    pub(super) fn helper_options(&self) -> Result<String, MountError> {
        for (name, value) in [("fsname", &self.fsname), ("subtype", &self.subtype)] {
            if value.contains(['\0', '\n']) {
                return Err(MountError::Option { name, value: value.clone() });
            }
        }
        let mut options =
            vec![format!("fsname={}", escape(&self.fsname)), format!("subtype={}", escape(&self.subtype))];
        options.extend(self.flags().into_iter().filter(|(on, ..)| *on).map(|(.., name)| name.to_owned()));
        options.extend(self.fuse_options());
        if self.auto_unmount {
            options.push("auto_unmount".into());
        }
        Ok(options.join(","))
    }

    /// Returns the options of FUSE itself.
    fn fuse_options(&self) -> impl Iterator<Item = String> {
        let words = [(self.default_permissions, "default_permissions"), (self.allow_other, "allow_other")];
        let words = words.into_iter().filter(|(on, _)| *on).map(|(_, word)| word.to_owned());
        words.chain(self.max_read.map(|bytes| format!("max_read={bytes}")))
    }
}

/// Escapes a value: a comma would begin the next option (as in CVE-2018-10906).
fn escape(value: &str) -> String {
    value.replace('\\', r"\\").replace(',', r"\,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_have_both_forms() {
        let options = MountOptions {
            read_only: true,
            noexec: true,
            allow_other: true,
            max_read: Some(4096),
            auto_unmount: true,
            fsname: "pmem:/a,allow_root\\,suid".into(),
            ..MountOptions::default()
        };
        assert_eq!(options.kernel_flags(), MountFlags::RDONLY | MountFlags::NOEXEC);
        assert_eq!(options.kernel_type(), "fuse.ferry");
        assert_eq!(
            options.helper_options().expect("good options"),
            r"fsname=pmem:/a\,allow_root\\\,suid,subtype=ferry,ro,noexec,default_permissions,allow_other,max_read=4096,auto_unmount"
        );
        let device = OwnedFd::from(std::fs::File::open("/dev/null").expect("a device"));
        let data = options.kernel_data(&device).into_string().expect("text");
        assert!(data.starts_with(&format!("fd={},rootmode=40000,user_id=", device.as_raw_fd())), "{data}");
        assert!(data.ends_with(",default_permissions,allow_other,max_read=4096"), "{data}");
        assert!(!data.contains("pmem"), "{data}");
    }

    #[test]
    fn text_that_cannot_be_passed_is_refused() {
        for fsname in ["a\nb", "a\0b"] {
            let options = MountOptions { fsname: fsname.into(), ..MountOptions::default() };
            let error = options.helper_options().expect_err(fsname).to_string();
            assert!(error.contains("fsname"), "{error}");
        }
    }
}
