//! `d_type` of directory entries (Linux `DT_*`): the type bits of `st_mode`, shifted.

use ferry_vfs::FileType;

/// Returns the number of a file type; 0 if it is unknown.
#[allow(clippy::cast_possible_truncation, reason = "file types have four bits")]
pub(crate) fn from_file_type(kind: FileType) -> u8 {
    if kind == FileType::Unknown { 0 } else { (kind.as_raw_mode() >> 12) as u8 }
}

/// Returns the file type with this number.
pub(crate) fn to_file_type(raw: u8) -> FileType {
    if raw < 16 { FileType::from_raw_mode(u32::from(raw) << 12) } else { FileType::Unknown }
}
