//! The flags of `ferry doctor`.

use super::check::Export;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Check for these exports only: virtiofs, mount, disk, 9p, image, containers [default: all].
    #[arg(long = "for", value_name = "EXPORT", value_enum, value_delimiter = ',')]
    pub(super) exports: Vec<Export>,

    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(super) json: bool,
}
