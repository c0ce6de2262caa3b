//! `ferry image`: builds, mounts, checks and lists images.

mod args;
mod build;
mod container;
mod fuse_fallback;
pub mod kernel;
mod lazy;
mod loops;
mod mount;
mod option_strings;
mod private_root;
pub mod registry;
mod repair;
mod report;
mod store;
mod trace;
mod upper;
mod verity;
pub mod watch;

use std::ffi::OsString;
use std::io::{BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use ferry_control::{Logging, printable, printable_json};
use ferry_image::{DumpError, Image, Inode, Nid, Objects, Source, Store, hex, walk};
use ferry_vfs::{FileType, Name};
use serde_json::json;

use crate::output::{ignore_closed_pipe, print};
use crate::status;
use args::{ImageArg, StoreArg};
use report::{bar, set_name};

/// Shown by `ferry image --help`.
pub const EXAMPLES: &str = "\
Examples:
  ferry image build rootfs -o rootfs.img --store /var/lib/ferry    # prints the digest that verifies the tree
  ferry image mount rootfs.img /mnt --store /var/lib/ferry --digest DIGEST
  umount /mnt

  ferry image mount rootfs.img /mnt --store /var/lib/ferry --upper changes    # writable
  ferry mount image:rootfs.img /mnt --store /var/lib/ferry    # verifies each byte

  ferry image build rootfs -o rootfs.img --store /var/lib/ferry --verity    # the kernel verifies each read
  ferry image ls -l rootfs.img /etc
  ferry image cat rootfs.img /usr/lib/os-release --store /var/lib/ferry
  ferry image diff old.img rootfs.img --store /var/lib/ferry
  ferry image verify rootfs.img --store /var/lib/ferry             # reads and verifies every byte
  ferry image verify rootfs.img --store /var/lib/ferry --repair    # and replaces damaged data
  ferry image gc images/ --store /var/lib/ferry    # keeps the data of the images in this directory

  ferry image trace /mnt -o start.trace -- chroot /mnt /usr/bin/service --check
  ferry image build rootfs -o rootfs.img --store /var/lib/ferry --order-from start.trace

Other formats:
  ferry image build oci:bundle:latest -o bundle.img --store /var/lib/ferry    # an OCI image directory
  ferry image build rootfs -o rootfs.cfs --store /var/lib/ferry --layout composefs    # as mkcomposefs does
  ferry image dump rootfs.cfs > rootfs.dump

Registries, and S3-compatible stores (configured by AWS_ENDPOINT_URL and the like):
  ferry image push rootfs.img oci:registry.example/os/base:12 --store /var/lib/ferry
  ferry image push rootfs.img s3:bucket/os/base:12 --store /var/lib/ferry
  FROM=oci:registry.example/os/base:12
  ferry image pull $FROM --store /var/lib/ferry -o rootfs.img --digest DIGEST
  ferry image mount rootfs.img /mnt --store /var/lib/ferry --from $FROM    # while it is fetched
  ferry mount image:rootfs.img /mnt --store /var/lib/ferry --from $FROM    # on kernels before 6.14

Container images in registries (eStargz and zstd:chunked are read chunk by chunk, others are pulled and built):
  ferry image mount app.img /mnt --store /var/lib/ferry --from oci:registry.example/app:1
  ferry image convert oci:registry.example/app:1 --store /var/lib/ferry    # pushes a flat image beside it

HTTPS uses the host's certificate authorities; SSL_CERT_FILE names a file of others, in PEM.

An image file holds the metadata of a tree; the data of its files is in the store, where images
share equal data. A stock kernel mounts it (EROFS, Linux 6.12 or later).";

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Build an image from a directory, a tar archive, an OCI image directory, or a composefs dump file.
    Build(build::BuildArgs),
    /// Mount an image with the kernel's EROFS, or as ferry mount does if the kernel or the user cannot; umount(8) ends it.
    Mount(mount::MountArgs),
    /// List the contents of an image.
    Ls {
        #[command(flatten)]
        image: ImageArg,
        /// The directory or file to list [default: the whole tree].
        #[arg(value_name = "PATH", default_value = "/")]
        path: PathBuf,
        /// The store, which is needed to verify the digest of a tree.
        #[arg(long, value_name = "DIR")]
        store: Option<PathBuf>,
        /// Show modes, owners, sizes (device numbers of devices) and times (UTC).
        #[arg(short)]
        long: bool,
        /// Print a line of JSON for each name. A name that is not UTF-8 is also in path_hex, a link target in target_hex.
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
    /// Write the contents of an image of the composefs layout as a dump file (composefs-dump(5)).
    Dump {
        #[command(flatten)]
        image: ImageArg,
    },
    /// Record the files of a mounted image that a workload opens, in order; exits with the workload's status.
    Trace(trace::TraceArgs),
    /// Show the digests of an image's tree and of the image, its size, and its packs.
    Info {
        #[command(flatten)]
        image: ImageArg,
        /// Show which packs in this store the kernel verifies with fs-verity.
        #[arg(long, value_name = "DIR")]
        store: Option<PathBuf>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Check an image's metadata, which may be untrusted; the status is 4 if it is invalid, or not an image.
    Fsck {
        #[command(flatten)]
        image: ImageArg,
        /// The store, which is needed to verify the digest of a tree.
        #[arg(long, value_name = "DIR")]
        store: Option<PathBuf>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Check an image's metadata and all data of its files; the status is 4 if any is invalid, or it is not an image.
    Verify {
        #[command(flatten)]
        image: ImageArg,
        #[command(flatten)]
        store: StoreArg,
        #[command(flatten)]
        repair: repair::RepairArgs,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Push an image, and the data of its files that a registry or S3-compatible store lacks.
    Push(registry::PushArgs),
    /// Pull an image, and the data of its files that the store lacks. A repeated pull resumes.
    Pull(registry::PullArgs),
    /// Build a flat image of a container image in a registry, and push it beside that as a referrer, if there is none yet.
    Convert(registry::ConvertArgs),
    /// Remove data from a store that no listed image references. List all images that are to stay usable.
    Gc(store::GcArgs),
    /// Show the space that images take in a store, and what they share.
    Du(store::DuArgs),
    /// List what changed between two images; the status is 4 if anything did.
    Diff(store::DiffArgs),
}

/// Runs a command; returns the exit status.
pub fn run(command: &Command, line: &[OsString], common: &[OsString], logging: &Logging) -> Result<u8> {
    match command {
        Command::Build(args) => build::build(args)?,
        Command::Dump { image } => dump(&image.open(None)?, &image.image)?,
        Command::Mount(args) => return fuse_fallback::mount(args, line, common, logging),
        Command::Ls { image, path, store, long, json } => list(&image.open(store.as_deref())?, path, *long, *json)?,
        Command::Cat { image, path, store } => cat(image, path, &store.store)?,
        Command::Info { image, store, json } => info(&image.open(store.as_deref())?, store.as_deref(), *json)?,
        Command::Fsck { image, store, json } => {
            let findings = match image.open_or_finding(store.as_deref())? {
                Ok(image) => ferry_image::check(&image).findings,
                Err(finding) => vec![finding],
            };
            return say(&findings, *json);
        }
        Command::Verify { image, store, repair, json } => {
            let opened = match image.open_or_finding(Some(&store.store))? {
                Ok(opened) => opened,
                Err(finding) => return say(&[finding], *json),
            };
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
        Command::Convert(args) => registry::convert(args)?,
        Command::Gc(args) => store::gc(args)?,
        Command::Du(args) => store::du(args)?,
        Command::Diff(args) => return store::diff(args),
    }
    Ok(0)
}

fn dump(image: &Image, path: &Path) -> Result<()> {
    if !image.is_composefs() {
        bail!("{} has the flat layout: only images of the composefs layout have dump files", path.display());
    }
    let mut out = BufWriter::new(std::io::stdout().lock());
    let written = ferry_image::dump(image, &mut out).map_err(|error| match error {
        DumpError::Io(error) => error.into(),
        error => error.into(),
    });
    ignore_closed_pipe(written.and_then(|()| Ok(out.flush()?)))
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
            std::path::Component::ParentDir => bail!("{}: a path in an image cannot contain ..", path.display()),
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
            writeln!(out, "{}", printable_json(&line.to_string()))?;
        } else if long {
            let arrow = target.map(|target| format!(" -> {}", target.escape_ascii())).unwrap_or_default();
            let (mode, time) = (permissions(inode), date(inode.mtime.sec));
            let (links, uid, gid, size) = (inode.nlink, inode.uid, inode.gid, size(inode));
            writeln!(out, "{mode} {links:>3} {uid:>5} {gid:>5} {size:>10} {time} {name}{arrow}")?;
        } else {
            writeln!(out, "{name}")?;
        }
        Ok(())
    };
    let walked = walk(image, from, path.as_os_str().as_bytes(), |step, inode| line(&step.path(), inode));
    ignore_closed_pipe(walked.and_then(|()| Ok(out.flush()?)))
}

/// Returns the size, or the major and minor number of a device.
fn size(inode: &Inode) -> String {
    match inode.kind() {
        FileType::CharacterDevice | FileType::BlockDevice => {
            let device = inode.rdev();
            // The kernel's 32-bit form: the lower 8 bits of the minor number, 12 bits of the major, 12 bits of the minor.
            format!("{}, {}", device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xf_ff00)
        }
        _ => inode.bytes.to_string(),
    }
}

/// Formats seconds since 1970 as date and time, UTC, to the minute, as tar(1) does. Any number is a day of the Gregorian
/// calendar.
fn date(seconds: i64) -> String {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Years begin in March here, so that the leap day comes last; 400 years have 146,097 days. Source: Howard Hinnant,
    // "chrono-Compatible Low-Level Date Algorithms".
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = era * 400 + year + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}", second / 3600, second / 60 % 60)
}

/// Formats the type and mode, as `ls -l` does.
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
        bail!("{} is not a regular file", path.display());
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
            return ignore_closed_pipe(Err(error.into()));
        }
        offset += count as u64;
    }
}

fn info(image: &Image, store: Option<&Path>, json: bool) -> Result<()> {
    let (digest, bytes, inodes) = (image.digest(), image.bytes(), image.inodes());
    let layout = if image.is_composefs() { "composefs" } else { "flat" };
    let proofs = store.map(|store| verity::look(image, store)).transpose()?;
    let proof = |number: usize| proofs.as_ref().and_then(|proofs| proofs.get(number));
    let opened = store.map(Store::open).transpose()?;
    let layer = |pack: &ferry_image::PackRef| opened.as_ref()?.layer_of(pack.name);
    let manifest = image.manifest().map(|manifest| format!("sha256:{}", hex(&manifest)));
    if json {
        let pack = |(number, pack): (usize, &ferry_image::PackRef)| {
            let mut answer = json!({"name": pack.name.hex(), "bytes": pack.blocks * 4096, "ahead": pack.ahead});
            if let Some(proof) = proof(number) {
                answer["verity"] = verity::word(*proof).into();
            }
            if let Some(layer) = layer(pack) {
                answer["layer"] = format!("sha256:{}", hex(&layer.sha256)).into();
                answer["proved_by"] = format!("sha256:{}", hex(&layer.toc)).into();
            }
            answer
        };
        let packs: Vec<_> = image.packs().iter().enumerate().map(pack).collect();
        return print(format!(
            "{}\n",
            json!({"digest": image.shown_digest().to_string(), "image_digest": digest.to_string(), "layout": layout, "bytes": bytes, "inodes": inodes, "packs": packs, "manifest": manifest, "inode_share": image.has_identities()})
        ));
    }
    let own = if image.shown_digest() == digest { String::new() } else { format!("image   {digest}\n") };
    let mut text =
        format!("digest  {}\n{own}layout  {layout}\nbytes   {bytes}\ninodes  {inodes}\n", image.shown_digest());
    if image.has_identities() {
        text += "memory  mounts with --inode-share share that of equal files\n";
    }
    if let Some(manifest) = manifest {
        text +=
            &format!("proofs  the manifest {manifest} names tables of contents, and they prove each chunk of a file\n");
    }
    for (number, pack) in image.packs().iter().enumerate() {
        if let Some(layer) = layer(pack) {
            let (blob, toc) = (hex(&layer.sha256), hex(&layer.toc));
            text += &format!(
                "pack    {} {} bytes, of the layer sha256:{blob}, proved by the table sha256:{toc}\n",
                pack.name,
                pack.blocks * 4096
            );
            continue;
        }
        let ahead = if pack.ahead { ", read ahead by mounts" } else { "" };
        let verity = proof(number).map(|proof| format!(", fs-verity: {}", verity::word(*proof))).unwrap_or_default();
        text += &format!("pack    {} {} bytes{ahead}{verity}\n", pack.name, pack.blocks * 4096);
    }
    print(&text)
}

/// Verifies the data of every file; returns the findings.
fn verify(image: &Image, store: &Path) -> Result<Vec<String>> {
    let missing = missing_packs(image, store)?;
    if !missing.is_empty() {
        return Ok(missing);
    }
    let objects = match Objects::open(image, store) {
        // A pack is damaged.
        Err(error @ ferry_image::Error::Pack { .. }) => return Ok(vec![error.to_string()]),
        objects => objects?,
    };
    if let Err(error) = objects.verify_tree(image) {
        return Ok(vec![error.to_string()]);
    }
    let bar = bar("inodes");
    bar.set_length(image.inodes());
    let mut findings = Vec::new();
    walk(image, image.root(), b"/", |step, inode| -> Result<()> {
        bar.inc(1);
        if inode.kind() == FileType::RegularFile
            && let Err(bad) = objects.verify_file(image.data(inode)?, inode.bytes)
        {
            findings.push(format!("{}: {bad}", step.text()));
        }
        Ok(())
    })?;
    bar.finish_and_clear();
    if findings.is_empty() {
        // Unused data in packs counts as well: the kernel verifies whole packs.
        findings.extend(objects.verify_packs().err().map(|bad| bad.to_string()));
    }
    Ok(findings)
}

/// Returns a finding for each pack that the store lacks.
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
        findings.iter().map(|finding| printable(finding) + "\n").collect()
    };
    print(&text)?;
    Ok(if findings.is_empty() { status::DONE } else { status::WRONG })
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00"),
            (-1, "1969-12-31 23:59"),
            (951_782_400, "2000-02-29 00:00"),
            (951_868_800, "2000-03-01 00:00"),
            (4_107_542_399, "2100-02-28 23:59"),
            (4_107_542_400, "2100-03-01 00:00"),
            (-62_135_596_800, "0001-01-01 00:00"),
            (253_402_300_799, "9999-12-31 23:59"),
        ] {
            assert_eq!(date(seconds), expected);
        }
        // A hostile image may contain any number.
        date(i64::MAX);
        date(i64::MIN);
    }
}
