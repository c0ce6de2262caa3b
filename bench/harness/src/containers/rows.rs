//! The rows of the containers table.

use super::image::Image;

/// The table's name.
pub const TABLE: &str = "containers";
/// Images that are measured, with the delays of the network in milliseconds, there and back.
const DELAYS_MS: [u64; 3] = [0, 5, 50];

/// What is measured in one go, all systems in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A container is started from an image that is only in the registry.
    Cold(Image, u64),
    /// The same once more, and its root is listed.
    Warm(Image),
    /// Images that have most files in common.
    Related,
}

/// A figure of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Figure {
    /// The time from the pull to the first output.
    Cold,
    /// What the registry sent until then.
    Bytes,
    /// What it was asked for until then.
    Requests,
    /// What the snapshotter's processes have in memory then.
    Memory,
    /// The time from the command to the first output when all is there, in the kernel's caches, too.
    Warm,
    /// The same with empty caches.
    Again,
    /// `ls -lR` of the root with empty caches.
    ListCold,
    /// The same again.
    ListWarm,
    /// What snapshots take on the disk.
    Disk,
}

impl Figure {
    /// Of all of them less is better.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Cold | Self::Warm | Self::Again | Self::ListCold | Self::ListWarm => "ms",
            Self::Bytes | Self::Disk => "MB",
            Self::Requests => "requests",
            Self::Memory => "MiB",
        }
    }

    /// What its rows' names begin with.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold start",
            Self::Bytes => "bytes of cold start",
            Self::Requests => "requests of cold start",
            Self::Memory => "memory after cold start",
            Self::Warm => "warm start",
            Self::Again => "start with empty caches",
            Self::ListCold => "ls -lR cold",
            Self::ListWarm => "ls -lR warm",
            Self::Disk => "disk of twenty images",
        }
    }
}

/// All, in the order in which they run.
pub fn all() -> Vec<Work> {
    let cold = DELAYS_MS.into_iter().flat_map(|delay| Image::ALL.map(|image| Work::Cold(image, delay)));
    cold.chain(Image::ALL.map(Work::Warm)).chain([Work::Warm(Image::Layered), Work::Related]).collect()
}

impl Work {
    /// Whether a quick run has it.
    pub fn is_quick(self) -> bool {
        matches!(self, Self::Cold(Image::Shell, 0) | Self::Cold(Image::Python, 0 | 50) | Self::Warm(Image::Python))
    }

    /// The rows that it gives.
    pub fn rows(self) -> Vec<(Figure, String)> {
        let named = |figure: Figure, image: Image| (figure, format!("{} {}", figure.name(), image.name()));
        match self {
            Self::Cold(image, delay_ms) => {
                let start = (Figure::Cold, format!("{} {}, {delay_ms} ms", Figure::Cold.name(), image.name()));
                // A network that is slower changes only the time.
                let more = [Figure::Bytes, Figure::Requests, Figure::Memory].map(|figure| named(figure, image));
                std::iter::once(start).chain(more.into_iter().filter(|_| delay_ms == 0)).collect()
            }
            Self::Warm(image) => {
                let figures = [Figure::Warm, Figure::Again, Figure::ListCold, Figure::ListWarm];
                figures.map(|figure| named(figure, image)).into()
            }
            Self::Related => vec![(Figure::Disk, Figure::Disk.name().into())],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_has_a_name_of_its_own() {
        let mut rows: Vec<String> = all().into_iter().flat_map(Work::rows).map(|(_, row)| row).collect();
        assert_eq!(rows.len(), 12 + 12 + 20 + 1);
        assert!(
            rows.contains(&"cold start java, 50 ms".into()) && rows.contains(&"memory after cold start node".into())
        );
        rows.sort_unstable();
        rows.dedup();
        assert_eq!(rows.len(), 45);
        assert_eq!(all().into_iter().filter(|work| work.is_quick()).count(), 4);
    }
}
