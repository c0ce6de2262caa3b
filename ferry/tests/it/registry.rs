//! `ferry image push` and `pull`, and mounts of what is not here yet, with Debian's docker-registry and with an S3 server.
#![cfg(feature = "registry")]
use crate::common;
use crate::metrics::free_port;

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use common::images::{Kind, LAYOUTS, Place, Target, content, json, number, text};
use common::place::{Place as Mounted, unmount, until};
use common::servers::{S3_SECRET, USER, registry};
use common::{ferry, needs_fuse, refused, run};

fn there_and_back(kind: Kind, layout: &'static str) {
    let place = Place::laid_out(layout);
    let Some(target) = Target::start(kind, &place.at("server")) else { return };
    let digest = place.build();
    let pushed = json(&mut place.push(&target));
    assert_eq!(pushed["digest"], digest.as_str());
    assert!(number(&pushed, "new_bytes") > 9_000_000, "{pushed}");
    let again = json(&mut place.push(&target));
    assert_eq!((number(&again, "new_bytes"), &again["manifest"]), (0, &pushed["manifest"]), "{again}");

    // Nothing for this machine goes to a proxy.
    let mut pull = place.pull(&target, "copy");
    let pulled = json(pull.args(["--digest", &digest, "--jobs", "3"]).env("HTTPS_PROXY", "http://127.0.0.1:1"));
    assert_eq!((&pulled["digest"], &pulled["manifest"]), (&pushed["digest"], &pushed["manifest"]), "{pulled}");
    place.is_same("copy");
    let again = json(&mut place.pull(&target, "copy"));
    assert_eq!((number(&again, "new_bytes"), number(&again, "requests")), (0, 1), "{again}");

    // By the manifest's own name, and another digest than the image has.
    let name = target.reference.strip_suffix(":12").unwrap();
    let exact = format!("{name}@{}", pushed["manifest"].as_str().unwrap());
    let mut line = place.command("pull", "exact");
    json(target.set(&mut line).arg(exact).arg("-o").arg(place.at("exact.img")).arg("--json"));
    place.is_same("exact");
    let other = format!("{}:{}", digest.split_once(':').unwrap().0, "0".repeat(64));
    let said = refused(1, place.pull(&target, "other").args(["--digest", &other]));
    assert!(said.contains(&format!("the image has the digest {digest}, not {other}")), "{said}");
    assert!(!place.at("other.img").exists());
    let mut line = place.command("pull", "none");
    let said = refused(
        1,
        target.set(&mut line).arg(target.reference.replace("base", "none")).arg("-o").arg(place.at("none.img")),
    );
    assert!(said.contains("there is no image") && !place.at("none.img").exists(), "{said}");
}

#[test]
fn images_go_to_a_registry_and_back() {
    LAYOUTS.into_iter().for_each(|layout| there_and_back(Kind::Oci, layout));
}

#[test]
fn images_go_to_an_s3_store_and_back() {
    LAYOUTS.into_iter().for_each(|layout| there_and_back(Kind::S3, layout));
}

fn what_is_here_is_not_fetched(kind: Kind, layout: &'static str) {
    let place = Place::laid_out(layout);
    let Some(target) = Target::start(kind, &place.at("server")) else { return };
    place.build();
    json(&mut place.push(&target));
    json(&mut place.pull(&target, "copy"));
    // A newer image has one more pack; what is another in it is all that moves.
    place.write("new", 2000, 500_000);
    place.build();
    let pushed = number(&json(&mut place.push(&target)), "new_bytes");
    // So few objects of composefs are in one part.
    assert!((500_000..700_000).contains(&pushed) || layout == "composefs", "{pushed}");
    let pulled = number(&json(&mut place.pull(&target, "copy")), "new_bytes");
    assert_eq!(pulled, 500_000);
    place.is_same("copy");

    // A store with the same files in packs of its own has but one byte more to fetch.
    fs::write(place.at("tree/one"), [7; 8192]).unwrap();
    place.build_in("own.img", "own");
    fs::write(place.at("tree/two"), [8; 8192]).unwrap();
    place.build();
    json(&mut place.push(&target));
    let pulled = number(&json(&mut place.pull(&target, "own")), "new_bytes");
    assert_eq!(pulled, 8192);
    place.is_same("own");
}

#[test]
fn only_missing_data_is_fetched_from_a_registry() {
    LAYOUTS.into_iter().for_each(|layout| what_is_here_is_not_fetched(Kind::Oci, layout));
}

#[test]
fn only_missing_data_is_fetched_from_an_s3_store() {
    LAYOUTS.into_iter().for_each(|layout| what_is_here_is_not_fetched(Kind::S3, layout));
}

fn servers_die(kind: Kind, layout: &'static str) {
    let place = Place::laid_out(layout);
    let Some(target) = Target::start(kind, &place.at("server")) else { return };
    place.build();
    target.die_after(4 << 20);
    let said = refused(1, &mut place.push(&target));
    assert!(said.contains(&target.proxy.address.to_string()), "{said}");
    target.restart(kind, &place.at("server"));
    let said = refused(1, &mut place.pull(&target, "copy"));
    assert!(said.contains("there is no image"), "the manifest comes last: {said}");
    assert!(!said.contains("kept"), "nothing came: {said}");
    json(&mut place.push(&target));

    target.die_after(5 << 20);
    let said = refused(1, place.pull(&target, "copy").args(["--jobs", "1"]));
    assert!(said.contains("what came so far is kept for the next try"), "{said}");
    assert!(!place.at("copy.img").exists(), "an image that is not complete");
    target.restart(kind, &place.at("server"));
    let had = place.stored_bytes("copy");
    assert!(had > 1 << 20, "{had}");
    let pulled = json(&mut place.pull(&target, "copy"));
    // Each object whole, each once; of composefs's large one what had come.
    let all = place.stored_bytes("store");
    assert!(number(&pulled, "received_bytes") < all - (1 << 20), "{pulled} of {all}, {had} were here");
    place.is_same("copy");
}

#[test]
fn a_push_continues_after_a_registry_fails() {
    LAYOUTS.into_iter().for_each(|layout| servers_die(Kind::Oci, layout));
}

#[test]
fn a_push_continues_after_an_s3_store_fails() {
    LAYOUTS.into_iter().for_each(|layout| servers_die(Kind::S3, layout));
}

#[test]
fn a_killed_pull_continues() {
    LAYOUTS.into_iter().for_each(pulls_are_killed);
}

fn pulls_are_killed(layout: &'static str) {
    let place = Place::laid_out(layout);
    let Some(target) = Target::start(Kind::Oci, &place.at("server")) else { return };
    place.build();
    json(&mut place.push(&target));
    let child = Arc::new(Mutex::new(None::<std::process::Child>));
    let victim = Arc::clone(&child);
    let mut guard = child.lock().unwrap();
    // The proxy waits for us to know whom to kill.
    target.proxy.die_after(6 << 20, move || _ = victim.lock().unwrap().as_mut().unwrap().kill());
    *guard =
        Some(place.pull(&target, "copy").args(["--jobs", "1"]).stdout(std::process::Stdio::null()).spawn().unwrap());
    drop(guard);
    until("its end", || child.lock().unwrap().as_mut().unwrap().try_wait().unwrap().is_some());
    assert!(!place.at("copy.img").exists());
    target.proxy.revive(target.server.lock().unwrap().address);
    let pulled = json(&mut place.pull(&target, "copy"));
    assert!(number(&pulled, "received_bytes") < place.stored_bytes("store") - (1 << 20), "{pulled}");
    let gc = run(place.command("gc", "copy").arg(place.at("copy.img")).args(["--grace-s", "0"]));
    assert!(gc.status.success(), "what was begun and not ended goes: {gc:?}");
    place.is_same("copy");
}

/// Two processes pull one image into one store, and the one that fetches is killed half-way: the other one goes on from there.
#[test]
fn a_pull_continues_where_another_one_was_killed() {
    for layout in LAYOUTS {
        let place = Place::laid_out(layout);
        let Some(target) = Target::start(Kind::Oci, &place.at("server")) else { return };
        place.build();
        json(&mut place.push(&target));
        let victim = Arc::new(Mutex::new(None::<Child>));
        let at_half = Arc::clone(&victim);
        let mut guard = victim.lock().unwrap();
        // In the large file: a hole costs nothing on the way.
        target.proxy.die_after(6 << 20, move || _ = at_half.lock().unwrap().as_mut().unwrap().kill());
        *guard = Some(place.pull(&target, "copy").args(["--jobs", "1"]).stdout(Stdio::null()).spawn().unwrap());
        let mut line = place.command("pull", "copy");
        target.set(&mut line).arg(&target.reference).arg("-o").arg(place.at("other.img")).arg("--json");
        let other = line.args(["--jobs", "1"]).stdout(Stdio::piped()).spawn().unwrap();
        drop(guard);
        until("its end", || victim.lock().unwrap().as_mut().unwrap().try_wait().unwrap().is_some());
        assert!(!place.at("copy.img").exists(), "{layout}: it was too early for that");
        // Of what was sent, much may have been in sockets.
        let (had, sent) = (place.stored_bytes("copy"), target.proxy.answered());
        assert!(had > 1 << 20, "{layout}: {had} bytes were here");
        target.proxy.revive(target.server.lock().unwrap().address);
        let other = other.wait_with_output().unwrap();
        assert!(other.status.success(), "{layout}");
        let more = target.proxy.answered() - sent;
        let most = place.stored_bytes("store") - had + (1 << 20);
        assert!(more < most, "{layout}: {more} bytes were sent, of which {most} would be enough: {had} were here");
        fs::rename(place.at("other.img"), place.at("copy.img")).unwrap();
        place.is_same("copy");
        assert!(place.is_all_here("copy"), "{layout}: {:?}", place.files("copy"));
    }
}

/// One that is stopped gets no further: others do not wait for it for ever.
#[test]
#[ignore = "long: make test-all"]
fn a_pull_does_not_wait_for_another_one_that_is_stopped() {
    let place = Place::new();
    let Some(target) = Target::start(Kind::Oci, &place.at("server")) else { return };
    place.build();
    json(&mut place.push(&target));
    let victim = Arc::new(Mutex::new(None::<Child>));
    let at_half = Arc::clone(&victim);
    let mut guard = victim.lock().unwrap();
    target.proxy.die_after(6 << 20, move || {
        let child = at_half.lock().unwrap().as_ref().unwrap().id();
        assert!(Command::new("kill").args(["-STOP", &child.to_string()]).status().unwrap().success());
    });
    *guard = Some(place.pull(&target, "copy").args(["--jobs", "1"]).stdout(Stdio::null()).spawn().unwrap());
    drop(guard);
    until("the stop", || target.proxy.is_dead());
    target.proxy.revive(target.server.lock().unwrap().address);
    let mut line = place.command("pull", "copy");
    json(target.set(&mut line).arg(&target.reference).arg("-o").arg(place.at("other.img")).arg("--json"));
    let mut victim = victim.lock().unwrap().take().unwrap();
    victim.kill().unwrap();
    victim.wait().unwrap();
    fs::rename(place.at("other.img"), place.at("copy.img")).unwrap();
    place.is_same("copy");
}

/// A flipped bit anywhere is never seen: not pushed, not pulled, and put right where it can be.
#[test]
fn flipped_objects_of_composefs_are_found() {
    let place = Place::laid_out("composefs");
    let Some(target) = Target::start(Kind::Oci, &place.at("server")) else { return };
    place.build();
    json(&mut place.push(&target));
    json(&mut place.pull(&target, "copy"));
    let flip = |store: &str| {
        let victim = place.at(store).join(&place.files(store)[40]);
        let file = File::options().read(true).write(true).open(&victim).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 1000).unwrap();
        file.write_all_at(&[byte[0] ^ 1], 1000).unwrap();
        victim.metadata().unwrap().len()
    };
    let bytes = flip("copy");
    let said = run(place.command("verify", "copy").arg(place.at("copy.img")));
    assert_eq!(said.status.code(), Some(4), "{said:?}");
    let pulled = json(&mut place.pull(&target, "copy"));
    assert_eq!(number(&pulled, "new_bytes"), bytes, "{pulled}");
    place.is_same("copy");
    flip("store");
    let said = refused(1, &mut place.push(&target));
    assert!(said.contains("is damaged: its bytes have the digest"), "{said}");
}

#[test]
fn missing_permission_is_an_error() {
    let place = Place::new();
    place.build();
    if let Some(target) = Target::start(Kind::S3, &place.at("s3")) {
        // s3rver looks at who it is, and does not check signatures of this kind.
        let said = refused(1, place.push(&target).env("AWS_ACCESS_KEY_ID", "nobody"));
        assert!(said.contains("answers 403") && !said.contains(S3_SECRET) && !said.contains("Signature="), "{said}");
        let said = refused(1, place.push(&target).env_remove("AWS_SECRET_ACCESS_KEY"));
        assert!(said.contains("give both or none"), "{said}");
    }
    let Some(server) = registry(&place.at("oci"), true) else { return };
    let reference = format!("oci:{}/os/base:12", server.address);
    let push = |file: Option<&Path>| {
        let mut line = place.command("push", "store");
        line.arg(place.at("image")).arg(&reference);
        file.map(|file| line.env("REGISTRY_AUTH_FILE", file));
        line
    };
    let said = refused(1, &mut push(None));
    assert!(said.contains("answers 401"), "{said}");
    let file = place.at("auth.json");
    let said = refused(1, &mut push(Some(&file)));
    assert!(said.contains("auth.json"), "{said}");
    let write = |user: &str| {
        // base64 by the tool of the same name.
        let coded = Command::new("sh").args(["-c", "printf %s \"$1\" | base64", "-", user]).output().unwrap().stdout;
        let coded = String::from_utf8(coded).unwrap();
        let entry = serde_json::json!({"auths": {server.address.to_string(): {"auth": coded.trim_end()}}});
        fs::write(&file, entry.to_string()).unwrap();
    };
    write("me:other");
    let said = refused(1, &mut push(Some(&file)));
    assert!(said.contains("answers 401") && said.contains("auth.json") && !said.contains("me:other"), "{said}");
    write(USER);
    text(&mut push(Some(&file)));
}

#[test]
fn bad_words_are_refused_in_one_sentence() {
    let place = Place::new();
    let pull = |words: &[&str]| {
        refused(1, place.command("pull", "copy").current_dir(place.directory.path()).args(words).args(["-o", "x.img"]))
    };
    assert!(pull(&["nowhere"]).contains("write oci:HOST/NAME:TAG"));
    assert!(pull(&["oci:http://registry.invalid/a"]).contains("--plain-http"));
    let port = free_port();
    let said = pull(&[&format!("oci:127.0.0.1:{port}/a")]);
    assert!(said.contains(&format!("http://127.0.0.1:{port}/v2/a/manifests/latest")), "{said}");
    let mut mount = ferry();
    let said = run(mount.args(["mount", "image:x.img", "/nowhere", "--store", "s", "--jobs", "3"]));
    assert!(String::from_utf8_lossy(&said.stderr).contains("add --from"), "{said:?}");
}

fn mounts_before_it_is_here(kind: Kind, layout: &'static str) {
    let place = Place::laid_out(layout);
    let Some(target) = Target::start(kind, &place.at("server")) else { return };
    let digest = place.build();
    json(&mut place.push(&target));
    let mounted = Mounted::new();
    let mount = |words: &[&str]| {
        let mut line = ferry();
        target.set(&mut line).env("HOME", place.directory.path());
        line.arg("mount").arg(format!("image:{}", place.at("lazy.img").display())).arg(&mounted.mnt).arg("--store");
        line.arg(place.at("lazy")).args(["--from", &target.reference, "--digest", &digest]).args(words);
        line
    };
    let before = target.proxy.answered();
    let pid = mounted.mounted_by(&mut mount(&["--jobs", "0", "--fetch-ahead", "1"]));
    let listed = text(Command::new("find").arg(&mounted.mnt).arg("-type").arg("f"));
    assert_eq!(listed.lines().count(), 82);
    assert_eq!(fs::read(mounted.mnt.join("sub/07")).unwrap(), content(7, 10_000));
    let came = target.proxy.answered() - before;
    assert!(came < 1 << 20, "{came} bytes for the metadata and one file");

    // Without the server: what is here is read, what is not is EIO, and nobody waits for ever.
    target.proxy.cut();
    assert_eq!(fs::read(mounted.mnt.join("sub/07")).unwrap(), content(7, 10_000));
    let error = fs::read(mounted.mnt.join("sub/30")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    target.proxy.revive(target.server.lock().unwrap().address);
    assert_eq!(fs::read(mounted.mnt.join("sub/30")).unwrap(), content(30, 33_000));
    mounted.unmount(pid);

    // Who could not be given all of it is told so at once.
    target.proxy.cut();
    let said = refused(1, &mut mount(&[]));
    assert!(said.contains(&target.proxy.address.to_string()), "{said}");
    target.proxy.revive(target.server.lock().unwrap().address);

    // The next mount goes on with what is here, and gets the rest by itself.
    let pid = mounted.mounted_by(&mut mount(&[]));
    until("all of it", || place.is_all_here("lazy"));
    target.proxy.cut();
    assert_eq!(fs::read(mounted.mnt.join("large")).unwrap(), content(1000, 9_000_001));
    mounted.unmount(pid);
    place.is_same("lazy");

    // What is all here needs no server.
    let pid = mounted.mounted_by(&mut mount(&[]));
    assert_eq!(fs::read(mounted.mnt.join("sub/79")).unwrap(), content(79, 82_000));
    mounted.unmount(pid);
}

#[test]
fn an_image_is_mounted_from_a_registry_before_it_is_here() {
    needs_fuse!();
    LAYOUTS.into_iter().for_each(|layout| mounts_before_it_is_here(Kind::Oci, layout));
}

#[test]
fn an_image_is_mounted_from_an_s3_store_before_it_is_here() {
    needs_fuse!();
    LAYOUTS.into_iter().for_each(|layout| mounts_before_it_is_here(Kind::S3, layout));
}

#[test]
fn the_cache_is_bounded() {
    needs_fuse!();
    let place = Place::new();
    let Some(target) = Target::start(Kind::Oci, &place.at("server")) else { return };
    let digest = place.build();
    json(&mut place.push(&target));
    let mounted = Mounted::new();
    let mount = |store: &str, words: &[&str]| {
        let mut line = ferry();
        target.set(&mut line).env("HOME", place.directory.path());
        line.arg("mount").arg(format!("image:{}", place.at("lazy.img").display())).arg(&mounted.mnt).arg("--store");
        line.arg(place.at(store)).args(["--from", &target.reference, "--digest", &digest]).args(words);
        mounted.mounted_by(&mut line)
    };
    let read_all = || {
        for number in 0..80 {
            let read = fs::read(mounted.mnt.join(format!("sub/{number:02}"))).unwrap();
            assert_eq!(read, content(number, 3000 + 1000 * number as usize));
        }
    };
    // All small files together are 3.4 MB, and of the large one this much does not fit either.
    const BOUND: u64 = 1 << 20;
    // What the file system may take for itself: the index of the pack, and its map of where its pieces are.
    const SLACK: u64 = 128 << 10;
    let pid = mount("bounded", &["--cache-size", "1M", "--jobs", "0", "--fetch-ahead", "1"]);
    read_all();
    assert_eq!(fs::read(mounted.mnt.join("large")).unwrap(), content(1000, 9_000_001));
    let kept = place.stored_bytes("bounded");
    assert!((BOUND / 2..=BOUND + SLACK).contains(&kept), "{kept}");
    mounted.unmount(pid);
    let pid = mount("free", &["--jobs", "0", "--fetch-ahead", "1"]);
    read_all();
    assert!(place.stored_bytes("free") > 3 << 20);
    mounted.unmount(pid);
    // Where it means nothing.
    let said = run(ferry().args(["mount", "image:x.img", "/nowhere", "--store", "s", "--cache-size", "1M"]));
    assert!(String::from_utf8_lossy(&said.stderr).contains("add --from"), "{said:?}");
}

/// The kernel's mount of an image that is not all here.
struct KernelMount<'a> {
    place: &'a Place,
    target: &'a Target,
    digest: String,
    image: PathBuf,
    dir: PathBuf,
}

impl KernelMount<'_> {
    fn command(&self, words: &[&str]) -> Command {
        let mut line = self.place.command("mount", "lazy");
        self.target.set(&mut line).arg(&self.image).arg(&self.dir);
        line.args(["--from", &self.target.reference, "--digest", &self.digest]).args(words);
        line
    }

    /// Starts a server that stays in front, and waits for its mount; `None` where the kernel or the file system cannot wait for
    /// what is not here.
    fn served(&self, words: &[&str]) -> Option<Child> {
        let mut line = self.command(words);
        let mut child = line.arg("--foreground").stderr(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        for text in BufReader::new(child.stderr.take().unwrap()).lines() {
            let text = text.unwrap();
            if text.contains("mounting over FUSE instead") {
                child.kill().unwrap();
                child.wait().unwrap();
                ferry_skip::skip!("{text}");
                return None;
            }
            if text.contains("mounted") {
                return Some(child);
            }
            said += &text;
        }
        panic!("{:?}: {said}", child.wait());
    }

    fn read(&self, name: &str) -> std::io::Result<Vec<u8>> {
        fs::read(self.dir.join(name))
    }

    /// That a mount over FUSE shows what is not here.
    fn waits_by_fuse(&self) {
        let output = run(&mut self.command(&["--jobs", "0"]));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), output.stdout), (Some(0), Vec::new()), "{said}");
        assert!(self.read("sub/07").unwrap() == content(7, 10_000), "{said}");
        assert!(said.contains("mounting over FUSE instead: ferry mount image:"), "{said}");
        assert!(said.contains(" --jobs 0 "), "{said}");
        assert!(!self.place.is_all_here("lazy"));
    }

    fn is_denied(&self, name: &str) {
        let error = self.read(name).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()), "{name}: {error}");
    }

    /// Guardians of servers with this store that are still there.
    fn guardians(&self) -> usize {
        let packs = fs::canonicalize(self.place.at("lazy")).unwrap();
        let holds = |process: &fs::DirEntry| {
            let is_one =
                fs::read(process.path().join("cmdline")).is_ok_and(|line| line.starts_with(b"ferry-guardian\0"));
            let files = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
            is_one && files.flat_map(|file| fs::read_link(file.path())).any(|file| file.starts_with(&packs))
        };
        fs::read_dir("/proc").unwrap().flatten().filter(holds).count()
    }
}

impl Drop for KernelMount<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.dir, rustix::mount::UnmountFlags::DETACH);
    }
}

/// On a file system whose files cannot be watched.
#[test]
fn the_fuse_mount_waits_where_the_kernel_cannot() {
    needs_fuse!();
    if !Path::new("/dev/shm").is_dir() {
        ferry_skip::skip!("no tmpfs at /dev/shm");
        return;
    }
    let place = Place::below("/dev/shm");
    let Some(target) = Target::start(Kind::Oci, &place.at("server")) else { return };
    let digest = place.build();
    json(&mut place.push(&target));
    let mounted = Mounted::new();
    let image = place.at("lazy.img");
    let mount = KernelMount { place: &place, target: &target, digest, image, dir: mounted.mnt.clone() };
    mount.waits_by_fuse();
    assert!(mounted.mounts()[0].contains("fuse"), "{:?}", mounted.mounts());
}

/// The kernel mounts an image on a tmpfs from a loop device only, whose reads of the packs cannot be watched.
#[test]
fn the_fuse_mount_waits_if_the_kernel_needs_a_loop_device() {
    needs_fuse!();
    if !Path::new("/dev/shm").is_dir() {
        ferry_skip::skip!("no tmpfs at /dev/shm");
        return;
    }
    let place = Place::below("/var/tmp");
    let Some(target) = Target::start(Kind::Oci, &place.at("server")) else { return };
    let digest = place.build();
    json(&mut place.push(&target));
    let (mounted, shared) = (Mounted::new(), tempfile::tempdir_in("/dev/shm").unwrap());
    let image = shared.path().join("lazy.img");
    let mount = KernelMount { place: &place, target: &target, digest, image, dir: mounted.mnt.clone() };
    mount.waits_by_fuse();
    assert!(mounted.mounts()[0].contains("fuse"), "{:?}", mounted.mounts());
}

/// `umount` removes what is on top, which may be the mount of another program.
#[test]
fn a_signal_removes_only_the_own_mount() {
    needs_fuse!();
    let place = Place::below("/var/tmp");
    let Some(target) = Target::start(Kind::Oci, &place.at("server")) else { return };
    let digest = place.build();
    json(&mut place.push(&target));
    let (image, dir) = (place.at("lazy.img"), place.at("mnt"));
    fs::create_dir(&dir).unwrap();
    let mount = KernelMount { place: &place, target: &target, digest, image, dir };
    let Some(mut server) = mount.served(&["--jobs", "0", "--fetch-ahead", "1"]) else { return };
    let open = File::open(mount.dir.join("sub/07")).unwrap();
    rustix::mount::mount("none", &mount.dir, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
    fs::write(mount.dir.join("theirs"), "").unwrap();
    let pid = rustix::process::Pid::from_child(&server);
    let end = || rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    end();
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert!(mount.dir.join("theirs").exists() && server.try_wait().unwrap().is_none());
    let mut bytes = vec![0; 10_000];
    open.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == content(7, 10_000));
    drop(open);
    unmount(&mount.dir);
    end();
    assert!(server.wait().unwrap().success());
    assert!(!mount.dir.join("sub").exists());
}

#[test]
fn the_kernel_mounts_an_image_before_it_is_here() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("only root mounts images with the kernel");
        return;
    }
    // A tmpfs cannot be watched, which /tmp may be.
    let place = Place::below("/var/tmp");
    let Some(target) = Target::start(Kind::Oci, &place.at("server")) else { return };
    let digest = place.build();
    json(&mut place.push(&target));
    let mount = |name: &str| {
        fs::create_dir(place.at(name)).unwrap();
        let image = place.at("lazy.img");
        KernelMount { place: &place, target: &target, digest: digest.clone(), image, dir: place.at(name) }
    };
    let one = mount("one");
    let before = target.proxy.answered();
    let few = ["--jobs", "0", "--fetch-ahead", "1"];
    let Some(mut server) = one.served(&few) else { return };
    let names = text(Command::new("find").arg(&one.dir).arg("-type").arg("f"));
    assert_eq!(names.lines().count(), 82);
    assert_eq!(one.read("sub/07").unwrap(), content(7, 10_000));
    let came = target.proxy.answered() - before;
    assert!(came < 1 << 20, "{came} bytes for the metadata and one file");
    let status = json(ferry().arg("status").arg(&one.dir).arg("--json"));
    let share = &status["servers"][0]["shares"][0];
    assert_eq!((&share["mount"], &share["read_only"]), (&one.dir.to_str().unwrap().into(), &true.into()), "{status}");
    let export = &share["exports"][0];
    assert!(export["path"].as_str().unwrap().starts_with("the kernel's EROFS"), "{status}");
    let fetched = export["usage"].as_array().unwrap().iter().find(|one| one["name"] == "image_fetched_bytes_total");
    assert!((10_000..1 << 20).contains(&fetched.unwrap()["value"].as_u64().unwrap()), "{status}");
    let said = refused(1, ferry().arg("log").arg(one.dir.join("sub/07")).arg("requests"));
    assert!(said.contains("the kernel serves the requests"), "{said}");

    // Without the registry: what is here is read, what is not is EIO, and nobody waits for ever.
    target.proxy.cut();
    assert_eq!(one.read("sub/07").unwrap(), content(7, 10_000));
    one.is_denied("sub/40");
    target.proxy.revive(target.server.lock().unwrap().address);
    until("the registry to be asked again", || one.read("sub/40").is_ok());
    assert_eq!(one.read("sub/40").unwrap(), content(40, 43_000));

    // Without the server: the same, and never zeros.
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(one.read("sub/40").unwrap(), content(40, 43_000));
    one.is_denied("sub/09");
    one.is_denied("large");
    // One that comes to nothing, after it has taken over, leaves it at that.
    let two = mount("two");
    let nowhere = place.at("no/such/directory");
    let failed = two.command(&few).arg("--foreground").arg("--upper").arg(nowhere).output().unwrap();
    let said = String::from_utf8_lossy(&failed.stderr);
    assert!(!failed.status.success() && said.contains("no/such/directory"), "{said}");
    one.is_denied("sub/09");
    // A new one, of a second mount, answers for the first, too.
    let server = two.served(&few).unwrap();
    until("the guardian of the first to go", || one.guardians() == 1);
    assert_eq!(two.read("sub/09").unwrap(), content(9, 12_000));
    assert_eq!(one.read("sub/10").unwrap(), content(10, 13_000));
    // It ends with its mount, but not the file that is open.
    let open = File::open(two.dir.join("sub/11")).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_child(&server), rustix::process::Signal::TERM).unwrap();
    let status = server.wait_with_output().unwrap().status;
    assert!(status.success(), "{status}");
    let error = open.read_at(&mut [0; 100], 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    drop(open);

    // In the background, and to the end: the server goes, the mount stays and needs nobody any more.
    let three = mount("three");
    text(&mut three.command(&[]));
    until("all of it", || place.is_all_here("lazy"));
    until("the server and all guardians to go", || three.guardians() == 0);
    target.proxy.cut();
    assert_eq!(three.read("large").unwrap(), content(1000, 9_000_001));
    assert_eq!(three.read("sub/20").unwrap(), content(20, 23_000));
    place.is_same("lazy");
    assert_eq!(one.read("sub/30").unwrap(), content(30, 33_000), "the first mount has all of it, too");
    // What is whole is mounted, and nobody has to stay; the registry need not be there.
    let four = mount("four");
    text(&mut four.command(&["--foreground"]));
    assert_eq!((four.read("sub/31").unwrap(), four.guardians()), (content(31, 34_000), 0));
}

/// overlayfs opens a file for each object: the kernel has the mount when all is here.
#[test]
fn the_kernel_mounts_a_composefs_image_of_a_registry() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("only root mounts images with the kernel");
        return;
    }
    let place = Place::of(tempfile::tempdir_in("/var/tmp").unwrap(), "composefs");
    let Some(target) = Target::start(Kind::Oci, &place.at("server")) else { return };
    let digest = place.build();
    json(&mut place.push(&target));
    let dir = place.at("mnt");
    fs::create_dir(&dir).unwrap();
    let mount = || {
        let mut line = place.command("mount", "lazy");
        target.set(&mut line).arg(place.at("lazy.img")).arg(&dir).args(["--from", &target.reference, "--foreground"]);
        line
    };
    target.die_after(2 << 20);
    let said = refused(1, &mut mount());
    assert!(said.contains("cannot fetch the object"), "{said}");
    target.restart(Kind::Oci, &place.at("server"));
    let mounted = run(&mut mount());
    let said = String::from_utf8_lossy(&mounted.stderr).into_owned();
    if said.contains("this kernel has no") {
        ferry_skip::skip!("{said}");
        return;
    }
    assert!(mounted.status.success(), "{said}");
    let read = ["sub/07", "large"].map(|name| fs::read(dir.join(name)).unwrap());
    rustix::mount::unmount(&dir, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!(read, [content(7, 10_000), content(1000, 9_000_001)]);
    assert_eq!(text(place.command("verify", "lazy").arg(place.at("lazy.img")).args(["--digest", &digest])), "clean\n");
    assert!(place.is_all_here("lazy"), "{:?}", place.files("lazy"));
    // What is all here needs no server.
    target.proxy.cut();
    text(&mut mount());
    let read = fs::read(dir.join("sub/08"));
    rustix::mount::unmount(&dir, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!(read.unwrap(), content(8, 11_000));
}

/// A flipped bit in a pack: said, and put right by what the registry has.
#[test]
fn flipped_objects_of_packs_are_replaced() {
    let place = Place::new();
    let Some(target) = Target::start(Kind::Oci, &place.at("server")) else { return };
    place.build();
    json(&mut place.push(&target));
    json(&mut place.pull(&target, "copy"));
    let pack = || {
        let files = place.files("copy");
        place.at("copy").join(files.iter().find(|file| !file.contains('.')).unwrap())
    };
    let flip = |at: u64| {
        let file = File::options().read(true).write(true).open(pack()).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    };
    let verify = |words: &[&str]| {
        let mut line = place.command("verify", "copy");
        let output = run(target.set(&mut line).arg(place.at("copy.img")).args(words));
        let said = String::from_utf8(output.stdout).unwrap() + std::str::from_utf8(&output.stderr).unwrap();
        (output.status.code(), said)
    };
    flip(1000);
    flip(5 << 20);
    let (status, said) = verify(&[]);
    assert!(status == Some(4) && said.contains("is damaged"), "{said}");
    // Without a word of repairing, nothing is, and a pull does not look at what it has.
    assert_eq!(number(&json(&mut place.pull(&target, "copy")), "requests"), 1);
    assert_eq!(verify(&[]).0, Some(4));
    let (status, said) = verify(&["--repair"]);
    assert!(status == Some(4) && said.contains("2 objects were damaged; 0 of them"), "{said}");
    let pulled = json(&mut place.pull(&target, "copy"));
    assert!(number(&pulled, "received_bytes") < 1 << 18, "{pulled}");
    place.is_same("copy");
    // At once, if it is said where from; packs that are of no use at all, too.
    flip(1000);
    let (status, said) = verify(&["--repair", "--from", &target.reference]);
    assert!(status == Some(0) && said.contains("1 objects were damaged; 1 of them"), "{said}");
    place.is_same("copy");
    fs::write(pack().with_extension("index"), "no index").unwrap();
    let (status, said) = verify(&["--repair", "--from", &target.reference]);
    assert!(status == Some(0) && said.contains("clean"), "{said}");
    place.is_same("copy");
    // So does a mount.
    flip(1000);
    verify(&["--repair"]);
    let mut line = place.command("pull", "copy");
    let lazily = target.set(&mut line).arg(&target.reference).arg("-o").arg(place.at("copy.img"));
    text(lazily.arg("--metadata-only"));
    place.is_same("copy");
}
