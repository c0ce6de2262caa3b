//! A cpio archive ("newc") of one file, to append to an initramfs.

/// An archive ("newc") of one file with this name, these permissions and these bytes, to append to an initramfs.
// The header's numbers are eight hexadecimal digits; names and data are padded to four bytes.
pub fn archive(name: &str, mode: u32, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len() + 512);
    member(&mut out, name, 0o100_000 | mode, data);
    member(&mut out, "TRAILER!!!", 0, &[]);
    out
}

fn member(out: &mut Vec<u8>, name: &str, mode: u32, data: &[u8]) {
    // Inode, mode, uid, gid, links, mtime, size, device major and minor, rdev major and minor, name size, check.
    let fields = [0, mode as usize, 0, 0, 1, 0, data.len(), 0, 0, 0, 0, name.len() + 1, 0];
    out.extend_from_slice(b"070701");
    for field in fields {
        out.extend_from_slice(format!("{field:08X}").as_bytes());
    }
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    pad(out);
    out.extend_from_slice(data);
    pad(out);
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_start_on_four_bytes() {
        let bytes = archive("init", 0o755, b"hello");
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(&bytes[..14], b"07070100000000");
        let data = 110 + 5 + 1;
        assert_eq!(&bytes[data..data + 5], b"hello");
        assert_eq!(&bytes[data + 8..data + 14], b"070701");
    }
}
