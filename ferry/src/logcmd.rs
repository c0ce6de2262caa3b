//! `ferry log`: shows and changes what a running share or mount logs.

use std::io::{BufRead, Read, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use ferry_control::{LOG_LINE_BYTES_MAX, Request, Status, printable, printable_json};

use crate::cli::LogArgs;
use crate::control::{Target, statuses};
use crate::output::print;

/// Runs the command.
pub fn run(args: &LogArgs) -> Result<()> {
    let Some(target) = &args.target else { return list(args.json) };
    let Some(level) = &args.level else {
        let targets = Target::find_all(target)?;
        return targets.iter().try_for_each(|target| show(&target.client.status()?, args.json));
    };
    let ask = |Target { client, share, file, .. }| {
        let request = Request::Log { level: level.clone(), share, file, follow: args.follow };
        client.ask::<Status>(&request)
    };
    if !args.follow {
        return Target::find_all(target)?.into_iter().try_for_each(|target| show(&ask(target)?.0, args.json));
    }
    let (status, mut lines) = ask(Target::find(target)?)?;
    eprintln!("ferry: following the log of process {}; Ctrl-C ends it and logs as before", status.pid);
    lines.get_ref().set_read_timeout(None::<Duration>)?;
    let mut out = std::io::stdout().lock();
    while let Some(line) = next_line(&mut lines).context("the server's log")? {
        match writeln!(out, "{line}").and_then(|()| out.flush()) {
            // A pager may end early.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            result => result.context("cannot write to standard output")?,
        }
    }
    Ok(())
}

/// Reads the next line of a log and makes it safe for a terminal: the server may be another user's program.
fn next_line(lines: &mut impl BufRead) -> std::io::Result<Option<String>> {
    /// No server sends longer ones.
    const BYTES_MAX: u64 = 2 * LOG_LINE_BYTES_MAX as u64;
    let mut line = Vec::new();
    if lines.by_ref().take(BYTES_MAX).read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    let is_cut = line.pop_if(|byte| *byte == b'\n').is_none();
    let end = if is_cut && lines.skip_until(b'\n')? > 0 { "..." } else { "" };
    Ok(Some(printable(&String::from_utf8_lossy(&line)).into_owned() + end))
}

/// Lists all running servers.
fn list(json: bool) -> Result<()> {
    let all = statuses();
    if all.is_empty() {
        eprintln!("ferry: no ferry share, mount or disk of yours is running");
    }
    let text =
        if json { printable_json(&serde_json::to_string(&all)?) + "\n" } else { all.iter().map(described).collect() };
    print(&text)
}

fn show(status: &Status, json: bool) -> Result<()> {
    let text = if json { printable_json(&serde_json::to_string(status)?) + "\n" } else { described(status) };
    print(&text)
}

/// Describes a server in one line, and each of its shares in another.
fn described(status: &Status) -> String {
    let requests = printable(status.requests.as_deref().unwrap_or("none"));
    let mut text = format!("process {}: level {}, requests logged: {requests}\n", status.pid, printable(&status.log));
    for share in &status.shares {
        let places = [
            ("mounted on", &share.mount),
            ("for virtual machines on", &share.virtiofs),
            ("for 9P clients on", &share.ninep),
            ("as a disk on", &share.disk),
        ];
        let places =
            places.iter().filter_map(|(how, place)| place.as_ref().map(|place| format!(" {how} {}", printable(place))));
        text += &format!("  {}{}\n", printable(&share.source), places.collect::<Vec<_>>().join(","));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bounded_and_for_a_terminal() {
        let long = "y".repeat(100_000);
        let mut log = format!(" INFO a\x1b[2J\u{9b}b\rc\n{long}\nlast").into_bytes();
        log.insert(0, 0xff);
        let mut log = log.as_slice();
        let mut next = || next_line(&mut log).expect("bytes in memory");
        assert_eq!(next().as_deref(), Some("\u{fffd} INFO a\\u{1b}[2J\\u{9b}b\\rc"));
        let cut = next().expect("a line");
        assert!(cut.len() < 20_000 && cut.ends_with("y..."), "{}", cut.len());
        assert_eq!((next().as_deref(), next()), (Some("last"), None));
    }

    #[test]
    fn output_of_other_users_servers_is_escaped() {
        let shares = vec![ferry_control::ShareStatus {
            source: "/a\x1b]0;b\x07".into(),
            mount: Some("/m\nprocess 1: level off".into()),
            ..Default::default()
        }];
        let status = Status { pid: 7, shares, log: "\x1b[31m".into(), requests: Some("\u{202e}".into()) };
        let text = described(&status);
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.lines().all(|line| printable(line) == line), "{text:?}");
        let json = printable_json(&serde_json::to_string(&status).expect("it has a form"));
        assert_eq!(printable(&json), json);
    }
}
