//! Images that go to a server and come back: a tree, stores, and where images go.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use serde_json::Value;

use super::servers::{BUCKET, Program, Proxy, S3_KEY, S3_SECRET, registry, s3};
use super::{ferry, run};

/// A tree, stores and images of one layout. All of it goes at the end.
pub struct Place {
    pub directory: tempfile::TempDir,
    layout: &'static str,
    /// What else builds are told.
    words: &'static [&'static str],
}

pub const LAYOUTS: [&str; 2] = ["flat", "composefs"];

pub fn content(seed: u32, bytes: usize) -> Vec<u8> {
    (seed * 1_000_003..).flat_map(|n: u32| n.wrapping_mul(2_654_435_761).to_le_bytes()).take(bytes).collect()
}

impl Place {
    /// A tree of 80 small files, one of 9 MB, and one with a hole.
    pub fn new() -> Self {
        Self::laid_out("flat")
    }

    pub fn laid_out(layout: &'static str) -> Self {
        Self::of(tempfile::tempdir().unwrap(), layout)
    }

    /// Of packs with fs-verity digests.
    pub fn for_verity() -> Self {
        Self { words: &["--verity"], ..Self::new() }
    }

    pub fn below(directory: &str) -> Self {
        Self::of(tempfile::tempdir_in(directory).unwrap(), "flat")
    }

    pub fn of(directory: tempfile::TempDir, layout: &'static str) -> Self {
        let place = Self { directory, layout, words: &[] };
        fs::create_dir_all(place.at("tree/sub")).unwrap();
        for number in 0..80 {
            place.write(&format!("sub/{number:02}"), number, 3000 + 1000 * number as usize);
        }
        place.write("large", 1000, 9_000_001);
        let file = File::create(place.at("tree/holed")).unwrap();
        file.write_all_at(b"end", 2 << 20).unwrap();
        place
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn write(&self, name: &str, seed: u32, bytes: usize) {
        fs::write(self.at("tree").join(name), content(seed, bytes)).unwrap();
    }

    /// Builds `image` in `store`; answers its digest.
    pub fn build(&self) -> String {
        self.build_in("image", "store")
    }

    pub fn build_in(&self, image: &str, store: &str) -> String {
        let mut line = ferry();
        line.args(["image", "build", "--layout", self.layout])
            .args(self.words)
            .arg(self.at("tree"))
            .arg("-o")
            .arg(self.at(image));
        text(line.arg("--store").arg(self.at(store))).trim_end().to_owned()
    }

    /// What a store has: files of packs and of objects, below it.
    pub fn files(&self, store: &str) -> Vec<String> {
        let list = Command::new("find").args(["packs", "objects", "-type", "f"]).current_dir(self.at(store)).output();
        let mut files: Vec<_> = String::from_utf8(list.unwrap().stdout).unwrap().lines().map(str::to_owned).collect();
        files.sort();
        files
    }

    /// Whether a store has all of the image, and nothing that is not complete.
    pub fn is_all_here(&self, store: &str) -> bool {
        let files = self.files(store);
        let is_unfinished = |name: &String| name.contains(".part") || name.contains("/.");
        let all = if self.layout == "flat" { 2 } else { self.files("store").len() };
        files.len() >= all && !files.iter().any(is_unfinished)
    }

    /// A command of `ferry image` on a store.
    pub fn command(&self, command: &str, store: &str) -> Command {
        let mut line = ferry();
        line.args(["image", command, "--store"]).arg(self.at(store)).env_remove("REGISTRY_AUTH_FILE");
        // What podman and docker know here is none of a test's business.
        line.env("HOME", self.directory.path()).env_remove("DOCKER_CONFIG").env_remove("XDG_RUNTIME_DIR");
        line
    }

    pub fn push(&self, to: &Target) -> Command {
        let mut line = self.command("push", "store");
        to.set(&mut line).arg(self.at("image")).arg(&to.reference).arg("--json");
        line
    }

    pub fn pull(&self, from: &Target, store: &str) -> Command {
        let mut line = self.command("pull", store);
        from.set(&mut line).arg(&from.reference).arg("-o").arg(self.at(&format!("{store}.img"))).arg("--json");
        line
    }

    /// The image that was pulled is the one that was built, with all its bytes.
    pub fn is_same(&self, store: &str) {
        let image = self.at(&format!("{store}.img"));
        assert_eq!(fs::read(&image).unwrap(), fs::read(self.at("image")).unwrap());
        assert_eq!(text(self.command("verify", store).arg(&image)), "clean\n");
        assert!(self.is_all_here(store), "{:?}", self.files(store));
    }

    /// What the files of a store take on the disk, in bytes.
    pub fn stored_bytes(&self, store: &str) -> u64 {
        use std::os::unix::fs::MetadataExt;
        let files = self.files(store).into_iter();
        files.map(|file| fs::metadata(self.at(store).join(file)).unwrap().blocks() * 512).sum()
    }
}

pub fn text(command: &mut Command) -> String {
    let output = run(command);
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

pub fn json(command: &mut Command) -> Value {
    serde_json::from_str(&text(command)).unwrap()
}

pub fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} in {value}"))
}

/// Where images go, by a proxy.
pub struct Target {
    pub reference: String,
    environment: Vec<(&'static str, String)>,
    pub server: Arc<Mutex<Program>>,
    pub proxy: Proxy,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Oci,
    S3,
}

impl Target {
    pub fn start(kind: Kind, directory: &Path) -> Option<Self> {
        let server = Self::server(kind, directory)?;
        let proxy = Proxy::to(server.address);
        let address = proxy.address;
        let (reference, environment) = match kind {
            Kind::Oci => (format!("oci:{address}/os/base:12"), Vec::new()),
            Kind::S3 => (
                format!("s3:{BUCKET}/os/base:12"),
                vec![
                    ("AWS_ENDPOINT_URL", format!("http://{address}")),
                    ("AWS_ACCESS_KEY_ID", S3_KEY.into()),
                    ("AWS_SECRET_ACCESS_KEY", S3_SECRET.into()),
                ],
            ),
        };
        Some(Self { reference, environment, server: Arc::new(Mutex::new(server)), proxy })
    }

    pub fn server(kind: Kind, directory: &Path) -> Option<Program> {
        match kind {
            Kind::Oci => registry(directory, false),
            Kind::S3 => s3(directory),
        }
    }

    pub fn set<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.envs(self.environment.iter().map(|(key, value)| (key, value)))
    }

    /// Has the server be killed after so many more bytes.
    pub fn die_after(&self, bytes: u64) {
        let server = Arc::clone(&self.server);
        self.proxy.die_after(bytes, move || server.lock().unwrap().kill());
    }

    pub fn restart(&self, kind: Kind, directory: &Path) {
        assert!(self.proxy.is_dead());
        let server = Self::server(kind, directory).unwrap();
        self.proxy.revive(server.address);
        *self.server.lock().unwrap() = server;
    }
}
