//! Public test suites for file systems, and everyday programs.

pub mod build;
pub mod fsx;
pub mod pjdfstest;
pub mod programs;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use ferry_guest::Cache;

/// A program of a crate, installed into the cache (`tools/bin`) unless it is there.
///
/// # Panics
/// When it cannot be installed.
pub fn tool(name: &str, version: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    let root = Cache::from_env().unwrap().path().join("tools");
    let program = root.join("bin").join(name);
    if !program.is_file() {
        eprintln!("tests: installing {name} {version} into {} (once)", root.display());
        // Not optimized: they wait for system calls, and take a third of the time to build.
        let status = Command::new("cargo")
            .args(["install", name, "--debug", "--locked", "--version", version, "--root"])
            .arg(&root)
            .env_remove("CARGO_TARGET_DIR")
            .stdin(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success(), "cargo install {name} failed");
    }
    program
}
