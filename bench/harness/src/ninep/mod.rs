//! The ninep table: 9P servers by themselves, without the kernel's client: requests a second, and what each costs.

mod load;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use ferry_driver::measure::{Counter, Counting, Snapshot};
use ferry_guest::Cache;
use rustix::mount::{MountFlags, UnmountFlags};

use self::load::{Address, Client, Operation};
use crate::cli::Cli;
use crate::data::{NATIVE_BYTES, NATIVE_FILE, write_noise};
use crate::line::{Counts, FERRY, Line};
use crate::machine::Machine;
use crate::parts::find;
use crate::progress::Progress;
use crate::server::Server;
use crate::stats::{self, Better};
use crate::target::{self, RowFigures, Target};
use crate::trouble::Failures;
use crate::{chart, parts, session, v9fs};

/// The table's name.
const TABLE: &str = "ninep";
/// The unit of all figures.
const UNIT: &str = "requests/s";
/// The ports of ours and of diod.
const PORTS: [(System, u16); 2] = [(System::Ferry, 5650), (System::Diod, 5651)];

const OPERATIONS: [(&str, Operation); 5] = [
    ("getattr", Operation::Getattr),
    ("walk, clunk", Operation::WalkClunk),
    ("read 4K", Operation::Read(4096)),
    ("write 4K", Operation::Write(4096)),
    ("read 32K", Operation::Read(32 << 10)),
];
/// Requests under way.
const DEPTHS: [u16; 4] = [1, 4, 16, 64];

/// How the client reaches its server, as lines name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Transport {
    Unix,
    Tcp,
}

impl Transport {
    const ALL: [Self; 2] = [Self::Unix, Self::Tcp];

    fn name(self) -> &'static str {
        match self {
            Self::Unix => "unix",
            Self::Tcp => "tcp",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum System {
    Ferry,
    Diod,
}

impl System {
    const ALL: [Self; 2] = [Self::Ferry, Self::Diod];

    fn name(self) -> &'static str {
        match self {
            Self::Ferry => FERRY,
            Self::Diod => "diod",
        }
    }
}

/// One row in one configuration.
#[derive(Debug, Clone, Copy)]
struct Row {
    name: &'static str,
    operation: Operation,
    depth: u16,
    transport: Transport,
}

impl Row {
    fn title(&self) -> String {
        format!("{} depth {}", self.name, self.depth)
    }

    fn is_quick(&self) -> bool {
        matches!(self.depth, 1 | 16) && self.name != "walk, clunk"
    }
}

fn rows() -> Vec<Row> {
    let of = |transport| {
        let each = move |(name, operation)| DEPTHS.map(|depth| Row { name, operation, depth, transport });
        OPERATIONS.into_iter().flat_map(each)
    };
    Transport::ALL.into_iter().flat_map(of).collect()
}

/// How much is measured.
#[derive(Debug, Clone, Copy)]
struct Effort {
    runs: usize,
    time: Duration,
    /// Requests of a run that counts system calls.
    counted: u64,
}

impl Effort {
    const FULL: Self = Self { runs: 5, time: Duration::from_millis(700), counted: 20_000 };
    const QUICK: Self = Self { runs: 3, time: Duration::from_millis(300), counted: 5_000 };
}

/// The tree, in memory: what disks are capable of is not what is to be compared.
struct Tree(PathBuf);

impl Tree {
    fn make(directory: &Path) -> Result<Self> {
        let memory = directory.join("memory");
        std::fs::create_dir_all(&memory).with_context(|| format!("cannot create {}", memory.display()))?;
        rustix::mount::mount("tmpfs", &memory, "tmpfs", MountFlags::empty(), None).context("cannot mount a tmpfs")?;
        let tree = Self(memory);
        write_noise(&tree.0.join(NATIVE_FILE), NATIVE_BYTES)?;
        Ok(tree)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// A server, where it listens.
struct Served {
    server: Server,
    address: Address,
}

struct Runner<'a> {
    tree: &'a Path,
    served: BTreeMap<(System, Transport), Result<Served, String>>,
    effort: Effort,
    failures: Failures<(Transport, System)>,
}

/// The command of a server.
fn command(system: System, program: &Path, tree: &Path, address: &Address) -> Vec<OsString> {
    let words = |text: &str| text.split_whitespace().map(OsString::from).collect::<Vec<_>>();
    let mut command = vec![OsString::from(program)];
    match system {
        System::Ferry => {
            command.extend(words("--log warn share"));
            command.push(tree.into());
            command.push("--9p".into());
            match address {
                Address::Unix(path) => {
                    let mut word = OsString::from("unix:");
                    word.push(path);
                    command.push(word);
                }
                Address::Tcp(address) => command.extend(words(&format!("tcp:{address}"))),
            }
        }
        System::Diod => {
            command.extend(words("--foreground --no-auth --logdest stderr --export"));
            command.push(tree.into());
            command.push("--listen".into());
            command.push(match address {
                Address::Unix(path) => path.into(),
                Address::Tcp(address) => address.to_string().into(),
            });
        }
    }
    command
}

fn start(system: System, transport: Transport, program: &Path, tree: &Path, directory: &Path) -> Result<Served> {
    let cpus = session::all_cpus()?;
    let place = directory.join(format!("{}-{}", system.name(), transport.name()));
    let port = PORTS.iter().find(|(of, _)| *of == system).map_or(0, |(_, port)| *port);
    let (server, address) = match transport {
        Transport::Unix => {
            let address = Address::Unix(place.clone());
            (Server::spawn(system.name(), &place, &cpus, command(system, program, tree, &address))?, address)
        }
        Transport::Tcp => {
            let listen = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
            let address = Address::Tcp(listen);
            let command = command(system, program, tree, &address);
            (Server::spawn_tcp(system.name(), listen, place, &cpus, command)?, address)
        }
    };
    Ok(Served { server, address })
}

impl Runner<'_> {
    fn served(&self, system: System, transport: Transport) -> Result<&Served> {
        let served = self.served.get(&(system, transport)).context("it was not started")?;
        served.as_ref().map_err(|reason| anyhow!("{reason}"))
    }

    /// One run; requests a second.
    fn rate(&self, row: &Row, system: System) -> Result<f64> {
        let mut client = self.client(row, system)?;
        let end = Instant::now() + self.effort.time;
        let rate = client.run(row.operation, row.depth, |_| Instant::now() >= end)?;
        #[allow(clippy::cast_precision_loss, reason = "requests of a second")]
        Ok(rate.requests as f64 / rate.elapsed.as_secs_f64())
    }

    fn client(&self, row: &Row, system: System) -> Result<Client> {
        let served = self.served(system, row.transport)?;
        // Ours calls the one tree that it shares by no name.
        let tree = if system == System::Ferry { Path::new("") } else { self.tree };
        Client::connect(&served.address, tree, NATIVE_FILE, NATIVE_BYTES)
    }

    /// What a request costs the server, in a run of its own; and how many replies the client receives at once.
    #[allow(clippy::cast_precision_loss, reason = "counts of a second")]
    fn count(&self, row: &Row, system: System) -> Result<(Counts, f64)> {
        let mut client = self.client(row, system)?;
        let pid = self.served(system, row.transport)?.server.pid();
        let limit = self.effort.counted;
        // Whatever is made at the first request is there.
        client.run(row.operation, row.depth, |requests| requests >= limit / 10)?;
        let counting = Counting::start(pid, Counter::Perf);
        let before = Snapshot::take(pid)?;
        let rate = client.run(row.operation, row.depth, |requests| requests >= limit)?;
        let used = Snapshot::take(pid)?.since(&before);
        let calls = counting.and_then(Counting::finish).ok();
        let requests = rate.requests as f64;
        let counts = Counts {
            syscalls_per_request: calls.map(|calls| stats::round(calls.total as f64 / requests)),
            wakeups_per_request: Some(stats::round(used.voluntary_switches as f64 / requests)),
            calls_per_request: 0.0,
            kicks_per_request: 0.0,
        };
        Ok((counts, stats::round(rate.replies_per_receive)))
    }

    fn line(&mut self, row: &Row) -> Line {
        let mut samples: BTreeMap<System, Vec<f64>> = BTreeMap::new();
        self.failures.begin_row();
        for _ in 0..self.effort.runs {
            for system in System::ALL
                .into_iter()
                .filter(|system| self.failures.is_able((row.transport, *system)))
                .collect::<Vec<_>>()
            {
                let began = Instant::now();
                match self.rate(row, system) {
                    Ok(rate) => samples.entry(system).or_default().push(rate),
                    Err(error) => self.failures.note((row.transport, system), format!("{error:#}"), began.elapsed()),
                }
            }
        }
        self.failures.end_row(|(transport, system)| transport == row.transport && samples.contains_key(&system));
        let mut line = Line::new(TABLE, row.title(), row.transport.name(), UNIT, Better::Higher);
        line.fill(&samples.iter().map(|(system, rates)| (system.name().to_owned(), rates.clone())).collect());
        for system in System::ALL {
            if let Some(reason) = self.failures.reason((row.transport, system), self.effort.runs) {
                let reason = format!("{}: {reason}", system.name());
                if system == System::Ferry { line.fail(&reason) } else { line.skip(&reason) }
            }
        }
        for system in samples.keys() {
            match self.count(row, *system) {
                Ok((counts, replies)) => {
                    line.counts.insert(system.name().into(), counts);
                    line.also.entry("replies_per_receive".into()).or_default().insert(system.name().into(), replies);
                }
                Err(error) => line.skip(&format!("{}: counting: {error:#}", system.name())),
            }
        }
        line
    }
}

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let wanted = |row: &Row| match &cli.rows {
        Some(regex) => regex.is_match(&row.title()),
        None => row.is_quick() || !cli.quick,
    };
    let rows: Vec<Row> = rows().into_iter().filter(wanted).collect();
    if let Some(code) = cli.listed(TABLE, rows.iter().map(Row::title)) {
        return Ok(code);
    }
    ensure!(rustix::process::geteuid().is_root(), "bench/run {TABLE} mounts a tmpfs, and needs to be root");
    v9fs::loopback()?;
    let ferry = crate::cli::program("ferry")?;
    let diod = Cache::from_env()?.diod().map_err(|error| error.to_string());
    let machine = Machine::look(&cli.work, None, None);
    let progress = Progress::new(rows.len());
    progress.show("making the file");
    let directory = cli.work.join("run");
    let tree = Tree::make(&directory)?;
    let mut served = BTreeMap::new();
    for transport in Transport::ALL {
        for (system, program) in [(System::Ferry, Ok(&ferry)), (System::Diod, diod.as_ref())] {
            let started = program.map_err(Clone::clone).and_then(|program| {
                start(system, transport, program, &tree.0, &directory).map_err(|error| format!("{error:#}"))
            });
            served.insert((system, transport), started);
        }
    }
    let effort = if cli.quick { Effort::QUICK } else { Effort::FULL };
    let mut runner = Runner { tree: &tree.0, served, effort, failures: Failures::default() };
    let name = |row: &Row| format!("{} {}", row.title(), row.transport.name());
    let lines = progress.measure(&rows, name, &[], |row| vec![runner.line(row)])?;
    let targets = targets(&lines);
    targets.iter().for_each(|target| eprintln!("{target}"));
    if let Some(directory) = cli.results() {
        let machine = Machine { command: crate::cli::command(), ..machine };
        write(&directory, &lines, &machine, effort, &targets)?;
    }
    Ok(crate::cli::verdict(&lines))
}

/// Writes the report of a full run into a directory.
pub fn write_full(directory: &Path, lines: &[Line], machine: &Machine) -> Result<()> {
    write(directory, lines, machine, Effort::FULL, &targets(lines))
}

fn write(directory: &Path, lines: &[Line], machine: &Machine, effort: Effort, targets: &[Target]) -> Result<()> {
    parts::save(directory, TABLE, lines, &markdown(lines, machine, effort, targets), &chart::svg(lines, "diod"))
}

/// What there is of the targets in these lines.
fn targets(lines: &[Line]) -> Vec<Target> {
    let of = |(depth, limit): (u16, f64)| {
        let rows = rows().into_iter().filter(move |row| row.depth == depth);
        let ratios = RowFigures::ratios(rows.map(|row| find(lines, &row.title(), row.transport.name())), "diod");
        ratios.targets(&format!("depth {depth}: ferry : diod"), limit).collect::<Vec<_>>()
    };
    [(1, 2.0), (16, 4.0)].into_iter().flat_map(of).collect()
}

fn markdown(lines: &[Line], machine: &Machine, effort: Effort, targets: &[Target]) -> String {
    let Machine { cpu, cpus, kernel, ferry, command, date, .. } = machine;
    let mut out = String::from("# 9P servers by themselves: Ferry beside diod\n\n");
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC, on {cpu}, {cpus} CPUs, Linux {kernel}; Ferry {ferry}, diod of Debian sid. {} runs of each server, in \
         turn; medians of requests per second, with the least and the greatest in brackets. A ratio above 1 means that Ferry is better.\n\n\
         One client of one thread and one connection, written for this: it keeps so many requests under way (`depth`), takes all replies \
         that are there, and sends the next requests with one call. No kernel's client stands between. The file has {} MiB, in a tmpfs; \
         reads and writes go anywhere in it, 32 KiB at most, for diod's messages have 64. `walk, clunk` counts both. Both servers run as they do by default (Ferry in its sandbox; \
         diod without authentication), and may use all CPUs.\n",
        effort.runs,
        NATIVE_BYTES >> 20
    );
    target::chapter(&mut out, targets);
    out.push_str("![How many times better Ferry is than diod](ninep.svg)\n\n");
    for transport in Transport::ALL {
        let _ = writeln!(out, "## By {}\n\n| | Ferry | diod | ratio |\n| --- | --- | --- | --- |", transport.name());
        for line in lines.iter().filter(|line| line.config == transport.name()) {
            let [ours, theirs] = [FERRY, "diod"].map(|name| parts::figure(line, name));
            let _ = writeln!(out, "| {} | {ours} | {theirs} | {} |", line.row, parts::ratio(Some(line), "diod"));
        }
        out.push('\n');
    }
    out.push_str(
        "## What noise does not touch\n\nFor each request, in runs of their own: system calls of the server, how often its threads slept, and \
         how many replies the client received with one call.\n\n\
         | row | by | system calls: Ferry | diod | sleeps: Ferry | diod | replies at once: Ferry | diod |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for line in lines {
        let show = |value: Option<f64>| value.map_or("-".to_owned(), |value| value.to_string());
        let counted = |name: &str| line.counts.get(name);
        let replies = |name: &str| line.also.get("replies_per_receive").and_then(|all| all.get(name)).copied();
        let of = |each: &dyn Fn(&str) -> Option<f64>| [FERRY, "diod"].map(|name| show(each(name))).join(" | ");
        let calls = of(&|name| counted(name)?.syscalls_per_request);
        let sleeps = of(&|name| counted(name)?.wakeups_per_request);
        let _ = writeln!(out, "| {} | {} | {calls} | {sleeps} | {} |", line.row, line.config, of(&replies));
    }
    parts::shortfalls(&mut out, lines, |_| true, |_| parts::most_runs(lines));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_figures_and_targets() {
        let mut lines = Vec::new();
        for row in rows() {
            let mut line = Line::new(TABLE, row.title(), row.transport.name(), UNIT, Better::Higher);
            line.fill(&[(FERRY.to_owned(), vec![6.0]), ("diod".to_owned(), vec![2.0])].into());
            lines.push(line);
        }
        let said: Vec<String> = targets(&lines).iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            [
                "depth 1: ferry : diod, geometric mean of 10 of 10 rows: 3.00 (target: at least 2: reached)",
                "depth 1: ferry : diod, least of 10 of 10 rows: 3.00 (target: at least 2: reached)",
                "depth 16: ferry : diod, geometric mean of 10 of 10 rows: 3.00 (target: at least 4: missed)",
                "depth 16: ferry : diod, least of 10 of 10 rows: 3.00 (target: at least 4: missed)"
            ]
        );
        let text = markdown(&lines, &Machine::default(), Effort::QUICK, &targets(&lines));
        assert_eq!(text.matches("| read 4K depth 16 | 6 [6, 6] | 2 [2, 2] | **3.00** |").count(), 2, "{text}");
        assert!(text.ends_with("No row is below its peers, none was skipped or failed.\n"), "{text}");
    }

    #[test]
    fn servers_listen_where_they_are_told_to() {
        let unix = Address::Unix("/s".into());
        let words = |system, address: &Address| {
            let words = command(system, Path::new("p"), Path::new("/t"), address);
            words.iter().map(|word| word.to_str().unwrap().to_owned()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(words(System::Ferry, &unix), "p --log warn share /t --9p unix:/s");
        let tcp = Address::Tcp("127.0.0.1:7".parse().unwrap());
        assert!(words(System::Diod, &tcp).ends_with("--export /t --listen 127.0.0.1:7"));
    }
}
