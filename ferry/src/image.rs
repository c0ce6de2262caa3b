//! `ferry image`: builds, mounts, checks and shows images.

mod lazy;
mod loops;
mod mount;
pub mod registry;
mod repair;
mod store;
mod trace;
mod upper;
mod verity;
pub mod watch;

use std::ffi::OsString;
use std::io::{BufWriter, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail};
use ferry_image::{
    BuildOptions, Built, COMPOSEFS_VERSION_MAX, Digest, DumpError, Image, Inode, Layout, Nid, Objects, Source, Store,
    Trace, Whiteouts, walk,
};
use ferry_vfs::{FileType, Name};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

/// Copy-paste lines for the help.
pub const EXAMPLES: &str = "\
Examples:
  ferry image build rootfs -o rootfs.img --store /var/lib/ferry    # prints the digest that proves it
  ferry image mount rootfs.img /mnt --store /var/lib/ferry --digest DIGEST
  umount /mnt

  ferry image mount rootfs.img /mnt --store /var/lib/ferry --upper changes    # can be written to
  ferry mount image:rootfs.img /mnt --store /var/lib/ferry    # Ferry's own mount proves each byte

  ferry image build rootfs -o rootfs.img --store /var/lib/ferry --verity    # mounts prove each read
  ferry image ls -l rootfs.img /etc
  ferry image cat rootfs.img /usr/lib/os-release --store /var/lib/ferry
  ferry image diff old.img rootfs.img --store /var/lib/ferry
  ferry image verify rootfs.img --store /var/lib/ferry             # reads and proves every byte
  ferry image verify rootfs.img --store /var/lib/ferry --repair    # and replaces what is damaged
  ferry image gc images/ --store /var/lib/ferry    # keeps what the images in this folder need

  ferry image trace /mnt -o start.trace -- chroot /mnt /usr/bin/service --check
  ferry image build rootfs -o rootfs.img --store /var/lib/ferry --order-from start.trace

What others make and take:
  ferry image build oci:bundle:latest -o bundle.img --store /var/lib/ferry    # an OCI image directory
  ferry image build rootfs -o rootfs.cfs --store /var/lib/ferry --layout composefs    # mkcomposefs's
  ferry image dump rootfs.cfs > rootfs.dump

Registries, and stores of the S3 kind (AWS_ENDPOINT_URL and the like say which):
  ferry image push rootfs.img oci:registry.example/os/base:12 --store /var/lib/ferry
  ferry image push rootfs.img s3:bucket/os/base:12 --store /var/lib/ferry
  FROM=oci:registry.example/os/base:12
  ferry image pull $FROM --store /var/lib/ferry -o rootfs.img --digest DIGEST
  ferry image mount rootfs.img /mnt --store /var/lib/ferry --from $FROM    # before it is all here
  ferry mount image:rootfs.img /mnt --store /var/lib/ferry --from $FROM    # for kernels before 6.14

An image holds the tree's metadata; the bytes of its files are in the store, where images share
what they have in common. A stock kernel mounts it (EROFS, Linux 6.12 or later).";

/// A positive answer of `fsck` or `verify`, and a negative one.
const CLEAN_STATUS: u8 = 0;
const DAMAGED_STATUS: u8 = 4;

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Build an image of a directory, a tar archive, an OCI image directory, or a composefs dump file.
    Build {
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
        /// The version of composefs's layout [default: 1 if there are whiteouts, else 0; as mkcomposefs has it].
        #[arg(long, value_name = "0|1", value_parser = clap::value_parser!(u32).range(..=i64::from(COMPOSEFS_VERSION_MAX)))]
        composefs_version: Option<u32>,
        /// Put the files that ferry image trace has recorded first, in their order, where mounts read them ahead.
        #[arg(long, value_name = "TRACE")]
        order_from: Option<PathBuf>,
        /// Which image of an OCI index to take [default: Linux's for this machine].
        #[arg(long, value_name = "OS/ARCH[/VARIANT]")]
        platform: Option<String>,
        /// What becomes of the whiteouts of an archive that is a layer by itself: they are dropped, for there is nothing that they hide;
        /// made overlayfs's, so that a mount of the image can lie on others; or kept as the files that the archive has [default: such an
        /// archive is refused].
        #[arg(long, value_enum, value_name = "drop|overlay|keep", hide_possible_values = true)]
        whiteouts: Option<WhiteoutsName>,
        /// Have the kernel prove the bytes of files, too, when the image is mounted with --digest from a file system with fs-verity (of the
        /// layout flat: composefs has that always). The image names the fs-verity digests of its packs then, on every file system; it uses
        /// no packs without, and takes longer to build.
        #[arg(long)]
        verity: bool,
        /// How many threads read and hash [default: as many as CPUs].
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
        threads: Option<u16>,
        /// Answer in JSON.
        #[arg(long)]
        json: bool,
    },
    /// Mount an image with the kernel's own EROFS; umount(8) ends it.
    Mount(mount::MountArgs),
    /// List what is in an image.
    Ls {
        #[command(flatten)]
        image: ImageArg,
        /// Where to begin [default: the whole tree].
        #[arg(value_name = "PATH", default_value = "/")]
        path: PathBuf,
        /// With modes, owners, sizes and times.
        #[arg(short)]
        long: bool,
        /// A line of JSON for each name. One that is no UTF-8 has its bytes in path_hex, a link's in target_hex.
        #[arg(long)]
        json: bool,
    },
    /// Write a file of an image to standard output.
    Cat {
        #[command(flatten)]
        image: ImageArg,
        /// The file.
        #[arg(value_name = "PATH")]
        path: PathBuf,
        #[command(flatten)]
        store: StoreArg,
    },
    /// Write what is in an image of the layout composefs as a dump file (composefs-dump(5)).
    Dump {
        #[command(flatten)]
        image: ImageArg,
    },
    /// Record which files of a mounted image a workload opens, in their order; the status is the workload's.
    Trace(trace::TraceArgs),
    /// Show an image's digest, its size, and the packs that it needs.
    Info {
        #[command(flatten)]
        image: ImageArg,
        /// Show, too, which of the packs in this store the kernel proves by fs-verity when it reads them.
        #[arg(long, value_name = "DIR")]
        store: Option<PathBuf>,
        /// Answer in JSON.
        #[arg(long)]
        json: bool,
    },
    /// Check an image's metadata, which may come from anywhere; the status is 4 if something is wrong.
    Fsck {
        #[command(flatten)]
        image: ImageArg,
        /// Answer in JSON.
        #[arg(long)]
        json: bool,
    },
    /// Check an image's metadata and every byte of its files; the status is 4 if something is wrong.
    Verify {
        #[command(flatten)]
        image: ImageArg,
        #[command(flatten)]
        store: StoreArg,
        #[command(flatten)]
        repair: repair::RepairArgs,
        /// Answer in JSON.
        #[arg(long)]
        json: bool,
    },
    /// Push an image, and what a registry or S3-compatible store has not got of its files.
    Push(registry::PushArgs),
    /// Pull an image, and what the store has not got of its files. What a pull that failed has left is used.
    Pull(registry::PullArgs),
    /// Remove from a store what none of these images needs. All images that are to stay have to be named.
    Gc(store::GcArgs),
    /// Show what images take in a store, and what they share.
    Du(store::DuArgs),
    /// Show what is another in the newer of two images; the status is 4 if anything is.
    Diff(store::DiffArgs),
}

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

#[derive(Debug, clap::Args)]
pub struct StoreArg {
    /// The folder with the bytes of the files.
    #[arg(long, value_name = "DIR")]
    store: PathBuf,
}

#[derive(Debug, clap::Args)]
pub struct ImageArg {
    /// The image.
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Go on only if the image has this digest.
    #[arg(long, value_name = "DIGEST")]
    digest: Option<ImageDigest>,
}

impl ImageArg {
    fn digest(&self) -> Option<Digest> {
        self.digest.map(|digest| digest.0)
    }

    fn open(&self) -> Result<Image> {
        Ok(Image::open(&self.image, self.digest())?)
    }
}

/// A digest as people write it.
#[derive(Clone, Copy, Debug)]
pub struct ImageDigest(pub Digest);

impl FromStr for ImageDigest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digest = Digest::parse(text.as_bytes());
        let why = || {
            format!(
                "{text:?} is no digest: it is blake3: or sha256: and 64 hexadecimal digits, as ferry image build prints it"
            )
        };
        digest.map(Self).ok_or_else(why)
    }
}

impl<'de> Deserialize<'de> for ImageDigest {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        String::deserialize(input)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Does what was asked for; answers the status.
pub fn run(command: &Command, line: &[OsString]) -> Result<u8> {
    match command {
        Command::Build {
            source,
            output,
            store,
            layout,
            composefs_version,
            order_from,
            platform,
            whiteouts,
            verity,
            threads,
            json,
        } => {
            let layout = match (layout, composefs_version) {
                (LayoutName::Composefs, version) => Layout::Composefs { version: *version },
                (LayoutName::Flat, None) => Layout::Flat,
                (LayoutName::Flat, Some(_)) => bail!("--composefs-version is of --layout composefs"),
            };
            if layout != Layout::Flat && order_from.is_some() {
                bail!("--order-from is of --layout flat: composefs has a file for each object");
            }
            let order = order_from.as_deref().map(Trace::read).transpose()?;
            let mut options = BuildOptions { layout, order, platform: platform.clone(), ..BuildOptions::default() };
            options.threads = threads.map_or(options.threads, usize::from);
            // composefs's objects have it wherever they can.
            options.verity = *verity && layout == Layout::Flat;
            options.whiteouts = whiteouts.map(|whiteouts| match whiteouts {
                WhiteoutsName::Drop => Whiteouts::Drop,
                WhiteoutsName::Overlay => Whiteouts::Overlay,
                WhiteoutsName::Keep => Whiteouts::Keep,
            });
            build(source, output, &store.store, &options, *json)?;
        }
        Command::Dump { image } => dump(&image.open()?, &image.image)?,
        Command::Mount(args) => return mount::mount(args, line),
        Command::Ls { image, path, long, json } => list(&image.open()?, path, *long, *json)?,
        Command::Cat { image, path, store } => cat(image, path, &store.store)?,
        Command::Info { image, store, json } => info(&image.open()?, store.as_deref(), *json)?,
        Command::Fsck { image, json } => {
            let report = ferry_image::check(&image.open()?);
            return say(&report.findings, *json);
        }
        Command::Verify { image, store, repair, json } => {
            let opened = image.open()?;
            let mut findings = ferry_image::check(&opened).findings;
            if findings.is_empty() {
                findings = verify(&opened, &store.store)?;
                if !findings.is_empty() && repair.repair {
                    repair.run(image, &opened, &store.store)?;
                    findings = verify(&opened, &store.store)?;
                }
                if findings.is_empty() && repair.repair {
                    repair::seal(image, &opened, &store.store)?;
                }
            }
            return say(&findings, *json);
        }
        Command::Trace(args) => return trace::trace(args),
        Command::Push(args) => registry::push(args)?,
        Command::Pull(args) => registry::pull(args)?,
        Command::Gc(args) => store::gc(args)?,
        Command::Du(args) => store::du(args)?,
        Command::Diff(args) => return store::diff(args),
    }
    Ok(0)
}

fn dump(image: &Image, path: &Path) -> Result<()> {
    if !image.is_composefs() {
        bail!("{} is of the layout flat: a dump file is of images of the layout composefs", path.display());
    }
    let mut out = BufWriter::new(std::io::stdout().lock());
    let written = ferry_image::dump(image, &mut out).map_err(|error| match error {
        DumpError::Io(error) => error.into(),
        error => error.into(),
    });
    ended(written.and_then(|()| Ok(out.flush()?)))
}

fn build(source: &Path, output: &Path, store: &Path, options: &BuildOptions, json: bool) -> Result<()> {
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
    let built = ferry_image::build(source, output, Store::create(store)?, options, &progress)?;
    bar.finish_and_clear();
    let Built { digest, image_bytes, inodes, data_bytes, new_bytes, packs } = built;
    if json {
        let packs: Vec<String> = packs.iter().map(Digest::hex).collect();
        let answer = json!({"digest": digest.to_string(), "image_bytes": image_bytes, "inodes": inodes,
            "data_bytes": data_bytes, "new_bytes": new_bytes, "packs": packs});
        return print(&format!("{answer}\n"));
    }
    eprintln!(
        "ferry: {inodes} inodes in {image_bytes} bytes; {data_bytes} bytes of files, {new_bytes} of them new in the store"
    );
    print(&format!("{digest}\n"))
}

fn bar(what: &str) -> ProgressBar {
    let target =
        if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(&format!("{{wide_bar}} {{pos}}/{{len}} {what} {{eta}}"));
    ProgressBar::with_draw_target(Some(0), target).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Finds a path, without following symbolic links.
fn find(image: &Image, path: &Path) -> Result<Nid> {
    let mut nid = image.root();
    for part in path.components() {
        match part {
            std::path::Component::Normal(name) => {
                let missing = || anyhow!("{} is not in the image", path.display());
                let name = Name::new(name.as_bytes()).map_err(|_| missing())?;
                let dir = image.inode(nid)?;
                if dir.kind() != FileType::Directory {
                    return Err(missing());
                }
                nid = image.lookup(&dir, name)?.ok_or_else(missing)?;
            }
            std::path::Component::ParentDir => bail!("{}: .. has no meaning in an image", path.display()),
            _ => {}
        }
    }
    Ok(nid)
}

fn list(image: &Image, path: &Path, long: bool, json: bool) -> Result<()> {
    let from = find(image, path)?;
    let path = Path::new("/").join(path);
    let mut out = BufWriter::new(std::io::stdout().lock());
    let mut line = |path: &[u8], inode: &Inode| -> Result<()> {
        let target = match inode.kind() {
            FileType::Symlink => Some(image.link(inode)?),
            _ => None,
        };
        let name = path.escape_ascii();
        if json {
            let mut line = json!({"mode": format!("{:o}", inode.mode),
                "nlink": inode.nlink, "uid": inode.uid, "gid": inode.gid, "size": inode.bytes, "rdev": inode.rdev(),
                "mtime": {"sec": inode.mtime.sec, "nsec": inode.mtime.nsec}, "target": null});
            set_name(&mut line, "path", path);
            if let Some(target) = target {
                set_name(&mut line, "target", &target);
            }
            writeln!(out, "{line}")?;
        } else if long {
            let arrow = target.map(|target| format!(" -> {}", target.escape_ascii())).unwrap_or_default();
            let (mode, time) = (permissions(inode), inode.mtime.sec);
            let (links, uid, gid, size) = (inode.nlink, inode.uid, inode.gid, inode.bytes);
            writeln!(out, "{mode} {links:>3} {uid:>5} {gid:>5} {size:>10} {time:>10} {name}{arrow}")?;
        } else {
            writeln!(out, "{name}")?;
        }
        Ok(())
    };
    let walked = walk(image, from, path.as_os_str().as_bytes(), |step, inode| line(&step.path(), inode));
    ended(walked.and_then(|()| Ok(out.flush()?)))
}

/// Says a name in JSON: as text, and where that is not all of it (it is no UTF-8) as hexadecimal digits of its bytes, too.
fn set_name(answer: &mut Value, key: &str, name: &[u8]) {
    answer[key] = String::from_utf8_lossy(name).into();
    if std::str::from_utf8(name).is_err() {
        let digits: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        answer[format!("{key}_hex")] = digits.into();
    }
}

/// A reader that has seen enough is no error.
fn ended(outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(error) => match error.downcast_ref::<std::io::Error>() {
            Some(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            _ => Err(error),
        },
        Ok(()) => Ok(()),
    }
}

/// As `ls -l` shows them.
fn permissions(inode: &Inode) -> String {
    let kind = match inode.kind() {
        FileType::Directory => 'd',
        FileType::Symlink => 'l',
        FileType::CharacterDevice => 'c',
        FileType::BlockDevice => 'b',
        FileType::Fifo => 'p',
        FileType::Socket => 's',
        _ => '-',
    };
    let mut text = String::from(kind);
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = inode.mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (inode.mode & special != 0, bits & 1 != 0) {
            (true, true) => letter,
            (true, false) => letter.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

fn cat(arg: &ImageArg, path: &Path, store: &Path) -> Result<()> {
    let source = Source::open(&arg.image, store, arg.digest())?;
    let nid = find(source.image(), path)?;
    if source.image().inode(nid)?.kind() != FileType::RegularFile {
        bail!("{} is no regular file", path.display());
    }
    let mut out = std::io::stdout().lock();
    let mut piece = vec![0; 1 << 20];
    let mut offset = 0;
    loop {
        let count = source
            .read_at(nid, offset, &mut piece)
            .map_err(|_| anyhow!("{} cannot be read: the image or its store is damaged", path.display()))?;
        if count == 0 {
            return Ok(());
        }
        if let Err(error) = out.write_all(&piece[..count]) {
            return ended(Err(error.into()));
        }
        offset += count as u64;
    }
}

fn info(image: &Image, store: Option<&Path>, json: bool) -> Result<()> {
    let (digest, bytes, inodes) = (image.digest(), image.bytes(), image.inodes());
    let layout = if image.is_composefs() { "composefs" } else { "flat" };
    let proofs = store.map(|store| verity::look(image, store)).transpose()?;
    let proof = |number: usize| proofs.as_ref().and_then(|proofs| proofs.get(number));
    if json {
        let pack = |(number, pack): (usize, &ferry_image::PackRef)| {
            let mut answer = json!({"name": pack.name.hex(), "bytes": pack.blocks * 4096, "ahead": pack.ahead});
            if let Some(proof) = proof(number) {
                answer["verity"] = verity::word(*proof).into();
            }
            answer
        };
        let packs: Vec<_> = image.packs().iter().enumerate().map(pack).collect();
        return print(&format!(
            "{}\n",
            json!({"digest": digest.to_string(), "layout": layout, "bytes": bytes, "inodes": inodes, "packs": packs})
        ));
    }
    let mut text = format!("digest  {digest}\nlayout  {layout}\nbytes   {bytes}\ninodes  {inodes}\n");
    for (number, pack) in image.packs().iter().enumerate() {
        let ahead = if pack.ahead { ", read ahead by mounts" } else { "" };
        let verity = proof(number).map(|proof| format!(", fs-verity: {}", verity::word(*proof))).unwrap_or_default();
        text += &format!("pack    {} {} bytes{ahead}{verity}\n", pack.name, pack.blocks * 4096);
    }
    print(&text)
}

/// Proves the bytes of every file.
fn verify(image: &Image, store: &Path) -> Result<Vec<String>> {
    let missing = missing_packs(image, store)?;
    if !missing.is_empty() {
        return Ok(missing);
    }
    let objects = match Objects::open(image, store) {
        // One of its packs is damaged.
        Err(error @ ferry_image::Error::Pack { .. }) => return Ok(vec![error.to_string()]),
        objects => objects?,
    };
    let bar = bar("inodes");
    bar.set_length(image.inodes());
    let mut findings = Vec::new();
    walk(image, image.root(), b"/", |step, inode| -> Result<()> {
        bar.inc(1);
        if inode.kind() == FileType::RegularFile
            && let Err(bad) = objects.prove_file(image.data(inode)?, inode.bytes)
        {
            findings.push(format!("{}: {bad}", step.text()));
        }
        Ok(())
    })?;
    bar.finish_and_clear();
    if findings.is_empty() {
        // What nobody uses in a pack counts here as well: the kernel proves packs as wholes.
        findings.extend(objects.prove_packs().err().map(|bad| bad.to_string()));
    }
    Ok(findings)
}

/// A finding for each pack that the store has not got.
fn missing_packs(image: &Image, store: &Path) -> Result<Vec<String>> {
    if image.packs().is_empty() {
        return Ok(Vec::new());
    }
    let opened = Store::open(store)?;
    let missing = image.packs().iter().filter(|pack| !opened.has(pack.name));
    Ok(missing.map(|pack| format!("the pack {} is not in {}", pack.name, store.display())).collect())
}

fn say(findings: &[String], json: bool) -> Result<u8> {
    let text = if json {
        format!("{}\n", json!({"clean": findings.is_empty(), "findings": findings}))
    } else if findings.is_empty() {
        "clean\n".into()
    } else {
        findings.iter().map(|finding| format!("{finding}\n")).collect()
    };
    print(&text)?;
    Ok(if findings.is_empty() { CLEAN_STATUS } else { DAMAGED_STATUS })
}

fn print(text: &str) -> Result<()> {
    ended(std::io::stdout().lock().write_all(text.as_bytes()).map_err(Into::into))
        .context("cannot write to standard output")
}
