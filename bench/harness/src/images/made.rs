//! The images: the commands that build them, and their sizes.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::systems::Builder;
use crate::process;

/// How long an image may take to make.
const BUILD_TIMEOUT: Duration = Duration::from_secs(300);
/// mkfs.erofs's own default is a block; with larger chunks its index is shorter.
const CHUNK_BYTES: u32 = 1 << 20;

/// The programs.
#[derive(Debug, Clone)]
pub struct Programs {
    /// Ours.
    pub ferry: PathBuf,
    /// The directory of mkcomposefs and mount.composefs.
    pub composefs: Option<PathBuf>,
    /// The directory of mkfs.erofs.
    pub erofs: Option<PathBuf>,
}

/// What a program made of a tree.
#[derive(Debug, Clone)]
pub struct BuiltImage {
    directory: PathBuf,
}

impl BuiltImage {
    /// The image.
    pub fn image(&self) -> PathBuf {
        self.directory.join("image")
    }

    /// What holds the data, if they are not in the image: ours and composefs's store, the blob.
    pub fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// Size of the image, and of image and data on the disk, in bytes.
    pub fn bytes(&self) -> Result<(u64, u64)> {
        let image = std::fs::metadata(self.image()).context("no image")?.len();
        Ok((image, allocated(&self.directory)?))
    }
}

/// What files and directories take on the disk, in bytes.
fn allocated(path: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::symlink_metadata(path).with_context(|| format!("cannot look at {}", path.display()))?;
    let mut bytes = metadata.blocks() * 512;
    if metadata.is_dir() {
        for entry in std::fs::read_dir(path)? {
            bytes += allocated(&entry?.path())?;
        }
    }
    Ok(bytes)
}

/// Where the list of what is read first of a tree is.
pub fn trace_of(tree: &Path) -> PathBuf {
    tree.with_extension("trace")
}

/// Makes an image in a directory, which is new each time. Answers how long the program took, and how long it took until all was on
/// the disk.
pub fn make(
    builder: Builder,
    tree: &Path,
    directory: PathBuf,
    programs: &Programs,
) -> Result<(BuiltImage, [Duration; 2])> {
    if directory.exists() {
        std::fs::remove_dir_all(&directory).with_context(|| format!("cannot remove {}", directory.display()))?;
    }
    std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let made = BuiltImage { directory };
    let words = command(builder, tree, &made, programs)?;
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    rustix::fs::sync();
    let started = Instant::now();
    process::run(command, &made.directory, BUILD_TIMEOUT).with_context(|| format!("{} failed", builder.name()))?;
    let alone = started.elapsed();
    rustix::fs::sync();
    Ok((made, [alone, started.elapsed()]))
}

fn command(builder: Builder, tree: &Path, made: &BuiltImage, programs: &Programs) -> Result<Vec<OsString>> {
    let composefs = || programs.composefs.as_ref().context("there is no composefs");
    let erofs = || programs.erofs.as_ref().context("there is no erofs-utils");
    let (image, data): (OsString, OsString) = (made.image().into(), made.data().into());
    let mut order = OsString::from("--order-from=");
    order.push(trace_of(tree));
    let tree = tree.into();
    Ok(match builder {
        Builder::Ferry | Builder::FerryOrdered | Builder::FerryVerity | Builder::FerryComposefs => vec![
            programs.ferry.clone().into(),
            "image".into(),
            "build".into(),
            tree,
            "-o".into(),
            image,
            "--store".into(),
            data,
        ]
        .into_iter()
        .chain(match builder {
            Builder::FerryOrdered => Some(order),
            Builder::FerryVerity => Some("--verity".into()),
            Builder::FerryComposefs => Some("--layout=composefs".into()),
            _ => None,
        })
        .collect(),
        Builder::Composefs => {
            let mut store = OsString::from("--digest-store=");
            store.push(data);
            vec![composefs()?.join("mkcomposefs").into(), store, tree, image]
        }
        Builder::Full => {
            vec![erofs()?.join("mkfs.erofs").into(), "--quiet".into(), "--preserve-mtime".into(), image, tree]
        }
        Builder::Blob => {
            let mut blob = OsString::from("--blobdev=");
            blob.push(data);
            vec![
                erofs()?.join("mkfs.erofs").into(),
                "--quiet".into(),
                "--preserve-mtime".into(),
                // Compact inodes with times of their own.
                "-E48bit".into(),
                format!("--chunksize={CHUNK_BYTES}").into(),
                blob,
                image,
                tree,
            ]
        }
    })
}
