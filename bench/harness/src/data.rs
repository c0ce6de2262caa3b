//! The shared data: files for fio and the driver, trees, repositories.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::fio;
use crate::noise::Noise;
use crate::rows::Task;

/// The native driver's file.
pub const NATIVE_FILE: &str = "native";
/// Its size.
pub const NATIVE_BYTES: u64 = 64 << 20;
/// The guest's user need not be the owner of the repositories on the host.
const GIT_CONFIG: &str = "[safe]\n\tdirectory = *\n[user]\n\tname = bench\n\temail = bench@localhost\n";
/// The large repository.
const LARGE: &str = "large";
/// Files in each of its directories.
const LARGE_DIR_FILES: usize = 100;
/// What a package has, by directory and number of files.
const PACKAGE: [(&str, usize); 5] = [("", 4), ("lib", 16), ("lib/internal", 10), ("dist", 12), ("test", 8)];
/// The sum of them.
const PACKAGE_FILES: usize = 50;
/// The workspace that cargo builds, and the number of its crates.
const WORKSPACE: &str = "workspace";
const CRATES: usize = 20;
/// The project of which npm installs the packages, and how many packages of the node_modules these are a part of.
const PROJECT: &str = "project";
const NPM_PART: usize = 10;

/// The data, on the host.
#[derive(Debug)]
pub struct Data {
    /// What is shared.
    pub share: PathBuf,
    /// What the guest reads from the host's own files.
    pub beside: PathBuf,
    numbered: std::cell::Cell<u32>,
    /// The directories of the large trees.
    large: LargeTrees,
}

/// How large they are.
#[derive(Debug, Clone, Copy, Default)]
pub struct LargeTrees {
    /// Directories of the repository, of 100 files each.
    pub repo_dirs: usize,
    /// Packages of the node_modules, of 50 files each.
    pub packages: usize,
}

impl LargeTrees {
    /// 50,000 files and 60,000.
    pub const FULL: Self = Self { repo_dirs: 500, packages: 1200 };
    /// A twentieth.
    pub const QUICK: Self = Self { repo_dirs: 25, packages: 60 };
}

impl Data {
    /// Makes what the rows need, within `work`.
    pub fn make(work: &Path, files: bool, native: bool, trees: bool) -> Result<Self> {
        let data = Self {
            share: work.join("share"),
            beside: work.join("beside"),
            numbered: std::cell::Cell::new(0),
            large: LargeTrees::default(),
        };
        fs::create_dir_all(&data.share)?;
        fs::create_dir_all(&data.beside)?;
        if files {
            for number in 0..fio::MULTI_JOBS {
                write_noise(&data.share.join(fio::file_name(number)), fio::FILE_MIB << 20)?;
            }
        }
        if native {
            write_noise(&data.share.join(NATIVE_FILE), NATIVE_BYTES)?;
        }
        if trees {
            data.make_trees()?;
        }
        data.settle();
        Ok(data)
    }

    /// Makes the large trees, within `work`.
    pub fn make_large(work: &Path, large: LargeTrees) -> Result<Self> {
        let data = Self { large, ..Self::make(work, false, false, false)? };
        fs::write(data.git_config(), GIT_CONFIG)?;
        make_tree(&data.share.join(LARGE), large.repo_dirs, LARGE_DIR_FILES, 100..=3000)?;
        data.commit(LARGE)?;
        let modules = data.beside.join("modules");
        make_packages(&modules, large.packages)?;
        run(Command::new("tar").arg("-C").arg(&modules).arg("-cf").arg(data.tar()).arg("."))?;
        make_workspace(&data.share.join(WORKSPACE))?;
        data.make_project()?;
        data.settle();
        Ok(data)
    }

    /// How many packages npm installs.
    fn npm_packages(&self) -> usize {
        self.large.packages.div_ceil(NPM_PART)
    }

    /// A project that needs packages, as archives beside the share, and its lock file.
    fn make_project(&self) -> Result<()> {
        let (project, archives) = (self.share.join(PROJECT), self.beside.join("npm"));
        fs::create_dir_all(&project)?;
        fs::create_dir_all(&archives)?;
        let (mut dependencies, mut locked) = (serde_json::Map::new(), serde_json::Map::new());
        for number in 0..self.npm_packages() {
            let name = format!("package-{number:04}");
            let modules = self.beside.join("modules").join(&name);
            fs::write(modules.join("package.json"), json!({"name": name, "version": "1.0.0"}).to_string())?;
            let archive = archives.join(format!("{name}.tgz"));
            // npm leaves out the first directory.
            run(Command::new("tar")
                .arg("-C")
                .arg(modules.parent().unwrap_or(&modules))
                .arg("-czf")
                .arg(&archive)
                .arg(&name))?;
            let address = format!("file:{}", archive.display());
            dependencies.insert(name.clone(), address.clone().into());
            locked.insert(format!("node_modules/{name}"), json!({"version": "1.0.0", "resolved": address}));
        }
        let root = json!({"name": "project", "version": "1.0.0", "dependencies": dependencies});
        fs::write(project.join("package.json"), root.to_string())?;
        locked.insert(String::new(), root);
        let lock =
            json!({"name": "project", "version": "1.0.0", "lockfileVersion": 3, "requires": true, "packages": locked});
        Ok(fs::write(project.join("package-lock.json"), lock.to_string())?)
    }

    /// How many files a task on a large tree is about; of `cargo-build`, how many crates.
    pub fn files(&self, task: Task) -> Option<usize> {
        match task {
            Task::CargoBuild => Some(CRATES),
            Task::NpmCi => Some(self.npm_packages() * (PACKAGE_FILES + 1)),
            Task::LargeFind | Task::LargeFindStat | Task::LargeGitStatus | Task::LargeGitClone => {
                Some(self.large.repo_dirs * LARGE_DIR_FILES)
            }
            Task::LargeUnpack | Task::LargeDelete => Some(self.large.packages * PACKAGE_FILES),
            _ => None,
        }
    }

    /// Makes a directory of the share a repository.
    fn commit(&self, name: &str) -> Result<()> {
        for args in [&["init", "-q"][..], &["add", "."], &["commit", "-q", "-m", "all"]] {
            let mut git = Command::new("git");
            git.args(args).current_dir(self.share.join(name));
            run(git.env("GIT_CONFIG_GLOBAL", self.git_config()).env("GIT_CONFIG_NOSYSTEM", "1"))?;
        }
        Ok(())
    }

    fn make_trees(&self) -> Result<()> {
        make_tree(&self.share.join("walk"), 100, 50, 0..=600)?;
        make_tree(&self.share.join("src"), 10, 100, 4096..=16384)?;
        let small = self.beside.join("small");
        make_tree(&small, 50, 40, 100..=2000)?;
        run(Command::new("tar").arg("-C").arg(&small).arg("-cf").arg(self.tar()).arg("."))?;
        fs::write(self.git_config(), GIT_CONFIG)?;
        make_tree(&self.share.join("repo"), 50, 40, 100..=4000)?;
        make_tree(&self.share.join("repo-small"), 10, 30, 100..=4000)?;
        self.commit("repo")?;
        self.commit("repo-small")
    }

    fn tar(&self) -> PathBuf {
        self.beside.join("small.tar")
    }

    fn git_config(&self) -> PathBuf {
        self.beside.join("gitconfig")
    }

    /// Lets what was written reach the disk, so that it does not disturb what is measured next.
    pub fn settle(&self) {
        if let Ok(dir) = File::open(&self.share) {
            let _ = rustix::fs::syncfs(dir);
        }
    }

    /// A task with fresh names: what to run before in the guest, what to measure, and what is to go afterwards.
    pub fn task(&self, task: Task) -> Result<TaskRun> {
        self.numbered.set(self.numbered.get() + 1);
        let name = format!("made.{}", self.numbered.get());
        let made = self.share.join(&name);
        // The FORGETs that follow are not to meet what is measured.
        let forget = "sync; echo 2 >/proc/sys/vm/drop_caches; sleep 0.2";
        let forget_all = "sync; echo 3 >/proc/sys/vm/drop_caches; sleep 0.2";
        let walk = r"find walk -printf '%s %m %T@\n' >/dev/null".to_owned();
        let git = format!("GIT_CONFIG_GLOBAL={} GIT_CONFIG_NOSYSTEM=1 git", crate::cli::shell_word(&self.git_config()));
        let (before, timed) = match task {
            Task::StatWalk => (forget.to_owned(), walk),
            Task::StatWalkWarm => (walk.clone(), walk),
            Task::TreeCreate => {
                // Its own copy in the guest's memory, so that only the share is measured.
                let tar = crate::cli::shell_word(&self.tar());
                let before = format!("[ -e /run/small.tar ] || cp {tar} /run/small.tar; mkdir {name}");
                (before, format!("tar -xf /run/small.tar -C {name}"))
            }
            Task::TreeDelete => {
                make_tree(&made, 50, 40, 100..=2000)?;
                (forget_all.to_owned(), format!("rm -r {name}"))
            }
            Task::GitStatus => (forget_all.to_owned(), format!("{git} -C repo --no-optional-locks status --porcelain")),
            Task::GitClone => (forget_all.to_owned(), format!("{git} clone -q --no-hardlinks repo-small {name}")),
            Task::SmallFileCopy => (forget_all.to_owned(), format!("cp -r src {name}")),
            Task::LargeFind => {
                (forget_all.to_owned(), format!("find {LARGE} -path {LARGE}/.git -prune -o -print >/dev/null"))
            }
            Task::LargeFindStat => {
                let walk = format!(r"find {LARGE} -path {LARGE}/.git -prune -o -printf '%s %m %T@\n' >/dev/null");
                (forget_all.to_owned(), walk)
            }
            Task::LargeGitStatus => {
                (forget_all.to_owned(), format!("{git} -C {LARGE} --no-optional-locks status --porcelain"))
            }
            Task::LargeUnpack => {
                let tar = crate::cli::shell_word(&self.tar());
                let before =
                    format!("[ -e /run/modules.tar ] || cp {tar} /run/modules.tar; mkdir {name}; {forget_all}");
                (before, format!("tar -xf /run/modules.tar -C {name}"))
            }
            Task::LargeDelete => {
                make_packages(&made, self.large.packages)?;
                (forget_all.to_owned(), format!("rm -r {name}"))
            }
            Task::LargeGitClone => (forget_all.to_owned(), format!("{git} clone -q --no-hardlinks {LARGE} {name}")),
            Task::CargoBuild => {
                let tools = Path::new(env!("CARGO")).parent().context("cargo is in no directory")?;
                let build = format!(
                    "PATH={}:$PATH CARGO_HOME=/run/cargo cargo build -q --offline --manifest-path {WORKSPACE}/Cargo.toml --target-dir {name}",
                    crate::cli::shell_word(tools)
                );
                (forget_all.to_owned(), build)
            }
            Task::NpmCi => {
                let install = format!(
                    "(cd {name} && npm ci --offline --no-audit --no-fund --ignore-scripts --cache /run/npm --loglevel error)"
                );
                (format!("cp -r {PROJECT} {name}; rm -rf /run/npm; {forget_all}"), install)
            }
            Task::OpenReadClose => (forget_all.to_owned(), "cat src/*/* >/dev/null".to_owned()),
        };
        self.settle();
        Ok(TaskRun { before, timed, made })
    }
}

/// A task that can be run once. What it made goes when this is dropped.
#[derive(Debug)]
pub struct TaskRun {
    /// What the guest does first.
    pub before: String,
    /// What is measured.
    pub timed: String,
    made: PathBuf,
}

impl Drop for TaskRun {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.made);
    }
}

/// Writes a file of the same bytes each time.
pub fn write_noise(path: &Path, bytes: u64) -> Result<()> {
    const CHUNK_BYTES: usize = 1 << 20;
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    let mut file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    for _ in 0..bytes.div_ceil(CHUNK_BYTES as u64) {
        file.write_all(&noise.bytes(CHUNK_BYTES)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// A tree of `dirs` directories with `files` files each.
fn make_tree(root: &Path, dirs: usize, files: usize, sizes: std::ops::RangeInclusive<u64>) -> Result<()> {
    let mut noise = Noise(0x2545_f491_4f6c_dd1d);
    for dir in 0..dirs {
        let directory = root.join(format!("d{dir:02}"));
        fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        for file in 0..files {
            let size = sizes.start() + noise.below(sizes.end() - sizes.start() + 1);
            let content = noise.bytes(usize::try_from(size)?);
            fs::write(directory.join(format!("file-{file:03}.txt")), content)?;
        }
    }
    Ok(())
}

/// A tree like a node_modules: packages with a few directories of small files each.
fn make_packages(root: &Path, packages: usize) -> Result<()> {
    let mut noise = Noise(0x2545_f491_4f6c_dd1d);
    for package in 0..packages {
        for (dir, files) in PACKAGE {
            let directory = root.join(format!("package-{package:04}")).join(dir);
            fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
            for file in 0..files {
                let size = usize::try_from(100 + noise.below(1400))?;
                let content = noise.bytes(size);
                fs::write(directory.join(format!("module-{file:02}.js")), content)?;
            }
        }
    }
    Ok(())
}

/// A workspace of small libraries, and a program that uses all of them.
fn make_workspace(root: &Path) -> Result<()> {
    let library = |number: usize| format!("library-{number:02}");
    let write = |directory: &Path, file: &str, manifest: &str, source: &str| -> Result<()> {
        fs::create_dir_all(directory.join("src"))?;
        fs::write(directory.join("Cargo.toml"), manifest)?;
        Ok(fs::write(directory.join("src").join(file), source)?)
    };
    let (mut dependencies, mut sum) = (String::new(), String::from("0"));
    for number in 0..CRATES - 1 {
        let name = library(number);
        let manifest = format!("[package]\nname = \"{name}\"\nversion = \"1.0.0\"\nedition = \"2021\"\n");
        write(&root.join(&name), "lib.rs", &manifest, &format!("pub fn number() -> usize {{ {number} }}\n"))?;
        dependencies += &format!("{name} = {{ path = \"../{name}\" }}\n");
        sum += &format!(" + {}::number()", name.replace('-', "_"));
    }
    let manifest = format!(
        "[package]\nname = \"program\"\nversion = \"1.0.0\"\nedition = \"2021\"\n[dependencies]\n{dependencies}"
    );
    write(&root.join("program"), "main.rs", &manifest, &format!("fn main() {{ println!(\"{{}}\", {sum}); }}\n"))?;
    Ok(fs::write(root.join("Cargo.toml"), "[workspace]\nresolver = \"2\"\nmembers = [\"library-*\", \"program\"]\n")?)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_the_same_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        make_tree(&a, 2, 3, 10..=20).unwrap();
        make_tree(&b, 2, 3, 10..=20).unwrap();
        let file = "d01/file-002.txt";
        let content = fs::read(a.join(file)).unwrap();
        assert_eq!(content, fs::read(b.join(file)).unwrap());
        assert!((10..=20).contains(&content.len()));
    }

    #[test]
    fn packages_have_their_files() {
        let dir = tempfile::tempdir().unwrap();
        make_packages(dir.path(), 2).unwrap();
        assert!(dir.path().join("package-0001/lib/internal/module-09.js").exists());
        assert_eq!(PACKAGE.iter().map(|(_, files)| files).sum::<usize>(), PACKAGE_FILES);
    }

    #[test]
    fn files_of_a_task_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let data = Data::make(dir.path(), false, false, false).unwrap();
        let run = data.task(Task::TreeDelete).unwrap();
        let made = run.made.clone();
        assert!(made.join("d49/file-039.txt").exists() && run.timed.starts_with("rm -r made."));
        drop(run);
        assert!(!made.exists());
    }
}
