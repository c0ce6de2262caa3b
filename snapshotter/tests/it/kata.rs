//! Containers in virtual machines, with the steps of Kata's shim: it starts virtiofsd and the machine, and for each container mounts what
//! the snapshotter says on the host, and binds that into the share.

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ferry_guest::{Cache, Device, Guest, Input, Mount, Output, Running};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_bind_recursive, mount_change, unmount};

use crate::lazy_place::{LARGE, Place, WAYS, ferry, is_right, layers, noise, until};
use crate::server::{Mounted, can_mount};
use crate::toc_layers::{Format, sha256};

/// Far more than a guest needs.
const LIMIT: Duration = Duration::from_secs(300);
/// What a guest does: it waits for both containers, reads every byte, and writes.
const SCRIPT: &str = "
    for name in one two; do
        until [ -e $name/rootfs/small ] || [ -e $name/rootfs/stop ]; do sleep 0.1; done
        cd $name/rootfs
        sha256sum small other large above
        [ -e hidden ] && echo hidden
        echo from the guest >small && cat small && mkdir dir && mv small dir && rm other && ls
        cd ../..
        echo end of $name
    done";

/// The directories of a machine, and its virtiofsd.
struct Sandbox {
    directory: tempfile::TempDir,
    virtiofsd: Child,
    containers: Vec<PathBuf>,
}

impl Sandbox {
    /// The share shows what is mounted below `mounts` later, as a slave of it. Without a program, ours is virtiofsd.
    fn start(program: Option<&Path>) -> Self {
        let directory = tempfile::Builder::new().prefix("ferry-kata.").tempdir_in("/var/tmp").unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["mounts", "shared"] {
            fs::create_dir(at(name)).unwrap();
        }
        mount_bind(at("mounts"), at("mounts")).unwrap();
        mount_change(at("mounts"), MountPropagationFlags::SHARED).unwrap();
        mount_bind_recursive(at("mounts"), at("shared")).unwrap();
        mount_change(at("shared"), MountPropagationFlags::DOWNSTREAM).unwrap();
        std::os::unix::fs::symlink(program.unwrap_or(ferry()), at("virtiofsd")).unwrap();
        let socket = UnixListener::bind(at("s")).unwrap();
        let mut command = Command::new("sh");
        // User-mode Linux asks the device for the tag.
        let line = "exec $0 --cache=auto --shared-dir=$1 --fd=3 --thread-pool-size=1 --announce-submounts --tag kataShared 3<&0 0</dev/null";
        command.args(["-c", line]).arg(at("virtiofsd")).arg(at("shared"));
        let virtiofsd = command.stdin(std::os::fd::OwnedFd::from(socket)).spawn().unwrap();
        Self { directory, virtiofsd, containers: Vec::new() }
    }

    /// Binds the root of a container into the share.
    fn add(&mut self, name: &str, root: &Path) {
        let at = self.directory.path().join("mounts").join(name).join("rootfs");
        fs::create_dir_all(&at).unwrap();
        mount_bind_recursive(root, &at).unwrap();
        self.containers.push(at);
    }

    fn remove(&mut self) {
        for at in self.containers.drain(..) {
            unmount(&at, UnmountFlags::DETACH).unwrap();
        }
    }
}

/// A virtual machine with a share.
struct Machine(Running, JoinHandle<String>);

impl Machine {
    fn start(cache: &Cache, socket: &Path, script: &str) -> Self {
        let mut guest = Guest::new(cache.clone(), ["sh", "-c", script]);
        guest.devices = vec![Device::fs(socket, "kataShared")];
        guest.mounts = vec![Mount::virtiofs("kataShared", "/run/containers")];
        guest.cwd = "/run/containers".into();
        (guest.stdin, guest.stdout, guest.stderr) = (Input::Null, Output::Piped, Output::Inherit);
        let mut running = guest.spawn().unwrap();
        let mut out = running.stdout.take().unwrap();
        let reader = thread::spawn(move || {
            let mut said = String::new();
            out.read_to_string(&mut said).unwrap();
            said
        });
        Self(running, reader)
    }

    fn end(self) -> (i32, String) {
        (self.0.wait_timeout(LIMIT).unwrap(), self.1.join().unwrap())
    }
}

/// What `sha256sum` prints of the image's files.
fn sums() -> String {
    let sum = |seed, length| sha256(&noise(seed, length)).replace("sha256:", "");
    let files = [("small", 1, 20_000), ("other", 2, 20_000), ("large", 4, LARGE), ("above", 5, 20_000)];
    files.map(|(name, seed, length)| format!("{}  {name}\n", sum(seed, length))).concat()
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.virtiofsd.kill().and_then(|()| self.virtiofsd.wait());
        self.remove();
        for name in ["shared", "mounts"] {
            let _ = unmount(self.directory.path().join(name), UnmountFlags::DETACH);
        }
    }
}

/// kata-containers/kata-containers issue 10502: what is mounted after the start of virtiofsd was not seen in the guest.
#[test]
fn guests_see_containers_through_a_share_as_kata_makes_it() {
    if !can_mount() {
        return;
    }
    let cache = Cache::from_env().unwrap();
    let theirs = cache.peer("virtiofsd");
    if theirs.is_err() {
        eprintln!("virtiofsd itself is not here (guest/fetch peers): only ours is tried");
    }
    // By the kernel's EROFS, and by FUSE.
    for (way, program) in
        WAYS.map(|way| (way, None)).into_iter().chain(theirs.iter().map(|theirs| (WAYS[0], Some(&**theirs))))
    {
        let place = &mut Place::of(way, 0);
        let mut client = place.server.client();
        place.pull(&mut client);
        let mut sandbox = Sandbox::start(program);
        let guest = Machine::start(&cache, &sandbox.directory.path().join("s"), SCRIPT);
        // The machine runs.
        let mut roots = Vec::new();
        for name in ["one", "two"] {
            let root = Mounted::of(&client.prepare(name, &place.top()).unwrap());
            sandbox.add(name, root.path());
            roots.push(root);
            // It is not needed by what runs.
            place.server.kill();
            client = place.server.start_again();
        }
        let (status, said) = guest.end();
        let sums = sums();
        let expected = ["one", "two"].map(|name| format!("{sums}from the guest\nabove\ndir\nlarge\nend of {name}\n"));
        assert_eq!((status, said), (0, expected.concat()), "{way:?}");
        // What it wrote is in the containers' own layers.
        for root in &roots {
            assert_eq!(fs::read_to_string(root.path().join("dir/small")).unwrap(), "from the guest\n");
        }
        until("the end of virtiofsd", || sandbox.virtiofsd.try_wait().unwrap().is_some());
        sandbox.remove();
        // Nothing keeps the mounts.
        drop(roots);
        for name in ["one", "two"] {
            client.remove(name).unwrap();
        }
    }
}

/// For runtimes that give a machine a share per image: the image itself by virtio-fs, with memory of the machine above it.
#[test]
fn guests_read_images_of_the_snapshotter_directly() {
    if !can_mount() {
        return;
    }
    let cache = Cache::from_env().unwrap();
    for format in [Format::Estargz, Format::ZstdChunked] {
        let mut place = Place::new(layers(format));
        let mut client = place.server.client();
        place.pull(&mut client);
        let [directory] = &place.images()[..] else { panic!("one image") };
        let about: toml::Table = toml::from_str(&fs::read_to_string(directory.join("about.toml")).unwrap()).unwrap();
        let word = |name: &str| about[name].as_str().unwrap().to_owned();
        let mut command = Command::new(ferry());
        command.arg("share").arg(format!("image:{}", directory.join("image").display()));
        command.arg("--store").arg(place.server.root().join("store")).args(["--digest", &word("digest")]);
        let socket = place.server.directory.path().join("image.sock");
        command.args(["--from", &word("from"), "--tag", "kataShared", "--once", "--virtiofs"]).arg(&socket);
        let mut share = command.spawn().unwrap();
        until("the socket", || socket.exists() || share.try_wait().unwrap().is_some());
        let script = "
            mkdir /tmp/upper && mount -t tmpfs tmpfs /tmp/upper && mkdir /tmp/upper/fs /tmp/upper/work
            mkdir /tmp/root && mount -t overlay overlay -o lowerdir=.,upperdir=/tmp/upper/fs,workdir=/tmp/upper/work /tmp/root
            cd /tmp/root && sha256sum small other large above && echo new >small && cat small && rm other && ls";
        let (status, said) = Machine::start(&cache, &socket, script).end();
        assert_eq!((status, said), (0, format!("{}new\nabove\nlarge\nsmall\n", sums())), "{format:?}");
        assert!(share.wait().unwrap().success());
        // The host's containers see the same packs.
        let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
        place.fake.requests();
        is_right(mounted.path());
        assert_eq!(place.fetched(), 0, "{format:?}");
    }
}
