//! `ferry image build`.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use ferry_image::{
    BuildOptions, Built, COMPOSEFS_VERSION_MAX, Digest, Filter, Layout, Pattern, Store, Trace, Whiteouts,
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

/// A user and a group, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(u32, u32);

impl FromStr for Owner {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once(':').and_then(|(uid, gid)| Some(Self(uid.parse().ok()?, gid.parse().ok()?)));
        numbers.ok_or_else(|| format!("{text:?} is no owner: it is UID:GID, both numbers, as 0:0"))
    }
}

/// What is left out, as people write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excluded(Pattern);

impl FromStr for Excluded {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Pattern::new(text.as_bytes()).map(Self).map_err(|why| format!("{text:?} is no pattern: {why}"))
    }
}

#[derive(Debug, clap::Args)]
pub struct BuildArgs {
    /// The directory, archive (plain, gzip or zstd), dump file, oci:DIR or oci:DIR:TAG; - is standard input.
    #[arg(value_name = "SOURCE")]
    source: PathBuf,
    /// The image to make. One that is there is replaced when the new one is complete.
    #[arg(short, long, value_name = "IMAGE")]
    output: PathBuf,
    #[command(flatten)]
    store: StoreArg,
    /// How the image is laid out: flat is mounted alone and opens fastest, composefs is what mkcomposefs writes.
    #[arg(long, value_enum, default_value_t = LayoutName::Flat)]
    layout: LayoutName,
    /// The version of composefs's layout; 2 is what composefs-rs alone writes [default: 1 if there are whiteouts, else 0; as mkcomposefs has it].
    #[arg(long, value_name = "0|1|2", value_parser = clap::value_parser!(u32).range(..=i64::from(COMPOSEFS_VERSION_MAX)), help_heading = "Layout")]
    composefs_version: Option<u32>,
    /// Put the files that ferry image trace has recorded first, in their order, where mounts read them ahead.
    #[arg(long, value_name = "TRACE", help_heading = "Layout")]
    order_from: Option<PathBuf>,
    /// Which image of an OCI index to take [default: Linux's for this machine].
    #[arg(long, value_name = "OS/ARCH[/VARIANT]", help_heading = "Archives")]
    platform: Option<String>,
    /// What becomes of the whiteouts of an archive that is a layer on its own: they are dropped, for there is nothing
    /// that they hide; made overlayfs's, so that a mount of the image can lie on others; or kept as the files that the
    /// archive has [default: such an archive is refused].
    #[arg(long, value_enum, value_name = "drop|overlay|keep", hide_possible_values = true, help_heading = "Archives")]
    whiteouts: Option<WhiteoutsName>,
    /// Have the kernel prove the bytes of files, too, when the image is mounted with --digest from a file system with fs-verity (of the
    /// layout flat: composefs has that always). The image names the fs-verity digests of its packs then, on every file system; it uses
    /// no packs without, and takes longer to build.
    #[arg(long, help_heading = "Layout")]
    verity: bool,
    /// How many threads read and hash [default: as many as CPUs].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
    /// Leave out what has such a name (*.o), or such a path from the top of the tree (/var/cache/*), with all that is in it; may be given
    /// several times. * and ? do not match /, ** matches anything: **/x is x in any directory but the topmost, for that is x alone. Of directories only.
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<Excluded>,
    /// Have everything belong to this user and group, both numbers; 0:0 is root.
    #[arg(long, value_name = "UID:GID", help_heading = "Attributes")]
    owner: Option<Owner>,
    /// Give everything this time, in seconds since 1970.
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, help_heading = "Attributes")]
    mtime: Option<i64>,
    /// Leave out extended attributes, with labels, ACLs and capabilities.
    #[arg(long, help_heading = "Attributes")]
    skip_xattrs: bool,
}

impl BuildArgs {
    fn options(&self) -> Result<BuildOptions> {
        let layout = match (self.layout, self.composefs_version) {
            (LayoutName::Composefs, version) => Layout::Composefs { version },
            (LayoutName::Flat, None) => Layout::Flat,
            (LayoutName::Flat, Some(_)) => bail!("--composefs-version is of --layout composefs"),
        };
        if layout != Layout::Flat && self.order_from.is_some() {
            bail!("--order-from is of --layout flat: composefs has a file for each object");
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
            // composefs's objects have it wherever they can.
            verity: self.verity && layout == Layout::Flat,
            filter: Filter {
                exclude: self.exclude.iter().map(|Excluded(pattern)| pattern.clone()).collect(),
                owner: self.owner.map(|Owner(uid, gid)| (uid, gid)),
                mtime: self.mtime,
                skip_xattrs: self.skip_xattrs,
            },
        })
    }
}

/// An image of a tree that holds the store would hold the bytes of all files twice, and more with each build.
fn refuse_own_store(source: &Path, store: &Path, exclude: &[Excluded]) -> Result<()> {
    let (tree, place) = (canonical(source)?, canonical(store)?);
    let is_left_out =
        |path: &Path| exclude.iter().any(|Excluded(pattern)| pattern.matches(path.as_os_str().as_bytes()));
    match place.strip_prefix(&tree) {
        Ok(inside) if !inside.ancestors().any(is_left_out) => bail!(
            "the store {} lies in {}, and would be part of the image: choose one outside, or leave it out with --exclude",
            store.display(),
            source.display()
        ),
        _ => Ok(()),
    }
}

/// Where a path leads, also one whose last parts are still to be made.
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
    // Before there is a store that nobody wants.
    let is_word = source == Path::new("-") || source.as_os_str().as_bytes().starts_with(b"oci:");
    if !is_word && !source.try_exists().unwrap_or(true) {
        bail!(
            "there is no {}: an image is built of a directory, an archive, a dump file, or oci:DIR",
            source.display()
        );
    }
    if source.is_dir() && !is_word {
        refuse_own_store(source, store, &args.exclude)?;
    }
    let built = ferry_image::build(source, output, Store::create(store)?, &options, &progress)?;
    bar.finish_and_clear();
    let Built { digest, tree, image_bytes, inodes, data_bytes, new_bytes, packs } = built;
    if *json {
        let packs: Vec<String> = packs.iter().map(Digest::hex).collect();
        let answer = json!({"digest": tree.to_string(), "image_digest": digest.to_string(), "image_bytes": image_bytes, "inodes": inodes,
            "data_bytes": data_bytes, "new_bytes": new_bytes, "packs": packs});
        return print(&format!("{answer}\n"));
    }
    eprintln!(
        "ferry: {inodes} inodes in {image_bytes} bytes; {data_bytes} bytes of files, {new_bytes} of them new in the store"
    );
    print(&format!("{tree}\n"))
}
