//! `ferry image gc`, `du` and `diff`, and builds that are killed or run beside each other.
use crate::common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{ferry, refused, run};
use serde_json::Value;

/// Trees, a store and images. All of it goes at the end.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        for directory in ["tree", "images"] {
            fs::create_dir(place.at(directory)).unwrap();
        }
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, seed: u32, bytes: usize) {
        let content: Vec<u8> = (seed * 1_000_003..).flat_map(u32::to_le_bytes).take(bytes).collect();
        fs::write(self.at("tree").join(name), content).unwrap();
    }

    fn command(&self, command: &str) -> Command {
        let mut line = ferry();
        line.args(["image", command, "--store"]).arg(self.at("store"));
        line
    }

    fn build(&self, image: &str) -> Command {
        let mut line = self.command("build");
        line.arg(self.at("tree")).arg("-o").arg(self.at("images").join(image));
        line
    }

    fn json(&self, command: &str, words: &[&str]) -> Value {
        serde_json::from_str(&text(self.command(command).current_dir(self.0.path()).args(words).arg("--json"))).unwrap()
    }

    fn is_sound(&self, image: &Path) {
        assert_eq!(text(self.command("verify").arg(image)), "clean\n");
    }
}

fn text(command: &mut Command) -> String {
    let output = run(command);
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_store_is_looked_at_compared_and_cleaned() {
    let place = Place::new();
    place.write("one", 1, 50_000);
    place.write("two", 2, 5000);
    text(&mut place.build("old"));
    place.write("two", 3, 5000);
    text(&mut place.build("new"));
    let used = place.json("du", &["images"]);
    assert_eq!((used["packs"].as_u64(), used["store_bytes"].as_u64()), (Some(2), Some(17 * 4096)), "{used}");
    assert_eq!(used["images"][0]["own_bytes"].as_u64(), Some(2 * 4096), "{used}");
    assert_eq!((used["unused_bytes"].as_u64(), used["garbage_bytes"].as_u64()), (Some(0), Some(0)), "{used}");
    let shown = text(place.command("du").arg(place.at("images")));
    assert!(shown.contains("69632 bytes in 2 packs: 69632 needed, 0 unused"), "{shown}");

    let (old, new) = (place.at("images/old"), place.at("images/new"));
    let differs = run(place.command("diff").args([&old, &new]));
    assert_eq!(differs.status.code(), Some(4));
    assert_eq!(String::from_utf8(differs.stdout).unwrap(), "M /two (content, time)\n");
    assert_eq!(text(place.command("diff").args([&old, &old])), "");
    let line = run(place.command("diff").args([&new, &old]).arg("--json")).stdout;
    let line: Value = serde_json::from_slice(&line).unwrap();
    assert_eq!((line["path"].as_str(), line["change"].as_str()), (Some("/two"), Some("changed")));

    // The newer image needs both packs; the older one alone needs one.
    let kept = place.json("gc", &["images/old", "images/new", "--grace-s", "0"]);
    assert_eq!((kept["kept"].as_u64(), kept["removed"].as_array().unwrap().len()), (Some(2), 0), "{kept}");
    let young = place.json("gc", &["images/old"]);
    assert_eq!((young["young"].as_array().unwrap().len(), young["bytes"].as_u64()), (1, Some(0)), "{young}");
    let dry = place.json("gc", &["images/old", "--grace-s", "0", "--dry-run"]);
    assert_eq!((dry["removed"].as_array().unwrap().len(), dry["dry_run"].as_bool()), (1, Some(true)), "{dry}");
    place.is_sound(&new);
    let said = text(place.command("gc").arg(&old).args(["--grace-s", "0"]));
    assert!(said.starts_with("removed 1 packs and 0 leftovers, "), "{said}");
    place.is_sound(&old);
    let output = run(place.command("verify").arg(&new));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.code() == Some(4) && said.contains(" is not in "), "{said}");
}

/// Names are bytes: what JSON cannot say as text it says in digits, too.
#[test]
fn names_that_are_no_text_survive_json() {
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new();
    let named = |bytes: &[u8]| place.at("tree").join(std::ffi::OsStr::from_bytes(bytes));
    std::os::unix::fs::symlink(std::ffi::OsStr::from_bytes(b"to \xfe"), named(b"a link")).unwrap();
    text(&mut place.build("old"));
    fs::write(named(b"\xff"), "").unwrap();
    text(&mut place.build("new"));
    let lines = |command: &mut Command| -> Vec<Value> {
        let output = String::from_utf8(run(command).stdout).unwrap();
        output.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let listed = lines(ferry().args(["image", "ls", "--json"]).arg(place.at("images/new")));
    let link = listed.iter().find(|line| line["path"] == "/a link").unwrap();
    assert_eq!((link["target_hex"].as_str(), &link["path_hex"]), (Some("746f20fe"), &Value::Null), "{link}");
    let other = listed.iter().find(|line| line["path"] == "/\u{fffd}").unwrap();
    assert_eq!((other["path_hex"].as_str(), other["target"].as_str()), (Some("2fff"), None), "{other}");
    let differs = lines(place.command("diff").args([place.at("images/old"), place.at("images/new")]).arg("--json"));
    let added = differs.iter().find(|line| line["change"] == "added").unwrap();
    assert_eq!(added["path_hex"].as_str(), Some("2fff"), "{added}");
}

#[test]
fn a_single_layer_needs_a_policy_for_whiteouts() {
    let place = Place::new();
    place.write(".wh.gone", 1, 0);
    place.write("file", 1, 5000);
    text(Command::new("tar").args(["-cf", "layer.tar", "-C", "tree", "."]).current_dir(place.0.path()));
    let build = |words: &[&str]| {
        let mut line = place.command("build");
        line.arg(place.at("layer.tar")).arg("-o").arg(place.at("images/layer")).args(words);
        line
    };
    let said = refused(1, &mut build(&[]));
    assert!(said.contains("./.wh.gone at byte") && said.contains("--whiteouts drop, overlay or keep"), "{said}");
    for (how, names) in [("drop", "/\n/file\n"), ("overlay", "/\n/file\n/gone\n"), ("keep", "/\n/.wh.gone\n/file\n")] {
        text(&mut build(&["--whiteouts", how]));
        assert_eq!(text(ferry().args(["image", "ls"]).arg(place.at("images/layer"))), names, "{how}");
    }
    let said = refused(1, place.build("image").args(["--whiteouts", "drop"]));
    assert!(said.contains("only for a tar archive"), "{said}");
}

#[test]
fn a_store_in_its_own_tree_is_refused_or_left_out() {
    let place = Place::new();
    place.write("one", 1, 5000);
    for store in ["tree/store", "tree/a/../store/deeper"] {
        let build = |words: &[&str]| {
            let mut line = ferry();
            line.current_dir(place.0.path()).args(["image", "build", "tree", "-o", "images/image", "--store", store]);
            line.args(words);
            line
        };
        fs::create_dir_all(place.at("tree/a")).unwrap();
        let said = refused(1, &mut build(&[]));
        assert!(said.contains("is inside tree") && said.contains("--exclude"), "{said}");
        assert!(!place.at("tree/store").exists(), "nothing is made for nothing");
        text(&mut build(&["--exclude", "/store"]));
        assert_eq!(text(ferry().args(["image", "ls"]).arg(place.at("images/image"))), "/\n/a\n/one\n");
        fs::remove_dir_all(place.at("tree/store")).unwrap();
    }
    text(&mut place.build("beside"));
}

#[test]
fn a_build_repairs_damage_that_verify_recorded() {
    use std::os::unix::fs::FileExt;
    let place = Place::new();
    place.write("one", 1, 50_000);
    place.write("two", 2, 5000);
    text(&mut place.build("image"));
    let image = place.at("images/image");
    let packs = fs::read_dir(place.at("store/packs")).unwrap().map(|entry| entry.unwrap().path());
    let pack = packs.into_iter().find(|path| path.extension().is_none()).unwrap();
    fs::set_permissions(&pack, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    fs::File::options().write(true).open(&pack).unwrap().write_all_at(b"x", 1).unwrap();
    let verify = |words: &[&str]| {
        let output = run(place.command("verify").arg(&image).args(words));
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (status, said, _) = verify(&[]);
    assert!(status == Some(4) && said.starts_with("/one: the object blake3:"), "{said}");
    let (status, said, told) = verify(&["--repair"]);
    assert!(status == Some(4) && said.starts_with("/one: ") && told.contains("1 objects were damaged; 0"), "{told}");
    assert!(told.contains("will be replaced by the next build or pull"), "{told}");
    text(&mut place.build("again"));
    place.is_sound(&image);
    let refused = run(place.command("verify").arg(&image).args(["--from", "oci:registry.invalid/a"]));
    assert_eq!(refused.status.code(), Some(2), "nobody asked for a repair");
}

#[test]
fn nothing_is_removed_for_words_that_are_no_images() {
    let place = Place::new();
    place.write("one", 1, 5000);
    text(&mut place.build("image"));
    let gc = |words: &[&str]| {
        refused(1, place.command("gc").current_dir(place.0.path()).args(words).args(["--grace-s", "0"]))
    };
    fs::create_dir(place.at("none")).unwrap();
    assert!(gc(&["none"]).contains("there is no image in none"));
    assert!(gc(&["absent"]).contains("absent"));
    fs::write(place.at("images/README"), "no image").unwrap();
    assert!(gc(&["images"]).contains("images/README is no valid image"));
    place.is_sound(&place.at("images/image"));
    let said = run(&mut place.command("gc"));
    assert_eq!(said.status.code(), Some(2));
    let mut elsewhere = ferry();
    let said =
        refused(1, elsewhere.args(["image", "gc", "--store"]).arg(place.at("none")).arg(place.at("images/image")));
    assert!(said.contains("as a store"), "{said}");
}

/// Whatever moment a build is killed at: its image is the old one or the new one, whole, the next build succeeds, and nothing but
/// what gc removes is left.
#[test]
fn killed_builds_leave_nothing_half_made() {
    builds_are_killed("flat", 40);
    builds_are_killed("composefs", 20);
}

fn builds_are_killed(layout: &str, rounds: u32) {
    let place = Place::new();
    let build = || {
        let mut line = place.build("image");
        line.args(["--layout", layout]);
        line
    };
    for number in 0..40 {
        place.write(&format!("kept-{number}"), number, 30_000);
    }
    text(&mut build());
    let image = place.at("images/image");
    let started = Instant::now();
    place.write("extra", 99, 300_000);
    text(&mut build());
    let whole = started.elapsed();
    let mut finished = 0;
    for round in 0..rounds {
        place.write("extra", 100 + round, 300_000);
        place.write(&format!("more-{round}"), 200 + round, 70_000);
        let mut child = build().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // Spread over a little more than what a build takes, whatever that is here.
        std::thread::sleep(whole * (round * 13 % rounds) / (rounds - rounds / 10));
        child.kill().unwrap();
        finished += usize::from(child.wait().unwrap().success());
        place.is_sound(&image);
    }
    assert!(finished < rounds as usize, "no build was killed");
    let digest = text(&mut build());
    place.is_sound(&image);
    text(place.command("gc").arg(&image).args(["--grace-s", "0"]));
    let names = |directory: &str| -> Vec<String> {
        let mut find = Command::new("find");
        let found = text(find.args([directory, "-type", "f", "-printf", "%f\\n"]).current_dir(place.0.path()));
        found.lines().map(str::to_owned).collect()
    };
    let info: Value = serde_json::from_str(&text(ferry().args(["image", "info", "--json"]).arg(&image))).unwrap();
    // A pack is two files; the table of packs, which builds make when there are many, is none.
    let packs = names("store/packs").iter().filter(|name| *name != "table").count();
    assert_eq!(packs, 2 * info["packs"].as_array().unwrap().len());
    assert!(!names("store").iter().any(|name| name.starts_with(".new-")));
    assert_eq!(info["digest"].as_str(), Some(digest.trim_end()));
    place.is_sound(&image);
}

#[test]
fn gc_waits_for_a_build_and_builds_at_once_do_not_wait_for_each_other() {
    let place = Place::new();
    for number in 0..200 {
        place.write(&number.to_string(), number, 20_000);
    }
    let mut builds: Vec<_> = (0..4)
        .map(|number| place.build(&number.to_string()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
        .collect();
    for build in &mut builds {
        assert!(build.wait().unwrap().success());
    }
    for number in 0..4 {
        place.is_sound(&place.at("images").join(number.to_string()));
    }
    // Whoever holds the lock as builds do keeps gc waiting.
    let lock = fs::File::options().append(true).open(place.at("store/lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockShared).unwrap();
    let mut gc = place.command("gc");
    let gc = gc.arg(place.at("images")).args(["--grace-s", "0"]).stderr(Stdio::piped()).stdout(Stdio::null());
    let mut child = gc.spawn().unwrap();
    let mut said = [0; 14];
    std::io::Read::read_exact(child.stderr.as_mut().unwrap(), &mut said).unwrap();
    assert_eq!(&said, b"ferry: waiting");
    std::thread::sleep(Duration::from_millis(50));
    assert!(child.try_wait().unwrap().is_none());
    drop(lock);
    assert!(child.wait().unwrap().success());
    text(&mut place.build("later"));
    place.is_sound(&place.at("images/later"));
}
