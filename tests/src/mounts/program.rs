//! The program under test.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How often an end is looked for.
const TICK: Duration = Duration::from_millis(5);

/// The program `ferry`: what `FERRY_BIN` names, or the one that was built with these tests (`cargo test --workspace`
/// does), or else built now.
///
/// # Panics
/// When it cannot be built.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        if let Some(path) = std::env::var_os("FERRY_BIN") {
            return path.into();
        }
        // Tests are in the directory `deps` of their profile's directory.
        let test = std::env::current_exe().unwrap();
        let profile = test.ancestors().find(|path| path.join("deps").is_dir()).expect("tests are built by cargo");
        let path = profile.join("ferry");
        if !path.is_file() {
            let name = profile.file_name().and_then(|name| name.to_str()).expect("cargo names profiles");
            let name = if name == "debug" { "dev" } else { name };
            let status = Command::new(env!("CARGO"))
                .args(["build", "--locked", "-p", "ferry", "--profile", name])
                .arg("--target-dir")
                .arg(profile.parent().expect("a profile's directory is below the target directory"))
                .current_dir(env!("CARGO_MANIFEST_DIR"))
                .status();
            assert!(status.is_ok_and(|status| status.success()), "cannot build ferry");
        }
        path
    })
}

/// A command of the program that ends with the thread that starts it: a test that is killed leaves no mount.
pub fn ferry<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM"]).arg(program()).args(args).env_remove("FERRY_LOG").stdin(Stdio::null());
    command
}

/// The program, running in the background. It is killed on drop.
#[derive(Debug)]
pub struct RunningProgram {
    child: Child,
    out: File,
    err: File,
}

impl RunningProgram {
    /// Starts it; its output is kept.
    pub fn new(command: &mut Command) -> Self {
        let [out, err] = [(); 2].map(|()| tempfile::tempfile().unwrap());
        command.stdout(out.try_clone().unwrap()).stderr(err.try_clone().unwrap());
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self { child, out, err }
    }

    /// Its process id.
    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    /// What it has said so far: standard output, standard error.
    pub fn said(&self) -> (String, String) {
        (text(&self.out), text(&self.err))
    }

    /// Its end, if it comes within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        wait(&mut self.child, limit)
    }

    /// Ends it at once, as `kill -9` does.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for RunningProgram {
    /// A test that fails shows what it said.
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let (out, err) = self.said();
            eprintln!("a program of the test said:\n{out}{err}");
        }
    }
}

/// Waits for a child with a bound.
pub(crate) fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if begin.elapsed() >= limit {
            return None;
        }
        std::thread::sleep(TICK);
    }
}

/// All that a file holds; its offset, where a child may be writing, stays.
pub(crate) fn text(file: &File) -> String {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    let read = file.read_at(&mut bytes, 0).unwrap();
    String::from_utf8_lossy(&bytes[..read]).into_owned()
}
