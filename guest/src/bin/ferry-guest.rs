//! Runs a command in a guest, for tests and benchmarks:
//!
//! ```text
//! ferry-guest [--qemu] [--mem MIB] [--cpus N] [--root TAG] [--cwd DIR] [--queues N] [--dax]
//!             [--fs TAG=SOCKET[:MOUNTPOINT[:OPTIONS]]]... [--block SOCKET]... [--kernel-arg WORD]... [-- COMMAND...]
//! ```

#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::process::ExitCode;

use ferry_guest::{Cache, Device, DeviceKind, Guest, Kind, Mount};

const USAGE: &str = "usage: ferry-guest [--qemu] [--mem MIB] [--cpus N] [--root TAG] [--cwd DIR] [--queues N] [--dax]
  [--fs TAG=SOCKET[:MOUNTPOINT[:OPTIONS]]]... [--block SOCKET]... [--kernel-arg WORD]... [-- COMMAND...]";

fn main() -> ExitCode {
    let result = parse(std::env::args_os().skip(1).collect())
        .and_then(|guest| guest.spawn().and_then(ferry_guest::Running::wait).map_err(|error| error.to_string()));
    match result {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX)),
        Err(message) => {
            eprintln!("ferry-guest: {message}");
            ExitCode::from(125)
        }
    }
}

fn parse(args: Vec<OsString>) -> Result<Guest, String> {
    let mut guest = Guest::new(Cache::from_env().map_err(|error| error.to_string())?, [""; 0]);
    let (mut qemu, mut cpus, mut requests, mut root, mut dax) = (false, 1, 1, None, false);
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let name = arg.to_str().ok_or(USAGE)?.to_owned();
        let mut value = || args.next().ok_or(format!("{name} needs a value")).and_then(text);
        match name.as_str() {
            "--" => {
                guest.command = args.collect();
                break;
            }
            "--qemu" => qemu = true,
            "--dax" => dax = true,
            "--mem" => guest.memory_mib = number(&value()?)?,
            "--cpus" => cpus = number(&value()?)?,
            "--queues" => requests = number(&value()?)?,
            "--root" => root = Some(value()?),
            "--cwd" => guest.cwd = value()?.into(),
            "--fs" => add_fs(&mut guest, &value()?)?,
            "--block" => guest.devices.push(Device::block(value()?)),
            "--kernel-arg" => guest.kernel_args.push(value()?),
            _ => return Err(USAGE.into()),
        }
    }
    for device in &mut guest.devices {
        if let DeviceKind::Fs { queues, dax: window, .. } = &mut device.kind {
            (*queues, *window) = (requests, dax);
        }
    }
    if qemu {
        guest.kind = Kind::Qemu { cpus, root };
    }
    Ok(guest)
}

fn add_fs(guest: &mut Guest, spec: &str) -> Result<(), String> {
    let (tag, rest) = spec.split_once('=').ok_or(USAGE)?;
    let mut parts = rest.splitn(3, ':');
    guest.devices.push(Device::fs(parts.next().unwrap_or_default(), tag));
    if let Some(mountpoint) = parts.next() {
        let mut mount = Mount::virtiofs(tag, mountpoint);
        mount.options = parts.next().unwrap_or_default().into();
        guest.mounts.push(mount);
    }
    Ok(())
}

fn text(value: OsString) -> Result<String, String> {
    value.into_string().map_err(|value| format!("{} is not UTF-8", value.display()))
}

fn number<T: std::str::FromStr>(value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("'{value}' is not a number"))
}
