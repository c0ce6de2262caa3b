//! The space that a directory takes.

use std::collections::HashSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::{IoContext, Result};
use crate::metadata::Usage;

/// The size of a block in `stat`.
const BLOCK_BYTES: u64 = 512;

/// Counts the inodes and blocks of a directory and everything in it; those with several names once. Files may come and go meanwhile.
///
/// # Errors
///
/// Something cannot be listed.
pub fn of(root: &Path) -> Result<Usage> {
    let mut linked = HashSet::new();
    let (mut blocks, mut inodes) = (0_u64, 0_u64);
    let mut count = |found: &fs::Metadata| {
        if found.is_dir() || found.nlink() == 1 || linked.insert((found.dev(), found.ino())) {
            blocks += found.blocks();
            inodes += 1;
        }
    };
    count(&fs::symlink_metadata(root).doing("inspect", root)?);
    let mut left = vec![root.to_owned()];
    while let Some(folder) = left.pop() {
        let Some(entries) = present(fs::read_dir(&folder)).doing("list", &folder)? else { continue };
        for entry in entries {
            let entry = entry.doing("list", &folder)?;
            let Some(found) = present(entry.metadata()).doing("inspect", entry.path())? else { continue };
            count(&found);
            if found.is_dir() {
                left.push(entry.path());
            }
        }
    }
    let bytes = blocks.saturating_mul(BLOCK_BYTES);
    Ok(Usage { bytes: i64::try_from(bytes).unwrap_or(i64::MAX), inodes: i64::try_from(inodes).unwrap_or(i64::MAX) })
}

/// Returns nothing for a file that is gone.
fn present<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_count_once_and_links_to_directories_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert_eq!(of(folder.path()).unwrap().inodes, 1);
        fs::create_dir(at("a")).unwrap();
        fs::write(at("a/file"), vec![1; 100_000]).unwrap();
        fs::hard_link(at("a/file"), at("again")).unwrap();
        symlink("/", at("root")).unwrap();
        let usage = of(folder.path()).unwrap();
        assert_eq!(usage.inodes, 4);
        assert!((100_000..150_000).contains(&usage.bytes), "{usage:?}");
        assert!(of(&at("none")).is_err());
    }
}
