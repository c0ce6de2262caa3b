//! Where a size is measured, and the servers there.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferry_driver::{Config, Driver};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::server::Server;
use crate::{cli, session};

/// How long a server with the most may take for one request.
const TIMEOUT: Duration = Duration::from_secs(60);
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// Where a size is measured.
#[derive(Debug, Clone)]
pub struct Place {
    /// An empty directory, which goes afterwards.
    pub directory: PathBuf,
}

impl Place {
    pub fn new(directory: PathBuf) -> Result<Self> {
        std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        Ok(Self { directory })
    }

    /// The command `ferry` with these words.
    pub fn command(words: &[&str]) -> Result<Vec<OsString>> {
        let program = OsString::from(cli::program("ferry")?);
        Ok([program].into_iter().chain(["--log", "error"].iter().chain(words).map(OsString::from)).collect())
    }

    /// A path in the directory, as a word of a command.
    pub fn word(&self, name: &str) -> Result<String> {
        self.directory
            .join(name)
            .into_os_string()
            .into_string()
            .ok()
            .context("the directory for all data has an odd name")
    }

    /// Starts a `ferry share` of a source that listens at `socket` in the directory.
    pub fn share(&self, source: &str, flags: &[&str], socket: &str) -> Result<Server> {
        let socket = self.word(socket)?;
        let words = [&["share", source][..], flags, &["--virtiofs", &socket]].concat();
        Server::spawn("ferry", Path::new(&socket), &session::all_cpus()?, Self::command(&words)?)
    }
}

/// Connects to a share in a guest's place.
pub fn connect(socket: &Path) -> Result<Driver> {
    let config = Config { timeout: TIMEOUT, memory_bytes: 8 << 20, ..Config::default() };
    let mut driver = Driver::connect(socket, config)?;
    driver.init()?;
    Ok(driver)
}

/// Waits until something is so.
pub fn wait_for(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + TIMEOUT;
    while !is_so()? {
        ensure!(Instant::now() < end, "{what}: not within {} s", TIMEOUT.as_secs());
        std::thread::sleep(LOOK_INTERVAL);
    }
    Ok(())
}

/// Lets this process, and the servers that it starts, have so many descriptors.
pub fn allow_descriptors(wanted: u64) -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < wanted) {
        let maximum = limit.maximum.map(|maximum| maximum.max(wanted));
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })
            .with_context(|| format!("{wanted} descriptors are needed"))?;
    }
    Ok(())
}
