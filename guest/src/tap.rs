//! A network of a User-mode Linux guest and this host: a tap device.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};

use crate::{Context, Error, Result};

/// A tap device, which goes with this. The guest's end is `vec0`, which needs [`Tap::kernel_arg`] and an address.
#[derive(Debug)]
pub struct Tap {
    name: String,
    /// The first three bytes of the addresses and the last of the device's; the guest's is the next.
    network: (String, u8),
}

impl Tap {
    /// Makes one and gives it an address.
    ///
    /// # Errors
    /// [`Error`]: it takes root (or CAP_NET_ADMIN), /dev/net/tun and the program `ip`.
    pub fn new() -> Result<Self> {
        static NEXT: AtomicU8 = AtomicU8::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed) % 63;
        let process = std::process::id();
        let tap = Self {
            name: format!("f9p{process}x{number}"),
            network: (format!("10.{}.{}", 192 + (process >> 8) % 60, process % 256), number * 4 + 1),
        };
        ip(&["tuntap", "add", "dev", &tap.name, "mode", "tap"])?;
        ip(&["addr", "add", &format!("{}/30", tap.host()), "dev", &tap.name])?;
        ip(&["link", "set", &tap.name, "up"])?;
        Ok(tap)
    }

    /// The host's address.
    pub fn host(&self) -> String {
        format!("{}.{}", self.network.0, self.network.1)
    }

    /// The guest's, in a network of 30 bits.
    pub fn guest(&self) -> String {
        format!("{}.{}", self.network.0, self.network.1 + 1)
    }

    /// What User-mode Linux's command line must have.
    pub fn kernel_arg(&self) -> String {
        format!("vec0:transport=tap,ifname={},depth=128,gro=1", self.name)
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        // It is gone already where making it failed.
        let _ = ip(&["link", "del", &self.name]);
    }
}

fn ip(args: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(args).stdin(Stdio::null()).output();
    let output = output.context(|| "start the program ip (package iproute2), for a tap device".into())?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::Invalid(format!(
        "no tap device, which takes root and /dev/net/tun (ip {}: {})",
        args.join(" "),
        said.trim()
    )))
}
