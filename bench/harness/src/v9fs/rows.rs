//! The rows of the v9fs table.

use super::systems::{Cache, Server, System, Way};

const PAGE_BYTES: usize = 4096;
const LARGE_BYTES: usize = 1 << 20;
/// What each byte may take to the other side, in milliseconds.
const DELAYS_MS: [u64; 3] = [0, 1, 10];

/// Where the file is read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// This host.
    Host,
    /// A User-mode Linux guest, by TCP.
    Uml,
    /// The same by a unix socket, with the server in the guest.
    UmlUnix,
    /// A QEMU guest.
    Qemu,
}

impl Place {
    /// What its rows' names begin with.
    fn prefix(self) -> &'static str {
        match self {
            Self::Host => "",
            Self::Uml => "uml ",
            Self::UmlUnix => "uml unix ",
            Self::Qemu => "qemu ",
        }
    }

    /// What a reader must know; with the guest's kernel, once it has run.
    pub fn note(self, kernel: Option<&str>) -> Option<String> {
        let (guest, why) = match self {
            Self::Host => return None,
            Self::Uml => ("User-mode Linux", "where a system call takes tens of microseconds"),
            Self::UmlUnix => {
                ("User-mode Linux", "with the server in the guest, whose one CPU it shares with the client")
            }
            Self::Qemu => ("a QEMU guest", "which TCG emulates"),
        };
        let kernel = kernel.map_or(String::new(), |kernel| format!(" (Linux {kernel})"));
        Some(format!("in {guest}{kernel}, {why}: compare within it"))
    }
}

/// A row: what is measured in one go, all systems in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Where.
    pub place: Place,
    /// Writes rather than reads.
    pub write: bool,
    /// Random offsets rather than one behind the other.
    pub random: bool,
    /// Bytes of a request.
    pub block: usize,
    /// The delay of the link, each way.
    pub delay_ms: u64,
    /// Whether a quick run has it.
    pub quick: bool,
}

impl Step {
    /// Its name: for those on a direct link on this host, the published one.
    pub fn name(self) -> String {
        let random = if self.random { "random " } else { "" };
        let operation = if self.write { "write" } else { "read" };
        let block = if self.block == LARGE_BYTES { "1M" } else { "4K" };
        let delay = if self.delay_ms == 0 { String::new() } else { format!(" {} ms", self.delay_ms) };
        format!("{}{random}{operation} {block}{delay}", self.place.prefix())
    }

    /// The systems that take turns.
    pub fn systems(self) -> Vec<System> {
        let kernel = |server: Server| Cache::ALL.map(|cache| System::Kernel(server, cache));
        let mut systems = match self.place {
            Place::Host => Way::ALL.map(System::Client).to_vec(),
            Place::Uml => {
                [&[System::Client(Way::Pipelined)][..], &kernel(Server::Ferry), &kernel(Server::Diod)].concat()
            }
            Place::UmlUnix => [&[System::Client(Way::Pipelined)][..], &kernel(Server::Ferry)].concat(),
            Place::Qemu => [kernel(Server::Ferry), kernel(Server::Qemu)].concat(),
        };
        if matches!(self.place, Place::Uml | Place::Qemu) && self.delay_ms == 0 {
            systems.push(System::VirtioBlk);
        }
        systems
    }

    /// Whether messages are counted: wherever client and server are joined by TCP. What the link costs in time does not
    /// matter to the number of messages.
    pub fn is_counted(self) -> bool {
        matches!(self.place, Place::Host | Place::Uml) && self.delay_ms == 0
    }
}

/// All, in the order in which they run.
pub fn all() -> Vec<Step> {
    let places = DELAYS_MS.map(|delay_ms| (Place::Host, delay_ms)).into_iter();
    let places =
        places.chain(DELAYS_MS.map(|delay_ms| (Place::Uml, delay_ms))).chain([(Place::UmlUnix, 0), (Place::Qemu, 0)]);
    let patterns = [(false, LARGE_BYTES), (false, PAGE_BYTES), (true, LARGE_BYTES), (true, PAGE_BYTES)];
    let patterns =
        move || patterns.into_iter().flat_map(|(random, block)| [true, false].map(|write| (random, block, write)));
    let steps = |(place, delay_ms)| {
        patterns().map(move |(random, block, write)| {
            let quick = delay_ms < 10 && (place != Place::Qemu || !random);
            Step { place, write, random, block, delay_ms, quick }
        })
    };
    places.flat_map(steps).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_have_the_published_ones() {
        let mut names: Vec<_> = all().into_iter().map(Step::name).collect();
        assert_eq!(names.len(), 8 * 8);
        for row in super::super::report::published() {
            assert!(names.contains(&row.name), "{}", row.name);
        }
        assert!(names.contains(&"uml random write 4K 10 ms".into()) && names.contains(&"uml unix write 4K".into()));
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 8 * 8);
    }

    #[test]
    fn rows_with_a_delayed_link_have_no_virtio() {
        for step in all().into_iter().filter(|step| step.delay_ms > 0) {
            assert!(!step.systems().contains(&System::VirtioBlk), "{}", step.name());
        }
    }
}
