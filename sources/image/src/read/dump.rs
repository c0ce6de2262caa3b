//! Writes the tree of an image as a dump file (composefs-dump(5)). The output is that of `composefs-info dump`, except
//! that the latter omits more of overlayfs's attributes.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::rc::Rc;

use ferry_vfs::FileType;

use crate::format::composefs::view::{
    self, CONTENT_BYTES_MAX, USER_WHITEOUT, USER_WHITEOUTS, WHITEOUT, WHITEOUTS, escape,
};
use crate::format::data::Data;
use crate::format::digest::Digest;
use crate::format::error::{Flaw, ImageResult};
use crate::format::image::{Image, Inode, Nid};
use crate::format::walk::{Step, walk};

const TYPE_BITS: u32 = 0o170_000;

/// Why a dump could not be written.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// The image is damaged.
    #[error(transparent)]
    Flaw(#[from] Flaw),
    /// The output failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Writes a composefs image as a dump file.
///
/// # Errors
///
/// The image is damaged, or the output failed.
pub fn write(image: &Image, out: &mut dyn Write) -> Result<(), DumpError> {
    let mut known: HashMap<Nid, Rc<Step<'_>>> = HashMap::new();
    let mut entered = HashSet::new();
    walk(image, image.root(), b"/", |step, inode| {
        let first = known.get(&inode.nid).map(|step| step.path());
        line(image, inode, &step.path(), first, out)?;
        if inode.kind() != FileType::Directory {
            known.entry(inode.nid).or_insert_with(|| Rc::clone(step));
        } else if !entered.insert(inode.nid) {
            return Err(Flaw { what: "a directory that has another name already", offset: inode.nid.0 }.into());
        }
        Ok(())
    })
}

/// Writes the line of a name; `first` is the first name of an inode that already had one.
fn line(
    image: &Image,
    inode: &Inode,
    path: &[u8],
    first: Option<Vec<u8>>,
    out: &mut dyn Write,
) -> Result<(), DumpError> {
    let raw = image.raw_xattrs(inode)?;
    let has = |name: &[u8]| raw.iter().any(|(known, _)| known == name);
    let is_whiteout = inode.kind() == FileType::RegularFile && inode.bytes == 0 && has(&escape(WHITEOUT));
    let mode = if is_whiteout { inode.mode & !TYPE_BITS | 0o020_000 } else { inode.mode };
    let (payload, content, digest) = contents(image, inode)?;
    let is_again = first.is_some();
    let payload = first.or(payload);
    let field = |bytes: Option<Vec<u8>>| {
        bytes
            .filter(|bytes| !bytes.is_empty())
            .map_or("-".into(), |bytes| if bytes == b"-" { "\\x2d".into() } else { text(&bytes, false) })
    };
    write!(
        out,
        "{} {} {}{mode:o} {} {} {} {} {}.{} {} {} {}",
        text(path, false),
        inode.bytes,
        if is_again { "@" } else { "" },
        inode.nlink,
        inode.uid,
        inode.gid,
        inode.rdev(),
        inode.mtime.sec,
        inode.mtime.nsec,
        field(payload),
        field(content),
        digest.map_or("-".into(), |digest| digest.hex()),
    )?;
    // A build from the dump adds what whiteouts require.
    let is_marked = has(&escape(WHITEOUTS));
    for (name, value) in raw {
        let own = (is_whiteout && (name == escape(WHITEOUT) || name == USER_WHITEOUT))
            || (is_marked && (name == escape(WHITEOUTS) || name == USER_WHITEOUTS));
        if let (false, Some(name)) = (own, view::visible_name(name)) {
            write!(out, " {}={}", text(&name, true), text(value, true))?;
        }
    }
    out.write_all(b"\n")?;
    Ok(())
}

type Contents = (Option<Vec<u8>>, Option<Vec<u8>>, Option<Digest>);

/// Returns payload, content and digest.
fn contents(image: &Image, inode: &Inode) -> ImageResult<Contents> {
    Ok(match inode.kind() {
        FileType::Symlink => (Some(image.link(inode)?), None, None),
        FileType::RegularFile => match image.data(inode)? {
            Data::Near(whole, rest) if whole.len() + rest.len() <= CONTENT_BYTES_MAX => {
                (None, Some([whole, rest].concat()), None)
            }
            Data::Near(..) => {
                return Err(Flaw { what: "a file of more than 5000 bytes in the image", offset: inode.nid.0 });
            }
            Data::Object { path, digest } => (path.map(<[u8]>::to_vec), None, digest),
            Data::Far { .. } | Data::Chunks(_) => (None, None, None),
        },
        _ => (None, None, None),
    })
}

fn text(bytes: &[u8], is_xattr: bool) -> String {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            b'\\' => text.push_str("\\\\"),
            b'\n' => text.push_str("\\n"),
            b'\r' => text.push_str("\\r"),
            b'\t' => text.push_str("\\t"),
            b'=' if is_xattr => text.push_str("\\x3d"),
            b'!'..=b'~' => text.push(char::from(*byte)),
            _ => text.push_str(&format!("\\x{byte:02x}")),
        }
    }
    text
}
