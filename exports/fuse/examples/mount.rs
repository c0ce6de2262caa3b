//! Mounts a directory, memory, or a null file system, for manual measurements:
//!
//! ```text
//! cargo run --release -p ferry-fuse --example mount -- null|mem|DIR MOUNTPOINT [auto|uring|devfuse] [KEY=VALUE ...]
//! ```
//!
//! Keys: `depth`, `threads`, `passthrough`, `cache`, `write` (maximum bytes of a WRITE). Ends when it is unmounted, and
//! prints the counters.

#[path = "../tests/common/sources.rs"]
mod sources;

use std::sync::Arc;

use ferry_fuse::{Cache, Export, Options};
use ferry_vfs::FileSystem;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(source), Some(mountpoint)) = (arguments.next(), arguments.next()) else {
        return Err("usage: mount null|mem|DIR MOUNTPOINT [auto|uring|devfuse] [KEY=VALUE ...]".into());
    };
    let source: Arc<dyn FileSystem> = match &*source {
        "null" => Arc::new(sources::Null::default()),
        "mem" => Arc::new(ferry_mem::Mem::new(&ferry_mem::Options::default())?),
        dir => Arc::new(ferry_dir::Dir::open(dir, ferry_dir::Options { direct_io: true, ..Default::default() })?),
    };
    let mut options = Options::default();
    for argument in arguments {
        match argument.split_once('=') {
            None => options.path = argument.parse()?,
            Some(("depth", value)) => options.ring_depth = value.parse()?,
            Some(("threads", value)) => options.threads = value.parse()?,
            Some(("passthrough", value)) => options.passthrough = Some(value.parse()?),
            Some(("write", value)) => options.max_write_bytes = value.parse()?,
            Some(("cache", "none")) => options.cache = Cache::None,
            Some(("cache", "always")) => options.cache = Cache::Always,
            Some((key, _)) => return Err(format!("no such key: {key}").into()),
        }
    }
    let export = Export::mount(mountpoint.as_ref(), source, options)?;
    println!("{}", export.explain());
    export.wait();
    println!("{:?}", export.stats());
    Ok(())
}
