//! `ferry image verify --repair`: replaces damaged data in a store.

use std::path::Path;

use anyhow::Result;
use ferry_image::{Image, RepairCounts, SealReport, note_damage, repair_packs, seal_image};

use super::args::ImageArg;
use super::registry::{self, Origin};

#[derive(Debug, clap::Args)]
pub struct RepairArgs {
    /// Replace damaged data: from other packs of the store, from --from, and otherwise by the next build or pull that contains
    /// it. Damaged objects of the composefs layout are removed until then. Packs that were built with --verity, and their image,
    /// get fs-verity if the file system supports it.
    #[arg(long)]
    pub repair: bool,
    /// Fetch damaged or missing data from oci:HOST/NAME:TAG or s3:BUCKET/PREFIX:TAG.
    #[arg(long, value_name = "REF", requires = "repair")]
    from: Option<String>,
    /// Allow unencrypted HTTP to other machines.
    #[arg(long, requires = "from")]
    plain_http: bool,
}

impl RepairArgs {
    /// Records damaged data, and replaces what is available.
    pub fn run(&self, arg: &ImageArg, image: &Image, store: &Path) -> Result<()> {
        let found = note_damage(image, store)?;
        let counts = match &self.from {
            Some(from) => {
                let origin = Origin::new(from.clone(), self.plain_http);
                registry::restore(&arg.image, store, arg.digest(), &origin)?
            }
            None => repair_packs(image, store, None)?,
        };
        let RepairCounts { repaired, left } = counts;
        match (self.from.is_some(), image.is_composefs()) {
            (false, true) if found > 0 => {
                eprintln!(
                    "ferry: {found} damaged objects were removed: the next build or pull that contains them stores them again"
                );
            }
            (_, true) => eprintln!("ferry: {found} damaged objects were replaced"),
            (false, false) if found + repaired == 0 => {
                eprintln!(
                    "ferry: packs that are missing, truncated or without a valid index can be fetched with --from, or a pull"
                );
            }
            (_, false) => {
                eprintln!("ferry: {found} objects were damaged; {repaired} of them were repaired");
                if left > 0 {
                    eprintln!("ferry: {left} will be replaced by the next build or pull that contains them");
                }
            }
        }
        Ok(())
    }
}

/// Enables fs-verity on packs that were built for it, and on the image.
pub fn seal(arg: &ImageArg, image: &Image, store: &Path) -> Result<()> {
    // The data was verified just now.
    let SealReport { on, left, .. } = ferry_image::seal(image, store, None)?;
    if on > 0 && seal_image(&arg.image)? {
        eprintln!("ferry: the kernel verifies reads of the image and of {on} packs");
    }
    if left > 0 {
        eprintln!("ferry: {left} packs are in use or belong to other users, and have no fs-verity yet");
    }
    Ok(())
}
