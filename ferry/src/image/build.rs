//! `ferry image build`.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use ferry_image::{
    BuildOptions, BuildReport, COMPOSEFS_VERSION_MAX, Digest, Filter, Layout, Pattern, Store, Trace, Whiteouts,
};
use serde_json::json;

use super::args::StoreArg;
use super::report::bar;
use crate::output::print;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LayoutName {
    Flat,
    Composefs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WhiteoutsName {
    Drop,
    Overlay,
    Keep,
}

/// A user id and a group id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(u32, u32);

impl FromStr for Owner {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once(':').and_then(|(uid, gid)| Some(Self(uid.parse().ok()?, gid.parse().ok()?)));
        numbers.ok_or_else(|| format!("{text:?} is not an owner: write UID:GID, both numbers, such as 0:0"))
    }
}

/// A pattern of names to leave out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExcludePattern(Pattern);

impl FromStr for ExcludePattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Pattern::new(text.as_bytes()).map(Self).map_err(|why| format!("{text:?} is not a pattern: {why}"))
    }
}

#[derive(Debug, clap::Args)]
pub struct BuildArgs {
    /// The directory, archive (plain, gzip or zstd), dump file, oci:DIR or oci:DIR:TAG; - is standard input.
    #[arg(value_name = "SOURCE")]
    source: PathBuf,
    /// The image to create. An existing one is replaced when the new one is complete.
    #[arg(short, long, value_name = "IMAGE")]
    output: PathBuf,
    #[command(flatten)]
    store: StoreArg,
    /// The layout: flat is mounted on its own and opens fastest; composefs is the format of mkcomposefs.
    #[arg(long, value_enum, default_value_t = LayoutName::Flat)]
    layout: LayoutName,
    /// The version of the composefs layout; only composefs-rs writes 2 [default: 1 if there are whiteouts, else 0, as
    /// mkcomposefs].
    #[arg(long, value_name = "0|1|2", value_parser = clap::value_parser!(u32).range(..=i64::from(COMPOSEFS_VERSION_MAX)), help_heading = "Layout")]
    composefs_version: Option<u32>,
    /// Place the files that ferry image trace has recorded first, in their order; mounts read them ahead.
    #[arg(long, value_name = "TRACE", help_heading = "Layout")]
    order_from: Option<PathBuf>,
    /// The platform to take from an OCI index [default: Linux on this machine's architecture].
    #[arg(long, value_name = "OS/ARCH[/VARIANT]", help_heading = "Archives")]
    platform: Option<String>,
    /// How to treat the whiteouts of an archive that is a single layer: drop them, as there is nothing below to hide; convert
    /// them to overlayfs's, so that a mount of the image can be stacked on others; or keep them as plain files [default: such an
    /// archive is an error].
    #[arg(long, value_enum, value_name = "drop|overlay|keep", hide_possible_values = true, help_heading = "Archives")]
    whiteouts: Option<WhiteoutsName>,
    /// Let the kernel verify the data of files as well, if the image is mounted with --digest from a file system with fs-verity
    /// (flat layout; composefs always has it). The image then contains the fs-verity digests of its packs, on every file system.
    /// It does not reuse packs without them, and takes longer to build.
    #[arg(long, help_heading = "Layout")]
    verity: bool,
    /// Let mounts with --inode-share share the memory of equal files (flat layout; Linux 6.4 or later can mount the image). It adds 48
    /// bytes per file.
    #[arg(long, help_heading = "Layout")]
    inode_share: bool,
    /// The number of threads that read and hash [default: one per CPU].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Leave out files and directories with this name (*.o), or with this path from the top of the tree (/var/cache/*); can be
    /// repeated. * and ? do not match /, ** matches anything: **/x matches x in any directory below the top; use x for the top as
    /// well. For directories only.
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<ExcludePattern>,
    /// Give everything this owner and group, both numbers; 0:0 is root.
    #[arg(long, value_name = "UID:GID", help_heading = "Attributes")]
    owner: Option<Owner>,
    /// Give everything this modification time, in seconds since 1970.
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, help_heading = "Attributes")]
    mtime: Option<i64>,
    /// Leave out extended attributes, including labels, ACLs and capabilities.
    #[arg(long, help_heading = "Attributes")]
    skip_xattrs: bool,
}

impl BuildArgs {
    fn options(&self) -> Result<BuildOptions> {
        let layout = match (self.layout, self.composefs_version) {
            (LayoutName::Composefs, version) => Layout::Composefs { version },
            (LayoutName::Flat, None) => Layout::Flat,
            (LayoutName::Flat, Some(_)) => bail!("--composefs-version needs --layout composefs"),
        };
        if layout != Layout::Flat && self.order_from.is_some() {
            bail!("--order-from needs --layout flat: composefs has one file per object");
        }
        if layout != Layout::Flat && self.inode_share {
            bail!("--inode-share needs --layout flat: the files of composefs share their memory already, as objects");
        }
        let order = self.order_from.as_deref().map(Trace::read).transpose()?;
        let usual = BuildOptions::default();
        Ok(BuildOptions {
            threads: self.threads.map_or(usual.threads, usize::from),
            layout,
            platform: self.platform.clone(),
            order,
            whiteouts: self.whiteouts.map(|whiteouts| match whiteouts {
                WhiteoutsName::Drop => Whiteouts::Drop,
                WhiteoutsName::Overlay => Whiteouts::Overlay,
                WhiteoutsName::Keep => Whiteouts::Keep,
            }),
            // composefs enables it on objects where the file system can.
            verity: self.verity && layout == Layout::Flat,
            inode_share: self.inode_share,
            unused_packs: usual.unused_packs,
            filter: Filter {
                exclude: self.exclude.iter().map(|ExcludePattern(pattern)| pattern.clone()).collect(),
                owner: self.owner.map(|Owner(uid, gid)| (uid, gid)),
                mtime: self.mtime,
                skip_xattrs: self.skip_xattrs,
            },
        })
    }
}

/// Refuses a store inside the tree: the image would contain all data twice, and more with each build.
fn refuse_own_store(source: &Path, store: &Path, exclude: &[ExcludePattern]) -> Result<()> {
    let (tree, place) = (canonical(source)?, canonical(store)?);
    let is_left_out =
        |path: &Path| exclude.iter().any(|ExcludePattern(pattern)| pattern.matches(path.as_os_str().as_bytes()));
    match place.strip_prefix(&tree) {
        Ok(inside) if !inside.ancestors().any(is_left_out) => bail!(
            "the store {} is inside {}, and would be part of the image: choose one outside, or exclude it with --exclude",
            store.display(),
            source.display()
        ),
        _ => Ok(()),
    }
}

/// Returns the canonical path, even if its last components do not exist yet.
fn canonical(path: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(path).with_context(|| format!("cannot find {}", path.display()))?;
    let known = path.ancestors().find_map(|known| Some((known, known.canonicalize().ok()?)));
    Ok(known.map_or_else(|| path.clone(), |(known, there)| there.join(path.strip_prefix(known).unwrap_or(&path))))
}

pub fn build(args: &BuildArgs) -> Result<()> {
    let options = args.options()?;
    let BuildArgs { source, output, store: StoreArg { store }, json, .. } = args;
    let bar = bar(if source.is_dir() { "files" } else { "bytes" });
    let progress = |done: usize, all: usize| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    };
    // Checked before an unwanted store is created.
    let is_word = source == Path::new("-") || source.as_os_str().as_bytes().starts_with(b"oci:");
    if !is_word && !source.try_exists().unwrap_or(true) {
        bail!(
            "there is no {}: an image is built from a directory, an archive, a dump file, or oci:DIR",
            source.display()
        );
    }
    if source.is_dir() && !is_word {
        refuse_own_store(source, store, &args.exclude)?;
    }
    let built = ferry_image::build(source, output, Store::create(store)?, &options, &progress)?;
    bar.finish_and_clear();
    let BuildReport { digest, tree, image_bytes, inodes, data_bytes, new_bytes, packs } = built;
    if *json {
        let packs: Vec<String> = packs.iter().map(Digest::hex).collect();
        let answer = json!({"digest": tree.to_string(), "image_digest": digest.to_string(), "image_bytes": image_bytes, "inodes": inodes,
            "data_bytes": data_bytes, "new_bytes": new_bytes, "packs": packs});
        return print(format!("{answer}\n"));
    }
    eprintln!(
        "ferry: {inodes} inodes in {image_bytes} bytes; {data_bytes} bytes of files, {new_bytes} of them new in the store"
    );
    print(format!("{tree}\n"))
}
