//! The rows of the zufs table.

use super::systems::{self, System};

/// The threads of the published table.
pub const THREADS: [usize; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

/// What is measured in one go, all systems in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// 4 KiB random writes, the published table.
    Write,
    /// The same as reads.
    Read,
    /// Making, looking at and removing files.
    Names,
    /// `stat` of what the kernel may have cached for ever.
    Cached,
    /// 4 KiB random writes in a guest with persistent memory.
    Guest,
}

/// Work with a number of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The work.
    pub work: Work,
    /// Threads.
    pub threads: usize,
    /// Whether a quick run has it.
    pub quick: bool,
}

impl Step {
    /// The rows that it gives: the load's own names of its figures, and the rows'.
    pub fn rows(self) -> Vec<(&'static str, String)> {
        let threads = self.threads;
        let figures: &[(&str, &str)] = match self.work {
            Work::Write => &[("write", "")],
            Work::Read => &[("read", "randread ")],
            Work::Names => &[("create", "create "), ("stat", "stat "), ("unlink", "unlink ")],
            Work::Cached => &[("cached-stat", "cached-stat ")],
            Work::Guest => &[("write", "guest ")],
        };
        figures.iter().map(|(figure, prefix)| (*figure, format!("{prefix}threads {threads}"))).collect()
    }

    /// The unit of its figures.
    pub fn unit(self) -> &'static str {
        if self.is_data() { "IOPS" } else { "calls/s" }
    }

    /// Whether fio does it.
    pub fn is_data(self) -> bool {
        matches!(self.work, Work::Write | Work::Read | Work::Guest)
    }

    /// The systems that take turns.
    pub fn systems(self) -> &'static [System] {
        match self.work {
            Work::Write | Work::Read => &systems::DATA,
            Work::Names => &systems::NAMES,
            Work::Cached => &systems::CACHED,
            Work::Guest => &systems::GUEST,
        }
    }

    /// A note for the report.
    pub fn note(self) -> Option<&'static str> {
        match self.work {
            Work::Guest => Some("in a QEMU guest that TCG emulates: to be compared within the guest only"),
            Work::Names | Work::Cached => Some("libfuse is its memory file system"),
            Work::Write | Work::Read => None,
        }
    }
}

/// All, in the order in which they run.
pub fn all() -> Vec<Step> {
    let steps = |work, threads: &[usize], quick: &[usize]| {
        let step = |&threads: &usize| Step { work, threads, quick: quick.contains(&threads) };
        threads.iter().map(step).collect::<Vec<_>>()
    };
    [
        steps(Work::Write, &THREADS, &[1, 4, 8]),
        steps(Work::Read, &[1, 4, 8], &[1]),
        steps(Work::Names, &[1, 4], &[1, 4]),
        steps(Work::Cached, &[1], &[1]),
        // Two CPUs, and slow ones: more threads only queue (said in zufs-notes.md).
        steps(Work::Guest, &[1, 2, 4], &[1]),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_published_row_exists() {
        let names: Vec<String> = all().into_iter().flat_map(Step::rows).map(|(_, name)| name).collect();
        for threads in THREADS {
            assert!(names.contains(&format!("threads {threads}")));
        }
        let mut unique = names.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), names.len());
    }

    #[test]
    fn names_of_figures_become_names_of_rows() {
        let step = Step { work: Work::Names, threads: 4, quick: true };
        assert_eq!(step.rows()[2], ("unlink", "unlink threads 4".into()));
        assert_eq!((step.unit(), step.is_data()), ("calls/s", false));
    }
}
