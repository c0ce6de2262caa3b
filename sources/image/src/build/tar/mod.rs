//! Trees from tar archives: the old format, ustar, PAX and GNU.
//!
//! Input on which tar readers disagree is refused, so that no other reader sees other members; layers of containers are
//! read as Go's `archive/tar` reads them, because others have built and run them with it. Absolute names lose
//! their leading slash, as in GNU tar; `..` is refused. The last member with a name wins, and symbolic links above a
//! member's name are followed within the tree.
//!
//! Source: POSIX.1-2024, pax ("ustar Interchange Format", "pax Header Block"), and GNU tar's manual ("Basic Tar
//! Format").

mod file_bytes;
mod header;
mod layers;
mod marks;
mod member;
mod pax;
mod place;
mod sparse;
mod sparse_map;

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ferry_vfs::Timespec;

use crate::build::content_writer::ContentWriter;
use crate::build::filter::Whiteouts;
use crate::build::tree_builder::TreeBuilder;
use crate::format::error::Result;
use crate::format::tree::{Node, Tree, set_xattr};

use file_bytes::FileBytes;
use marks::LayerMarks;
use member::Members;
use pax::Dialect;
use place::{at_end, contents, directory, place, refused};

pub(crate) use header::{HEADER_BYTES, is_header};
pub(crate) use layers::{Layers, fill};
pub(crate) use marks::OverlayLayer;
pub(crate) use member::{Kind, Member, device};
pub(crate) use place::components;

/// A directory in lower layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LowerDirectory {
    /// Its permissions.
    pub mode: u16,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its time.
    pub mtime: Timespec,
    /// Its extended attributes; those of overlayfs are ignored.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Finds a directory in the layers below a layer, by its path without a slash at its beginning; that of the root is empty.
pub type LowerDirectories<'a> = dyn Fn(&Path) -> Result<Option<LowerDirectory>> + 'a;

/// What a layer's archive becomes.
#[allow(missing_debug_implementations, reason = "it has a function")]
pub struct LayerRules<'a> {
    /// What whiteouts become.
    pub whiteouts: Whiteouts,
    /// Owners, permissions and attributes of the root and of directories that the archive does not describe.
    pub lower: &'a LowerDirectories<'a>,
    /// The maximum size of all files in bytes: a small archive can describe large ones with holes.
    pub file_bytes_max: u64,
    /// Whether files get the identities by which mounts share their page cache.
    pub inode_share: bool,
}

/// Reads an archive; `writer` stores the files' bytes.
pub(crate) fn read<W: ContentWriter>(
    input: impl Read,
    source: &Path,
    whiteouts: Option<Whiteouts>,
    writer: &mut W,
) -> Result<Tree> {
    read_with(Members::of(input, source, Dialect::Archive), source, (whiteouts, None), writer)
}

/// Reads an archive that is a layer of a container, as containerd applies one: the root, and directories that the archive implies, are
/// those of the layers below.
pub(crate) fn read_layer<W: ContentWriter>(
    input: impl Read,
    source: &Path,
    rules: &LayerRules<'_>,
    writer: &mut W,
) -> Result<Tree> {
    read_with(Members::of(input, source, Dialect::Layer), source, (Some(rules.whiteouts), Some(rules)), writer)
}

fn read_with<W: ContentWriter>(
    mut members: Members<impl Read>,
    source: &Path,
    (whiteouts, rules): (Option<Whiteouts>, Option<&LayerRules<'_>>),
    writer: &mut W,
) -> Result<Tree> {
    let mut builder = TreeBuilder::default();
    let mut marks = LayerMarks::new(whiteouts);
    let mut file_bytes = FileBytes::within(rules.map(|rules| rules.file_bytes_max));
    while let Some(member) = members.next()? {
        let names = components(&member.path).map_err(|reason| refused(source, &member, reason))?;
        let is_mark = marks.takes(&names, member.mtime, &mut builder);
        let is_mark = is_mark.map_err(|reason| refused(source, &member, reason))?;
        if is_mark || (rules.is_some() && names.is_empty()) {
            members.skip()?;
            continue;
        }
        file_bytes.add(member.bytes).map_err(|reason| refused(source, &member, reason))?;
        let content = match member.kind {
            Kind::File => Some(contents(&mut members, &member, writer)?),
            _ => None,
        };
        place(&mut builder, &names, &member, content, W::IS_COMPOSEFS)
            .map_err(|reason| refused(source, &member, reason))?;
    }
    members.finish()?;
    let all = builder.enter(&[], directory).and_then(|_| marks.finish(&mut builder));
    all.map_err(|reason| at_end(source, reason))?;
    if let Some(rules) = rules {
        copy_up(&mut builder, rules.lower)?;
    }
    Ok(builder.finish_compact().map_err(|reason| at_end(source, reason))?.0)
}

/// Gives the root, and directories that no member describes, what they have in lower layers.
fn copy_up(builder: &mut TreeBuilder, lower: &LowerDirectories<'_>) -> Result<()> {
    let copy = |path: &[&[u8]], node: &mut Node| -> Result<()> {
        let path = path.join(&b'/');
        let Some(found) = lower(Path::new(OsStr::from_bytes(&path)))? else { return Ok(()) };
        node.mode = (node.mode & !0o7777) | (found.mode & 0o7777);
        (node.uid, node.gid, node.mtime) = (found.uid, found.gid, found.mtime);
        for (name, value) in found.xattrs.iter().filter(|(name, _)| !name.starts_with(b"trusted.")) {
            set_xattr(&mut node.xattrs, name, value);
        }
        Ok(())
    };
    copy(&[], builder.node(0))?;
    builder.for_each_implied(copy)
}
