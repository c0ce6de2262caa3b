//! The rows of the images table.

use super::systems::{GUESTS, READ, STARTED, System, WALKED};
use super::tree::Kind;
use crate::stats::Better;

/// What is measured in one go, all systems in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Making images of the tree.
    Build,
    /// How large they are.
    Size,
    /// Walking a tree.
    Walk(Walk, TreeLocation),
    /// Reading a large file.
    Read,
    /// Reading blocks of it in no order.
    Random,
    /// Reading the files that a program needs when it starts.
    Start,
}

/// How a tree is walked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Walk {
    /// `ls -lR`.
    Ls,
    /// Our own walk; in a guest that of find(1).
    Stat,
}

/// Which tree is walked, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TreeLocation {
    /// A tree like a distribution's root.
    Root,
    /// One like a developer's image.
    Developer,
    /// The same in a guest.
    Guest,
}

/// All, in the order in which they run.
pub const ALL: [Work; 11] = [
    Work::Build,
    Work::Size,
    Work::Walk(Walk::Ls, TreeLocation::Root),
    Work::Walk(Walk::Stat, TreeLocation::Root),
    Work::Read,
    Work::Random,
    Work::Start,
    Work::Walk(Walk::Ls, TreeLocation::Developer),
    Work::Walk(Walk::Stat, TreeLocation::Developer),
    Work::Walk(Walk::Ls, TreeLocation::Guest),
    Work::Walk(Walk::Stat, TreeLocation::Guest),
];

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
            Self::Walk(Walk::Ls, TreeLocation::Root) => &[
                (Figure::Cold, "ls -lR cold"),
                (Figure::MountedCold, "mount and ls -lR cold"),
                (Figure::Warm, "ls -lR warm"),
            ],
            Self::Walk(Walk::Stat, TreeLocation::Root) => &[
                (Figure::Cold, "stat walk cold"),
                (Figure::MountedCold, "mount and stat walk cold"),
                (Figure::Warm, "stat walk warm"),
            ],
            Self::Walk(Walk::Ls, TreeLocation::Developer) => {
                &[(Figure::Cold, "developer ls -lR cold"), (Figure::Warm, "developer ls -lR warm")]
            }
            Self::Walk(Walk::Stat, TreeLocation::Developer) => {
                &[(Figure::Cold, "developer stat walk cold"), (Figure::Warm, "developer stat walk warm")]
            }
            Self::Walk(Walk::Ls, TreeLocation::Guest) => {
                &[(Figure::Cold, "guest ls -lR cold"), (Figure::Warm, "guest ls -lR warm")]
            }
            Self::Walk(Walk::Stat, TreeLocation::Guest) => {
                &[(Figure::Cold, "guest stat walk cold"), (Figure::Warm, "guest stat walk warm")]
            }
            Self::Read => &[(Figure::Cold, "sequential read cold"), (Figure::Warm, "sequential read warm")],
            Self::Random => &[(Figure::Cold, "first-touch random read"), (Figure::Warm, "random read again")],
            Self::Start => &[
                (Figure::Cold, "start cold"),
                (Figure::MountedCold, "mount and start cold"),
                (Figure::Warm, "start again"),
            ],
        }
    }

    /// Whose lines it gives, ours and others'.
    pub fn systems(self) -> &'static [System] {
        match self {
            // What is built is told apart by who does it.
            Self::Build | Self::Size => &[System::Ferry],
            Self::Walk(_, TreeLocation::Guest) => &GUESTS,
            Self::Walk(..) => &WALKED,
            Self::Read | Self::Random => &READ,
            Self::Start => &STARTED,
        }
    }

    /// The tree that it is about.
    pub fn tree(self) -> Kind {
        match self {
            Self::Walk(_, TreeLocation::Developer | TreeLocation::Guest) => Kind::Developer,
            _ => Kind::Root,
        }
    }

    /// The unit of its figures.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Build => "s",
            Self::Size => "MB",
            Self::Walk(..) | Self::Start => "ms",
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
