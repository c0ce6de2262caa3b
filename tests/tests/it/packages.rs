//! The packages that `dist/package` builds: equal in each build, complete, and used as the guide says.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use ferry_tests::guest::Arch;
use ferry_tests::mounts::program;
use ferry_tests::{GuestCache, Place, TIMEOUT, directory, guest_on, run, static_program};
use serde_json::Value;

/// A stripped program is no larger.
const PROGRAM_BYTES_MAX: u64 = 25 << 20;

/// The agent is for guests of all sizes.
const AGENT_BYTES_MAX: u64 = 2_000_000;

/// Linux's standard name for a layer that was packed by gzip.
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

fn checked(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{command:?}: {}\n{stderr}", String::from_utf8_lossy(&stdout));
    String::from_utf8(stdout).unwrap()
}

/// Builds a package with a umask; returns its path.
fn build(kind: &str, program: &Path, directory: &Path, umask: &str) -> PathBuf {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../dist/package");
    let mut command = Command::new("sh");
    command.args(["-c", &format!("umask {umask}; exec {script} {kind}")]);
    // What is packed as the agent does not matter here.
    command.env("FERRY_AGENT", program).env("FERRY_SNAPSHOTTER", program.with_file_name("ferry-snapshotter"));
    command.env("FERRY", program).env("CARGO_TARGET_DIR", directory).env("SOURCE_DATE_EPOCH", "1790000000");
    PathBuf::from(checked(&mut command).trim_end())
}

/// Returns the contents of all files below a directory.
fn files(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else {
                let bytes = fs::read(&path).unwrap();
                files.insert(path, bytes);
            }
        }
    }
    files
}

/// From one program, two runs give the same bytes; Debian's checker has nothing to say.
#[test]
#[ignore = "long: packs the program four times"]
fn packages_are_reproducible_and_complete() {
    let directory = directory(Place::Disk);
    for (kind, needs) in [("deb", "dpkg-shlibdeps"), ("rpm", "rpmbuild")] {
        if !is_installed(needs) {
            ferry_skip::skip!("no {needs}: apt-get install dpkg-dev rpm");
            continue;
        }
        let package = build(kind, program(), directory.path(), "022");
        let first = fs::read(&package).unwrap();
        assert_eq!(build(kind, program(), directory.path(), "077"), package);
        assert!(fs::read(&package).unwrap() == first, "{kind}: two runs differ");
        let listed = match kind {
            "deb" => checked(Command::new("dpkg-deb").arg("--contents").arg(&package)),
            _ => checked(Command::new("rpm").args(["-qlp", "--dbpath"]).arg(directory.path()).arg(&package)),
        };
        for file in [
            "/usr/bin/ferry",
            "/usr/bin/ferry-agent",
            "/usr/bin/ferry-snapshotter",
            "/usr/share/man/man8/ferry-snapshotter.8.gz",
            "systemd/system/ferry-snapshotter.service",
            "/usr/sbin/mount.ferry",
            "/usr/share/man/man5/ferry.toml.5.gz",
            "systemd/system/ferry-mount@.service",
            "systemd/system/ferry-agent@.service",
            "/usr/share/ferry/openrc/ferry-agent",
            "/usr/share/qemu/vhost-user/50-ferry-disk.json",
            "/usr/share/ferry/grafana.json",
        ] {
            assert!(listed.contains(file), "{kind}: {file}: {listed}");
        }
        if kind == "deb" && is_installed("lintian") {
            assert_eq!(checked(Command::new("lintian").arg("--allow-root").arg(&package)), "");
        } else if kind == "deb" {
            ferry_skip::skip!("no lintian: apt-get install lintian");
        }
    }
}

/// What the guide does with a package, in a system of nothing but Debian's essential packages. `$1`: the system, `$2`: the package, which
/// is `ferry.deb` or `ferry.rpm` there.
///
/// RPM's database knows nothing of Debian's packages, so what the package needs is looked at by the test, and not by `rpm`.
const USE_PACKAGE: &str = r#"
mount --make-rprivate /
mount --rbind /dev "$1/dev"
mount -t proc proc "$1/proc"
rpm="rpm --root $1 --force-debian"
case $2 in
*.deb)
    cp "$2" "$1/ferry.deb"
    chroot "$1" apt-get -qq install --yes --no-install-recommends ./ferry.deb >/dev/null
    remove() { chroot "$1" apt-get -qq purge --yes ferry >/dev/null; }
    ;;
*)
    $rpm --install --nodeps "$2"
    $rpm --verify --nodeps ferry
    remove() { $rpm --erase ferry; }
    ;;
esac
chroot "$1" sh -euc '
    ferry --version
    ferry mount mem /mnt
    echo text >/mnt/file
    cat /mnt/file
    umount /mnt
    mount -t ferry mem /mnt -o size=1M
    df --output=size /mnt | tail -n 1
    umount /mnt
    ls -d /etc/ferry /lib/systemd/system/ferry-share@.socket /usr/share/ferry/grafana.json /usr/share/man/man1/ferry-share.1.gz
    stat --format "%U %a" /usr/bin/ferry
' sh
remove "$1"
[ ! -e "$1/usr/bin/ferry" ] && [ ! -e "$1/etc/ferry" ] && [ ! -e "$1/usr/share/ferry" ] && echo removed
"#;

#[test]
#[ignore = "long: installs a Debian system"]
fn packages_are_used_in_a_fresh_system() {
    let programs = ["debootstrap", "dpkg-shlibdeps", "rpmbuild"];
    if !rustix::process::geteuid().is_root() || !programs.into_iter().all(is_installed) {
        return ferry_skip::skip!("needs root, debootstrap, dpkg-dev and rpm: make test-all installs them");
    }
    let release = fs::read_to_string("/etc/os-release").unwrap();
    let Some(suite) = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME=")) else {
        return ferry_skip::skip!("/etc/os-release names no suite of Debian");
    };
    let directory = directory(Place::Disk);
    let system = directory.path().join("system");
    checked(Command::new("debootstrap").args(["--variant=minbase", suite]).arg(&system));
    for kind in ["deb", "rpm"] {
        let package = build(kind, program(), directory.path(), "022");
        let mut script = Command::new("unshare");
        script.args(["--mount", "--pid", "--fork", "sh", "-euc", USE_PACKAGE, "sh"]).args([&system, &package]);
        let said = checked(script.env("DEBIAN_FRONTEND", "noninteractive").env_remove("FERRY_LOG"));
        let said: Vec<_> = said.lines().map(str::trim).collect();
        let version = concat!("ferry ", env!("CARGO_PKG_VERSION"));
        let unit = "/lib/systemd/system/ferry-share@.socket";
        let dashboard = "/usr/share/ferry/grafana.json";
        let page = "/usr/share/man/man1/ferry-share.1.gz";
        let expected = [version, "text", "1024", "/etc/ferry", unit, dashboard, page, "root 755", "removed"];
        assert_eq!(said, expected, "{kind}");
    }
}

/// A distribution with RPM has what the package needs: the C library, a shell, and features of `rpm` itself.
#[test]
#[ignore = "long: packs the program"]
fn the_rpm_needs_no_more_than_every_system_has() {
    if !is_installed("rpmbuild") {
        return ferry_skip::skip!("no rpmbuild: apt-get install rpm");
    }
    let directory = directory(Place::Disk);
    let package = build("rpm", program(), directory.path(), "022");
    let query = |words: &[&str]| {
        let mut rpm = Command::new("rpm");
        rpm.arg("--query").args(words).arg("--package").arg("--dbpath").arg(directory.path()).arg(&package);
        checked(&mut rpm)
    };
    let known = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux", "rtld(GNU_HASH)", "rpmlib(", "/bin/sh"];
    for needed in query(&["--requires"]).lines() {
        assert!(known.iter().any(|known| needed.starts_with(known)), "{needed}");
    }
    // Directories of the system's are not the package's: it would conflict with others.
    let shown = query(&["--queryformat", "[%{FILEMODES:perms} %{FILEUSERNAME} %{FILENAMES}\\n]"]);
    let mut directories: Vec<_> = shown.lines().filter(|line| line.starts_with('d')).collect();
    directories.sort_unstable_by_key(|line| line.rsplit_once(' '));
    let licenses = concat!("/usr/share/licenses/ferry-", env!("CARGO_PKG_VERSION"));
    assert_eq!(
        directories,
        ["/etc/ferry", "/usr/share/ferry", "/usr/share/ferry/openrc", licenses]
            .map(|path| format!("drwxr-xr-x root {path}"))
    );
    assert!(shown.lines().all(|line| line.contains(" root /")), "{shown}");
}

/// Returns the bytes that a descriptor of an OCI image names, after a check of their size and digest.
fn blob(image: &Path, descriptor: &Value) -> Vec<u8> {
    let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
    let path = image.join("blobs/sha256").join(digest);
    let bytes = fs::read(&path).unwrap();
    assert_eq!(descriptor["size"], bytes.len());
    assert_eq!(sha256(&path), digest);
    bytes
}

fn sha256(path: &Path) -> String {
    checked(Command::new("sha256sum").arg(path)).split(' ').next().unwrap().to_owned()
}

/// Unpacks an image by what its JSON documents say, and returns its configuration.
fn unpack(image: &Path, root: &Path) -> Value {
    let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
    assert_eq!(json(&fs::read(image.join("oci-layout")).unwrap())["imageLayoutVersion"], "1.0.0");
    let index = json(&fs::read(image.join("index.json")).unwrap());
    let manifest = json(&blob(image, &index["manifests"][0]));
    let config = json(&blob(image, &manifest["config"]));
    let layer = &manifest["layers"][0];
    assert_eq!(layer["mediaType"], LAYER);
    let packed = root.with_extension("tar.gz");
    fs::write(&packed, blob(image, layer)).unwrap();
    checked(Command::new("gzip").arg("--decompress").arg(&packed));
    let archive = root.with_extension("tar");
    assert_eq!(config["rootfs"]["diff_ids"][0], format!("sha256:{}", sha256(&archive)));
    fs::create_dir(root).unwrap();
    checked(Command::new("tar").arg("--extract").arg("--file").arg(&archive).arg("--directory").arg(root));
    config
}

/// Runs the image's program as a container would: with namespaces, a /proc and the volumes. `$1`: the root, `$2`: the volume of
/// files, `$3`: the volume of the socket.
const RUN_CONTAINER: &str = r#"
mount --make-rprivate /
mkdir "$1/proc" "$1/dev"
mount -t proc proc "$1/proc"
mount --bind "$2" "$1/srv"
mount --bind "$3" "$1/run/ferry-share"
root=$1
shift 3
exec chroot "$root" "$@"
"#;

/// Ends a process and all in its PID namespace.
struct Container(Child);

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "long: packs the program and boots a guest"]
fn the_container_image_is_reproducible_and_shares_its_volume() {
    let Some(ferry) = static_program(Arch::HOST, "ferry") else { return };
    if !rustix::process::geteuid().is_root() {
        return ferry_skip::skip!("needs root for namespaces");
    }
    let directory = directory(Place::Disk);
    let path = |name: &str| directory.path().join(name);
    let image = build("container", &ferry, directory.path(), "022");
    let first = files(&image);
    assert_eq!(build("container", &ferry, directory.path(), "077"), image);
    assert!(files(&image) == first, "two runs differ");

    let config = unpack(&image, &path("root"));
    for program in ["ferry", "ferry-snapshotter"] {
        let mode = fs::metadata(path("root/usr/bin").join(program)).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o755, "{program}");
    }
    // What a node of Kubernetes runs, in a container without a shell.
    let installs = "command: [/usr/bin/ferry-snapshotter, --install-to, /node]";
    assert!(include_str!("../../../dist/kubernetes/ferry-snapshotter.yaml").contains(installs));
    let told = checked(Command::new("chroot").arg(path("root")).args(["/usr/bin/ferry-snapshotter", "--help"]));
    assert!(told.contains("--install-to"), "{told}");
    // Other programs read it, too.
    let cache = GuestCache::from_env().unwrap();
    let layout = format!("oci:{}", image.display());
    let told = checked(Command::new(cache.skopeo().unwrap()).args(["inspect", "--config", &layout]));
    assert_eq!(serde_json::from_str::<Value>(&told).unwrap()["config"]["Entrypoint"], config["config"]["Entrypoint"]);
    let tagged = format!("{}:{}", image.display(), env!("CARGO_PKG_VERSION"));
    checked(Command::new(cache.umoci().unwrap()).args(["unpack", "--image", &tagged]).arg(path("bundle")));
    assert!(files(&path("bundle/rootfs")).values().eq(files(&path("root")).values()));

    for volume in ["files", "socket"] {
        fs::create_dir(path(volume)).unwrap();
    }
    fs::write(path("files/from-host"), "hello").unwrap();
    let words = |name: &str| config["config"][name].as_array().unwrap().clone();
    // User-mode Linux takes the tag from the device.
    let command = [words("Entrypoint"), words("Cmd"), vec!["--tag".into(), "t".into()]].concat();
    let mut container = Command::new("unshare");
    container.args(["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]);
    container.args(["sh", "-euc", RUN_CONTAINER, "sh"]).args([path("root"), path("files"), path("socket")]);
    container.args(command.iter().map(|word| word.as_str().unwrap())).env_clear();
    container.env("PATH", std::env::var_os("PATH").unwrap()).stdin(Stdio::null());
    let mut container = Container(container.spawn().unwrap());
    let socket = path("socket/share.sock");
    let begin = Instant::now();
    while !socket.exists() {
        assert!(container.0.try_wait().unwrap().is_none(), "it ended");
        assert!(begin.elapsed() < TIMEOUT, "no socket");
        std::thread::sleep(Duration::from_millis(20));
    }
    let ran = run(guest_on(&socket, ["sh", "-euc", "cat from-host; echo text >from-guest"]), TIMEOUT);
    assert_eq!(ran.ok(), "hello");
    assert_eq!(fs::read_to_string(path("files/from-guest")).unwrap(), "text\n");
}

#[test]
#[ignore = "long: make test-all builds the programs"]
fn static_programs_need_no_library_and_are_small() {
    for arch in [Arch::HOST, Arch::Aarch64] {
        let programs =
            [("ferry", PROGRAM_BYTES_MAX), ("ferry-snapshotter", PROGRAM_BYTES_MAX), ("ferry-agent", AGENT_BYTES_MAX)];
        for (name, bytes_max) in programs {
            let Some(program) = static_program(arch, name) else { continue };
            let bytes = fs::read(&program).unwrap();
            assert!(bytes.len() as u64 <= bytes_max, "{}: {} bytes", program.display(), bytes.len());
            // `e_phoff`, `e_phentsize` and `e_phnum` of a 64-bit ELF file. PT_INTERP names the program that loads libraries.
            let number = |at: usize, length: usize| {
                bytes[at..at + length].iter().rev().fold(0, |number, byte| (number << 8) | usize::from(*byte))
            };
            let (at, size, count) = (number(32, 8), number(54, 2), number(56, 2));
            assert!(count > 0 && (0..count).all(|index| number(at + index * size, 4) != 3), "{}", program.display());
            assert_eq!(number(18, 2), if arch == Arch::Aarch64 { 183 } else { 62 }, "{}", program.display());
        }
    }
}
