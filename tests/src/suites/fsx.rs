//! The `fsx` crate: random reads, writes, maps, truncations, holes and copies, all of them verified.

use std::ffi::OsString;
use std::path::Path;

/// How long the file becomes at most.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Everything at once.
pub const MIXED: &str = "
[opsize]
max = 65536
[weights]
close_open = 1
read = 10
write = 10
mapread = 10
mapwrite = 10
invalidate = 1
truncate = 5
fsync = 1
fdatasync = 1
posix_fallocate = 2
punch_hole = 3
sendfile = 2
posix_fadvise = 1
copy_file_range = 3
";

/// Reads and writes only.
pub const PLAIN: &str = "
[weights]
close_open = 1
read = 10
write = 10
mapread = 0
mapwrite = 0
truncate = 5
fsync = 1
";

/// Maps, with little else.
pub const MAPPED: &str = "
[weights]
close_open = 1
read = 2
write = 2
mapread = 10
mapwrite = 10
invalidate = 2
truncate = 3
";

/// The command for some operations on `file`; `config` is the file that its configuration is written to, and what
/// differs in the end goes below /tmp.
pub fn command(config: &Path, file: &Path, weights: &str, operations: u32, seed: u32) -> Vec<OsString> {
    command_up_to(FILE_BYTES_MAX, config, file, weights, operations, seed)
}

/// The same for a file that becomes no longer than this.
pub fn command_up_to(
    file_bytes_max: u64,
    config: &Path,
    file: &Path,
    weights: &str,
    operations: u32,
    seed: u32,
) -> Vec<OsString> {
    std::fs::write(config, format!("flen = {file_bytes_max}\n{weights}")).unwrap();
    let program = super::tool("fsx", "0.3.2");
    let mut command: Vec<OsString> = vec![program.into(), "-q".into(), "-f".into(), config.into()];
    command.extend(["-P", "/tmp", "-N"].map(OsString::from));
    command.extend([operations.to_string().into(), "-S".into(), seed.to_string().into(), file.into()]);
    command
}
