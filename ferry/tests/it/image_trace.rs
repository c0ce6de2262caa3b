//! `ferry image trace`, images that are built by what it records, and mounts that read it ahead.
use crate::common;

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::place::Place;
use common::{ferry, needs_fuse, refused, run};
use rustix::fs::Advice;
use rustix::io::ReadWriteFlags;
use rustix::mount::{UnmountFlags, unmount};

/// Far more than it takes to read a few blocks.
const PATIENCE: Duration = Duration::from_secs(60);

fn text(command: &mut Command) -> String {
    let output = run(command);
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn content(number: u32) -> Vec<u8> {
    (number * 1_000_003..).flat_map(u32::to_le_bytes).take(20_000).collect()
}

/// An image of ten files and one with a strange name, beside a mount point.
struct Made(Place);

/// A mount that ends with the test.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, UnmountFlags::DETACH);
    }
}

impl Made {
    fn new() -> Self {
        let place = Place::new();
        fs::create_dir_all(place.at("tree/dir")).unwrap();
        for number in 0..10 {
            fs::write(place.at(&format!("tree/dir/{number}")), content(number)).unwrap();
        }
        fs::write(place.at("tree/a\\name\nin two lines"), content(10)).unwrap();
        let made = Self(place);
        made.build(&[]);
        made
    }

    fn at(&self, name: &str) -> String {
        self.0.at(name).to_str().unwrap().to_owned()
    }

    fn image(&self, words: &[&str]) -> Command {
        let mut line = ferry();
        line.arg("image").args(words).arg("--store").arg(self.0.at("store"));
        line
    }

    fn build(&self, options: &[&str]) {
        text(self.image(&["build", &self.at("tree"), "-o", &self.at("image")]).args(options));
    }

    fn mounted(&self) -> Option<Mounted<'_>> {
        let output = run(&mut self.image(&["mount", &self.at("image"), &self.at("mnt")]));
        let said = String::from_utf8_lossy(&output.stderr);
        if ["this kernel", "only root"].iter().any(|reason| said.contains(reason)) {
            ferry_skip::skip!("{said}");
            return None;
        }
        assert!(output.status.success(), "{said}");
        Some(Mounted(&self.0.mnt))
    }

    /// Traces a shell's commands in the mount; answers the list.
    fn trace(&self, script: &str) -> String {
        let mut line = ferry();
        line.args(["image", "trace", &self.at("mnt"), "-o", &self.at("trace"), "--", "sh", "-c", script]);
        text(line.current_dir(&self.0.mnt));
        fs::read_to_string(self.0.at("trace")).unwrap()
    }

    /// The pack that is read ahead, by `ferry image info`.
    fn ahead(&self) -> Option<String> {
        let info = text(ferry().args(["image", "info", "--json", &self.at("image")]));
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        let packs = info["packs"].as_array().unwrap();
        packs.iter().find(|pack| pack["ahead"] == true).map(|pack| pack["name"].as_str().unwrap().to_owned())
    }
}

/// Whether a file's last block is in the page cache, as far as its file system tells.
fn is_cached(file: &File) -> bool {
    let end = file.metadata().unwrap().len() - 1;
    let mut byte = [0];
    let read = rustix::io::preadv2(file, &mut [std::io::IoSliceMut::new(&mut byte)], end, ReadWriteFlags::NOWAIT);
    matches!(read, Ok(1) | Err(rustix::io::Errno::OPNOTSUPP))
}

#[test]
fn opened_files_are_recorded_placed_first_and_read_ahead() {
    let made = Made::new();
    let Some(mounted) = made.mounted() else { return };
    let script = "cat dir/7 dir/2 >out; stat dir/5 >>out; cat dir/2 'a\\name\nin two lines' dir/4 >>out; ls dir >>out";
    let script = script.replace("out", "/dev/null");
    assert_eq!(made.trace(&script), "/dir/7\n/dir/2\n/a\\\\name\\nin two lines\n/dir/4\n");
    drop(mounted);
    assert_eq!(made.ahead(), None);
    made.build(&["--order-from", &made.at("trace")]);
    let name = made.ahead().unwrap();
    let pack = made.0.at("store/packs").join(name);
    let expected = [content(7), content(2), content(10), content(4)];
    let expected = expected.map(|bytes| [&bytes[..], &[0; 480]].concat()).concat();
    assert!(fs::read(&pack).unwrap() == expected);
    // The mount has the kernel read it, where it can be made to forget it first.
    let file = File::open(&pack).unwrap();
    let begin = Instant::now();
    while is_cached(&file) && begin.elapsed() < Duration::from_secs(2) {
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    }
    if is_cached(&file) {
        ferry_skip::skip!("the pack stays in memory");
    }
    let mounted = made.mounted().unwrap();
    let begin = Instant::now();
    while !is_cached(&file) {
        assert!(begin.elapsed() < PATIENCE, "it is not read ahead");
        std::thread::sleep(Duration::from_millis(10));
    }
    for number in 0..10 {
        assert!(fs::read(made.0.mnt.join("dir").join(number.to_string())).unwrap() == content(number));
    }
    drop(mounted);
    assert_eq!(text(&mut made.image(&["verify", &made.at("image")])), "clean\n");
}

/// By Ferry's own mount, which proves what is ahead meanwhile.
#[test]
fn mounts_by_fuse_are_traced_and_read_ahead() {
    needs_fuse!();
    let made = Made::new();
    let mount = |made: &Made| {
        let mut line = ferry();
        line.arg("mount").arg(format!("image:{}", made.at("image"))).arg(&made.0.mnt).arg("--store");
        made.0.mounted_by(line.arg(made.0.at("store")))
    };
    let pid = mount(&made);
    assert_eq!(made.trace("cat dir/9 dir/1 >/dev/null"), "/dir/9\n/dir/1\n");
    made.0.unmount(pid);
    made.build(&["--order-from", &made.at("trace")]);
    assert!(made.ahead().is_some());
    let pid = mount(&made);
    for number in 0..10 {
        assert!(fs::read(made.0.mnt.join("dir").join(number.to_string())).unwrap() == content(number));
    }
    made.0.unmount(pid);
}

#[test]
fn failed_workloads_and_invalid_lists_are_errors() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("only root can trace");
        return;
    }
    let made = Made::new();
    let trace = |words: &[&str]| {
        let mut line = ferry();
        line.args(["image", "trace", &made.at("tree"), "-o", &made.at("trace"), "--"]).args(words);
        line
    };
    let output = run(trace(&["sh", "-c", "cat tree/dir/1 >/dev/null; exit 7"]).current_dir(made.0.directory.path()));
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(fs::read_to_string(made.0.at("trace")).unwrap(), "/dir/1\n");
    let output = run(&mut trace(&["sh", "-c", "kill -9 $$"]));
    assert_eq!(output.status.code(), Some(137));
    fs::remove_file(made.0.at("trace")).unwrap();
    let said = refused(1, &mut trace(&["/none/such"]));
    assert!(said.contains("cannot start /none/such"), "{said}");
    assert!(!made.0.at("trace").exists());
    fs::write(made.0.at("trace"), "/dir/1\ndir/2\n").unwrap();
    let order = ["--order-from", &made.at("trace")];
    let said = refused(1, made.image(&["build", &made.at("tree"), "-o", &made.at("new")]).args(order));
    assert!(said.contains("trace, line 2: it is no path that begins with /"), "{said}");
    let composefs = [&order[..], &["--layout", "composefs"]].concat();
    let said = refused(1, made.image(&["build", &made.at("tree"), "-o", &made.at("new")]).args(composefs));
    assert!(said.contains("--order-from needs --layout flat"), "{said}");
}

#[test]
fn signals_are_passed_on_to_the_workload() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("only root can trace");
        return;
    }
    let made = Made::new();
    let script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let mut line = ferry();
    line.args(["image", "trace", &made.at("tree"), "-o", &made.at("trace"), "--", "sh", "-c", script]);
    let mut tracer = line.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = [0; 6];
    tracer.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_child(&tracer), rustix::process::Signal::TERM).unwrap();
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = tracer.try_wait().unwrap() {
            break status;
        }
        if begin.elapsed() > PATIENCE / 4 {
            tracer.kill().unwrap();
            panic!("the signal is ignored");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(status.code(), Some(9), "the workload's");
    assert!(made.0.at("trace").exists());
}
