//! The kernel's table of mounts, `/proc/self/mountinfo` (proc_pid_mountinfo(5)). Reading it asks no file system
//! anything, so it works beside mounts that hang.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

/// Where the table is.
const PATH: &str = "/proc/self/mountinfo";

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mounted {
    /// Its type with its subtype, `fuse.ferry`.
    pub(super) kind: String,
    /// What is mounted, as its server calls it.
    pub(super) source: OsString,
}

/// The mount with this id, if this process can see it.
pub(super) fn find(id: u64) -> Option<Mounted> {
    parse(&std::fs::read(PATH).ok()?, id)
}

fn parse(table: &[u8], id: u64) -> Option<Mounted> {
    table.split(|&byte| byte == b'\n').find_map(|line| {
        let mut fields = line.split(|&byte| byte == b' ');
        let number = std::str::from_utf8(fields.next()?).ok()?;
        if number.parse() != Ok(id) {
            return None;
        }
        // A variable number of optional fields ends with a dash; no field before it can be one.
        let mut rest = fields.skip_while(|field| field != b"-").skip(1);
        let kind = String::from_utf8_lossy(&unescape(rest.next()?)).into_owned();
        Some(Mounted { kind, source: OsString::from_vec(unescape(rest.next()?)) })
    })
}

/// Space, tab, line break and backslash stand as three octal digits after a backslash.
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
            36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:2 - fuse.ferry my\\040dir\\134x rw,errors=continue\n\
            362 1 0:5 / / rw - tmpfs none rw\nbroken\n7 8";
        let mounted = |kind: &str, source: &str| Some(Mounted { kind: kind.into(), source: source.into() });
        for (id, expected) in [
            (22, mounted("sysfs", "sysfs")),
            (36, mounted("fuse.ferry", "my dir\\x")),
            (362, mounted("tmpfs", "none")),
            (3, None),
            (7, None),
        ] {
            assert_eq!(parse(table, id), expected, "{id}");
        }
    }

    #[test]
    fn backslashes_that_escape_nothing_stay() {
        for (field, bytes) in [(&b"a\\"[..], &b"a\\"[..]), (b"\\9", b"\\9"), (b"\\040", b" "), (b"\\777x", b"\\777x")] {
            assert_eq!(unescape(field), bytes);
        }
    }
}
