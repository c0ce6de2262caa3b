//! Whiteouts: names by which layers remove files.
//!
//! Source: OCI Image Format Specification 1.1, "Filesystem Layers": "Whiteouts", "Opaque Whiteout". Other names that
//! begin with `.wh..wh.` belong to AUFS, which introduced this form, and are ignored. `.wh..wh.plnk` has the targets of
//! hard links, and is removed at the end of its layer.

use ferry_vfs::{Name, NameBuf, Timespec};

use super::file_bytes::FileBytes;
use super::member::Member;
use super::place::{components, directory, place};
use crate::build::filter::Whiteouts;
use crate::build::tree_builder::{NAME_BYTES, NO_DIRECTORY, Refusal, TreeBuilder};
use crate::format::tree::{Content, Node, NodeId, Tree, set_xattr};

const WHITEOUT: &[u8] = b".wh.";
const AUFS: &[u8] = b".wh..wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// The directory in the root with AUFS's targets of hard links.
pub(super) const LINK_TARGETS: &[u8] = b".wh..wh.plnk";

/// The meaning of a path with a whiteout.
pub(super) enum Mark<'a, 'b> {
    /// Nothing.
    Nothing,
    /// A target of hard links, until the end of the layer.
    LinkTarget,
    /// Lower layers contribute nothing to this directory.
    Opaque(&'b [Name<'a>]),
    /// This path is removed.
    Gone(Vec<Name<'a>>),
}

/// Parses the whiteout in a path, if there is one.
pub(super) fn mark<'a, 'b>(names: &'b [Name<'a>]) -> Result<Option<Mark<'a, 'b>>, Refusal> {
    let Some(at) = names.iter().position(|name| name.as_bytes().starts_with(WHITEOUT)) else { return Ok(None) };
    let (parents, name) = (&names[..at], names[at].as_bytes());
    if name == LINK_TARGETS && at == 0 && names.len() > 1 {
        return Ok(Some(Mark::LinkTarget));
    }
    if name.starts_with(AUFS) {
        let is_opaque = name == OPAQUE && names.len() == at + 1;
        return Ok(Some(if is_opaque { Mark::Opaque(parents) } else { Mark::Nothing }));
    }
    if names.len() > at + 1 {
        return Err("a path continues below a whiteout".into());
    }
    let gone = Name::new(&name[WHITEOUT.len()..]).map_err(|error| format!("a whiteout of no name ({error})"))?;
    Ok(Some(Mark::Gone([parents, &[gone]].concat())))
}

/// The whiteouts of a layer that is built as a tree of its own.
pub(super) struct LayerMarks {
    whiteouts: Option<Whiteouts>,
    /// Whiteouts to add in overlayfs's form at the end: the directory, the name in it unless all of it is gone. If a later member has
    /// taken the directory's place, it hides what is below.
    left: Vec<(NodeId, Option<NameBuf>, Timespec)>,
}

impl LayerMarks {
    pub(super) fn new(whiteouts: Option<Whiteouts>) -> Self {
        Self { whiteouts, left: Vec::new() }
    }

    /// Returns whether a member is a whiteout, and only that.
    pub(super) fn takes(
        &mut self,
        names: &[Name<'_>],
        mtime: Timespec,
        builder: &mut TreeBuilder,
    ) -> Result<bool, Refusal> {
        let whiteouts = match self.whiteouts {
            Some(Whiteouts::Keep) => return Ok(false),
            whiteouts => whiteouts,
        };
        let Some(mark) = mark(names)? else { return Ok(false) };
        let how = whiteouts.ok_or(
            "a whiteout: the archive is one layer of an image. Choose --whiteouts drop, overlay or keep, or build the \
             whole image (oci:DIR)",
        )?;
        let (parents, name) = match &mark {
            Mark::LinkTarget => return Ok(false),
            _ if how == Whiteouts::Drop => return Ok(true),
            Mark::Nothing => return Ok(true),
            Mark::Opaque(parents) => (*parents, None),
            Mark::Gone(names) => names.split_last().map(|(name, parents)| (parents, Some(name))).unwrap_or_default(),
        };
        match builder.enter(parents, directory) {
            Ok(parent) => {
                builder.charge(NAME_BYTES + name.map_or(0, |name| name.as_bytes().len()))?;
                self.left.push((parent, name.map(|name| name.to_buf()), mtime));
            }
            // That already hides what is below.
            Err(reason) if reason == NO_DIRECTORY => {}
            Err(reason) => return Err(reason),
        }
        Ok(true)
    }

    /// Adds overlayfs's whiteouts. What the layer contains hides what is below, a directory only if it is opaque.
    pub(super) fn finish(self, builder: &mut TreeBuilder) -> Result<(), Refusal> {
        if self.whiteouts != Some(Whiteouts::Keep) {
            builder.remove_from_root(LINK_TARGETS);
        }
        for (parent, name, mtime) in self.left {
            let found = match &name {
                _ if !builder.is_directory(parent) => continue,
                None => Some(parent),
                Some(name) => builder.child(parent, name.as_name()),
            };
            match (found, name) {
                (Some(found), _) if builder.is_directory(found) => {
                    set_xattr(&mut builder.node(found).xattrs, b"trusted.overlay.opaque", b"y");
                }
                (None, Some(name)) => drop(builder.replace(parent, name.as_name(), device(mtime))?),
                _ => {}
            }
        }
        Ok(())
    }
}

/// A layer as a tree of its own, with overlayfs's whiteouts.
pub(crate) struct OverlayLayer {
    builder: TreeBuilder,
    marks: LayerMarks,
    file_bytes: FileBytes,
}

impl OverlayLayer {
    pub(crate) fn begin() -> Self {
        let (builder, marks) = (TreeBuilder::default(), LayerMarks::new(Some(Whiteouts::Overlay)));
        Self { builder, marks, file_bytes: FileBytes::within(None) }
    }

    /// Applies a member, a regular file with these contents.
    pub(crate) fn apply(&mut self, member: &Member, file: Option<Content>) -> Result<(), Refusal> {
        self.file_bytes.add(member.bytes)?;
        let names = components(&member.path)?;
        if !self.marks.takes(&names, member.mtime, &mut self.builder)? {
            place(&mut self.builder, &names, member, file, false)?;
        }
        Ok(())
    }

    pub(crate) fn finish(mut self) -> Result<Tree, Refusal> {
        self.builder.enter(&[], directory)?;
        self.marks.finish(&mut self.builder)?;
        Ok(self.builder.finish_compact()?.0)
    }
}

/// Returns overlayfs's whiteout.
fn device(mtime: Timespec) -> Node {
    let (mode, xattrs, content) = (0o020_000, Vec::new(), Content::None);
    Node { mode, uid: 0, gid: 0, rdev: 0, mtime, nlink: 1, xattrs, content }
}
