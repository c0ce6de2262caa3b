//! Disks with a public client: libblkio in qemu-io.

use std::fs;
use std::os::unix::fs::FileExt;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use ferry_disk::{Cache, Format, Options};
use ferry_tests::disks::{DiskServer, tool};
use ferry_tests::{Place, directory};

const MIB: u64 = 1 << 20;

#[track_caller]
fn good(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !text.contains("failed") && !errors.contains("failed"), "{text}\n{errors}");
    text
}

#[track_caller]
fn bad(output: &Output) {
    let both = [&output.stdout[..], &output.stderr].concat();
    let text = String::from_utf8_lossy(&both);
    assert!(text.contains("Input/output error") || text.contains("failed"), "it worked:\n{text}");
}

#[test]
fn reads_writes_zeroes_and_discards() {
    for (place, cache) in [
        (Place::Disk, Cache::None),
        (Place::Disk, Cache::Writeback),
        (Place::Disk, Cache::Writethrough),
        (Place::Memory, Cache::None),
    ] {
        let disk = DiskServer::new(place, 64 * MIB, &Options { cache: Some(cache), ..Options::default() });
        good(&disk.qemu_io(&[
            "write -P 7 0 2M",
            "read -P 7 0 2M",
            "read -P 0 2M 1M",
            "write -z 100k 50k",
            "read -P 0 100k 50k",
            "read -P 7 150k 10k",
            "write -P 9 512 512",
            "read -P 9 512 512",
            "read -P 7 1024 512",
            "flush",
        ]));
        let before = disk.allocated();
        good(&disk.qemu_io(&["discard 1M 1M", "write -z -u 512k 256k", "read -P 0 512k 256k", "read -P 0 1M 1M"]));
        assert!(disk.allocated() + MIB <= before, "{cache:?}: {before} before, {} after", disk.allocated());
        bad(&disk.qemu_io(&["read 64M 512"]));
        good(&disk.qemu_io(&["write -P 5 67108352 512", "read -P 5 67108352 512"]));
        let file = fs::read(&disk.file).unwrap();
        assert_eq!((file[511], file[512], file[1023], file[1024], file.len() as u64), (7, 9, 9, 7, 64 * MIB));
    }
}

#[test]
fn images_of_qemu_are_served_and_stay_sound() {
    for cache in [None, Some(Cache::None), Some(Cache::Writethrough)] {
        images_with(cache);
    }
}

fn images_with(cache: Option<Cache>) {
    let directory = directory(Place::Disk);
    let file = directory.path().join("disk");
    let img = |args: &[&str]| {
        let output = Command::new(tool("qemu-img")).args(args).arg(&file).output().unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
    };
    let created = Command::new(tool("qemu-img")).args(["create", "-q", "-f", "qcow2"]).arg(&file).arg("64M").status();
    assert!(created.unwrap().success());
    let options = Options { format: Some(Format::Qcow2), grow_to: Some(96 * MIB), cache, ..Options::default() };
    let disk = DiskServer::of(file.clone(), directory, &options);
    assert!(good(&disk.qemu_io(&["length"])).contains("96 MiB"));
    good(&disk.qemu_io(&[
        "write -P 3 0 8M",
        "write -P 4 65024 1024",
        "discard 1M 2M",
        "write -z 5M 100k",
        "write -z -u 6M 100k",
        "write -P 8 95M 1M",
        "flush",
        "read -P 4 65024 1024",
        "read -P 0 1M 2M",
        "read -P 0 5M 100k",
        "read -P 0 6M 100k",
        "read -P 3 7M 1M",
    ]));
    img(&["check", "-U", "-f", "qcow2"]);
    bad(&disk.qemu_io(&["read 96M 512"]));
    good(&disk.qemu_io(&["read -P 8 95M 1M"]));
}

#[test]
fn a_read_only_disk_stays_as_it_is() {
    let directory = directory(Place::Disk);
    let file = directory.path().join("disk");
    fs::write(&file, vec![3; 1 << 20]).unwrap();
    let disk = DiskServer::of(file.clone(), directory, &Options { read_only: true, ..Options::default() });
    bad(&disk.qemu_io(&["write -P 1 0 512"]));
    assert!(fs::read(&file).unwrap() == vec![3; 1 << 20]);
}

#[test]
fn a_full_disk_fails_only_allocating_requests() {
    let mounted = Tmpfs::new();
    let directory = tempfile::tempdir_in(mounted.0.path()).unwrap();
    let file = directory.path().join("disk");
    ferry_disk::grow(&file, 16 * MIB, &Options::default()).unwrap();
    let disk = DiskServer::of(file.clone(), directory, &Options::default());
    good(&disk.qemu_io(&["write -P 4 0 64k"]));
    fs::write(mounted.0.path().join("filler"), vec![1; 4 << 20]).unwrap_err();
    bad(&disk.qemu_io(&["write -P 5 1M 64k"]));
    good(&disk.qemu_io(&["read -P 4 0 64k", "write -P 6 0 64k", "read -P 6 0 64k", "read -P 0 2M 64k"]));
    fs::remove_file(mounted.0.path().join("filler")).unwrap();
    good(&disk.qemu_io(&["write -P 5 1M 64k", "read -P 5 1M 64k"]));
}

/// Waits until the server has noticed the length of the file.
fn wait_for_length(disk: &DiskServer, length: &str) {
    let end = Instant::now() + Duration::from_secs(60);
    while good(&disk.qemu_io(&["length"])).trim() != length {
        assert!(Instant::now() < end, "it is not {length} long");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_truncated_file_fails_only_requests_past_its_end() {
    let disk = DiskServer::new(Place::Disk, 4 * MIB, &Options::default());
    good(&disk.qemu_io(&["write -P 4 0 4M"]));
    fs::File::options().write(true).open(&disk.file).unwrap().set_len(MIB).unwrap();
    bad(&disk.qemu_io(&["read 2M 64k"]));
    good(&disk.qemu_io(&["read -P 4 0 1M"]));
    // And once it has been noticed, writes do not make the file grow again.
    wait_for_length(&disk, "1 MiB");
    bad(&disk.qemu_io(&["write 2M 64k"]));
    assert_eq!(fs::metadata(&disk.file).unwrap().len(), MIB);
}

#[test]
fn a_larger_file_is_a_larger_disk() {
    let disk = DiskServer::new(Place::Disk, 4 * MIB, &Options::default());
    assert!(good(&disk.qemu_io(&["length"])).contains("4 MiB"));
    ferry_disk::grow(&disk.file, 8 * MIB, &Options::default()).unwrap();
    wait_for_length(&disk, "8 MiB");
    good(&disk.qemu_io(&["write -P 1 7M 1M", "read -P 1 7M 1M"]));
}

#[test]
fn direct_writes_are_seen_by_unaligned_requests() {
    let disk = DiskServer::new(Place::Disk, 4 * MIB, &Options::default());
    good(&disk.qemu_io(&["write -P 1 0 64k", "aio_write -P 2 4096 4096", "aio_flush", "read -P 2 4096 4096"]));
    let mut bytes = [0; 3];
    let file = fs::File::open(&disk.file).unwrap();
    for (index, at) in [4095, 4096, 8192].into_iter().enumerate() {
        file.read_exact_at(&mut bytes[index..=index], at).unwrap();
    }
    assert_eq!(bytes, [1, 2, 1]);
}

/// A file system of 2 MiB.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn new() -> Self {
        let at = directory(Place::Disk);
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=2m", "tmpfs"]).arg(at.path()).status().unwrap();
        assert!(mount.success());
        Self(at)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Other people's load, through other people's driver.
#[test]
fn qemu_img_bench_runs() {
    for cache in [Cache::None, Cache::Writeback] {
        let disk = DiskServer::new(Place::Disk, 64 * MIB, &Options { cache: Some(cache), ..Options::default() });
        for args in [
            &["-d", "1", "-s", "512"][..],
            &["-d", "32", "-s", "4096", "-w", "--flush-interval=64"],
            &["-d", "64", "-s", "65536"],
        ] {
            let image = format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", disk.socket.display());
            let mut program = Command::new(tool("qemu-img"));
            let output = program
                .args(["bench", "-c", "1000", "-t", "none"])
                .args(args)
                .args(["--image-opts", &image])
                .output()
                .unwrap();
            assert!(good(&output).contains("Run completed"), "{output:?}");
        }
    }
}
