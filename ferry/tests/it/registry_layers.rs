//! Container images in Debian's docker-registry: eStargz, and zstd:chunked as skopeo makes it, read chunk by chunk; and
//! `ferry image convert`.
#![cfg(feature = "registry")]
use crate::common;
use crate::toc_layers;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use common::images::{content, json, number, text};
use common::place::{Place as Mounted, detach, runs, until};
use common::servers::{Program, Proxy, registry};
use common::{ferry, needs_fuse, refused, run};
use serde_json::json;
use toc_layers::{Format, Layer, Writer, lay_out, sha256};

/// A registry behind a proxy, and what is made for it.
struct Place {
    directory: tempfile::TempDir,
    _server: Program,
    proxy: Proxy,
}

impl Place {
    fn new() -> Option<Self> {
        Self::below(&std::env::temp_dir())
    }

    fn below(directory: &Path) -> Option<Self> {
        let directory = tempfile::tempdir_in(directory).unwrap();
        let server = registry(&directory.path().join("server"), false)?;
        let proxy = Proxy::to(server.address);
        Some(Self { directory, _server: server, proxy })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn reference(&self) -> String {
        format!("oci:{}/os/app:1", self.proxy.address)
    }

    fn command(&self, command: &str, store: &str) -> Command {
        let mut line = ferry();
        line.args(["image", command, "--store"]).arg(self.at(store)).env_remove("REGISTRY_AUTH_FILE");
        line.env("HOME", self.directory.path()).env_remove("DOCKER_CONFIG").env_remove("XDG_RUNTIME_DIR");
        line
    }

    /// Pushes layers by skopeo, with these words: by default as they are.
    fn push(&self, layers: &[Layer], words: &[&str]) {
        let bundle = self.at("bundle");
        lay_out(&bundle, layers);
        let program = ferry_guest::Cache::from_env().and_then(|cache| cache.skopeo()).expect("skopeo can be fetched");
        let mut line = Command::new(program);
        line.args(["--insecure-policy", "copy", "--dest-tls-verify=false"]).args(words);
        line.arg(format!("oci:{}:1", bundle.display())).arg(format!("docker://{}/os/app:1", self.proxy.address));
        text(line.env("HOME", self.directory.path()));
    }

    fn mount(&self, mounted: &Mounted, words: &[&str]) -> Command {
        let mut line = ferry();
        line.env("HOME", self.directory.path());
        line.arg("mount").arg(format!("image:{}", self.at("lazy.img").display())).arg(&mounted.mnt).arg("--store");
        line.arg(self.at("lazy")).args(["--from", &self.reference()]).args(words);
        line
    }
}

fn layers(format: Format) -> Vec<Layer> {
    let mut lower = Writer::new(format, &[4 << 20]);
    lower.dir("sub/");
    for number in 0..80 {
        lower.file(&format!("sub/{number:02}"), &content(number, 3000 + 1000 * number as usize));
    }
    lower.file("large", &content(1000, 9_000_001));
    lower.symlink("link", "sub/07");
    let mut upper = Writer::new(format, &[4 << 20]);
    upper.file("sub/.wh.79", b"");
    upper.file("above", &content(2000, 50_000));
    vec![lower.finish(), upper.finish()]
}

fn is_right(at: &Path) {
    for number in (0..79).step_by(13) {
        let expected = content(number, 3000 + 1000 * number as usize);
        assert_eq!(fs::read(at.join(format!("sub/{number:02}"))).unwrap(), expected, "{number}");
    }
    assert_eq!(fs::read(at.join("large")).unwrap(), content(1000, 9_000_001));
    assert_eq!(fs::read(at.join("link")).unwrap(), content(7, 10_000));
    assert_eq!(fs::read(at.join("above")).unwrap(), content(2000, 50_000));
    assert!(!at.join("sub/79").exists());
}

/// Mounts an image at once, reads some of it, all of it, and then without the server.
fn mounts_at_once(place: &Place) {
    let mounted = Mounted::new();
    let before = place.proxy.answered();
    let pid = mounted.mounted_by(&mut place.mount(&mounted, &["--jobs", "0", "--fetch-ahead", "1"]));
    let begun = place.proxy.answered() - before;
    assert_eq!(fs::read(mounted.mnt.join("sub/07")).unwrap(), content(7, 10_000));
    let one = place.proxy.answered() - before;
    let whole =
        json(place.command("pull", "whole").arg(place.reference()).arg("-o").arg(place.at("whole.img")).arg("--json"));
    println!("mounted after {begun} bytes, one file read after {one}; a whole pull: {whole}");
    assert!(number(&whole, "received_bytes") > 9_000_000, "{whole}");
    assert!(begun < 600_000 && one - begun < 40_000, "{begun} {one}");
    is_right(&mounted.mnt);
    // What is here is read without the server, what is not is EIO.
    place.proxy.cut();
    is_right(&mounted.mnt);
    let error = fs::read(mounted.mnt.join("sub/01")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    place.proxy.revive(place._server.address);
    mounted.unmount(pid);
    // The next mount gets the rest by itself.
    let pid = mounted.mounted_by(&mut place.mount(&mounted, &[]));
    let packs = place.at("lazy/packs");
    let is_part = |name: fs::DirEntry| name.file_name().to_string_lossy().contains(".part");
    until("all of it", || !fs::read_dir(&packs).unwrap().map(Result::unwrap).any(is_part));
    mounted.unmount(pid);
    place.proxy.cut();
    let pid = mounted.mounted_by(&mut place.mount(&mounted, &[]));
    is_right(&mounted.mnt);
    mounted.unmount(pid);
    assert_eq!(text(place.command("verify", "lazy").arg(place.at("lazy.img"))), "clean\n");
}

#[test]
fn estargz_is_mounted_before_it_is_here() {
    needs_fuse!();
    let Some(place) = Place::new() else { return };
    place.push(&layers(Format::Estargz), &["--preserve-digests"]);
    mounts_at_once(&place);
}

/// The layers are packed by skopeo, from an ordinary image.
#[test]
fn zstd_chunked_of_skopeo_is_mounted_before_it_is_here() {
    needs_fuse!();
    let Some(place) = Place::new() else { return };
    let words = ["--dest-compress-format", "zstd:chunked", "--dest-force-compress-format"];
    place.push(&layers(Format::Estargz), &words);
    mounts_at_once(&place);
}

/// Killed at any time, also while a chunk is written that shares a block with another one.
#[test]
fn servers_that_are_killed_leave_nothing_unproved() {
    needs_fuse!();
    let Some(place) = Place::new() else { return };
    let mut writer = Writer::new(Format::ZstdChunked, &[5000, 70_000, 300]);
    writer.file("large", &content(1000, 9_000_001));
    (0..40).for_each(|number| writer.file(&format!("{number}"), &content(number, 30_000)));
    place.push(&[writer.finish()], &["--preserve-digests"]);
    let mounted = Mounted::new();
    for wait_ms in [0, 3, 10, 20, 40, 80, 120, 200] {
        let pid = mounted.mounted_by(&mut place.mount(&mounted, &["--jobs", "4"]));
        std::thread::sleep(std::time::Duration::from_millis(wait_ms));
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        detach(&mounted.mnt);
        until("the server is gone", || !runs(pid));
    }
    let pid = mounted.mounted_by(&mut place.mount(&mounted, &[]));
    assert_eq!(fs::read(mounted.mnt.join("large")).unwrap(), content(1000, 9_000_001));
    assert_eq!(fs::read(mounted.mnt.join("7")).unwrap(), content(7, 30_000));
    let is_part = |name: fs::DirEntry| name.file_name().to_string_lossy().contains(".part");
    until("all of it", || !fs::read_dir(place.at("lazy/packs")).unwrap().map(Result::unwrap).any(is_part));
    mounted.unmount(pid);
    assert_eq!(text(place.command("verify", "lazy").arg(place.at("lazy.img"))), "clean\n");
}

/// The kernel mounts an image of layers at once, whether its chunks begin at blocks or not.
#[test]
fn the_kernel_mounts_layers_before_they_are_here() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("only root mounts images with the kernel");
        return;
    }
    // A tmpfs cannot be watched, which /tmp may be.
    let Some(place) = Place::below(Path::new("/var/tmp")) else { return };
    place.push(&layers(Format::Estargz), &["--preserve-digests"]);
    let dir = place.at("mnt");
    fs::create_dir(&dir).unwrap();
    let mount = |words: &[&str]| {
        let mut line = place.command("mount", "lazy");
        line.arg(place.at("lazy.img")).arg(&dir).args(["--from", &place.reference()]).args(words);
        run(&mut line)
    };
    let detach = || rustix::mount::unmount(&dir, rustix::mount::UnmountFlags::DETACH).unwrap();
    let before = place.proxy.answered();
    let output = mount(&["--jobs", "0", "--fetch-ahead", "1"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let read = fs::read(dir.join("sub/07"));
    let came = place.proxy.answered() - before;
    let is_by_fuse = said.contains("mounting over FUSE instead");
    if !is_by_fuse {
        is_right(&dir);
        // What is not here is EIO without the server, not zeros.
        place.proxy.cut();
        assert_eq!(
            fs::read(dir.join("sub/01")).unwrap_err().raw_os_error(),
            Some(rustix::io::Errno::IO.raw_os_error())
        );
        place.proxy.revive(place._server.address);
    }
    detach();
    if is_by_fuse {
        ferry_skip::skip!("{said}");
        return;
    }
    assert_eq!(read.unwrap(), content(7, 10_000));
    assert!(came < 600_000, "{came}");
    let output = mount(&["--foreground"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    is_right(&dir);
    detach();
    // Chunks that share blocks.
    let place = Place::below(Path::new("/var/tmp")).unwrap();
    let mut writer = Writer::new(Format::ZstdChunked, &[5000]);
    writer.file("large", &content(1000, 500_000));
    place.push(&[writer.finish()], &["--preserve-digests"]);
    let dir = place.at("mnt");
    fs::create_dir(&dir).unwrap();
    let mount = |words: &[&str]| {
        let mut line = place.command("mount", "lazy");
        line.arg(place.at("lazy.img")).arg(&dir).args(["--from", &place.reference()]).args(words);
        run(&mut line)
    };
    for words in [&["--jobs", "0", "--fetch-ahead", "1"][..], &["--jobs", "1"], &["--foreground"]] {
        let output = mount(words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && !said.contains("FUSE"), "{said}");
        // A block in the middle, and then all.
        let mut block = [0; 4096];
        fs::File::open(dir.join("large")).unwrap().read_exact_at(&mut block, 81_920).unwrap();
        assert!(block[..] == content(1000, 500_000)[81_920..86_016]);
        assert_eq!(fs::read(dir.join("large")).unwrap(), content(1000, 500_000));
        let is_part = |name: fs::DirEntry| name.file_name().to_string_lossy().contains(".part");
        let is_complete = || !fs::read_dir(place.at("lazy/packs")).unwrap().map(Result::unwrap).any(is_part);
        until("all of it", || words.contains(&"0") || is_complete());
        rustix::mount::unmount(&dir, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn info_shows_the_proofs_of_layers() {
    let Some(place) = Place::new() else { return };
    let layers = layers(Format::Estargz);
    place.push(&layers, &["--preserve-digests"]);
    let pulled = json(
        place
            .command("pull", "lazy")
            .arg(place.reference())
            .arg("-o")
            .arg(place.at("lazy.img"))
            .args(["--metadata-only", "--json"]),
    );
    let manifest = pulled["manifest"].as_str().unwrap();
    let info = |words: &[&str]| place.command("info", "lazy").arg(place.at("lazy.img")).args(words).output().unwrap();
    let said = String::from_utf8(info(&[]).stdout).unwrap();
    let table = &layers[0].annotations["containerd.io/snapshot/stargz/toc.digest"];
    for expected in [manifest, table.as_str(), &sha256(&layers[0].blob), pulled["digest"].as_str().unwrap()] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    let told: serde_json::Value = serde_json::from_slice(&info(&["--json"]).stdout).unwrap();
    assert_eq!((&told["manifest"], &told["packs"][0]["proved_by"]), (&json!(manifest), &json!(table)), "{told}");
    // The same digest wherever it is pulled, and no other image is taken for it.
    let again = |digest: &str| {
        let mut line = place.command("pull", "again");
        line.arg(place.reference()).arg("-o").arg(place.at("again.img")).args(["--metadata-only", "--digest", digest]);
        line
    };
    text(&mut again(pulled["digest"].as_str().unwrap()));
    let said = refused(1, &mut again(&format!("blake3:{}", "0".repeat(64))));
    assert!(said.contains("the image has the digest"), "{said}");
}

/// As podman looks for them; and the mount is one like others.
#[test]
fn layers_are_mounted_and_watched() {
    needs_fuse!();
    let Some(place) = Place::new() else { return };
    let layers = layers(Format::Estargz);
    place.push(&layers, &["--preserve-digests"]);
    let mounted = Mounted::new();
    let mut line = ferry();
    line.env("HOME", place.directory.path()).env_remove("REGISTRY_AUTH_FILE").env_remove("XDG_RUNTIME_DIR");
    let source = format!("layers:{}", place.at("layers").display());
    let pid = mounted.mounted_by(line.arg("mount").arg(&source).arg(&mounted.mnt).args(["--fetch-ahead", "1"]));
    let name = ferry_layers::reference_name(place.reference().strip_prefix("oci:").unwrap());
    let table = &layers[0].annotations["containerd.io/snapshot/stargz/toc.digest"];
    let layer = mounted.mnt.join(name).join(table);
    assert_eq!(fs::read(layer.join("diff/sub/07")).unwrap(), content(7, 10_000));
    assert_eq!(fs::read_link(layer.join("diff/link")).unwrap(), Path::new("sub/07"));
    assert!(!layer.with_file_name(sha256(b"none")).exists());
    let status = json(ferry().args(["status", "--json"]).arg(&mounted.mnt));
    assert_eq!(status["servers"][0]["shares"][0]["source"], source, "{status}");
    let metrics = text(ferry().arg("metrics").arg(&mounted.mnt));
    let value =
        |name: &str| metrics.lines().find(|line| line.starts_with(name)).and_then(|line| line.rsplit(' ').next());
    assert_eq!(value("ferry_layer_mounts{"), Some("1"), "{metrics}");
    let fetched: u64 = value("ferry_image_fetched_bytes_total{").unwrap().parse().unwrap();
    assert!((10_000..100_000).contains(&fetched), "{fetched}");
    let other = Mounted::new();
    let said = refused(1, ferry().arg("mount").arg(&source).arg(&other.mnt));
    assert!(said.contains("another process uses"), "{said}");
    mounted.unmount(pid);
    // As the unit does it.
    let file = place.at("layers.toml");
    fs::write(&file, format!("[[share]]\nsource = \"{source}\"\nmount = \"{}\"\n", mounted.mnt.display())).unwrap();
    let mut server =
        ferry().arg("share").arg("--config").arg(&file).env("HOME", place.directory.path()).spawn().unwrap();
    until("the mount", || !mounted.mounts().is_empty());
    let found = fs::read(layer.join("diff/sub/08"));
    let pid = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    assert_eq!(found.unwrap(), content(8, 11_000));
    for (flag, value) in [("--jobs", "1"), ("--store", "/srv")] {
        let output = run(ferry().arg("mount").arg(&source).arg(&mounted.mnt).args([flag, value]));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(flag), "{said}");
    }
}

/// As an additional image store.
#[test]
#[ignore = "long: make test-all installs podman"]
fn podman_makes_containers_of_an_image_of_its_storage() {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root || Command::new("podman").arg("--version").output().is_err() {
        return ferry_skip::skip!("needs root and podman: apt-get install podman");
    }
    // On a disk, for overlayfs.
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let at = |name: &str| directory.path().join(name);
    for name in ["tree", "mnt"] {
        fs::create_dir(at(name)).unwrap();
    }
    fs::write(at("tree/file"), content(7, 10_000)).unwrap();
    text(Command::new("tar").arg("-C").arg(at("tree")).arg("-cf").arg(at("tree.tar")).arg("."));
    let podman = |name: &str, options: &str, words: &[&str]| {
        let (graph, run, file) = (at(name), at(&format!("{name}.run")), at(&format!("{name}.conf")));
        let storage = format!(
            "[storage]\ndriver = \"overlay\"\ngraphroot = \"{}\"\nrunroot = \"{}\"\n[storage.options]\n{options}\n",
            graph.display(),
            run.display()
        );
        fs::write(&file, storage).unwrap();
        text(Command::new("podman").args(words).env("CONTAINERS_STORAGE_CONF", file)).trim().to_owned()
    };
    podman("first", "", &["import", "--quiet", at("tree.tar").to_str().unwrap(), "localhost/app:1"]);
    // podman leaves a mount of its own there.
    let _ = Command::new("umount").arg(at("first/overlay")).output();
    let image = |word: &str| {
        let mut line = ferry();
        line.args(["image", word, "--store"]).arg(at("store"));
        line
    };
    text(image("build").arg(at("first")).arg("-o").arg(at("app.img")));
    text(image("mount").arg(at("app.img")).arg(at("mnt")));
    let second =
        |words: &[&str]| podman("second", &format!("additionalimagestores = [\"{}\"]", at("mnt").display()), words);
    let container = second(&["create", "--network=none", "localhost/app:1", "/none"]);
    let root = PathBuf::from(second(&["mount", &container]));
    let found = fs::read(root.join("file"));
    let changed = fs::write(root.join("file"), "changed").and_then(|()| fs::read(root.join("file")));
    second(&["umount", &container]);
    second(&["rm", &container]);
    let _ = Command::new("umount").arg(at("second/overlay")).output();
    detach(&at("mnt"));
    assert_eq!((found.unwrap(), changed.unwrap()), (content(7, 10_000), b"changed".to_vec()));
}

#[test]
fn an_image_without_tables_is_pulled_as_a_whole_with_a_sentence() {
    let Some(place) = Place::new() else { return };
    let mut layers = layers(Format::Estargz);
    layers[1].annotations.clear();
    place.push(&layers, &["--preserve-digests"]);
    let output = run(place
        .command("pull", "lazy")
        .arg(place.reference())
        .arg("-o")
        .arg(place.at("lazy.img"))
        .arg("--metadata-only"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("layer 2 of 2: it has no table of contents that its manifest proves; the whole image is pulled"),
        "{said}"
    );
    assert_eq!(text(place.command("verify", "lazy").arg(place.at("lazy.img"))), "clean\n");
}

#[test]
fn a_whole_pull_that_is_killed_leaves_nothing_that_is_not_removed() {
    let Some(place) = Place::new() else { return };
    place.push(&layers(Format::Estargz), &["--preserve-digests"]);
    fs::create_dir_all(place.at("images")).unwrap();
    text(place.command("build", "killed").arg(place.at("images")).arg("-o").arg(place.at("other.img")));
    let child = Arc::new(Mutex::new(None::<std::process::Child>));
    let victim = Arc::clone(&child);
    let mut guard = child.lock().unwrap();
    // The proxy waits for us to know whom to kill.
    place.proxy.die_after(4 << 20, move || _ = victim.lock().unwrap().as_mut().unwrap().kill());
    let mut line = place.command("pull", "killed");
    *guard = Some(line.arg(place.reference()).arg("-o").arg(place.at("images/killed.img")).spawn().unwrap());
    drop(guard);
    until("its end", || child.lock().unwrap().as_mut().unwrap().try_wait().unwrap().is_some());
    let unfinished = || {
        let names = fs::read_dir(place.at("killed").join("packs")).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.as_encoded_bytes().starts_with(b".new-")).count()
    };
    assert_eq!(unfinished(), 1);
    let mut line = place.command("gc", "killed");
    let report = json(line.arg(place.at("other.img")).args(["--grace-s", "0", "--json"]));
    assert!(number(&report, "bytes") > 2_000_000, "{report}");
    assert_eq!(unfinished(), 0);
}

/// docker-registry of Debian keeps no list of referrers.
#[test]
fn converted_images_are_stored_beside_the_original() {
    let Some(place) = Place::new() else { return };
    place.push(&layers(Format::Estargz), &["--preserve-digests"]);
    let first = json(place.command("convert", "first").arg(place.reference()).arg("--json"));
    assert!(number(&first, "new_bytes") > 9_000_000, "{first}");
    let second = json(place.command("convert", "second").arg(place.reference()).arg("--json"));
    assert_eq!((&second["digest"], &second["manifest"]), (&first["digest"], &first["manifest"]));
    assert!(second["new_bytes"].is_null(), "{second}");
    let digest = first["digest"].as_str().unwrap();
    let mut line = place.command("pull", "pulled");
    let pulled =
        json(line.arg(place.reference()).arg("-o").arg(place.at("pulled.img")).args(["--digest", digest, "--json"]));
    assert_eq!((&pulled["digest"], &pulled["manifest"]), (&first["digest"], &first["manifest"]));
    assert_eq!(
        text(place.command("verify", "pulled").arg(place.at("pulled.img")).args(["--digest", digest])),
        "clean\n"
    );
    // By its own name, too.
    let exact = format!("{}@{}", place.reference().strip_suffix(":1").unwrap(), first["manifest"].as_str().unwrap());
    text(place.command("pull", "exact").arg(exact).arg("-o").arg(place.at("exact.img")));
    assert_eq!(fs::read(place.at("exact.img")).unwrap(), fs::read(place.at("pulled.img")).unwrap());
}
