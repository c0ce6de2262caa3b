//! Checking and repairing an image.

use std::path::Path;

use super::audit;
use super::error::{DamageError, OpenError};
use super::load::{LoadedImage, SuperblockCopies};
use super::open::{Media, Options, assemble, open_image, open_tier2};

/// The maximum number of damaged records that are reported one by one.
const DAMAGE_MAX: usize = 1000;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing; nothing is lost.
    Note,
    /// Damage without loss of data.
    Warning,
    /// Something is damaged or lost.
    Error,
}

/// A finding, as a sentence.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// What.
    pub what: String,
}

/// What [`fsck`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// Damage and other findings.
    pub findings: Vec<Finding>,
    /// Inodes.
    pub inodes: u64,
    /// Blocks in use, of both tiers.
    pub blocks_used: u64,
    /// Blocks in all.
    pub blocks: u64,
    /// Records in the log.
    pub records: u64,
    /// The damage was repaired.
    pub repaired: bool,
}

impl Report {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.findings.iter().all(|finding| finding.severity == Severity::Note)
    }

    fn add(&mut self, severity: Severity, what: impl ToString) {
        self.findings.push(Finding { severity, what: what.to_string() });
    }
}

/// Checks the image in a file or device, which must not be mounted: superblocks, log, tree (links and reachability are
/// recounted from the records), blocks. With `repair`, writes back what could be read: damaged copies of the superblock
/// are rewritten, invalid records and conflicting blocks are dropped. A damaged snapshot is replaced by the previous
/// one, if that is intact.
///
/// # Errors
///
/// The image cannot be checked at all: [`OpenError`].
pub fn fsck(path: &Path, tier2: Option<&Path>, repair: bool) -> Result<Report, OpenError> {
    let options = Options { read_only: !repair, ..Options::default() };
    let tier2_medium = tier2.map(|tier2| open_tier2(tier2, &options)).transpose()?.map(|(medium, _)| medium);
    let media = Media { image: open_image(path, &options)?.0, tier2: tier2_medium };
    check(path, tier2, &media, repair)
}

/// Checks the image on a medium, as [`fsck`].
///
/// # Errors
/// As for [`fsck`].
pub fn fsck_medium(media: &Media, repair: bool) -> Result<Report, OpenError> {
    check(Path::new("the image"), None, media, repair)
}

fn check(path: &Path, tier2: Option<&Path>, media: &Media, repair: bool) -> Result<Report, OpenError> {
    let mut report = Report::default();
    let copies = SuperblockCopies::read(&*media.image);
    for (index, copy) in copies.0.iter().enumerate() {
        if let Err(error) = copy {
            report.add(Severity::Warning, format!("superblock {index} is damaged: {error}"));
        }
    }
    if let [Ok(first), Ok(second)] = &copies.0
        && first.generation != second.generation
    {
        report.add(Severity::Note, "the superblocks differ: a crash came between writing them");
    }
    let options = Options { read_only: true, tier2: tier2.map(Into::into), ..Options::default() };
    let (mut damage, mut more): (Vec<DamageError>, u64) = (Vec::new(), 0);
    let tree = assemble(path, media, &options, &mut |error| {
        if damage.len() < DAMAGE_MAX {
            damage.push(error);
        } else {
            more += 1;
        }
        Ok(())
    });
    let tree = tree?;
    let disk = &tree.store().disk;
    let (blocks, free) = disk.space();
    (report.blocks, report.blocks_used) = (blocks, blocks - free);
    report.inodes = tree.usage().inodes;
    report.records = disk.log.records();
    let owned: u64 = disk.files().iter().map(|file| file.read().extents.blocks()).sum();
    if owned != report.blocks_used {
        report.add(Severity::Error, format!("files have {owned} blocks and {} are taken", report.blocks_used));
    }
    if let (Some(superblock), true) = (copies.best(), damage.is_empty()) {
        match LoadedImage::find(&*media.image, superblock, &mut Err) {
            Ok((log, _)) => audit::compare(&tree, &log).iter().for_each(|wrong| report.add(Severity::Error, wrong)),
            Err(error) => report.add(Severity::Error, error),
        }
    }
    drop(tree);
    damage.iter().for_each(|error| report.add(Severity::Error, error));
    if more > 0 {
        report.add(Severity::Error, format!("{more} more records are damaged"));
    }
    if repair && !report.is_clean() {
        let options = Options { read_only: false, commit: Some(std::time::Duration::ZERO), ..options };
        drop(assemble(path, media, &options, &mut |_| Ok(()))?);
        report.repaired = true;
    }
    Ok(report)
}
