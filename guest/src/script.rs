//! The guest's init script: the crate's parameters as shell text, before `init.sh`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::{Guest, Kind};

const INIT: &str = include_str!("init.sh");

/// The parameters of the kind of machine.
pub(crate) struct Machine<'a> {
    /// The interpreter's path in the guest, without blanks.
    pub busybox: &'a OsStr,
    /// The guest's devices for the control line, standard output (or the terminal) and standard error.
    pub lines: [&'a str; 3],
    /// Modules to load, in order, as a shell word list.
    pub modules: String,
    /// The directory of all modules, for modprobe.
    pub module_directory: &'a OsStr,
    /// The size of the terminal, when the command gets one.
    pub terminal: Option<(u16, u16)>,
    /// Whether standard input is empty.
    pub stdin_null: bool,
}

/// Writes the script.
pub(crate) fn init(guest: &Guest, machine: &Machine<'_>) -> Vec<u8> {
    let mut out = Script(b"#!".to_vec());
    out.raw(machine.busybox.as_bytes()).raw(b" sh\n");
    let (kind, root) = match &guest.kind {
        Kind::Uml => ("uml", "/"),
        Kind::Qemu { root, .. } => ("qemu", root.as_deref().unwrap_or("initramfs")),
    };
    out.assign("kind", kind).assign("root", root);
    out.raw(b"case ${1:-} in '') busybox=").word(machine.busybox).raw(b" ;; *) busybox=/run/ferry/busybox ;; esac\n");
    for (name, line) in ["control", "stdout", "stderr"].into_iter().zip(machine.lines) {
        out.assign(name, line);
    }
    out.raw(format!("[ $# -gt 0 ] || modules=\"{}\"\n", machine.modules).as_bytes());
    out.assign("module_directory", machine.module_directory);
    out.assign("stdin", if machine.stdin_null { "null" } else { "host" });
    let (rows, columns) = machine.terminal.unwrap_or_default();
    out.assign("terminal", if machine.terminal.is_some() { "1" } else { "0" });
    out.raw(format!("rows={rows}\ncolumns={columns}\n").as_bytes());

    mount_shares(&mut out, guest);
    start_services(&mut out, guest);
    run_command(&mut out, guest);
    out.raw(INIT.as_bytes());
    out.0
}

fn mount_shares(out: &mut Script, guest: &Guest) {
    out.raw(b"mount_shares() {\n    :\n");
    for mount in &guest.mounts {
        out.raw(b"    b mkdir -p ").word(&mount.mountpoint).raw(b" || fail 'cannot create a mount point'\n");
        out.raw(b"    said=$(b mount -t ").word(&mount.fstype);
        if !mount.options.is_empty() {
            out.raw(b" -o ").word(&mount.options);
        }
        out.raw(b" ").word(&mount.source).raw(b" ").word(&mount.mountpoint).raw(b" 2>&1) || fail $said\n");
    }
    out.raw(b"}\n");
}

fn start_services(out: &mut Script, guest: &Guest) {
    out.raw(b"start_services() {\n    services=\n");
    for service in guest.services.iter().filter(|service| !service.is_empty()) {
        out.raw(b"   ");
        for word in service {
            out.raw(b" ").word(word);
        }
        out.raw(b" </dev/null 3<&- &\n    services=\"$services $!\"\n");
    }
    out.raw(b"}\n");
}

/// A full path or the applet: within busybox's shell a bare name means the applet, also for what it starts.
fn run_command(out: &mut Script, guest: &Guest) {
    out.raw(b"run_command() {\n    env='/run/ferry/busybox env'\n    [ ! -x /usr/bin/env ] || env=/usr/bin/env\n");
    out.raw(b"    cd ").word(&guest.cwd).raw(b" || exit 127\n    exec $env -i");
    let defaults = [
        ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ("HOME", "/root"),
        ("TERM", "linux"),
    ];
    let given = |name: &str| guest.env.iter().any(|(key, _)| key == name);
    for (name, value) in defaults.iter().filter(|(name, _)| !given(name)) {
        out.raw(b" ").word(format!("{name}={value}"));
    }
    for (name, value) in &guest.env {
        let mut pair = name.clone();
        pair.push("=");
        pair.push(value);
        out.raw(b" ").word(&pair);
    }
    if guest.command.is_empty() {
        out.raw(b" $(for shell in /bin/bash /bin/sh; do [ -x $shell ] && echo $shell && break; done) -i");
    }
    for word in &guest.command {
        out.raw(b" ").word(word);
    }
    out.raw(b"\n}\n");
}

/// Shell text. Words are bytes: no path or argument needs to be UTF-8.
struct Script(Vec<u8>);

impl Script {
    fn raw(&mut self, text: &[u8]) -> &mut Self {
        self.0.extend_from_slice(text);
        self
    }

    fn word(&mut self, word: impl AsRef<OsStr>) -> &mut Self {
        self.0.push(b'\'');
        for &byte in word.as_ref().as_bytes() {
            match byte {
                b'\'' => self.0.extend_from_slice(br"'\''"),
                byte => self.0.push(byte),
            }
        }
        self.0.push(b'\'');
        self
    }

    fn assign(&mut self, name: &str, value: impl AsRef<OsStr>) -> &mut Self {
        self.raw(name.as_bytes()).raw(b"=").word(value).raw(b"\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell() {
        let mut script = Script(b"printf %s ".to_vec());
        script.word("it's $HOME `x`\n\"y\" \\");
        let output = std::process::Command::new("sh").arg("-c").arg(OsStr::from_bytes(&script.0)).output().unwrap();
        assert_eq!(output.stdout, b"it's $HOME `x`\n\"y\" \\");
    }
}
