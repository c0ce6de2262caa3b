//! Write a file system as one Rust type; mount it on this host and share it with virtual machines.
//!
//! A file system is a type that implements [`FileSystem`]. Its methods are the kernel's operations (look up a name,
//! read, rename), with plain values as parameters and results. Methods without an implementation return `ENOSYS`.
//! [`run`] turns it into a program with two subcommands:
//!
//! ```sh
//! hello mount /mnt/hello           # on this host, by FUSE
//! hello virtiofs /run/hello.sock   # in a virtual machine, by virtio-fs
//! ```
//!
//! The transport is chosen automatically. On the host it is io_uring, one ring per CPU, where the kernel allows it, and
//! otherwise /dev/fuse. Files with a descriptor of their own are passed through to the kernel. In a guest it is
//! virtqueues in shared memory.
//!
//! # One file with a greeting
//!
//! ```no_run
#![doc = include_str!("../examples/hello.rs")]
//! ```
//!
//! That is `examples/hello.rs`, whole. `tests/programs/toyfs.rs` is a complete small file system that can be written to.
//! The [contract](ferry_vfs) has the rules: inodes and their references, handles, threads, what may wait, what a panic
//! does, and which `posix_fadvise` calls and mappings reach a file system.
//!
//! # Seeing what it does
//!
//! `--log LEVEL` sets the level at the start. `ferry log` changes it while the program runs: for the process, for the requests of
//! one mount, or for those of one file.
//!
//! ```sh
//! ferry log /mnt/hello                             # what is served, and what is logged
//! ferry log /mnt/hello/hello requests --follow     # the requests of one file, until Ctrl-C
//! ferry log /mnt/hello debug                       # on the program's standard error, until `default`
//! ```
//!
//! This works if [`run`] or [`Command::run`] installed the logger; a program that has one already keeps it.
//!
//! # Custom options
//!
//! [`Command`] holds the subcommands of [`run`]; add it to your own [`clap`] parser:
//!
//! ```no_run
//! use clap::Parser as _;
//!
//! #[derive(clap::Parser)]
//! struct Cli {
//!     /// How many files there shall be.
//!     #[arg(long, default_value_t = 1)]
//!     files: u32,
//!     #[command(subcommand)]
//!     command: ferry_fs::Command,
//! }
//!
//! struct Many(u32);
//! impl ferry_fs::FileSystem for Many {}
//!
//! fn main() -> std::process::ExitCode {
//!     let cli = Cli::parse();
//!     cli.command.run(Many(cli.files))
//! }
//! ```
//!
//! # A custom `main`
//!
//! [`fuse::Export`] mounts and [`virtiofs::Export`] listens, both with threads of their own; each takes an
//! `Arc<dyn FileSystem>`, so one file system can be seen in several places at once. The others are then
//! notified of a change made through one if the file system has [`FileSystem::changes`].
//!
//! ```no_run
//! use std::sync::Arc;
//! use ferry_fs::{FileSystem, ShutdownSignals, fuse, virtiofs};
//!
//! # struct Hello;
//! # impl FileSystem for Hello {}
//! // Before anything exists that a signal would leave behind.
//! let mut signals = ShutdownSignals::catch(&ShutdownSignals::ALL)?;
//! let fs: Arc<dyn FileSystem> = Arc::new(Hello);
//! let mount = fuse::Export::mount("/mnt/hello".as_ref(), Arc::clone(&fs), fuse::Options::default())?;
//! let device = virtiofs::Export::listen("/run/hello.sock".as_ref(), fs, virtiofs::Options::default())?;
//! signals.wait();
//! device.stop();
//! mount.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod command;
mod error;
mod serve;
mod shutdown;

pub use command::{Cache, Command, CommonArgs, MountArgs, VirtiofsArgs, run};
pub use error::Error;
pub use ferry_fuse as fuse;
#[doc(inline)]
pub use ferry_vfs::*;
pub use ferry_virtiofs as virtiofs;
pub use shutdown::{ShutdownHandle, ShutdownSignals};
