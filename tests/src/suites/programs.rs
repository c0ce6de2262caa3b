//! Programs that people run, as scripts: git, sqlite, fio.

use std::path::Path;

use ferry_guest::Cache;

/// A repository with a history of its own; `sh -euc` in an empty directory.
pub const MAKE_REPOSITORY: &str = r#"
git init -q -b main repo && cd repo
git config user.email a@example.org && git config user.name a
for commit in $(seq 1 20); do
    mkdir -p dir$((commit % 5))/sub
    for file in $(seq 1 20); do seq $commit $((commit * 50 + file)) >dir$((commit % 5))/sub/file$file; done
    git add -A && git commit -q -m "commit $commit"
done
git tag middle HEAD~10
"#;

/// Uses that repository in the ways of a working day. `SCRATCH` is where git's own settings may go.
pub const USE_REPOSITORY: &str = r#"
export HOME=${SCRATCH:-/tmp} GIT_CONFIG_NOSYSTEM=1
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

/// Three threads that write to one database, in the journal mode of the first argument (Python).
pub const SQLITE: &str = r#"
import sqlite3, sys, threading
def work(name, count):
    db = sqlite3.connect("db", timeout=60)
    for number in range(count):
        with db: db.execute("insert into t values (?, ?)", (name, number))
db = sqlite3.connect("db")
mode = db.execute("pragma journal_mode=" + sys.argv[1]).fetchone()[0]
assert mode == sys.argv[1], mode
db.execute("pragma synchronous=full")
db.execute("create table t (name text, number integer)")
db.commit()
threads = [threading.Thread(target=work, args=(str(n), 20)) for n in range(3)]
[t.start() for t in threads]
[t.join() for t in threads]
assert db.execute("select count(*) from t").fetchone() == (60,)
assert db.execute("pragma integrity_check").fetchone() == ("ok",)
"#;

/// Whether the host has the Python that [`SQLITE`] needs.
pub fn has_sqlite() -> bool {
    let check = std::process::Command::new("/usr/bin/python3").args(["-c", "import sqlite3"]).status();
    check.is_ok_and(|status| status.success())
}

/// The engines that fio tries, with what each needs beside its name.
pub const FIO_ENGINES: &[(&str, &str)] = &[("psync", ""), ("libaio", "--direct=1 --iodepth=16"), ("mmap", "")];

/// A shell line: two jobs that write and read at random in `directory` and verify every block.
pub fn fio(directory: &Path, engine: &str, more: &str, size_mib: u32, loops: u32) -> String {
    let program = Cache::from_env().unwrap().peer("fio").unwrap();
    format!(
        "{} --name=v --directory={} --size={size_mib}M --rw=randrw --bsrange=4k-64k --blockalign=4k --verify=crc32c \
         --verify_fatal=1 --do_verify=1 --numjobs=2 --ioengine={engine} {more} --loops={loops} --minimal >/dev/null",
        program.display(),
        directory.display()
    )
}
