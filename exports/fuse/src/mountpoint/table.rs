//! The kernel's mount table, `/proc/self/mountinfo` (proc_pid_mountinfo(5)). Reading it makes no request to a file
//! system, so it works beside hanging mounts.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Where the table is.
const PATH: &str = "/proc/self/mountinfo";

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Its id, as in `statx` (`STATX_MNT_ID`).
    pub id: u64,
    /// Where it is.
    pub at: PathBuf,
    /// Its type with its subtype, `fuse.ferry`.
    pub kind: String,
    /// The source, as its server named it.
    pub source: OsString,
    /// The options of the file system, escaped, separated by commas.
    options: Vec<u8>,
}

impl MountEntry {
    /// Returns all mounts that this process can see.
    ///
    /// # Errors
    ///
    /// `/proc` is missing, or no descriptor is left.
    pub fn all() -> io::Result<Vec<Self>> {
        Ok(Self::read(&std::fs::read(PATH)?))
    }

    /// Parses a mount table; invalid lines are skipped.
    pub fn read(table: &[u8]) -> Vec<Self> {
        table.split(|&byte| byte == b'\n').filter_map(Self::of).collect()
    }

    /// Returns the mount with this id, if this process can see it.
    pub(super) fn find(id: u64) -> Option<Self> {
        Self::all().ok()?.into_iter().find(|mounted| mounted.id == id)
    }

    fn of(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|&byte| byte == b' ');
        let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
        let at = OsString::from_vec(unescape(fields.nth(3)?)).into();
        // A variable number of optional fields ends with a dash, which none of them can be.
        let mut rest = fields.skip_while(|field| field != b"-").skip(1);
        let kind = String::from_utf8_lossy(&unescape(rest.next()?)).into_owned();
        let source = OsString::from_vec(unescape(rest.next()?));
        Some(Self { id, at, kind, source, options: rest.next().unwrap_or_default().to_vec() })
    }

    /// Returns the value of an option of the file system.
    pub fn option(&self, name: &str) -> Option<OsString> {
        self.values(name).next()
    }

    /// Returns the values of an option that may be there several times.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = OsString> + 'a {
        let value = |option: &[u8]| Some(unescape(option.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?));
        // Commas in values are escaped.
        self.options.split(|byte| *byte == b',').filter_map(value).map(OsString::from_vec)
    }
}

/// Decodes space, tab, line break and backslash, which are a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok();
        match tail.get(..3).filter(|_| byte == b'\\').and_then(octal) {
            Some(escaped) => {
                bytes.push(escaped);
                rest = &tail[3..];
            }
            None => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_the_kernel_writes_them() {
        let table = b"22 27 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n\
            36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:2 - fuse.ferry my\\040dir\\134x rw,errors=continue,dir=a\\054b\n\
            362 1 0:5 / / rw - tmpfs none rw\nbroken\n7 8";
        let found = MountEntry::read(table);
        let fields =
            |mounted: &MountEntry| (mounted.id, mounted.at.clone(), mounted.kind.clone(), mounted.source.clone());
        let expected = |id: u64, at: &str, kind: &str, source: &str| (id, at.into(), kind.into(), source.into());
        assert_eq!(
            found.iter().map(fields).collect::<Vec<_>>(),
            [
                expected(22, "/sys", "sysfs", "sysfs"),
                expected(36, "/mnt 2", "fuse.ferry", "my dir\\x"),
                expected(362, "/", "tmpfs", "none"),
            ]
        );
        let option = |name| found[1].option(name);
        assert_eq!(
            (option("errors"), option("dir"), option("rw")),
            (Some("continue".into()), Some("a,b".into()), None)
        );
    }

    #[test]
    fn backslashes_that_escape_nothing_stay() {
        for (field, bytes) in [(&b"a\\"[..], &b"a\\"[..]), (b"\\9", b"\\9"), (b"\\040", b" "), (b"\\777x", b"\\777x")] {
            assert_eq!(unescape(field), bytes);
        }
    }
}
