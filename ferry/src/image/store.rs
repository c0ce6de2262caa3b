//! `ferry image gc | du | diff`: many images in one store.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ferry_control::{HeldImage, Request, printable, printable_json};
use ferry_image::{
    ChangeKind, Digests, ExclusiveStore, GcObjects, GcReport, Image, ImageUsage, LiveSet, Store, Usage,
    object_locations,
};
use serde_json::json;

use super::args::StoreArg;
use super::report::set_name;
use crate::control::Target;
use crate::output::{ignore_closed_pipe, print};
use crate::status;

/// The prefix of images that a build has not completed.
const NEW_PREFIX: &[u8] = b".new-";
/// The suffix of the lists of files to fetch first, beside images.
const LIST_SUFFIX: &[u8] = b".trace";

const IMAGES_OF_DU: &str =
    "The images, or directories that contain only images [default for the store of ferry-snapshotter: all that it has]";

#[derive(Debug, clap::Args)]
pub struct ImagesArg {
    /// The images, or directories that contain only images and their lists (.trace).
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<PathBuf>,
    #[command(flatten)]
    store: StoreArg,
}

#[derive(Debug, clap::Args)]
pub struct GcArgs {
    #[command(flatten)]
    images: ImagesArg,
    /// Only show what would be removed.
    #[arg(long)]
    dry_run: bool,
    /// Keep data that was created or used in the last seconds: its image may not be in a listed place yet.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    grace_s: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
#[command(mut_arg("images", |images| images.required(false).help(IMAGES_OF_DU)))]
pub struct DuArgs {
    #[command(flatten)]
    images: ImagesArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub struct DiffArgs {
    /// The older image.
    #[arg(value_name = "OLD")]
    old: PathBuf,
    /// The newer image.
    #[arg(value_name = "NEW")]
    new: PathBuf,
    #[command(flatten)]
    store: StoreArg,
    /// Print a line of JSON for each change. A path that is not UTF-8 is also in path_hex.
    #[arg(long)]
    json: bool,
}

impl ImagesArg {
    /// Returns the files; those of directories are sorted by name.
    fn files(&self) -> Result<Vec<PathBuf>> {
        if self.images.is_empty() {
            let root =
                snapshotter_of(&self.store.store).context("name at least one image, or a directory of images")?;
            return images_of_snapshotter(&root);
        }
        let mut files = Vec::new();
        for path in &self.images {
            if !path.is_dir() {
                files.push(path.clone());
                continue;
            }
            let list = || format!("cannot list {}", path.display());
            let mut found = Vec::new();
            for entry in std::fs::read_dir(path).with_context(list)? {
                let entry = entry.with_context(list)?;
                let name = entry.file_name();
                let name = name.as_encoded_bytes();
                if !name.starts_with(NEW_PREFIX) && !name.ends_with(LIST_SUFFIX) {
                    found.push(entry.path());
                }
            }
            found.sort_unstable();
            files.extend(found);
        }
        if files.is_empty() {
            bail!("there is no image in {}: name at least one", self.images[0].display());
        }
        Ok(files)
    }
}

/// Returns the root of the snapshotter to which a store belongs, recognised by the files beside it.
fn snapshotter_of(store: &Path) -> Option<PathBuf> {
    let store = store.canonicalize().ok()?;
    let root = store.parent()?;
    (root.join("metadata.redb").is_file() && root.join("snapshots").is_dir()).then(|| root.to_owned())
}

/// Returns the images of layers, also of uncommitted ones, and those that are fetched on demand.
fn images_of_snapshotter(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for directory in ["snapshots", "lazy"].map(|name| root.join(name)) {
        let entries = std::fs::read_dir(&directory).with_context(|| format!("cannot list {}", directory.display()))?;
        let of_snapshot = |path: PathBuf| ["image", "applied"].map(|name| path.join(name));
        // For a moment, a layer has both names.
        let images =
            entries.flatten().filter_map(|entry| of_snapshot(entry.path()).into_iter().find(|it| it.is_file()));
        files.extend(images);
    }
    files.sort_unstable();
    Ok(files)
}

/// Removes data that no listed image references. A file that is not an image is an error before anything is removed.
pub fn gc(args: &GcArgs) -> Result<()> {
    let store = &args.images.store.store;
    if let Some(root) = snapshotter_of(store) {
        bail!(
            "{} is the store of ferry-snapshotter (see {}), which alone knows the layers that images, leases and pulls of containerd need: it \
             removes the others when containerd collects garbage, so remove images there (crictl rmi, nerdctl rmi, ctr images rm); ferry image \
             du --store {} shows what holds each layer",
            store.display(),
            store.display(),
            root.join("metadata.redb").display()
        );
    }
    let waiting = || eprintln!("ferry: waiting for other processes that use {}", store.display());
    let exclusive = ExclusiveStore::lock(store, &waiting)?;
    // Listed after the wait, because other builds may have ended meanwhile.
    let mut needed = LiveSet::default();
    for file in args.images.files()? {
        needed.add(&Image::open(&file, None)?).with_context(|| format!("{} is damaged", file.display()))?;
    }
    let collected = exclusive.collect(&needed, Duration::from_secs(args.grace_s), args.dry_run)?;
    drop(exclusive);
    let GcReport { removed, leftovers, bytes, young, kept, missing, objects } = &collected;
    if args.json {
        let names = |packs: &[ferry_image::Digest]| packs.iter().map(ferry_image::Digest::hex).collect::<Vec<_>>();
        let answer = json!({"dry_run": args.dry_run, "removed": names(removed), "leftovers": leftovers, "bytes": bytes,
            "young": names(young), "kept": kept, "missing": names(missing), "objects": {"removed": objects.removed,
            "young": objects.young, "kept": objects.kept,
            "missing": objects.missing.iter().map(|path| path.escape_ascii().to_string()).collect::<Vec<_>>()}});
        return print(format!("{answer}\n"));
    }
    let done = if args.dry_run { "would remove" } else { "removed" };
    let mut text =
        format!("{done} {} packs and {leftovers} leftovers, {bytes} bytes; {kept} packs are needed\n", removed.len());
    if objects != &GcObjects::default() {
        text += &format!("{done} {} objects; {} objects are needed\n", objects.removed, objects.kept);
    }
    if objects.young > 0 {
        text += &format!(
            "{} objects are not needed, but were used in the last {} s: --grace-s\n",
            objects.young, args.grace_s
        );
    }
    if !young.is_empty() {
        text +=
            &format!("{} packs are not needed, but were used in the last {} s: --grace-s\n", young.len(), args.grace_s);
    }
    for pack in missing {
        text += &format!("missing: the pack {pack}, which an image needs\n");
    }
    for object in &objects.missing {
        text += &format!("missing: the object {}, which an image needs\n", object.escape_ascii());
    }
    print(&text)
}

/// Shows the space of each image and of the store; for the store of a snapshotter also which snapshots hold the images.
pub fn du(args: &DuArgs) -> Result<()> {
    let store = Store::open(&args.images.store.store)?;
    let root = snapshotter_of(&args.images.store.store);
    let mut usage = Usage::default();
    let mut images = Vec::new();
    for file in args.images.files()? {
        let image = match Image::open(&file, None) {
            // It was removed, or committed under another name, since it was listed.
            Err(_) if root.is_some() && !file.exists() => continue,
            image => image?,
        };
        let found = object_locations(&image).with_context(|| format!("{} is damaged", file.display()))?;
        usage.add(&found);
        images.push((file, image.bytes(), found));
    }
    let holders = root.as_deref().and_then(Holders::ask);
    let total = usage.total(&store)?;
    let unused = total.bytes.saturating_sub(total.garbage_bytes).saturating_sub(total.live_bytes);
    if args.json {
        let images: Vec<_> = images
            .iter()
            .map(|(file, bytes, found)| {
                let ImageUsage { bytes: data, own_bytes: own } = usage.of_image(found);
                let mut image = json!({"image": file.display().to_string(), "image_bytes": bytes, "data_bytes": data, "own_bytes": own});
                if let Some(holders) = &holders {
                    image["held_by"] = json!(holders.of(file).collect::<Vec<_>>());
                }
                image
            })
            .collect();
        let answer = json!({"images": images, "packs": total.packs, "objects": total.objects, "store_bytes": total.bytes,
            "live_bytes": total.live_bytes, "unused_bytes": unused, "garbage_bytes": total.garbage_bytes});
        return print(format!("{answer}\n"));
    }
    let mut text = format!("{:>12} {:>14} {:>14}  image\n", "metadata", "data", "not shared");
    for (file, bytes, found) in &images {
        let ImageUsage { bytes: data, own_bytes: own } = usage.of_image(found);
        text += &format!("{bytes:>12} {data:>14} {own:>14}  {}\n", file.display());
        text += &holders.as_ref().map_or_else(String::new, |holders| holders.text(file));
    }
    text += &format!(
        "{} bytes in {} packs{}: {} needed, {unused} unused in the same packs, {} that {} removes\n",
        total.bytes,
        total.packs,
        if total.objects > 0 { format!(" and {} objects", total.objects) } else { String::new() },
        total.live_bytes,
        total.garbage_bytes,
        if root.is_some() { "containerd's garbage collection" } else { "gc" },
    );
    print(&text)
}

/// Which snapshots hold the images of a running snapshotter.
struct Holders {
    root: PathBuf,
    images: Vec<HeldImage>,
}

impl Holders {
    /// Asks the snapshotter, if it runs.
    fn ask(root: &Path) -> Option<Self> {
        let asked = Target::find(root).and_then(|target| target.client.ask(&Request::Images));
        match asked {
            Ok((images, _)) => Some(Self { root: root.to_owned(), images }),
            Err(error) => {
                eprintln!(
                    "ferry: what holds these images is not shown, because ferry-snapshotter does not tell: {error:#}"
                );
                None
            }
        }
    }

    fn of(&self, image: &Path) -> impl Iterator<Item = &HeldImage> {
        // The named file may have another path.
        let image = image.canonicalize().unwrap_or_else(|_| image.to_owned());
        self.images.iter().filter(move |held| self.root.join(&held.image) == image)
    }

    /// Describes what holds an image, one line for each snapshot.
    fn text(&self, image: &Path) -> String {
        let lines = self.of(image).map(|held| {
            let container = held.container.as_ref().map_or_else(String::new, |container| format!(" of {container}"));
            let more = held.uses_count.saturating_sub(held.uses.len() as u64);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let uses = match &*held.uses.join(", ") {
                "" => "no snapshot is based on it: an image or a lease of containerd keeps it".to_owned(),
                uses => format!("based on it: {uses}{more}"),
            };
            printable(&format!("held by snapshot {}{container}; {uses}", held.snapshot)).into_owned()
        });
        let mut lines: Vec<String> = lines.collect();
        if lines.is_empty() {
            lines.push("held by no snapshot: it was pulled just now, or goes with the next garbage".to_owned());
        }
        lines.iter().map(|line| format!("{:44}{line}\n", "")).collect()
    }
}

/// Lists what changed; returns the exit status.
pub fn diff(args: &DiffArgs) -> Result<u8> {
    let (old, new) = (Image::open(&args.old, None)?, Image::open(&args.new, None)?);
    let store = Store::open(&args.store.store)?;
    let mut digests = Digests::default();
    digests.add(&old, &store)?;
    digests.add(&new, &store)?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut same = true;
    let walked = ferry_image::diff::<anyhow::Error>(&old, &new, &digests, &mut |change| {
        same = false;
        let (letter, word) = match change.kind {
            ChangeKind::Added => ('A', "added"),
            ChangeKind::Removed => ('D', "removed"),
            ChangeKind::Changed => ('M', "changed"),
        };
        if args.json {
            let mut line = json!({"change": word, "what": change.what});
            set_name(&mut line, "path", &change.path);
            writeln!(out, "{}", printable_json(&line.to_string()))?;
        } else {
            let what = if change.what.is_empty() { String::new() } else { format!(" ({})", change.what.join(", ")) };
            writeln!(out, "{letter} {}{what}", change.path.escape_ascii())?;
        }
        Ok(())
    });
    let walked = walked.and_then(|()| Ok(out.flush()?));
    ignore_closed_pipe(walked).with_context(|| damaged(&args.old, &args.new))?;
    Ok(if same { status::DONE } else { status::WRONG })
}

fn damaged(old: &Path, new: &Path) -> String {
    format!("cannot compare all of {} and {} (see ferry image fsck)", old.display(), new.display())
}
