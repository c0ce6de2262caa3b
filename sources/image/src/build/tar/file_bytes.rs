//! The size of all files of archives.

use crate::build::tree_builder::Refusal;

/// The default maximum size of all files of an archive in bytes: a small archive can describe large files with holes, which take as
/// much time to hash as others.
const FILE_BYTES_MAX: u64 = 1 << 40;

/// The size of the files of an archive, or of several, so far.
pub(crate) struct FileBytes {
    sum: u64,
    max: u64,
}

impl FileBytes {
    pub(crate) fn within(max: Option<u64>) -> Self {
        Self { sum: 0, max: max.map_or(FILE_BYTES_MAX, |max| max.min(FILE_BYTES_MAX)) }
    }

    pub(crate) fn add(&mut self, bytes: u64) -> Result<(), Refusal> {
        self.sum = self.sum.saturating_add(bytes);
        let Self { sum, max } = self;
        if sum > max { Err(format!("the files up to here have {sum} bytes, more than {max}")) } else { Ok(()) }
    }
}
