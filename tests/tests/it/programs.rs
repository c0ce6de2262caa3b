//! Programs that people run: git, tar, fio, sqlite.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ferry_tests::suites::programs::{
    FIO_ENGINES, MAKE_REPOSITORY, SQLITE, USE_REPOSITORY, fio as fio_line, has_sqlite,
};
use ferry_tests::{Cache, MOUNTPOINT, Place, Share, cache_name, directory, run};

#[test]
fn git() {
    for cache in [Cache::None, Cache::Auto, Cache::Always] {
        let share = Share::new(cache);
        let made = Command::new("sh").args(["-euc", MAKE_REPOSITORY]).current_dir(&share.path).status().unwrap();
        assert!(made.success());
        let ran = share.sh(USE_REPOSITORY);
        println!("git, cache {}: {:?}", cache_name(cache), ran.took);
        ran.ok();
        share.assert_released();
        for repository in ["repo", "clone"] {
            let fsck = Command::new("git")
                .args(["-c", "safe.directory=*", "-C"])
                .arg(share.path.join(repository))
                .args(["fsck", "--full", "--strict"])
                .status();
            assert!(fsck.unwrap().success(), "git fsck on the host");
        }
    }
}

/// A tree with all kinds of entries; `FILES` regular ones.
const MAKE_TREE: &str = r#"
mkdir tree && cd tree
for dir in $(seq 1 20); do
    mkdir -p d$dir/deep/er
    for file in $(seq 1 $((FILES / 20))); do echo "$dir $file" >d$dir/deep/f$file; done
    head -c $((dir * 30000)) /dev/urandom >d$dir/big
    ln -s ../d1/big d$dir/link; ln d$dir/big d$dir/hard; mkfifo d$dir/fifo
    touch -d '2001-02-03 04:05:06.789012345' d$dir/deep
done
truncate -s 10M sparse; echo end >>sparse
chown -R 12:34 d3; chmod 4755 d4/big; setfattr -n user.x -v y d5/big 2>/dev/null || :
"#;

/// Modes, owners, times, links, contents of everything below a directory.
const LIST: &str = r#"cd "$1" && find . -printf '%p %y %m %U %G %n %s %l %T@\n' | sed 's/ d \([0-9]*\) \([0-9]*\) \([0-9]*\) [0-9]* [0-9]* / d \1 \2 \3 - - /' |
    LC_ALL=C sort && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum"#;

fn tar(files: u32) {
    for cache in [Cache::Auto, Cache::None] {
        let share = Share::new(cache);
        let host = directory(Place::Disk);
        let mut make = Command::new("sh");
        make.args(["-euc", MAKE_TREE]).env("FILES", files.to_string()).current_dir(&host);
        assert!(make.status().unwrap().success());
        let pack =
            Command::new("tar").args(["--format=posix", "-cf", "in.tar", "tree"]).current_dir(&host).status().unwrap();
        assert!(pack.success());
        // In (unpacked in the guest), and out (packed in the guest) again.
        let script = format!(
            "tar xpf {0}/in.tar && tar --format=posix -cf out.tar tree && tar df {0}/in.tar",
            host.path().display()
        );
        let ran = run(share.guest(["sh", "-euc", &script]), Duration::from_secs(600));
        println!("tar of {files} files, cache {}: {:?}", cache_name(cache), ran.took);
        ran.ok();
        share.assert_released();
        let back = host.path().join("back");
        std::fs::create_dir(&back).unwrap();
        let unpack =
            Command::new("tar").arg("xpf").arg(share.path.join("out.tar")).current_dir(&back).status().unwrap();
        assert!(unpack.success());
        let list = |path: &std::path::Path| {
            let output = Command::new("sh").args(["-euc", LIST, "list"]).arg(path).output().unwrap();
            assert!(output.status.success());
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let original = list(&host.path().join("tree"));
        assert!(original == list(&share.path.join("tree")), "what was unpacked in the guest differs");
        assert!(original == list(&back.join("tree")), "what was packed in the guest differs");
    }
}

#[test]
fn tar_both_ways() {
    tar(1000);
}

#[test]
#[ignore = "long: make test-all"]
fn tar_both_ways_with_many_files() {
    tar(30_000);
}

/// User-mode Linux maps each page of a process on its own, and the host allows a process 65,530 maps
/// (`vm.max_map_count`): past that the guest's kernel takes the same fault for ever. fio maps its file again in each
/// loop.
const MAPPED_MIB_MAX: u32 = 160;

fn fio(loops: u32, size_mib: u32) {
    for cache in [Cache::None, Cache::Auto, Cache::Always] {
        for &(engine, more) in FIO_ENGINES {
            let share = Share::new(cache);
            let size_mib = if engine == "mmap" { size_mib.min(MAPPED_MIB_MAX / loops) } else { size_mib };
            let script = fio_line(Path::new(MOUNTPOINT), engine, more, size_mib, loops);
            let ran = run(share.guest(["sh", "-euc", &script]), Duration::from_secs(120 + u64::from(loops) * 30));
            println!("fio --verify, {engine}, cache {}: {:?}", cache_name(cache), ran.took);
            ran.ok();
            share.assert_released();
        }
    }
}

#[test]
fn fio_verifies() {
    fio(1, 8);
}

#[test]
#[ignore = "long: make test-all"]
fn fio_verifies_for_long() {
    fio(5, 64);
}

#[test]
fn sqlite() {
    if !has_sqlite() {
        ferry_skip::skip!("/usr/bin/python3 has no sqlite3 here");
        return;
    }
    for cache in [Cache::None, Cache::Auto, Cache::Always] {
        let share = Share::new(cache);
        run(share.guest(["/usr/bin/python3", "-c", SQLITE, "delete"]), Duration::from_secs(120)).ok();
        share.assert_released();
    }
}
