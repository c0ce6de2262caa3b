//! Runs the rows: all systems in turn, so that changes of the machine affect all.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::content::{Content, RELATED};
use super::engine::{self, Engine};
use super::image::{Form, Image};
use super::rows::{Figure, TABLE, Work};
use super::systems::{Programs, System};
use crate::line::{FERRY, Line};
use crate::server::Server;
use crate::stats::Better;
use crate::trouble::Failures;
use crate::v9fs::link::Link;
use crate::{process, session};

/// Where the registry listens, in a network of its own. Other programs than soci-snapshotter would do without TLS on loopback.
const REGISTRY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), 5000);
/// How long a listing may take.
const LIST_TIMEOUT: Duration = Duration::from_secs(120);

/// How much of each thing.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Runs of each system.
    pub runs: usize,
    /// When no further round of a step begins, on a machine that is slower than it was thought.
    pub step_limit: Duration,
}

impl Effort {
    /// The full run.
    pub const FULL: Self = Self { runs: 5, step_limit: Duration::from_secs(400) };
    /// The quick one.
    pub const QUICK: Self = Self { runs: 2, step_limit: Duration::from_secs(60) };

    /// How often each system runs in a step. What is on the disk does not vary.
    fn runs_of(&self, work: Work) -> usize {
        if work == Work::Related { 1 } else { self.runs }
    }
}

/// The samples of a step.
type Samples = BTreeMap<(Figure, System), Vec<f64>>;

/// The runner.
#[derive(Debug)]
pub struct Runner {
    programs: Programs,
    directory: PathBuf,
    effort: Effort,
    /// Those that take part.
    systems: Vec<System>,
    content: Content,
    trouble: Failures<System>,
    /// It ends with the run.
    _registry: Server,
}

impl Runner {
    /// Starts the registry, with all data below a directory.
    pub fn new(programs: Programs, directory: PathBuf, effort: Effort, systems: Vec<System>) -> Result<Self> {
        let mut ip = Command::new("ip");
        ip.args(["address", "add", &REGISTRY.ip().to_string(), "dev", "lo"]);
        process::run(ip, &directory, LIST_TIMEOUT).context("cannot give the registry an address")?;
        let certificate = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
        let certificate = certificate.context("there is no certificate for the registry, which bench/run makes")?;
        let config = directory.join("registry.yml");
        std::fs::write(&config, registry_config(&data(&directory), &certificate))
            .context("cannot configure the registry")?;
        let command = vec![programs.registry.clone().into(), "serve".into(), config.into()];
        let registry =
            Server::spawn_tcp("docker-registry", REGISTRY, directory.join("registry"), &session::all_cpus()?, command)?;
        let content = Content::new(programs.clone(), directory.join("content"), REGISTRY.to_string())?;
        Ok(Self { programs, directory, effort, systems, content, trouble: Failures::default(), _registry: registry })
    }

    /// Runs a step, and makes a line of each of its rows for each of our configurations.
    pub fn run(&mut self, work: Work) -> Vec<Line> {
        self.trouble.begin_row();
        let samples = match work {
            Work::Cold(image, delay_ms) => self.cold(work, image, Duration::from_millis(delay_ms)),
            Work::Warm(image) => self.warm(work, image),
            Work::Related => self.related(),
        };
        self.trouble.end_row(|system| samples.keys().any(|(_, of)| *of == system));
        self.lines(work, &samples)
    }

    /// The systems that have a form of an image.
    fn able(&mut self, image: Image) -> Vec<System> {
        let mut able = self.systems.clone();
        able.retain(|&system| {
            let (began, made) = (Instant::now(), self.content.make(image, system.form()));
            let note = |error: &anyhow::Error| {
                self.trouble.note(system, format!("{}: {error:#}", system.name()), began.elapsed());
            };
            made.inspect_err(note).is_ok()
        });
        able
    }

    /// Runs something for each system in turn, as often as the step asks for.
    fn rounds(
        &mut self,
        work: Work,
        systems: &[System],
        mut sample: impl FnMut(&Self, System) -> Result<Vec<(Figure, f64)>>,
    ) -> Samples {
        let mut samples = Samples::new();
        let (started, limit) = (Instant::now(), self.effort.step_limit);
        for _ in (0..self.effort.runs_of(work)).take_while(|_| started.elapsed() < limit) {
            for &system in systems {
                if !self.trouble.is_able(system) {
                    continue;
                }
                let began = Instant::now();
                match sample(self, system) {
                    Ok(found) => found
                        .into_iter()
                        .for_each(|(figure, value)| samples.entry((figure, system)).or_default().push(value)),
                    Err(error) => {
                        self.trouble.note(system, format!("{}: {error:#}", system.name()), began.elapsed());
                    }
                }
            }
        }
        samples
    }

    /// Nothing is there at first, and nothing is left of the run before.
    fn cold(&mut self, work: Work, image: Image, delay: Duration) -> Samples {
        let able = self.able(image);
        self.rounds(work, &able, |runner, system| {
            process::drop_caches()?;
            engine::look_at(&runner.programs, &data(&runner.directory));
            // The same delay each way.
            let link = Link::new(REGISTRY, delay / 2, false)?;
            let engine = runner.engine(system, link.address())?;
            let (bytes, requests) = (link.received_bytes(), runner.requests()?);
            let started = Instant::now();
            engine.pull(image.name())?;
            let pulled = started.elapsed();
            let time = pulled + engine.run(image)?;
            let (bytes, requests) = (link.received_bytes() - bytes, runner.requests()? - requests);
            engine.ensure_lazy()?;
            let mut found = vec![
                (Figure::Cold, milliseconds(time)),
                (Figure::Bytes, megabytes(bytes)),
                (Figure::Requests, f64::from(requests)),
            ];
            found.extend(engine.resident_mib()?.map(|mib| (Figure::Memory, mib)));
            Ok(found)
        })
    }

    /// How many requests the registry has answered.
    fn requests(&self) -> Result<u32> {
        let log = std::fs::read_to_string(self.directory.join("registry.log")).context("the registry has no log")?;
        Ok(u32::try_from(log.matches("msg=\"response completed\"").count())?)
    }

    /// All of the systems have the image, and keep it.
    fn warm(&mut self, work: Work, image: Image) -> Samples {
        let mut engines = BTreeMap::new();
        for system in self.able(image) {
            let began = Instant::now();
            let ready = self.engine(system, REGISTRY).and_then(|engine| {
                engine.pull(image.name())?;
                engine.run(image)?;
                Ok((engine.mount(image.name())?, engine))
            });
            match ready {
                Ok(ready) => drop(engines.insert(system, ready)),
                Err(error) => {
                    self.trouble.note(system, format!("{}: {error:#}", system.name()), began.elapsed());
                }
            }
        }
        let systems: Vec<System> = engines.keys().copied().collect();
        self.rounds(work, &systems, |runner, system| {
            let (root, engine) = engines.get(&system).context("it was started")?;
            // The first fills the caches: another system's sample has emptied them.
            let [_, warm] = [engine.run(image)?, engine.run(image)?];
            process::drop_caches()?;
            engine::look_at_programs(&runner.programs);
            let uncached = engine.run(image)?;
            process::drop_caches()?;
            // The program itself is not to be read from the disk.
            let _ = Command::new("ls").arg("--version").stdout(Stdio::null()).status();
            let [cold, again] = [runner.list(root)?, runner.list(root)?];
            Ok(vec![
                (Figure::Warm, milliseconds(warm)),
                (Figure::Again, milliseconds(uncached)),
                (Figure::ListCold, milliseconds(cold)),
                (Figure::ListWarm, milliseconds(again)),
            ])
        })
    }

    fn list(&self, root: &Path) -> Result<Duration> {
        let mut command = Command::new("ls");
        command.arg("-lR").arg(root);
        let started = Instant::now();
        let text = process::run(command, &self.directory, LIST_TIMEOUT)?;
        let took = started.elapsed();
        ensure!(text.contains("os-release"), "the root has not the files of the image");
        Ok(took)
    }

    /// Twenty images, of those that keep whole ones.
    fn related(&mut self) -> Samples {
        let systems: Vec<System> = self.systems.iter().copied().filter(|system| system.form() == Form::Plain).collect();
        let began = Instant::now();
        if let Err(error) = self.content.make_related() {
            for &system in &systems {
                self.trouble.note(system, format!("{}: {error:#}", system.name()), began.elapsed());
            }
            return Samples::new();
        }
        self.rounds(Work::Related, &systems, |runner, system| {
            let engine = runner.engine(system, REGISTRY)?;
            (0..RELATED).try_for_each(|number| engine.pull(&format!("related{number}")))?;
            rustix::fs::sync();
            Ok(vec![(Figure::Disk, engine.disk_bytes()? / 1e6)])
        })
    }

    fn engine(&self, system: System, registry: SocketAddr) -> Result<Engine> {
        let directory = self.directory.join(format!("engine-{}", system.name()));
        Engine::start(system, directory, &self.programs, registry.to_string())
    }

    fn lines(&self, work: Work, samples: &Samples) -> Vec<Line> {
        let has = |system: &System| system.is_ours() && (work != Work::Related || system.form() == Form::Plain);
        let ours: Vec<System> = self.systems.iter().copied().filter(has).collect();
        let mut lines = Vec::new();
        for (figure, row) in work.rows() {
            for &config in &ours {
                let named = |&system: &System| Some((system, config.calls(system)?));
                let named: Vec<(System, String)> = self.systems.iter().filter_map(named).collect();
                let found = named
                    .iter()
                    .filter_map(|(system, name)| Some((name.clone(), samples.get(&(figure, *system))?.clone())));
                let mut line = Line::new(TABLE, row.clone(), config.name(), figure.unit(), Better::Lower);
                line.fill(&found.collect());
                for (system, name) in &named {
                    if let Some(reason) = self.trouble.reason(*system, self.effort.runs_of(work)) {
                        if name == FERRY { line.fail(&reason) } else { line.skip(&reason) }
                    }
                }
                lines.push(line);
            }
        }
        lines
    }
}

/// Where the registry keeps its data.
fn data(directory: &Path) -> PathBuf {
    directory.join("registry-data")
}

fn registry_config(data: &Path, certificate: &Path) -> String {
    let [data, certificate, key] = [data.into(), certificate.into(), certificate.with_extension("key")]
        .map(|path: PathBuf| path.display().to_string());
    format!(
        "version: 0.1\nlog: {{level: info}}\nstorage: {{filesystem: {{rootdirectory: {data:?}}}}}\n\
         http: {{addr: \"{REGISTRY}\", secret: x, tls: {{certificate: {certificate:?}, key: {key:?}}}}}\n"
    )
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

#[allow(clippy::cast_precision_loss)] // Four digits are shown.
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
