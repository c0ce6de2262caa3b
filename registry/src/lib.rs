//! Images in OCI registries (distribution API, v2) and in S3-compatible stores.
//!
//! Both hold blobs, named by their SHA-256, and manifests, named by users. An image is one blob, and each of its packs
//! an index and parts. The objects of a composefs image are parts only; the image contains their locations. Ranges of
//! parts are requested, so that single objects can be fetched, and ferry-image verifies them before use. So the server
//! and the network need not be trusted.
//!
//! ```no_run
//! use std::path::Path;
//! use ferry_image::Store;
//! use ferry_registry::{pull, Client, Options, PullOptions, Remote};
//!
//! let store = Store::create(Path::new("/var/lib/ferry"))?;
//! let remote = Remote::open(&"oci:registry.example/os/base:12".parse()?, Client::new(Options::default()))?;
//! let remote = std::sync::Arc::new(remote);
//! let pulled = pull(&remote, Path::new("base.img"), Path::new("/var/lib/ferry"), &PullOptions::default(), &|_, _| {})?;
//! drop(store);
//! println!("{} in {} requests", pulled.digest, remote.counts().requests);
//! # Ok::<(), ferry_registry::Error>(())
//! ```
#![forbid(unsafe_code)]

mod container;
mod container_image;
mod convert;
mod credential_helper;
mod credentials;
mod error;
mod files;
mod frames;
mod hosts;
mod http;
mod identities;
mod layers;
mod lazily;
mod manifest;
mod oci;
mod packs;
mod parts;
mod pull;
mod push;
mod reference;
mod referrers;
mod remote;
mod resolver;
mod s3;
mod traces;

pub use container_image::{ContainerImage, StackedLayer, fetch_layer};
pub use convert::{ConvertOptions, ConvertOutcome, convert};
pub use credentials::parse_credentials;
pub use error::{Error, Result};
pub use files::{LIST_BYTES_MAX, list_beside};
pub use hosts::{Host, parse_hosts};
pub use http::{Client, Counts, Limits, Options, Slot, Slots};
pub use lazily::{LazyImage, LazyLayer, LazyOptions, pull_lazily};
pub use manifest::{PART_BYTES, Sha256};
pub use packs::Packs;
pub use pull::{PullOptions, PullOutcome, pull, pull_metadata};
pub use push::{PushOutcome, push};
pub use reference::Reference;
pub use remote::Remote;
pub use traces::{pull_trace, push_trace};
