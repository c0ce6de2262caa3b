//! Programs that people run: git, tar, fio, sqlite.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::process::Command;
use std::time::Duration;

use ferry_tests::{Cache, GuestCache, MOUNTPOINT, Place, Share, cache_name, folder, run};

/// A repository with a history of its own, made on the host.
const MAKE_REPOSITORY: &str = r#"
git init -q -b main repo && cd repo
git config user.email a@example.org && git config user.name a
for commit in $(seq 1 20); do
    mkdir -p dir$((commit % 5))/sub
    for file in $(seq 1 20); do seq $commit $((commit * 50 + file)) >dir$((commit % 5))/sub/file$file; done
    git add -A && git commit -q -m "commit $commit"
done
git tag middle HEAD~10
"#;

const USE_REPOSITORY: &str = r#"
export HOME=/tmp GIT_CONFIG_NOSYSTEM=1
git config --global --add safe.directory '*'
git config --global user.email a@example.org && git config --global user.name a
git clone -q repo clone && cd clone
git checkout -q middle && git status --porcelain | (! grep .) && git checkout -q main
echo change >>dir1/sub/file1 && git commit -qam change
git rm -qr dir2 && git commit -qm removed && git mv dir3 dir9 && git commit -qm moved
git gc -q --prune=now
git fsck --full --strict 2>&1 | (! grep -i error)
git reset -q --hard HEAD~3 && git status --porcelain | (! grep .)
cd ../repo && git fsck --full 2>&1 | (! grep -i error)
"#;

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

/// Modes, owners, times, links, contents of everything below a folder.
const LIST: &str = r#"cd "$1" && find . -printf '%p %y %m %U %G %n %s %l %T@\n' | sed 's/ d \([0-9]*\) \([0-9]*\) \([0-9]*\) [0-9]* [0-9]* / d \1 \2 \3 - - /' |
    LC_ALL=C sort && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum"#;

fn tar(files: u32) {
    for cache in [Cache::Auto, Cache::None] {
        let share = Share::new(cache);
        let host = folder(Place::Disk);
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

fn fio(seconds: u32, size_mib: u32) {
    let program = GuestCache::from_env().unwrap().peer("fio").unwrap();
    for cache in [Cache::None, Cache::Auto, Cache::Always] {
        for (engine, more) in [("psync", ""), ("libaio", "--direct=1 --iodepth=16"), ("mmap", "")] {
            let share = Share::new(cache);
            let script = format!(
                "{} --name=v --directory={MOUNTPOINT} --size={size_mib}M --rw=randrw --bsrange=4k-64k --blockalign=4k \
                 --verify=crc32c --verify_fatal=1 --do_verify=1 --numjobs=2 --ioengine={engine} {more} --loops={seconds} \
                 --minimal >/dev/null",
                program.display()
            );
            let ran = run(share.guest(["sh", "-euc", &script]), Duration::from_secs(120 + u64::from(seconds) * 30));
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

const SQLITE: &str = r#"
import sqlite3, sys, threading
def work(name, count):
    db = sqlite3.connect("db", timeout=60)
    for number in range(count):
        with db: db.execute("insert into t values (?, ?)", (name, number))
db = sqlite3.connect("db")
db.execute("pragma journal_mode=delete")
db.execute("create table t (name text, number integer)")
db.commit()
threads = [threading.Thread(target=work, args=(str(n), 20)) for n in range(3)]
[t.start() for t in threads]
[t.join() for t in threads]
assert db.execute("select count(*) from t").fetchone() == (60,)
assert db.execute("pragma integrity_check").fetchone() == ("ok",)
"#;

#[test]
fn sqlite() {
    if !Command::new("/usr/bin/python3").args(["-c", "import sqlite3"]).status().is_ok_and(|status| status.success()) {
        println!("skipped: /usr/bin/python3 has no sqlite3 here");
        return;
    }
    for cache in [Cache::None, Cache::Auto, Cache::Always] {
        let share = Share::new(cache);
        run(share.guest(["/usr/bin/python3", "-c", SQLITE]), Duration::from_secs(120)).ok();
        share.assert_released();
    }
}
