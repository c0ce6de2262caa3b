//! Many shares in one process, and many queues of one share.

use std::fmt::Write as _;
use std::time::Instant;

use anyhow::{Context, Result};
use ferry_driver::load::Op;
use ferry_driver::{Driver, ROOT};

use super::case::{Case, Figure, Measure, STRAIGHT, us_each};
use super::place::{Place, allow_descriptors, connect};
use crate::data::{NATIVE_BYTES, NATIVE_FILE, write_noise};
use crate::procfs::Family;
use crate::rows::Native;
use crate::server::Server;
use crate::{native, session};

/// At most so many for each driver: its socket, its memory, three events for each queue.
const DESCRIPTORS: u64 = 20;
/// Requests to one share of many.
const REQUESTS: u64 = 10_000;
/// How long queues are loaded, and with how many requests each.
const SECONDS: f64 = 1.0;
const DEPTH: usize = 16;
const QUEUES: &str = "16";

pub const CASES: &[Case] = &[
    Case {
        name: "shares in one process",
        of: "shares",
        sizes: &[1, 10, 100, 500],
        quick_max: 100,
        figures: &[
            Figure { name: "until all listen, for one", unit: "ms", growth_max: STRAIGHT },
            Figure { name: "private memory, for one", unit: "KiB", growth_max: STRAIGHT },
            Figure { name: "private memory with a guest each, for one", unit: "KiB", growth_max: STRAIGHT },
            Figure { name: "connecting a guest", unit: "ms", growth_max: STRAIGHT },
            Figure { name: "threads with a guest each, for one", unit: "threads", growth_max: STRAIGHT },
            Figure { name: "a request to the last share", unit: "us", growth_max: STRAIGHT },
        ],
        prepare: prepare_shares,
    },
    Case {
        name: "queues of a share, 16 reads of 4 KiB in flight on each",
        of: "queues",
        sizes: &[1, 2, 4, 8, 16],
        quick_max: 16,
        figures: &[
            Figure { name: "time for one read", unit: "us", growth_max: STRAIGHT },
            Figure { name: "CPU time of the server for one read", unit: "us", growth_max: STRAIGHT },
        ],
        prepare: prepare_queues,
    },
];

fn prepare_shares(place: &Place, shares: u64) -> Result<Measure> {
    allow_descriptors(DESCRIPTORS * shares + 1000)?;
    let mut config = String::new();
    for number in 0..shares {
        std::fs::create_dir(place.directory.join(number.to_string()))?;
        let (source, socket) = (place.word(&number.to_string())?, place.word(&format!("socket-{number}"))?);
        let _ = writeln!(config, "[[share]]\nsource = '{source}'\nvirtiofs = '{socket}'");
    }
    std::fs::write(place.directory.join("config"), config)?;
    let place = place.clone();
    Ok(Box::new(move || measure_shares(&place, shares)))
}

#[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
fn measure_shares(place: &Place, shares: u64) -> Result<Vec<f64>> {
    let count = shares as f64;
    let last = place.directory.join(format!("socket-{}", shares - 1));
    let command = Place::command(&["share", "--config", &place.word("config")?])?;
    let begin = Instant::now();
    // They begin to listen in turn.
    let server = Server::spawn("ferry", &last, &session::all_cpus()?, command)?;
    let ready = us_each(begin, shares) / 1e3;
    let family = Family::of(server.started());
    let [_, alone] = family.memory_kib()?;

    let begin = Instant::now();
    let sockets = (0..shares).map(|number| place.directory.join(format!("socket-{number}")));
    let mut drivers: Vec<Driver> = sockets.map(|socket| connect(&socket)).collect::<Result<_>>()?;
    let connected = us_each(begin, shares) / 1e3;
    let [_, used] = family.memory_kib()?;
    let threads = family.threads()?;

    let driver = drivers.last_mut().context("there is a share")?;
    let begin = Instant::now();
    (0..REQUESTS).try_for_each(|_| driver.getattr(ROOT).map(drop))?;
    let request = us_each(begin, REQUESTS);
    Ok(vec![ready, alone / count, used / count, connected, threads / count, request])
}

fn prepare_queues(place: &Place, queues: u64) -> Result<Measure> {
    std::fs::create_dir(place.directory.join("share"))?;
    write_noise(&place.directory.join("share").join(NATIVE_FILE), NATIVE_BYTES)?;
    let server = place.share(&place.word("share")?, &["--queues", QUEUES], "socket")?;
    let native = Native { op: Op::Read, queues: usize::try_from(queues)?, depth: DEPTH };
    Ok(Box::new(move || {
        let report = native::report(native, server.socket(), SECONDS)?;
        let server = report.server.context("the server's process is not known")?;
        Ok(vec![1e6 / report.requests_per_second, server.cpu_us_per_request])
    }))
}
