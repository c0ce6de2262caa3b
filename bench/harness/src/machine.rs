//! The machine of the measurements.

use std::path::Path;
use std::process::{Command, Stdio};

/// The machine and the programs.
#[derive(Debug, Clone, Default)]
pub struct Machine {
    /// The processor.
    pub cpu: String,
    /// How many of them this process may use.
    pub cpus: usize,
    /// The host's kernel.
    pub kernel: String,
    /// The file system of the data.
    pub file_system: String,
    /// The guest's kernel.
    pub guest_kernel: String,
    /// The peer.
    pub virtiofsd: String,
    /// fio.
    pub fio: String,
    /// Our commit.
    pub ferry: String,
    /// The command.
    pub command: String,
    /// When it began, in UTC.
    pub date: String,
}

impl Machine {
    /// Looks at this machine.
    pub fn look(data: &Path, virtiofsd: Option<&Path>, fio: Option<&Path>) -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let version = |program: Option<&Path>| {
            program.map_or("none".into(), |program| said(Command::new(program).arg("--version")))
        };
        let commit = said(Command::new("git").args(["rev-parse", "--short=12", "HEAD"]));
        let changed = !said(Command::new("git").args(["status", "--porcelain", "--untracked-files=no"])).is_empty();
        Self {
            cpu: model.map_or("unknown".into(), |(_, model)| model.trim().to_owned()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: kernel.trim().to_owned(),
            file_system: said(Command::new("findmnt").args(["-n", "-o", "FSTYPE", "-T"]).arg(data)),
            virtiofsd: version(virtiofsd),
            fio: version(fio),
            ferry: format!("{commit}{}", if changed { " with changes that are not committed" } else { "" }),
            date: said(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M"])),
            ..Self::default()
        }
    }
}

/// The first line that a program prints; nothing when it fails.
fn said(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or_default().trim().to_owned()
}
