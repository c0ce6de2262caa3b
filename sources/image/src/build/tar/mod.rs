//! Trees from tar archives: the old format, ustar, PAX and GNU.
//!
//! Input on which tar readers disagree is refused, so that no other reader sees other members. Absolute names lose
//! their leading slash, as in GNU tar; `..` is refused. The last member with a name wins, and symbolic links above a
//! member's name are followed within the tree.
//!
//! Source: POSIX.1-2024, pax ("ustar Interchange Format", "pax Header Block"), and GNU tar's manual ("Basic Tar
//! Format").

mod header;
mod layers;
mod marks;
mod member;
mod pax;
mod place;
mod sparse;
mod sparse_map;

use std::io::Read;
use std::path::Path;

use crate::build::content_writer::ContentWriter;
use crate::build::filter::Whiteouts;
use crate::build::tree_builder::TreeBuilder;
use crate::format::error::Result;
use crate::format::tree::Tree;

use marks::LayerMarks;
use member::Members;
use pax::Globals;
use place::{at_end, contents, directory, place, refused};

pub(crate) use header::{HEADER_BYTES, is_header};
pub(crate) use layers::{Layers, fill};
pub(crate) use marks::OverlayLayer;
pub(crate) use member::{Kind, Member, device};
pub(crate) use place::components;

/// Reads an archive; `writer` stores the files' bytes.
pub(crate) fn read<W: ContentWriter>(
    input: impl Read,
    source: &Path,
    whiteouts: Option<Whiteouts>,
    writer: &mut W,
) -> Result<Tree> {
    let mut members = Members::of(input, source, Globals::Apply);
    let mut builder = TreeBuilder::default();
    let mut marks = LayerMarks::new(whiteouts);
    while let Some(member) = members.next()? {
        let names = components(&member.path).map_err(|reason| refused(source, &member, reason))?;
        if marks.takes(&names, member.mtime).map_err(|reason| refused(source, &member, reason))? {
            members.skip()?;
            continue;
        }
        let content = match member.kind {
            Kind::File => Some(contents(&mut members, &member, writer)?),
            _ => None,
        };
        place(&mut builder, &names, &member, content, W::IS_COMPOSEFS)
            .map_err(|reason| refused(source, &member, reason))?;
    }
    members.finish()?;
    let all = builder.enter(&[], directory).and_then(|_| marks.finish(&mut builder));
    let tree = all.and_then(|()| builder.finish_compact()).map_err(|reason| at_end(source, reason))?;
    Ok(tree.0)
}
