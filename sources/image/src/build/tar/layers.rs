//! Archives as layers of an image, each with its changes to those below.
//!
//! Source: OCI Image Format Specification 1.1, "Filesystem Layers": "Applying Changesets", "Whiteouts".

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use super::file_bytes::FileBytes;
use super::marks::{LINK_TARGETS, Mark, mark};
use super::member::{Kind, Member, Members};
use super::pax::Dialect;
use super::place::{at_end, components, contents, directory, place, refused};
use crate::build::content_writer::ContentWriter;
use crate::build::tree_builder::{Refusal, TreeBuilder};
use crate::format::error::{Error, Result};
use crate::format::tree::{Content, NodeId, Tree};

/// The files whose bytes an image needs, by the offsets of their headers in the archive.
pub(crate) type NeededFiles = HashMap<u64, NodeId>;

/// Layers while their headers are read.
pub(crate) struct Layers {
    builder: TreeBuilder,
    /// The files of each layer.
    files: Vec<Vec<(u64, NodeId)>>,
    file_bytes: FileBytes,
    for_composefs: bool,
}

impl Layers {
    pub(crate) fn begin(for_composefs: bool) -> Self {
        let (builder, files, file_bytes) = (TreeBuilder::default(), Vec::new(), FileBytes::within(None));
        Self { builder, files, file_bytes, for_composefs }
    }

    /// Applies the next layer.
    pub(crate) fn add(&mut self, input: impl Read, source: &Path) -> Result<()> {
        let mut members = Members::of(input, source, Dialect::Layer);
        self.next_layer();
        while let Some(member) = members.next()? {
            self.member(&member).map_err(|reason| refused(source, &member, reason))?;
            members.skip()?;
        }
        Ok(())
    }

    /// Begins the next layer.
    pub(crate) fn next_layer(&mut self) {
        self.builder.remove_from_root(LINK_TARGETS);
        if !self.files.is_empty() {
            self.builder.next_layer();
        }
        self.files.push(Vec::new());
    }

    /// Applies a member of the layer, a regular file with these contents; returns its inode if it is new.
    pub(crate) fn apply(&mut self, member: &Member, file: Option<Content>) -> Result<Option<NodeId>, Refusal> {
        self.file_bytes.add(member.bytes)?;
        let names = components(&member.path)?;
        match mark(&names)? {
            None | Some(Mark::LinkTarget) => place(&mut self.builder, &names, member, file, self.for_composefs),
            Some(Mark::Nothing) => Ok(None),
            Some(Mark::Opaque(directory)) => self.builder.make_opaque(directory).map(|()| None),
            Some(Mark::Gone(names)) => self.builder.whiteout(&names).map(|()| None),
        }
    }

    fn member(&mut self, member: &Member) -> Result<(), Refusal> {
        let file = Content::Unread { bytes: member.bytes };
        let id = self.apply(member, (member.kind == Kind::File).then_some(file))?;
        if let (Kind::File, Some(id), Some(files)) = (member.kind, id, self.files.last_mut()) {
            files.push((member.offset, id));
        }
        Ok(())
    }

    /// Returns the tree, whose files are still unread, and the files of each layer that remain in it.
    pub(crate) fn finish(mut self, source: &Path) -> Result<(Tree, Vec<NeededFiles>)> {
        self.builder.remove_from_root(LINK_TARGETS);
        let grown = self.builder.enter(&[], directory).and_then(|_| self.builder.finish_compact());
        let (tree, places) = grown.map_err(|reason| at_end(source, reason))?;
        let left = |(offset, id): (u64, NodeId)| Some((offset, places[id]?));
        let wanted = self.files.into_iter().map(|files| files.into_iter().filter_map(left).collect());
        Ok((tree, wanted.collect()))
    }
}

/// Reads the bytes of a layer's files that remain in the tree.
pub(crate) fn fill(
    input: impl Read,
    source: &Path,
    wanted: &NeededFiles,
    tree: &mut Tree,
    writer: &mut impl ContentWriter,
) -> Result<()> {
    let mut members = Members::of(input, source, Dialect::Layer);
    let mut found = 0;
    while let Some(member) = members.next()? {
        match wanted.get(&member.offset) {
            Some(id) if member.kind == Kind::File => {
                tree.nodes[*id].content = contents(&mut members, &member, writer)?;
                found += 1;
            }
            _ => members.skip()?,
        }
    }
    // It changed between the passes.
    if found == wanted.len() { Ok(()) } else { Err(Error::Changed(source.into())) }
}
