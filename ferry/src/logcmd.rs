//! `ferry log`: shows and changes what a running share or mount logs.

use std::io::{BufRead, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use ferry_control::{Request, Status};

use crate::cli::LogArgs;
use crate::control::{Target, statuses};

/// Shows or changes it.
pub fn run(args: &LogArgs) -> Result<()> {
    let Some(target) = &args.target else { return list(args.json) };
    let target = Target::find(target)?;
    let Some(level) = &args.level else { return show(&target.client.status()?, args.json) };
    let Target { client, share, file } = target;
    let request = Request::Log { level: level.clone(), share, file, follow: args.follow };
    let (status, mut lines) = client.ask::<Status>(&request)?;
    if !args.follow {
        return show(&status, args.json);
    }
    eprintln!("ferry: following the log of process {}; Ctrl-C ends it and logs as before", status.pid);
    lines.get_ref().set_read_timeout(None::<Duration>)?;
    let mut out = std::io::stdout().lock();
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line).context("the server's log")? > 0 {
        match out.write_all(&line).and_then(|()| out.flush()) {
            // A pager that was left early.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            result => result.context("cannot write to standard output")?,
        }
        line.clear();
    }
    Ok(())
}

/// Shows all that run.
fn list(json: bool) -> Result<()> {
    let all = statuses();
    if all.is_empty() {
        eprintln!("ferry: no ferry share or mount of yours is running");
    }
    let text = if json { serde_json::to_string(&all)? + "\n" } else { all.iter().map(described).collect() };
    write(&text)
}

fn show(status: &Status, json: bool) -> Result<()> {
    let text = if json { serde_json::to_string(status)? + "\n" } else { described(status) };
    write(&text)
}

/// A server in a line, and each of its shares in another.
fn described(status: &Status) -> String {
    let requests = status.requests.as_deref().unwrap_or("none");
    let mut text = format!("process {}: level {}, requests logged: {requests}\n", status.pid, status.log);
    for share in &status.shares {
        let places = [
            ("mounted on", &share.mount),
            ("for virtual machines on", &share.virtiofs),
            ("for 9P clients on", &share.ninep),
        ];
        let places = places.iter().filter_map(|(how, place)| place.as_ref().map(|place| format!(" {how} {place}")));
        text += &format!("  {}{}\n", share.source, places.collect::<Vec<_>>().join(","));
    }
    text
}

fn write(text: &str) -> Result<()> {
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")
}
