//! What is recorded as damaged in a pack.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use crate::format::digest::Digest;
use crate::store::layout;

/// What is noted as damaged in a pack of a store.
pub(crate) fn noted(store: &Path, pack: Digest) -> HashSet<Digest> {
    let Ok(lines) = fs::read(layout::damage_path(store, pack)) else { return HashSet::new() };
    lines.split(|byte| *byte == b'\n').filter_map(Digest::parse).collect()
}
