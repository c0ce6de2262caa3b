//! A snapshotter for containerd: it keeps the layers of container images in Ferry's deduplicated store, and has the kernel mount them.
//!
//! containerd connects over a unix socket with gRPC (its Snapshots API v1). [`Snapshotter`] is what the calls do, without gRPC:
//!
//! ```no_run
//! use ferry_snapshotter::{Config, NewSnapshot, Snapshotter};
//!
//! let snapshotter = Snapshotter::open(&Config { root: "/var/lib/ferry-snapshotter".into(), ..Config::default() })?;
//! let mounts = snapshotter.prepare(NewSnapshot { key: "unpack".into(), ..NewSnapshot::default() })?;
//! println!("{mounts:?}");
//! snapshotter.commit("layer", "unpack", "", Default::default())?;
//! # Ok::<(), ferry_snapshotter::Error>(())
//! ```
#![deny(unsafe_code)]

pub mod api;
mod calls;
mod cleanup;
mod config;
mod convert;
pub mod cri_api;
pub mod diff;
mod directories;
mod erofs;
mod error;
mod filter;
mod holders;
mod idmap;
pub mod idmapped;
mod image_service;
mod keys;
mod layers;
mod lazy;
mod metadata;
mod mounted;
mod overlay;
mod report;
mod running;
mod server;
mod service;
mod shared_views;
mod snapshotter;
mod trash;
mod usage;
mod virtiofs;

pub use config::{Config, Images, LazyConfig, VirtiofsConfig};
pub use directories::ROOT_BYTES_MAX;
pub use error::{Error, Result};
pub use filter::{FILTER_BYTES_MAX, FILTERS_MAX, Filter, PATTERNS_MAX};
pub use idmap::{GID_LABEL, IdMaps, UID_LABEL};
pub use metadata::{LAYERS_MAX, Usage};
pub use report::served;
pub use server::{Socket, serve};
pub use snapshotter::{LABEL_BYTES_MAX, LABELS_MAX, NAME_BYTES_MAX, NewSnapshot, Snapshotter};
pub use virtiofs::VIRTIOFS_LABEL;
