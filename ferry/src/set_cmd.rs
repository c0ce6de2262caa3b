//! `ferry set`: changes settings of a running share, mount or disk.

use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ferry_control::{Request, ServedShare, Setting, printable};
use ferry_engine::{PollLimit, TokenBucket};
use ferry_serve::Timeout;
use ferry_virtiofs::WindowUsage;

use crate::control::Target;
use crate::flags::{Limit, POLL_US_MAX, TIMEOUT_MAX, limit};
use crate::output::print;
use crate::status::misuse;

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A process id, a mount point, the socket of a share or disk, its 9P address, or a shared directory.
    #[arg(value_name = "TARGET")]
    pub target: PathBuf,

    /// limit=iops=N,bps=SIZE[,burst=SECONDS]: the rates of --limit; limit=none: no limit; poll-us=N: as --poll-us; entry-timeout=SECONDS, attr-timeout=SECONDS, negative-timeout=SECONDS: as these flags, or default; log=LEVEL: the level of ferry log.
    #[arg(value_name = "SETTING=VALUE", required = true)]
    pub settings: Vec<String>,
}

/// How data of a share may pass its limit by.
#[derive(Default)]
pub struct Bypass {
    /// The kernel accesses files directly.
    pub passthrough: bool,
    /// The window in which the guest maps files.
    pub window: Option<Arc<WindowUsage>>,
}

impl Bypass {
    /// Returns why a limit would not hold.
    fn reason(&self) -> Option<&'static str> {
        if self.passthrough {
            return Some(
                "the mount uses passthrough, which no limit holds up: mount with --limit, or with --passthrough off",
            );
        }
        let has_window = self.window.as_ref().is_some_and(|window| window.bytes() > 0);
        has_window
            .then_some("the guest maps files (DAX), which no limit holds up: share with --limit, or with --dax off")
    }
}

/// Lets `ferry status` show, and `ferry set` change, the limit of a share or disk that is served. `limit` is that of its start.
pub fn limited(served: &mut ServedShare, limit: Option<&Limit>, bucket: Arc<TokenBucket>, bypass: Bypass) {
    let group = limit.and_then(|limit| limit.group.clone());
    let (shown, shown_group) = (Arc::clone(&bucket), group.clone());
    served.limited(move || limit::in_force(&shown, shown_group.as_deref()));
    served.settable("limit", move |text| match bypass.reason().filter(|_| text != "none") {
        Some(reason) => Err(reason.into()),
        None => limit::change(&bucket, group.as_deref(), text),
    });
}

/// Lets `ferry set` change how long the workers of a device, or the threads of a 9P server, poll.
pub fn polls(served: &mut ServedShare, limit: PollLimit) {
    served.settable("poll-us", move |text| {
        let us: Option<u64> = text.parse().ok().filter(|us| *us <= POLL_US_MAX);
        let us = us.ok_or_else(|| format!("poll-us={text} is not possible: the number is from 0 to {POLL_US_MAX}"))?;
        let limit = limit.clone();
        Ok(Box::new(move || {
            limit.set(Duration::from_micros(us));
            format!("poll-us {us}")
        }))
    });
}

/// Lets `ferry set` change how long clients of these exports may keep names and attributes.
pub fn keeps(served: &mut ServedShare, exports: &[Weak<ferry_serve::Share>]) {
    let timeouts =
        [("entry-timeout", Timeout::Entry), ("attr-timeout", Timeout::Attr), ("negative-timeout", Timeout::Negative)];
    for (name, timeout) in timeouts {
        let exports = exports.to_vec();
        served.settable(name, move |text| {
            let seconds = (text != "default").then(|| text.parse().ok().filter(|seconds| *seconds <= TIMEOUT_MAX));
            if seconds == Some(None) {
                return Err(format!(
                    "{name}={text} is not possible: write default, or seconds from 0 to {TIMEOUT_MAX}"
                ));
            }
            let (exports, time) = (exports.clone(), seconds.flatten().map(Duration::from_secs));
            let outcome = format!("{name} {text}");
            Ok(Box::new(move || {
                exports.iter().filter_map(Weak::upgrade).for_each(|export| export.set_timeout(timeout, time));
                outcome
            }))
        });
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let settings = args.settings.iter().map(|text| setting(text)).collect::<Result<Vec<_>>>()?;
    // The level is that of every server of a process, and all else of one share.
    let targets = match settings.iter().all(|setting| setting.name == "log") {
        true => Target::find_all(&args.target)?,
        false => vec![Target::find(&args.target)?],
    };
    for Target { client, share, file, .. } in targets {
        if file.is_some() {
            bail!("{} is a file; name its mount point or shared directory", args.target.display());
        }
        let request = Request::Set { share, settings: settings.clone() };
        let outcomes: Vec<String> =
            client.ask(&request).with_context(|| format!("cannot set {}", args.settings.join(" ")))?.0;
        // The server may be another user's program.
        print(outcomes.iter().map(|outcome| format!("{}\n", printable(outcome))).collect::<String>())?;
    }
    Ok(())
}

fn setting(text: &str) -> Result<Setting> {
    let Some((name, value)) = text.split_once('=') else {
        let error = anyhow::anyhow!("{text:?} has no value: write limit=iops=1000, limit=none or log=debug");
        return Err(misuse(error));
    };
    Ok(Setting { name: name.into(), value: value.into() })
}
