//! The rows of the images table.

use crate::stats::Better;

/// What is measured in one go, all systems in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Making images of the tree.
    Build,
    /// How large they are.
    Size,
    /// `ls -lR`.
    Ls,
    /// Our own walk.
    Stat,
    /// Reading a large file.
    Read,
    /// Reading blocks of it in no order.
    Random,
    /// Reading the files that a program needs when it starts.
    Start,
}

/// All, in the order in which they run.
pub const ALL: [Work; 7] = [Work::Build, Work::Size, Work::Ls, Work::Stat, Work::Read, Work::Random, Work::Start];

/// A figure of a run, and the row that it becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Figure {
    /// The program alone.
    Build,
    /// Until its image is on the disk, too.
    BuildSynced,
    /// The metadata.
    Metadata,
    /// And the data.
    Whole,
    /// Nothing in the caches.
    Cold,
    /// The same with the time of the mount.
    MountedCold,
    /// At once after that.
    Warm,
    /// The mount alone; shown beside the cold rows.
    Mount,
}

impl Work {
    /// The rows that it gives.
    pub fn rows(self) -> &'static [(Figure, &'static str)] {
        match self {
            Self::Build => &[(Figure::Build, "build"), (Figure::BuildSynced, "build and sync")],
            Self::Size => &[(Figure::Metadata, "image size"), (Figure::Whole, "image size with data")],
            Self::Ls => &[
                (Figure::Cold, "ls -lR cold"),
                (Figure::MountedCold, "mount and ls -lR cold"),
                (Figure::Warm, "ls -lR warm"),
            ],
            Self::Stat => &[
                (Figure::Cold, "stat walk cold"),
                (Figure::MountedCold, "mount and stat walk cold"),
                (Figure::Warm, "stat walk warm"),
            ],
            Self::Read => &[(Figure::Cold, "sequential read cold"), (Figure::Warm, "sequential read warm")],
            Self::Random => &[(Figure::Cold, "first-touch random read"), (Figure::Warm, "random read again")],
            Self::Start => &[
                (Figure::Cold, "start cold"),
                (Figure::MountedCold, "mount and start cold"),
                (Figure::Warm, "start again"),
            ],
        }
    }

    /// The unit of its figures.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Build => "s",
            Self::Size => "MB",
            Self::Ls | Self::Stat | Self::Start => "ms",
            Self::Read => "MiB/s",
            Self::Random => "reads/s",
        }
    }

    /// Which way they are good.
    pub fn better(self) -> Better {
        if matches!(self, Self::Read | Self::Random) { Better::Higher } else { Better::Lower }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = ALL.iter().flat_map(|work| work.rows()).map(|(_, name)| name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
