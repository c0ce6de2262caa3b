//! The tree through the kernel, and below overlayfs.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use ferry_fuse::{Cache, Export};

use crate::place::{Place, each_format, eventually, noise, toc};
use crate::toc_layers::sha256;

/// A mount of a store, as `ferry mount layers:` makes it.
pub struct Mount {
    export: Export,
    pub at: PathBuf,
}

impl Mount {
    /// `None`: this user cannot mount, and the test is skipped.
    pub fn of(place: &Place) -> Option<Self> {
        Self::with(place, ferry_layers::Options::default())
    }

    fn with(place: &Place, store: ferry_layers::Options) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
            ferry_skip::skip!("only root can put overlayfs on a mount, and needs /dev/fuse");
            return None;
        }
        let at = place.directory.path().join("mount");
        fs::create_dir(&at).unwrap();
        let options = ferry_fuse::Options {
            cache: Cache::Auto,
            negative_timeout: Some(Duration::ZERO),
            ..ferry_fuse::Options::default()
        };
        let export =
            Export::mount(&at, Arc::clone(&place.open_with(store).0) as Arc<dyn ferry_vfs::FileSystem>, options)
                .unwrap();
        Some(Self { export, at })
    }

    pub fn stop(self) {
        self.export.stop();
    }
}

/// What containers/storage does when it looks for a layer: `getAdditionalLayerPath`, `notifyUseAdditionalLayer` and
/// `notifyReleaseAdditionalLayer` of its driver for overlayfs.
fn look_for(at: &Path) -> bool {
    let is_there = ["diff", "info", "blob"].iter().all(|name| at.join(name).symlink_metadata().is_ok());
    if is_there {
        assert_eq!(fs::File::create(at.join("use")).unwrap_err().kind(), ErrorKind::NotFound, "it counts uses");
    }
    is_there
}

#[test]
fn overlayfs_stacks_the_layers() {
    each_format(|place| {
        let Some(mount) = Mount::of(&place) else { return };
        let image = mount.at.join(place.name());
        let layers: Vec<_> = place.layers.iter().rev().map(|layer| image.join(toc(layer))).collect();
        assert!(layers.iter().all(|layer| look_for(layer)));
        assert!(
            !look_for(&image.join(sha256(b"nothing")))
                && !look_for(&mount.at.join("nothing").join(toc(&place.layers[0])))
        );
        for layer in &layers {
            // The handle of the lookup is let go.
            assert_eq!(fs::remove_dir(layer).unwrap_err().kind(), ErrorKind::NotFound);
            assert!(look_for(layer), "it is there again");
        }
        assert!(fs::symlink_metadata(layers[0].join("diff/gone")).unwrap().file_type().is_char_device());
        let directory = |name: &str| {
            let path = place.directory.path().join(name);
            fs::create_dir(&path).unwrap();
            path
        };
        let (upper, work, merged) = (directory("upper"), directory("work"), directory("merged"));
        let lower: Vec<_> = layers.iter().map(|layer| layer.join("diff").display().to_string()).collect();
        // mount(8) takes these paths, which have colons, as containers/storage does: by links without them.
        let links: Vec<_> = (0..lower.len()).map(|number| place.directory.path().join(format!("l{number}"))).collect();
        lower.iter().zip(&links).for_each(|(lower, link)| std::os::unix::fs::symlink(lower, link).unwrap());
        let lower: Vec<_> = links.iter().map(|link| link.display().to_string()).collect();
        let options = format!("lowerdir={},upperdir={},workdir={}", lower.join(":"), upper.display(), work.display());
        let mounted =
            Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&merged).output().unwrap();
        assert!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
        let found = (|| -> std::io::Result<_> {
            let mut names: Vec<_> = fs::read_dir(&merged)?.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            let inner: Vec<_> =
                fs::read_dir(merged.join("replaced"))?.map(|entry| entry.unwrap().file_name()).collect();
            fs::write(merged.join("below"), "changed")?;
            let large = fs::read(merged.join("large"))?;
            // While it is in use, an engine may let it go.
            let _ = fs::remove_dir(&layers[0]);
            Ok((names, inner, large, fs::read(merged.join("above"))?, fs::read(merged.join("replaced/new"))?))
        })();
        // A child of another test has the files of this process until it executes its program.
        eventually(|| Command::new("umount").arg(&merged).status().unwrap().success().then_some(()));
        let (names, inner, large, above, new) = found.unwrap();
        assert_eq!(names, ["above", "below", "large", "replaced"]);
        assert_eq!(inner, ["new"]);
        assert!(large == noise(1, 1_000_000) && above == noise(2, 5000) && new == b"is shown");
        mount.stop();
    });
}

/// The kernel drops what it knows of a layer when the last use ends, so that its data can be removed.
#[test]
fn what_the_kernel_has_cached_keeps_no_unused_data() {
    let place = Place::of(crate::toc_layers::Format::ZstdChunked);
    let options = ferry_layers::Options { removal_delay: Duration::from_millis(20), ..Default::default() };
    let Some(mount) = Mount::with(&place, options) else { return };
    let layer = mount.at.join(place.name()).join(toc(&place.layers[0]));
    assert!(look_for(&layer));
    assert!(fs::read(layer.join("diff/large")).unwrap() == noise(1, 1_000_000));
    assert!(place.stored_bytes() >= 1_000_000);
    assert_eq!(fs::remove_dir(&layer).unwrap_err().kind(), ErrorKind::NotFound);
    eventually(|| (place.stored_bytes() == 0).then_some(()));
    mount.stop();
}

/// Others see the directory, and may enter it as far as the mount lets them.
#[test]
fn directories_can_be_entered_and_read() {
    let place = Place::of(crate::toc_layers::Format::Estargz);
    let Some(mount) = Mount::of(&place) else { return };
    let mode = |path: &Path| std::os::unix::fs::MetadataExt::mode(&fs::metadata(path).unwrap());
    let layer = mount.at.join(place.name()).join(toc(&place.layers[0]));
    assert_eq!([mode(&mount.at), mode(layer.parent().unwrap()), mode(&layer)], [0o40_555; 3]);
    assert_eq!(mode(&layer.join("diff/below")), 0o100_644);
    mount.stop();
}
