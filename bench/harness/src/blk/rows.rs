//! The rows of the vhost-blk table.

use super::systems::{Aio, System, Way};

/// The depths of the published table.
pub const PUBLISHED_DEPTHS: [usize; 3] = [1, 2, 3];
/// The depths of the random rows.
pub const DEPTHS: [usize; 3] = [1, 32, 128];
/// The depths of the random rows in User-mode Linux, where everything takes longer.
const UML_DEPTHS: [usize; 2] = [1, 32];
/// The same in QEMU, where it takes longest.
const QEMU_DEPTHS: [usize; 1] = [32];
const SECTOR_BYTES: usize = 512;
const PAGE_BYTES: usize = 4096;

/// Who sends the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Client {
    /// Our driver, on this host.
    Native,
    /// `qemu-img bench` over libblkio, on this host.
    QemuImg,
    /// fio in User-mode Linux.
    Uml,
    /// fio in a QEMU guest.
    Qemu,
}

impl Client {
    /// What its rows' names begin with.
    fn prefix(self) -> &'static str {
        match self {
            Self::Native => "",
            Self::QemuImg => "qemu-img ",
            Self::Uml => "uml ",
            Self::Qemu => "qemu ",
        }
    }

    /// A note for the report.
    pub fn note(self) -> Option<&'static str> {
        match self {
            Self::Native => None,
            Self::QemuImg => Some("qemu-img has no random offsets: it goes through the disk in long steps"),
            Self::Uml => Some("in User-mode Linux, where a system call takes tens of microseconds: compare within it"),
            Self::Qemu => Some("in a QEMU guest that TCG emulates: to be compared within the guest only"),
        }
    }
}

/// A row: what is measured in one go, all systems in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The client.
    pub client: Client,
    /// Writes rather than reads.
    pub write: bool,
    /// Random offsets rather than a walk.
    pub random: bool,
    /// Bytes of a request.
    pub block: usize,
    /// Requests in flight on each queue.
    pub depth: usize,
    /// Queues.
    pub queues: usize,
    /// The server uses O_DIRECT.
    pub direct: bool,
    /// Whether a quick run has it.
    pub quick: bool,
}

impl Step {
    /// Its name: for the published rows, the name there.
    pub fn name(self) -> String {
        let pattern = if self.random { "random" } else { "sequential" };
        let operation = if self.write { "write" } else { "read" };
        let block = if self.block == SECTOR_BYTES { "512B" } else { "4K" };
        let queues = if self.queues > 1 { format!(" queues {}", self.queues) } else { String::new() };
        format!("{}{pattern} {operation} {block} depth {}{queues}", self.client.prefix(), self.depth)
    }

    /// The name of one of our configurations in it.
    pub fn config(self, ours: System) -> String {
        format!("{}{}", ours.name(), if self.direct { " direct" } else { "" })
    }

    /// The systems that take turns.
    pub fn systems(self) -> Vec<System> {
        let (poll, sleep) = (System::Ferry(Way::Poll), System::Ferry(Way::Sleep));
        let qsd = System::StorageDaemon(Way::Poll);
        let mut systems = match self.client {
            Client::Native if !self.direct && self.queues == 1 => {
                vec![poll, qsd, sleep, System::StorageDaemon(Way::Sleep), System::Ferry(Way::Packed)]
            }
            Client::Native | Client::QemuImg | Client::Uml => vec![poll, qsd, sleep],
            Client::Qemu => vec![poll, System::QemuDisk(Aio::Uring), sleep, System::QemuDisk(Aio::Native), qsd],
        };
        if self.client == Client::Native && self.depth == 1 && self.queues == 1 {
            systems.push(System::BareFile);
        }
        systems
    }

    /// Whether what a request costs the server is counted, too.
    pub fn is_counted(self) -> bool {
        self.client == Client::Native && !self.direct && self.queues == 1
    }
}

/// All, in the order in which they run.
pub fn all() -> Vec<Step> {
    let native = Step {
        client: Client::Native,
        write: false,
        random: false,
        block: SECTOR_BYTES,
        depth: 1,
        queues: 1,
        direct: false,
        quick: true,
    };
    let both = |step: Step| [false, true].map(|write| Step { write, ..step });
    let published =
        |step: Step| both(step).into_iter().flat_map(|step| PUBLISHED_DEPTHS.map(|depth| Step { depth, ..step }));
    let random = |step: Step, depths: &'static [usize]| {
        let step = Step { random: true, block: PAGE_BYTES, ..step };
        both(step).into_iter().flat_map(move |step| depths.iter().map(move |&depth| Step { depth, ..step }))
    };
    let direct = Step { direct: true, ..native };
    let image = Step { client: Client::QemuImg, ..native };
    let uml = Step { client: Client::Uml, ..native };
    // O_DIRECT, as in the published runs; aio=native needs it, too.
    let qemu = Step { client: Client::Qemu, direct: true, ..native };
    // Of the other rows, a quick run has depths 1 and 32 only.
    let few = |step: Step| Step { quick: step.quick && (step.depth == 1 || step.depth == 32), ..step };
    published(native)
        .chain(random(native, &DEPTHS))
        .chain(
            [2, 4]
                .into_iter()
                .flat_map(|queues| random(Step { queues, quick: queues == 4, ..native }, &DEPTHS))
                .chain(published(direct))
                .chain(random(direct, &DEPTHS))
                .chain(published(image))
                .chain(random(image, &DEPTHS))
                .chain(published(uml))
                .chain(random(uml, &UML_DEPTHS))
                .chain(published(qemu))
                .chain(random(qemu, &QEMU_DEPTHS))
                .map(few),
        )
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_within_a_configuration() {
        let mut names: Vec<_> = all().into_iter().map(|step| (step.name(), step.direct)).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(names.contains(&("random write 4K depth 128 queues 4".into(), false)));
    }

    #[test]
    fn every_published_row_exists_for_each_client() {
        let published = super::super::report::published();
        assert_eq!(published.len(), 6);
        for row in published {
            for client in [Client::Native, Client::QemuImg, Client::Uml, Client::Qemu] {
                let name = format!("{}{}", client.prefix(), row.name);
                assert!(all().iter().any(|step| step.name() == name), "{name}");
            }
        }
    }
}
