//! The commands that mount file systems on this host.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::systems::{Files, Flavour, System, Way};
use crate::mounted::Mounted;

/// The servers' programs.
#[derive(Debug, Clone)]
pub struct Programs {
    /// Ours.
    pub ferry: PathBuf,
    /// Our null file system.
    pub null: PathBuf,
    /// libfuse's file systems; nothing when they could not be built.
    pub libfuse: Option<PathBuf>,
}

/// The command that serves a system at `dir`; nothing for those of the kernel.
pub fn command(system: System, programs: &Programs, dir: &Path) -> Result<Option<Vec<OsString>>> {
    let (program, before, after): (&Path, &str, &str) = match system {
        System::Ferry(Files::Null, Way::Uring) => (&programs.null, "", "--path uring"),
        System::Ferry(Files::Null, Way::Devfuse) => (&programs.null, "", "--path devfuse"),
        System::Ferry(Files::Null, Way::Passthrough) => bail!("the null file system has no backing files"),
        System::Ferry(Files::Mem, Way::Uring) => {
            (&programs.ferry, "mount mem", "--foreground --path uring --passthrough off")
        }
        System::Ferry(Files::Mem, Way::Devfuse) => {
            (&programs.ferry, "mount mem", "--foreground --path devfuse --passthrough off")
        }
        System::Ferry(Files::Mem, Way::Passthrough) => (&programs.ferry, "mount mem", "--foreground --passthrough on"),
        System::FerryCached => (&programs.ferry, "mount mem", "--foreground --cache always"),
        System::Libfuse(files, flavour) => {
            let program = programs.libfuse.as_deref().context("the libfuse server is not there")?;
            let files = if files == Files::Null { "null" } else { "memory" };
            let after = match flavour {
                Flavour::Plain => "",
                Flavour::Splice => "splice",
                Flavour::Uring => "uring",
                Flavour::Passthrough => "passthrough",
            };
            (program, files, after)
        }
        System::Tmpfs => return Ok(None),
        System::FerryPmem | System::XfsDax => bail!("it needs persistent memory, which only the guest has"),
    };
    let words = |text: &str| text.split_whitespace().map(OsString::from).collect::<Vec<_>>();
    let mut command = vec![program.into()];
    command.extend(words(before));
    command.push(dir.into());
    command.extend(words(after));
    Ok(Some(command))
}

/// Mounts a system in a directory of its own below `directory`.
pub fn mount(system: System, programs: &Programs, directory: &Path) -> Result<Mounted> {
    let dir = directory.join(system.full_name().replace(' ', "-"));
    let command = command(system, programs, &dir)?;
    Mounted::new(dir, command)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(system: System) -> String {
        let programs = Programs { ferry: "ferry".into(), null: "null".into(), libfuse: Some("peer".into()) };
        let words = command(system, &programs, Path::new("/a b")).unwrap().unwrap();
        words.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join("|")
    }

    #[test]
    fn each_server_gets_its_options() {
        for (system, words) in [
            (System::Ferry(Files::Null, Way::Devfuse), "null|/a b|--path|devfuse"),
            (System::Ferry(Files::Mem, Way::Uring), "ferry|mount|mem|/a b|--foreground|--path|uring|--passthrough|off"),
            (System::Libfuse(Files::Mem, Flavour::Splice), "peer|memory|/a b|splice"),
            (System::Libfuse(Files::Mem, Flavour::Passthrough), "peer|memory|/a b|passthrough"),
            (System::Libfuse(Files::Null, Flavour::Plain), "peer|null|/a b"),
        ] {
            assert_eq!(text(system), words);
        }
    }

    #[test]
    fn a_peer_that_was_not_built_is_an_error() {
        let programs = Programs { ferry: "ferry".into(), null: "null".into(), libfuse: None };
        let system = System::Libfuse(Files::Null, Flavour::Plain);
        assert!(command(system, &programs, Path::new("/a")).is_err());
        assert!(command(System::Tmpfs, &programs, Path::new("/a")).unwrap().is_none());
    }
}
