//! containerd with a snapshotter, all with data of their own.

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::image::Image;
use super::systems::{Programs, System};
use crate::server::Server;
use crate::{mounted, process, session};

/// How long a command may take.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The same, for timeout(1).
const TIMEOUT_S: &str = "120";
/// More than a manifest or a configuration has, and less than a layer.
const LAYER_BYTES_MIN: u64 = 256 << 10;
/// The end of what a container says when it fails.
const LAST_WORDS_BYTES: usize = 400;

/// A running containerd. It ends, and all its data go, when this is dropped.
#[derive(Debug)]
pub struct Engine {
    system: System,
    directory: PathBuf,
    ctr: PathBuf,
    registry: String,
    snapshotter: Option<Server>,
    containerd: Option<Server>,
}

impl Engine {
    /// Starts containerd with a system, in a directory that is made; `registry` is where it pulls from.
    pub fn start(system: System, directory: PathBuf, programs: &Programs, registry: String) -> Result<Self> {
        std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let ctr = programs.containerd.join("ctr");
        let command = system.command(programs, &directory).context("cannot configure the snapshotter")?;
        let mut engine = Self { system, directory, ctr, registry, snapshotter: None, containerd: None };
        let cpus = session::all_cpus()?;
        if let Some(command) = command {
            let socket = engine.directory.join("s.sock");
            engine.snapshotter = Some(Server::spawn(system.name(), &socket, &cpus, command)?);
        }
        let config = engine.directory.join("containerd.toml");
        std::fs::write(&config, system.containerd(&engine.directory)).context("cannot configure containerd")?;
        let path = [Some(&programs.containerd), programs.erofs.as_ref().filter(|_| system == System::Erofs)]
            .into_iter()
            .flatten()
            .cloned();
        let path =
            std::env::join_paths(path.chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())))?;
        let mut assignment = std::ffi::OsString::from("PATH=");
        assignment.push(path);
        let command = vec![
            "env".into(),
            assignment,
            programs.containerd.join("containerd").into(),
            "--config".into(),
            config.into(),
            "--log-level=error".into(),
        ];
        engine.containerd = Some(Server::spawn("containerd", &engine.socket(), &cpus, command)?);
        engine.ctr(["version"])?;
        Ok(engine)
    }

    /// Where containerd listens.
    pub fn socket(&self) -> PathBuf {
        self.directory.join("c.sock")
    }

    /// Runs containerd's client.
    pub fn ctr<W: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = W>) -> Result<String> {
        let mut command = self.client();
        command.args(words);
        process::run(command, &self.directory, TIMEOUT).with_context(|| self.last_words())
    }

    fn client(&self) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--signal=KILL", TIMEOUT_S]).arg(&self.ctr).arg("--address").arg(self.socket());
        command
    }

    /// The end of what containerd and the snapshotter said.
    fn last_words(&self) -> String {
        let servers = [&self.snapshotter, &self.containerd].into_iter().flatten();
        servers.map(Server::last_words).collect::<Vec<_>>().join("; containerd: ")
    }

    fn name(&self, image: &str) -> String {
        format!("{}/{}", self.registry, self.system.form().repository(image))
    }

    /// Pulls an image, or as much of it as the system needs.
    pub fn pull(&self, image: &str) -> Result<()> {
        let name = self.name(image);
        self.ctr(["images", "pull", "--snapshotter", self.system.plugin(), &name]).map(drop)
    }

    /// Fails if layers were pulled that were to stay in the registry.
    pub fn ensure_lazy(&self) -> Result<()> {
        let blobs = self.directory.join("containerd/io.containerd.content.v1.content/blobs/sha256");
        for blob in std::fs::read_dir(&blobs).with_context(|| format!("cannot list {}", blobs.display()))? {
            let bytes = blob?.metadata()?.len();
            ensure!(
                bytes < LAYER_BYTES_MIN || !self.system.is_lazy(),
                "a layer of {bytes} bytes was pulled, not mounted: {}",
                self.last_words()
            );
        }
        Ok(())
    }

    /// Runs the program of an image in a container, and returns the time to the first output.
    pub fn run(&self, image: Image) -> Result<Duration> {
        let (program, expected) = image.command();
        let errors = self.directory.join("run.err");
        let mut command = self.client();
        command
            .args(["run", "--rm", "--snapshotter", self.system.plugin(), &self.name(image.name()), &container()])
            .args(program);
        let started = Instant::now();
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(std::fs::File::create(&errors)?).spawn();
        let mut child = child.context("cannot start ctr")?;
        let mut output = child.stdout.take().context("it is piped")?;
        let mut said = vec![0];
        let first = output.read_exact(&mut said).map(|()| started.elapsed());
        let rest = output.read_to_end(&mut said);
        let status = child.wait().context("ctr is lost")?;
        let said = String::from_utf8_lossy(&said);
        let why = || {
            let errors = std::fs::read(&errors).unwrap_or_default();
            let errors = String::from_utf8_lossy(&errors[errors.len().saturating_sub(LAST_WORDS_BYTES)..]).into_owned();
            format!("{status}: {errors} {}", self.last_words())
        };
        ensure!(status.success() && rest.is_ok() && said.contains(expected), "{said:?} was said: {}", why());
        first.with_context(why)
    }

    /// Has Ferry record the files that the program of an image opens.
    pub fn record(&self, image: Image, ferry: &Path, list: &Path) -> Result<()> {
        let mut command = Command::new(ferry);
        command.args(["image", "trace", "--container", &container(), "--output"]).arg(list).arg("--").arg(&self.ctr);
        command.arg("--address").arg(self.socket());
        command.args(["run", "--rm", "--snapshotter", self.system.plugin(), &self.name(image.name()), &container()]);
        command.args(image.command().0);
        process::run(command, &self.directory, TIMEOUT).map(drop).with_context(|| self.last_words())
    }

    /// Mounts the root of an image; it is unmounted with the rest.
    pub fn mount(&self, image: &str) -> Result<PathBuf> {
        let at = self.directory.join("at");
        std::fs::create_dir_all(&at)?;
        let (name, place) = (self.name(image), at.display().to_string());
        self.ctr(["images", "mount", "--snapshotter", self.system.plugin(), &name, &place])?;
        Ok(at)
    }

    /// What the snapshotter's processes have in memory, in MiB: a part of what they share with others. None for a part of containerd.
    pub fn resident_mib(&self) -> Result<Option<f64>> {
        if self.snapshotter.is_none() {
            return Ok(None);
        }
        let root = self.system.root(&self.directory);
        let mut kib = 0.0;
        for process in std::fs::read_dir("/proc")? {
            let process = process?.path();
            // All of them are told where the data are. One that ends meanwhile needs no memory.
            let words = std::fs::read(process.join("cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&words).contains(&*root.to_string_lossy()) {
                let memory = std::fs::read_to_string(process.join("smaps_rollup")).unwrap_or_default();
                let pss = memory.lines().find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB"));
                kib += pss.map_or(Ok(0.0), str::parse::<f64>)?;
            }
        }
        ensure!(kib > 0.0, "the snapshotter has ended: {}", self.last_words());
        Ok(Some(kib / 1024.0))
    }

    /// What the snapshots take on the disk, in bytes. What is mounted among them is not counted.
    pub fn disk_bytes(&self) -> Result<f64> {
        let mut command = Command::new("du");
        command.args(["--summarize", "--one-file-system", "--block-size=1"]).arg(self.system.root(&self.directory));
        let text = process::run(command, &self.directory, TIMEOUT)?;
        text.split_whitespace().next().and_then(|bytes| bytes.parse().ok()).with_context(|| format!("du said {text:?}"))
    }
}

/// The name of containers.
fn container() -> String {
    format!("ferry-bench-{}", std::process::id())
}

impl Drop for Engine {
    fn drop(&mut self) {
        // What a failed container left running would outlive containerd.
        let tasks = self.ctr(["task", "ls", "--quiet"]).unwrap_or_default();
        for task in tasks.split_whitespace() {
            let _ = self.ctr(["task", "rm", "--force", task]);
        }
        self.containerd = None;
        // Mounts that the snapshotter serves go before it, or those who look at them would wait.
        mounted::unmount_below(&self.directory);
        self.snapshotter = None;
        mounted::unmount_below(&self.directory);
        if let Err(error) = std::fs::remove_dir_all(&self.directory) {
            eprintln!("bench/run: cannot remove {}: {error}", self.directory.display());
        }
    }
}

/// Has programs and the registry's files read, which are not to be read from the disk while something is measured.
pub fn look_at(programs: &Programs, registry: &Path) {
    look_at_programs(programs);
    for file in crate::images::walk::files(registry).unwrap_or_default() {
        let _ = std::fs::File::open(registry.join(file))
            .and_then(|mut file| std::io::copy(&mut file, &mut std::io::sink()));
    }
}

/// The same of programs alone.
pub fn look_at_programs(programs: &Programs) {
    let containerd = &programs.containerd;
    for (program, flag) in [("ctr", "--version"), ("runc", "--version"), ("containerd-shim-runc-v2", "-v")] {
        let _ = Command::new(containerd.join(program)).arg(flag).stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
    for program in
        programs.erofs.iter().map(|directory| directory.join("mkfs.erofs")).chain(["du".into(), "timeout".into()])
    {
        let _ = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}
