//! The costs of a load for the server: CPU time, sleeps, system calls.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;

/// How long a counting program may take to attach itself.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);

/// The process that serves, of one that was started or listens: one that confines itself is the child of that, in a
/// namespace of processes of its own.
pub fn serving(started: u32) -> u32 {
    let namespace = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let of_started = namespace(started);
    let children = std::fs::read_to_string(format!("/proc/{started}/task/{started}/children")).unwrap_or_default();
    let mut children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
    // One that has just ended has none.
    children.find(|child| namespace(*child).is_some_and(|own| Some(own) != of_started)).unwrap_or(started)
}

/// The figures of one thread up to now.
#[derive(Debug, Clone, Default)]
struct Thread {
    name: String,
    cpu_ns: u64,
    voluntary: u64,
    involuntary: u64,
}

/// The figures of a process's threads up to now.
#[derive(Debug, Clone)]
pub struct Snapshot(BTreeMap<u32, Thread>);

/// What one thread did between two snapshots.
#[derive(Debug, Clone, Serialize)]
pub struct ThreadUse {
    /// Its name.
    pub name: String,
    /// CPU time.
    pub cpu_seconds: f64,
    /// How often it went to sleep.
    pub voluntary_switches: u64,
    /// How often it was made to yield the CPU.
    pub involuntary_switches: u64,
}

/// What a process did between two snapshots. Threads that ended meanwhile are not in it.
#[derive(Debug, Clone, Serialize)]
pub struct ResourceUsage {
    /// CPU time.
    pub cpu_seconds: f64,
    /// How often its threads went to sleep.
    pub voluntary_switches: u64,
    /// How often its threads were made to yield the CPU.
    pub involuntary_switches: u64,
    /// Threads that did anything.
    pub threads: Vec<ThreadUse>,
}

impl Snapshot {
    /// Reads the figures of process `pid`.
    ///
    /// # Errors
    /// When /proc does not show the process.
    pub fn take(pid: u32) -> io::Result<Self> {
        let mut threads = BTreeMap::new();
        for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let entry = entry?;
            let read = |file| std::fs::read_to_string(entry.path().join(file)).unwrap_or_default();
            let status = read("status");
            let field = |name: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name));
                line.and_then(|rest| rest.strip_prefix(':')).map_or("", str::trim).to_owned()
            };
            let number = |text: &str| text.parse().unwrap_or(0);
            let thread = Thread {
                name: field("Name"),
                cpu_ns: read("schedstat").split_whitespace().next().map_or(0, number),
                voluntary: number(&field("voluntary_ctxt_switches")),
                involuntary: number(&field("nonvoluntary_ctxt_switches")),
            };
            if let Ok(tid) = entry.file_name().to_string_lossy().parse() {
                threads.insert(tid, thread);
            }
        }
        Ok(Self(threads))
    }

    /// What happened since `before`.
    pub fn since(&self, before: &Self) -> ResourceUsage {
        let mut threads = Vec::new();
        for (tid, now) in &self.0 {
            let then = before.0.get(tid).cloned().unwrap_or_default();
            let used = ThreadUse {
                name: now.name.clone(),
                cpu_seconds: seconds(now.cpu_ns.saturating_sub(then.cpu_ns)),
                voluntary_switches: now.voluntary.saturating_sub(then.voluntary),
                involuntary_switches: now.involuntary.saturating_sub(then.involuntary),
            };
            if used.cpu_seconds > 0.0 || used.voluntary_switches > 0 {
                threads.push(used);
            }
        }
        ResourceUsage {
            cpu_seconds: threads.iter().map(|thread| thread.cpu_seconds).sum(),
            voluntary_switches: threads.iter().map(|thread| thread.voluntary_switches).sum(),
            involuntary_switches: threads.iter().map(|thread| thread.involuntary_switches).sum(),
            threads,
        }
    }
}

fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}

/// What counts the system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Counter {
    /// `perf stat -e raw_syscalls:sys_enter`: cheap, but needs perf and its rights.
    Perf,
    /// `strace -f -c`: slows the server a lot, and tells the calls' names.
    Strace,
}

/// System calls counted.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Syscalls {
    /// All of them.
    pub total: u64,
    /// By thread (`perf`) or by name of the call (`strace`).
    pub by: BTreeMap<String, u64>,
}

/// A count under way.
#[derive(Debug)]
pub struct Counting {
    child: Child,
    counter: Counter,
    /// perf's end of the pipe must not see it closed while it counts.
    _control: Option<File>,
}

impl Counting {
    /// Attaches a counter to process `pid` and starts it.
    ///
    /// # Errors
    /// When the program is missing, or cannot attach itself.
    pub fn start(pid: u32, counter: Counter) -> io::Result<Self> {
        match counter {
            Counter::Perf => Self::perf(pid),
            Counter::Strace => Self::strace(pid),
        }
    }

    fn perf(pid: u32) -> io::Result<Self> {
        // Not close-on-exec: perf takes the descriptors over. It starts disabled, so that its own start and the
        // attaching are not counted.
        let (control_in, control_out) = rustix::pipe::pipe()?;
        let (ack_in, ack_out) = rustix::pipe::pipe()?;
        let fds = format!("--control=fd:{},{}", control_in.as_raw_fd(), ack_out.as_raw_fd());
        let child = Command::new("perf")
            .args(["stat", "-x,", "--per-thread", "-e", "raw_syscalls:sys_enter", "-D", "-1", "-p", &pid.to_string()])
            .arg(fds)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        drop((control_in, ack_out));
        let mut control = File::from(control_out);
        let asked = control.write_all(b"enable\n");
        let mut counting = Self { child, counter: Counter::Perf, _control: Some(control) };
        let mut ack = [0; 4];
        // End of file when perf could not attach.
        if asked.is_err() || File::from(ack_in).read_exact(&mut ack).is_err() {
            let said = counting.output()?;
            return Err(io::Error::other(format!("perf cannot count system calls: {}", said.trim())));
        }
        Ok(counting)
    }

    fn strace(pid: u32) -> io::Result<Self> {
        let child = Command::new("strace")
            .args(["-f", "-c", "-U", "calls,name", "-p", &pid.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut counting = Self { child, counter: Counter::Strace, _control: None };
        let end = Instant::now() + ATTACH_TIMEOUT;
        while !all_traced(pid)? {
            if counting.child.try_wait()?.is_some() || Instant::now() > end {
                return Err(io::Error::other(format!("strace cannot attach: {}", counting.output()?.trim())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(counting)
    }

    /// Stops counting.
    ///
    /// # Errors
    /// When the counter cannot be stopped or says nothing that can be understood.
    pub fn finish(mut self) -> io::Result<Syscalls> {
        let said = self.output()?;
        let counts = match self.counter {
            Counter::Perf => parse_perf(&said),
            Counter::Strace => parse_strace(&said),
        };
        counts.ok_or_else(|| io::Error::other(format!("cannot understand the counter's output: {}", said.trim())))
    }

    /// Interrupts the counter and takes what it prints at its end.
    fn output(&mut self) -> io::Result<String> {
        if self.child.try_wait()?.is_none() {
            let pid = Pid::from_child(&self.child);
            kill_process(pid, Signal::INT)?;
        }
        let mut said = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            stderr.read_to_string(&mut said)?;
        }
        self.child.wait()?;
        Ok(said)
    }
}

/// Whether every thread of the process has a tracer.
fn all_traced(pid: u32) -> io::Result<bool> {
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = std::fs::read_to_string(entry?.path().join("status")).unwrap_or_default();
        if status.lines().any(|line| line.strip_prefix("TracerPid:").is_some_and(|pid| pid.trim() == "0")) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Reads lines such as `virtiofsd-7210,1234,,raw_syscalls:sys_enter,...`.
fn parse_perf(said: &str) -> Option<Syscalls> {
    let mut counts = Syscalls::default();
    for line in said.lines().filter(|line| line.contains("raw_syscalls:sys_enter")) {
        let mut fields = line.split(',');
        let (thread, count) = (fields.next()?, fields.next()?);
        // A thread that never ran has `<not counted>`.
        let count = count.parse().unwrap_or(0);
        counts.total += count;
        if count > 0 {
            *counts.by.entry(thread.to_owned()).or_default() += count;
        }
    }
    said.contains("raw_syscalls:sys_enter").then_some(counts)
}

/// Reads the table of `strace -c -U calls,name`.
fn parse_strace(said: &str) -> Option<Syscalls> {
    let mut counts = Syscalls::default();
    for line in said.lines() {
        let mut fields = line.split_whitespace();
        if let (Some(Ok(calls)), Some(name), None) =
            (fields.next().map(str::parse::<u64>), fields.next(), fields.next())
            && name != "total"
        {
            counts.total += calls;
            counts.by.insert(name.to_owned(), calls);
        }
    }
    // Without a single call there is no table.
    (counts.total > 0 || said.contains("attached")).then_some(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perf_output_is_parsed() {
        let said = "Events disabled\nEvents enabled\nvirtiofsd-12,300,,raw_syscalls:sys_enter,100,100.00,,\n\
                    virtiofsd-13,<not counted>,,raw_syscalls:sys_enter,0,100.00,,\n";
        let counts = parse_perf(said).unwrap();
        assert_eq!((counts.total, counts.by.len()), (300, 1));
        assert!(parse_perf("event syntax error").is_none());
    }

    #[test]
    fn strace_output_is_parsed() {
        let said = "strace: Process 3 attached with 2 threads\n    calls syscall\n--------- ------\n     2000 preadv\n\
                    3 epoll_wait\n--------- ------\n     2003 total\n";
        let counts = parse_strace(said).unwrap();
        assert_eq!((counts.total, counts.by["preadv"]), (2003, 2000));
    }

    #[test]
    fn sees_its_own_cpu_time() {
        let before = Snapshot::take(std::process::id()).unwrap();
        let end = Instant::now() + Duration::from_millis(50);
        while Instant::now() < end {
            std::hint::spin_loop();
        }
        let used = Snapshot::take(std::process::id()).unwrap().since(&before);
        assert!(used.cpu_seconds > 0.0, "{used:?}");
    }
}
