//! Runs the rows: all systems in turn, so that changes of the machine affect all.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use super::made::{self, BuiltImage, Programs};
use super::mounts::Tree;
use super::rows::{Figure, TreeLocation, Walk, Work};
use super::systems::{BUILDERS, Builder, System};
use super::tree::Kind;
use super::walk::{self, Found};
use super::{TABLE, guest};
use crate::line::{FERRY, Line};
use crate::noise::Noise;
use crate::process;
use crate::stats;
use crate::trouble::Failures;

/// The large file's name in its own tree.
const LARGE: &str = "large";
/// How it is read.
const PIECE_BYTES: usize = 1 << 20;
/// The blocks that it is read in without an order.
const BLOCK_BYTES: usize = 4096;
/// How many of them.
const READS: u32 = 2000;
/// Of so many files a program needs one when it starts.
const FILES_PER_STARTED: usize = 100;
/// How long a walk may take, in seconds.
const WALK_LIMIT_S: &str = "120";

/// How much of each thing.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Files in the tree.
    pub files: usize,
    /// Files in the developer's tree.
    pub developer_files: usize,
    /// Length of the large file, in MiB.
    pub large_mib: usize,
    /// Runs of each walk and each reading.
    pub runs: usize,
    /// Runs of each build.
    pub builds: usize,
    /// When no further round of a step begins, on a machine that is slower than it was thought.
    pub step_limit: Duration,
}

impl Effort {
    /// The full run.
    pub const FULL: Self = Self {
        files: 100_000,
        developer_files: 40_000,
        large_mib: 512,
        runs: 7,
        builds: 5,
        step_limit: Duration::from_secs(240),
    };
    /// How often each system runs in a step.
    pub fn runs_of(&self, work: Work) -> usize {
        match work {
            Work::Build => self.builds,
            Work::Size => 1,
            _ => self.runs,
        }
    }

    /// The quick one.
    pub const QUICK: Self = Self {
        files: 10_000,
        developer_files: 4000,
        large_mib: 128,
        runs: 3,
        builds: 1,
        step_limit: Duration::from_secs(60),
    };
}

/// The samples of a step, by figure and by the peer's or system's name.
type Samples = BTreeMap<(Figure, &'static str), Vec<f64>>;

/// The runner.
#[derive(Debug)]
pub struct Runner {
    programs: Programs,
    directory: PathBuf,
    effort: Effort,
    made: BTreeMap<(Kind, Builder), BuiltImage>,
    /// The image with the large file in it.
    large: Option<BuiltImage>,
    /// What a program reads when it starts, below the tree.
    started: Vec<PathBuf>,
    /// What every walk has to find.
    found: BTreeMap<Kind, Found>,
    /// Where guests run, or why none does.
    guests: std::result::Result<guest::Place, String>,
    trouble: Failures<&'static str>,
}

impl Runner {
    /// A runner with all its data below a directory.
    pub fn new(
        programs: Programs,
        directory: PathBuf,
        effort: Effort,
        guests: std::result::Result<guest::Place, String>,
    ) -> Self {
        let (made, trouble) = (BTreeMap::new(), Failures::default());
        Self {
            programs,
            directory,
            effort,
            made,
            large: None,
            started: Vec::new(),
            found: BTreeMap::new(),
            guests,
            trouble,
        }
    }

    /// Runs a step, and makes a line of each of its rows for each of our configurations.
    pub fn run(&mut self, work: Work, wanted: impl Fn(&str) -> bool) -> Result<Vec<Line>> {
        self.tree(work.tree())?;
        self.trouble.begin_row();
        let samples = match work {
            Work::Build => self.builds(&wanted),
            Work::Size => self.sizes(&wanted),
            Work::Walk(..) => self.mounted(work, &wanted),
            Work::Read | Work::Random => {
                self.large()?;
                self.mounted(work, &wanted)
            }
            Work::Start => {
                self.trace()?;
                self.mounted(work, &wanted)
            }
        };
        self.trouble.end_row(|name| samples.keys().any(|(_, of)| *of == name));
        Ok(self.lines(work, &samples))
    }

    /// The tree, which is made when it is first needed.
    fn tree(&mut self, kind: Kind) -> Result<PathBuf> {
        let root = self.directory.join(kind.name());
        if !self.found.contains_key(&kind) {
            let files = if kind == Kind::Root { self.effort.files } else { self.effort.developer_files };
            kind.make(&root, files)?;
            self.found.insert(kind, walk::walk(&root)?);
        }
        Ok(root)
    }

    fn large(&mut self) -> Result<PathBuf> {
        let root = self.directory.join("large-tree");
        if self.large.is_none() {
            std::fs::create_dir_all(&root)?;
            let bytes = Noise(1).bytes(self.effort.large_mib << 20);
            std::fs::write(root.join(LARGE), bytes).context("cannot make the large file")?;
            let directory = self.directory.join("large-made");
            self.large = Some(made::make(Builder::Ferry, &root, directory, &self.programs)?.0);
        }
        Ok(root)
    }

    /// Chooses the files that a program is to need, in their order.
    fn trace(&mut self) -> Result<()> {
        if self.started.is_empty() {
            let root = self.tree(Kind::Root)?;
            let all = walk::files(&root)?;
            let mut noise = Noise(7);
            let count = all.len().div_ceil(FILES_PER_STARTED);
            let chosen: BTreeSet<usize> = (0..count).map(|_| below(&mut noise, all.len())).collect();
            let mut chosen: Vec<PathBuf> = chosen.into_iter().map(|at| all[at].clone()).collect();
            // Programs load what they need in an order of their own.
            for at in (1..chosen.len()).rev() {
                chosen.swap(at, below(&mut noise, at + 1));
            }
            let lines: String = chosen.iter().map(|path| format!("/{}\n", path.display())).collect();
            std::fs::write(made::trace_of(&root), lines).context("cannot write the trace")?;
            self.started = chosen;
        }
        Ok(())
    }

    fn builds(&mut self, wanted: &impl Fn(&str) -> bool) -> Samples {
        let mut samples = Samples::new();
        let (started, limit) = (Instant::now(), self.effort.step_limit);
        for _ in (0..self.effort.builds).take_while(|_| started.elapsed() < limit) {
            for builder in BUILDERS.into_iter().filter(|builder| is_wanted(*builder, wanted)) {
                if !self.trouble.is_able(builder.name()) {
                    continue;
                }
                let began = Instant::now();
                match self.build(Kind::Root, builder) {
                    Ok(times) => {
                        for (figure, time) in [Figure::Build, Figure::BuildSynced].into_iter().zip(times) {
                            samples.entry((figure, builder.name())).or_default().push(time);
                        }
                    }
                    Err(error) => {
                        self.trouble.note(builder.name(), format!("{}: {error:#}", builder.name()), began.elapsed());
                    }
                }
            }
        }
        samples
    }

    fn build(&mut self, kind: Kind, builder: Builder) -> Result<[f64; 2]> {
        let root = self.tree(kind)?;
        let directory = self.directory.join(format!("made-{}-{}", kind.name(), builder.name()));
        let (made, times) = made::make(builder, &root, directory, &self.programs)?;
        self.made.insert((kind, builder), made);
        Ok(times.map(|time| time.as_secs_f64()))
    }

    /// What a builder made, which is built when nobody has yet.
    fn made(&mut self, kind: Kind, builder: Builder) -> Result<BuiltImage> {
        if !self.made.contains_key(&(kind, builder)) {
            self.build(kind, builder)?;
        }
        self.made.get(&(kind, builder)).cloned().context("it was just built")
    }

    fn sizes(&mut self, wanted: &impl Fn(&str) -> bool) -> Samples {
        let mut samples = Samples::new();
        for builder in BUILDERS.into_iter().filter(|builder| is_wanted(*builder, wanted)) {
            let began = Instant::now();
            match self.made(Kind::Root, builder).and_then(|made| made.bytes()) {
                Ok((image, whole)) => {
                    // With all data in it, the image's own size says nothing about metadata.
                    if builder != Builder::Full {
                        samples.insert((Figure::Metadata, builder.name()), vec![megabytes(image)]);
                    }
                    samples.insert((Figure::Whole, builder.name()), vec![megabytes(whole)]);
                }
                Err(error) => {
                    self.trouble.note(builder.name(), format!("{}: {error:#}", builder.name()), began.elapsed());
                }
            }
        }
        samples
    }

    fn mounted(&mut self, work: Work, wanted: &impl Fn(&str) -> bool) -> Samples {
        let systems = work.systems();
        let mut samples = Samples::new();
        let (started, limit) = (Instant::now(), self.effort.step_limit);
        for _ in (0..self.effort.runs).take_while(|_| started.elapsed() < limit) {
            for &system in systems.iter().filter(|system| system.is_ours() || wanted(system.name())) {
                if !self.trouble.is_able(system.name()) {
                    continue;
                }
                let began = Instant::now();
                match self.sample(work, system) {
                    Ok(found) => found
                        .into_iter()
                        .for_each(|(figure, value)| samples.entry((figure, system.name())).or_default().push(value)),
                    Err(error) => {
                        self.trouble.note(system.name(), format!("{}: {error:#}", system.name()), began.elapsed());
                    }
                }
            }
        }
        samples
    }

    /// Mounts with empty caches, does the work, and does it again.
    fn sample(&mut self, work: Work, system: System) -> Result<Vec<(Figure, f64)>> {
        let made = match (system.builder(), work) {
            (None, _) => None,
            (Some(_), Work::Read | Work::Random) => self.large.clone(),
            (Some(builder), _) => Some(self.made(work.tree(), builder)?),
        };
        let is_large = matches!(work, Work::Read | Work::Random);
        let bare = self.directory.join(if is_large { "large-tree" } else { work.tree().name() });
        process::drop_caches()?;
        // The programs themselves are not to be read from the disk while they are measured.
        look_at_programs(&self.programs, &self.directory);
        let started = Instant::now();
        if let (Work::Walk(walk, TreeLocation::Guest), Some(made)) = (work, &made) {
            let place = self.guests.as_ref().map_err(|error| anyhow!("{error}"))?;
            let mut visit = guest::GuestWalk::begin(system, made, &self.directory, &self.programs, place)?;
            let found = *self.found.get(&work.tree()).context("there is no tree")?;
            return Ok(vec![(Figure::Cold, visit.walk(walk, found)?), (Figure::Warm, visit.walk(walk, found)?)]);
        }
        let tree = match &made {
            Some(made) => Tree::mount(system, made, &self.directory, &self.programs)?,
            None => Tree::bare(&bare),
        };
        let mount = milliseconds(started);
        let work = || {
            let done = self.work(work, tree.dir());
            done.with_context(|| tree.last_words().unwrap_or_else(|| "it is the kernel's own mount".into()))
        };
        let (cold, warm) = (work()?, work()?);
        Ok(vec![
            (Figure::Mount, mount),
            (Figure::Cold, cold),
            (Figure::MountedCold, mount + cold),
            (Figure::Warm, warm),
        ])
    }

    /// Does the work once. Answers milliseconds, or MiB/s.
    fn work(&self, work: Work, dir: &Path) -> Result<f64> {
        let started = Instant::now();
        match work {
            Work::Walk(Walk::Ls, _) => {
                // ls is killed if the file system does not answer.
                let mut command = Command::new("timeout");
                command.args(["--signal=KILL", WALK_LIMIT_S, "ls", "-lR"]).arg(dir);
                let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status().context("cannot start ls")?;
                ensure!(status.success(), "ls -lR: {status}");
                Ok(milliseconds(started))
            }
            Work::Read => {
                let mut file = File::open(dir.join(LARGE)).context("cannot open the large file")?;
                let (mut piece, mut bytes) = (vec![0; PIECE_BYTES], 0);
                loop {
                    match file.read(&mut piece).context("cannot read the large file")? {
                        0 => break,
                        count => bytes += count,
                    }
                }
                ensure!(bytes == self.effort.large_mib << 20, "{bytes} bytes were read, not all");
                #[allow(clippy::cast_precision_loss)] // Some hundred.
                Ok(self.effort.large_mib as f64 / started.elapsed().as_secs_f64())
            }
            Work::Random => {
                let file = File::open(dir.join(LARGE)).context("cannot open the large file")?;
                let (mut block, mut noise) = (vec![0; BLOCK_BYTES], Noise(3));
                let blocks = (self.effort.large_mib << 20) / BLOCK_BYTES;
                for _ in 0..READS {
                    let at = below(&mut noise, blocks) * BLOCK_BYTES;
                    file.read_exact_at(&mut block, at as u64).context("cannot read the large file")?;
                }
                Ok(f64::from(READS) / started.elapsed().as_secs_f64())
            }
            Work::Start => {
                for path in &self.started {
                    let path = dir.join(path);
                    std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
                }
                Ok(milliseconds(started))
            }
            _ => {
                let found = walk::walk(dir)?;
                let time = milliseconds(started);
                let expected = self.found.get(&work.tree());
                ensure!(Some(&found) == expected, "{found:?} was found, not {expected:?}");
                Ok(time)
            }
        }
    }

    fn lines(&self, work: Work, samples: &Samples) -> Vec<Line> {
        let mut lines = Vec::new();
        for (figure, row) in work.rows() {
            let configs: Vec<(&str, Vec<(&str, String)>)> = match work {
                Work::Build | Work::Size => {
                    vec![("flat", BUILDERS.map(|builder| (builder.name(), builder.name().to_owned())).to_vec())]
                }
                _ => ours(work.systems()),
            };
            for (config, names) in configs {
                let mut line = Line::new(TABLE, (*row).to_owned(), config, work.unit(), work.better());
                let of = |figure: Figure| -> BTreeMap<String, Vec<f64>> {
                    let found = |(system, name): &(&'static str, String)| {
                        Some((name.clone(), samples.get(&(figure, *system))?.clone()))
                    };
                    names.iter().filter_map(found).collect()
                };
                line.fill(&of(*figure));
                if *figure == Figure::Cold {
                    let medians = of(Figure::Mount).into_iter();
                    let medians =
                        medians.filter_map(|(name, values)| Some((name, stats::round(stats::median(&values)?))));
                    line.also.insert("mount_ms".into(), medians.collect());
                }
                for (system, name) in &names {
                    if let Some(reason) = self.trouble.reason(system, self.effort.runs_of(work)) {
                        if name == FERRY { line.fail(&reason) } else { line.skip(&reason) }
                    }
                }
                lines.push(line);
            }
        }
        lines
    }
}

/// Each of our configurations, with all that its lines have: the system's name, and what the line calls it.
fn ours(systems: &[System]) -> Vec<(&'static str, Vec<(&'static str, String)>)> {
    let of = |ours: System| {
        let name = |system: System| if system == ours { Some(FERRY.to_owned()) } else { ours.calls(system) };
        systems.iter().filter_map(|&system| Some((system.name(), name(system)?))).collect()
    };
    systems.iter().filter(|system| system.is_ours()).map(|&ours| (ours.name(), of(ours))).collect()
}

fn is_wanted(builder: Builder, wanted: &impl Fn(&str) -> bool) -> bool {
    builder == Builder::Ferry || wanted(builder.name())
}

/// Has the programs and their libraries read, and what `ls` looks up; what they say does not matter.
fn look_at_programs(programs: &Programs, directory: &Path) {
    let composefs = programs.composefs.iter().map(|directory| directory.join("mount.composefs"));
    for program in composefs.chain([programs.ferry.clone(), "losetup".into()]) {
        let _ = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
    let _ = Command::new("timeout").args(["5", "ls", "-l"]).arg(directory).stdout(Stdio::null()).status();
}

fn below(noise: &mut Noise, limit: usize) -> usize {
    usize::try_from(noise.below(limit as u64)).unwrap_or_default()
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

#[allow(clippy::cast_precision_loss)] // Four digits are shown.
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
