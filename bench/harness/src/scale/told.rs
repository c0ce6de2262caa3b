//! Names that a mount's kernel has to be told of, because they changed on the host.

use std::ffi::OsString;
use std::fs;
use std::time::Instant;

use anyhow::{Context, Result};

use super::case::{Case, Figure, Measure, STRAIGHT, us_each};
use super::place::{Place, wait_for};
use crate::mounted::Mounted;
use crate::procfs::Family;
use crate::tmpfs::{Tmpfs, file_name};

/// The mount has a thousand names in each directory.
const DIR_FILES: u64 = 1000;
/// One of so many names is looked at.
const SAMPLE: usize = 100;

pub const CASES: &[Case] = &[Case {
    name: "names to be told of, removed on the host",
    of: "names",
    sizes: &[1_000, 10_000, 100_000, 1_000_000],
    quick_max: 100_000,
    figures: &[
        Figure { name: "until all are told, for one", unit: "us", growth_max: STRAIGHT },
        Figure { name: "CPU time of the server for one", unit: "us", growth_max: STRAIGHT },
        Figure { name: "memory that the server has then, beyond before", unit: "MiB", growth_max: None },
    ],
    prepare,
}];

fn prepare(place: &Place, names: u64) -> Result<Measure> {
    let tmpfs = Tmpfs::mount(place.directory.join("host"))?;
    let mount = place.directory.join("mnt");
    let words =
        ["mount", &place.word("host")?, &place.word("mnt")?, "--foreground", "--cache", "always", "--watch", "always"];
    let command: Vec<OsString> = Place::command(&words)?;
    let mounted = Mounted::new(mount, Some(command))?;
    let directories = names.div_ceil(DIR_FILES);
    Ok(Box::new(move || {
        let server = Family::of(mounted.pid().context("the mount has no server")?);
        let paths = || {
            (0..directories)
                .flat_map(|directory| (0..DIR_FILES).map(move |file| (format!("d{directory}"), file_name(file))))
        };
        for directory in 0..directories {
            tmpfs.make_files(&format!("d{directory}"), DIR_FILES)?;
        }
        for (directory, file) in paths() {
            fs::symlink_metadata(mounted.dir().join(directory).join(&file))
                .with_context(|| format!("{file} is not there"))?;
        }
        let [before, _] = server.memory_kib()?;
        let usage = server.usage()?;
        let begin = Instant::now();
        paths().try_for_each(|(directory, file)| fs::remove_file(tmpfs.path().join(directory).join(file)))?;
        // The kernel keeps names for good, so who is not told sees them. One of which it was told costs a request.
        for (directory, file) in paths().step_by(SAMPLE) {
            let path = mounted.dir().join(directory).join(file);
            wait_for("the kernel is told of a name", || Ok(fs::symlink_metadata(&path).is_err()))?;
        }
        let told = us_each(begin, names);
        let (_, cpu) = usage.since()?;
        let [after, _] = server.memory_kib()?;
        (0..directories).try_for_each(|directory| fs::remove_dir(tmpfs.path().join(format!("d{directory}"))))?;
        #[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
        let cpu = cpu * 1e6 / names as f64;
        Ok(vec![told, cpu, ((after - before) / 1024.0).max(0.0)])
    }))
}
