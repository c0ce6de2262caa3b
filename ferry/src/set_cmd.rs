//! `ferry set`: changes a setting of a running share or mount.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use ferry_control::{Request, ServedShare, Status, printable};
use ferry_engine::TokenBucket;
use ferry_virtiofs::WindowUsage;

use crate::control::Target;
use crate::flags::{Share, limit};
use crate::output::print;
use crate::status::misuse;

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A process id, a mount point, the socket of a share, its 9P address, or a shared directory.
    #[arg(value_name = "TARGET")]
    pub target: PathBuf,

    /// limit=iops=N,bps=SIZE[,burst=SECONDS]: the rates of --limit; limit=none: no limit; log=LEVEL: the level of ferry log.
    #[arg(value_name = "SETTING=VALUE")]
    pub setting: String,
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

/// Lets `ferry set` change the limit of a share that is served.
pub fn limited(served: &mut ServedShare, share: &Share, bucket: Arc<TokenBucket>, bypass: Bypass) {
    let group = share.limit.as_ref().and_then(|limit| limit.group.clone());
    served.settable("limit", move |text| match bypass.reason().filter(|_| text != "none") {
        Some(reason) => Err(reason.into()),
        None => limit::set(&bucket, group.as_deref(), text),
    });
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let Some((setting, value)) = args.setting.split_once('=') else {
        let error = anyhow::anyhow!("{:?} has no value: write limit=iops=1000, limit=none or log=debug", args.setting);
        return Err(misuse(error));
    };
    let Target { client, share, file } = Target::find(&args.target)?;
    if file.is_some() {
        bail!("{} is a file; name its mount point or shared directory", args.target.display());
    }
    let text = if setting == "log" {
        let request = Request::Log { level: value.into(), share: None, file: None, follow: false };
        let (status, _) = client.ask::<Status>(&request)?;
        format!("log {}", status.log)
    } else {
        let request = Request::Set { share, setting: setting.into(), value: value.into() };
        client.ask::<String>(&request).with_context(|| format!("cannot set {setting}={value}"))?.0
    };
    // The server may be another user's program.
    print(format!("{}\n", printable(&text)))
}
