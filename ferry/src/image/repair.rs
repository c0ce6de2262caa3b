//! `ferry image verify --repair`: what is damaged in a store is replaced.

use std::path::Path;

use anyhow::Result;
use ferry_image::{Image, RepairCounts, Sealed, note_damage, repair_packs, seal_image};

use super::args::ImageArg;
use super::registry::{self, Origin};

#[derive(Debug, clap::Args)]
pub struct RepairArgs {
    /// Replace what is damaged: by what other packs of the store have, by what --from has, and the rest when an image is built that has it,
    /// or pulled. Objects of the layout composefs that are damaged are removed until then. Packs that were built with --verity, and their
    /// image, get fs-verity where the file system has it.
    #[arg(long)]
    pub repair: bool,
    /// Fetch what is damaged or missing from oci:HOST/NAME:TAG or s3:BUCKET/PREFIX:TAG.
    #[arg(long, value_name = "REF", requires = "repair")]
    from: Option<String>,
    /// Ask other machines than this one without encryption, too.
    #[arg(long, requires = "from")]
    plain_http: bool,
}

impl RepairArgs {
    /// Notes what is damaged, and replaces what can be had.
    pub fn run(&self, arg: &ImageArg, image: &Image, store: &Path) -> Result<()> {
        let found = note_damage(image, store)?;
        let counts = match &self.from {
            Some(from) => {
                let origin = Origin::new(from.clone(), None, None, None, self.plain_http);
                registry::restore(&arg.image, store, arg.digest(), &origin)?
            }
            None => repair_packs(image, store, None)?,
        };
        let RepairCounts { repaired, left } = counts;
        match (self.from.is_some(), image.is_composefs()) {
            (false, true) if found > 0 => {
                eprintln!(
                    "ferry: {found} damaged objects were removed: a build or pull that has them stores them again"
                );
            }
            (_, true) => eprintln!("ferry: {found} damaged objects were replaced"),
            (false, false) if found + repaired == 0 => {
                eprintln!(
                    "ferry: packs that are missing, cut off or without a sound index are fetched by --from, or by a pull"
                );
            }
            (_, false) => {
                eprintln!("ferry: {found} objects were damaged; {repaired} of them have their right bytes again");
                if left > 0 {
                    eprintln!("ferry: {left} are replaced when a build or pull has them");
                }
            }
        }
        Ok(())
    }
}

/// Turns fs-verity on for packs that were built for it, and for the image.
pub fn seal(arg: &ImageArg, image: &Image, store: &Path) -> Result<()> {
    // What is here was proved just now.
    let Sealed { on, left, .. } = ferry_image::seal(image, store, None)?;
    if on > 0 && seal_image(&arg.image)? {
        eprintln!("ferry: the kernel proves what is read of the image and of {on} packs");
    }
    if left > 0 {
        eprintln!("ferry: {left} packs are in use, or not ours, and have no fs-verity yet");
    }
    Ok(())
}
