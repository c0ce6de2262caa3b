//! Drives a virtio-fs or virtio-blk server from the host: load, malformed input, and a query of its features.

mod spawner;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use ferry_driver::hostile::{self, Options};
use ferry_driver::load::{self, Load, LoadTarget, Op};
use ferry_driver::measure::Counter;
use ferry_driver::{Config, Driver};
use spawner::Spawner;

/// The maximum time until a restarted server serves.
const RESPAWN: Duration = Duration::from_secs(3);

/// A driver of virtio-fs and virtio-blk on the host: it connects to a vhost-user server in place of a VMM.
#[derive(Debug, Parser)]
#[command(name = "ferry-driver", version)]
struct Cli {
    /// The server's socket
    socket: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Send requests as fast as the server replies; print one JSON object
    Load(LoadArgs),
    /// Send malformed input, case by case; print one JSON object per case
    Hostile(HostileArgs),
    /// Print the server's features
    Info,
}

#[derive(Debug, Args)]
struct HostileArgs {
    /// Run only cases whose name contains this
    #[arg(long, default_value = "")]
    case: String,
    /// Print only the names of the cases
    #[arg(long)]
    list: bool,
    /// The time after which a chain without a reply counts as dropped
    #[arg(long, default_value_t = 400)]
    drop_ms: u64,
    /// The duration of each race
    #[arg(long, default_value_t = 2.0)]
    race_seconds: f64,
    /// A shell command that starts the server; it is started again whenever it ends
    #[arg(long)]
    spawn: Option<String>,
}

impl HostileArgs {
    fn run(&self, socket: &Path) -> anyhow::Result<ExitCode> {
        let options = Options {
            drop_after: Duration::from_millis(self.drop_ms),
            race: Duration::from_secs_f64(self.race_seconds),
            retry: if self.spawn.is_some() { RESPAWN } else { Duration::ZERO },
        };
        let cases: Vec<_> = hostile::cases().into_iter().filter(|case| case.name.contains(&self.case)).collect();
        if self.list {
            cases.iter().for_each(|case| println!("{}", case.name));
            return Ok(ExitCode::SUCCESS);
        }
        let spawner = self.spawn.as_ref().map(|command| Spawner::start(command, socket));
        let mut failed = 0;
        for case in &cases {
            let outcome = hostile::run(case, socket, &options);
            println!("{}", serde_json::to_string(&outcome)?);
            failed += usize::from(!outcome.passed);
            if let Some(spawner) = &spawner {
                spawner.restart();
            }
        }
        drop(spawner);
        eprintln!("{} cases, {failed} failed", cases.len());
        Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("until").required(true).args(["seconds", "requests"]))]
#[command(group = ArgGroup::new("on").required(true).args(["file", "disk"]))]
struct LoadArgs {
    /// The file in the root of the share, created if it does not exist
    #[arg(long)]
    file: Option<String>,
    /// The device is a disk; --op write and --verify overwrite it
    #[arg(long)]
    disk: bool,
    /// The size in bytes of the file, or of the used part of the disk [default: the existing size; 64 MiB for a new file]
    #[arg(long)]
    size: Option<u64>,
    /// The operation
    #[arg(long, value_enum, default_value_t = OpArg::Read)]
    op: OpArg,
    /// The number of request queues
    #[arg(long, default_value_t = 1)]
    queues: usize,
    /// The number of entries of each queue
    #[arg(long, default_value_t = 1024)]
    queue_size: u16,
    /// The number of requests in flight per queue
    #[arg(long, default_value_t = 1)]
    depth: usize,
    /// The size in bytes of a READ or WRITE
    #[arg(long, default_value_t = 4096)]
    block: usize,
    /// Use random offsets [default]
    #[arg(long, overrides_with = "sequential")]
    random: bool,
    /// Use sequential offsets
    #[arg(long)]
    sequential: bool,
    /// Stop after this many seconds
    #[arg(long)]
    seconds: Option<f64>,
    /// Stop after this many requests
    #[arg(long)]
    requests: Option<u64>,
    /// Poll the used ring [default]
    #[arg(long, overrides_with = "sleep")]
    poll: bool,
    /// Sleep until the server signals the call descriptor, as a guest does
    #[arg(long)]
    sleep: bool,
    /// The number of threads of the driver [default: one per queue, at most one per CPU]
    #[arg(long)]
    threads: Option<usize>,
    /// Write a pattern first and check the data
    #[arg(long)]
    verify: bool,
    /// After the loss of the server, wait this many seconds for the next one, and continue with the requests in flight
    #[arg(long, value_name = "SECONDS")]
    reattach: Option<u64>,
    /// Do not use the event index
    #[arg(long)]
    no_event_idx: bool,
    /// Do not use indirect descriptors
    #[arg(long)]
    no_indirect: bool,
    /// Use packed rings
    #[arg(long)]
    packed: bool,
    /// The server's process id [default: the process that listens on the socket]
    #[arg(long)]
    pid: Option<u32>,
    /// Count the server's system calls in a second run
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "perf", require_equals = true)]
    count_syscalls: Option<CounterArg>,
    /// The number of requests of the second run
    #[arg(long, default_value_t = 100_000)]
    count_requests: u64,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum OpArg {
    Read,
    Write,
    Getattr,
    Lookup,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum CounterArg {
    Perf,
    Strace,
}

impl LoadArgs {
    fn load(&self) -> anyhow::Result<Load> {
        if self.queues == 0 || self.depth == 0 || self.block == 0 {
            bail!("--queues, --depth and --block are at least 1");
        }
        if !self.queue_size.is_power_of_two() && !self.packed {
            bail!("--queue-size {} is not a power of two, as it must be without --packed", self.queue_size);
        }
        Ok(Load {
            on: self.file.clone().map_or(LoadTarget::Disk, LoadTarget::File),
            size: self.size,
            op: match self.op {
                OpArg::Read => Op::Read,
                OpArg::Write => Op::Write,
                OpArg::Getattr => Op::Getattr,
                OpArg::Lookup => Op::Lookup,
            },
            queues: self.queues,
            queue_size: self.queue_size,
            event_idx: !self.no_event_idx,
            indirect: !self.no_indirect,
            packed: self.packed,
            depth: self.depth,
            block: self.block,
            random: !self.sequential,
            seconds: self.seconds,
            requests: self.requests,
            sleep: self.sleep,
            threads: self.threads,
            verify: self.verify,
            reattach: self.reattach.map(Duration::from_secs),
            pid: self.pid,
            count_syscalls: self.count_syscalls.map(|counter| match counter {
                CounterArg::Perf => (Counter::Perf, self.count_requests),
                CounterArg::Strace => (Counter::Strace, self.count_requests),
            }),
        })
    }
}

fn info(socket: &Path) -> anyhow::Result<()> {
    let mut driver = Driver::connect(socket, Config::default())?;
    let space = driver.config_space().ok();
    let init = driver.init().context("INIT failed")?;
    let json = serde_json::json!({
        "tag": space.as_ref().map(|(tag, _)| tag),
        "request_queues": space.as_ref().map(|(_, queues)| queues),
        "virtio_features": format!("{:#x}", driver.features()),
        "protocol_features": format!("{:#x}", driver.protocol_features()),
        "fuse": format!("{}.{}", init.major, init.minor),
        "max_write": init.max_write,
        "flags": format!("{:#x}", u64::from(init.flags2) << 32 | u64::from(init.flags)),
        "pid": driver.peer(),
    });
    println!("{json}");
    Ok(())
}

fn run() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    match &cli.command {
        Command::Load(args) => {
            let report = load::run(&cli.socket, &args.load()?)?;
            println!("{}", serde_json::to_string(&report)?);
            Ok(if report.errors == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Command::Hostile(args) => args.run(&cli.socket),
        Command::Info => info(&cli.socket).map(|()| ExitCode::SUCCESS),
    }
}

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("ferry-driver: {error:#}");
        ExitCode::FAILURE
    })
}
