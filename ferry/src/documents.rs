//! The man page and the completions, made of the table of flags.

use std::io::Write;

use anyhow::{Context, Result, bail};
use clap::builder::Resettable;

use crate::cli;

/// Prints the page of the program, or of one of its commands.
pub fn man(command: Option<&str>) -> Result<()> {
    let mut table = cli::table();
    table.build();
    let table = match command {
        None => table,
        Some(name) => match table.find_subcommand(name) {
            Some(found) => found.clone().display_name(format!("ferry-{name}")),
            None => bail!(
                "there is no command {name:?}; the commands are share, mount, disk, log, fsck, try, man and completions"
            ),
        },
    };
    let examples = table.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    let mut page = Vec::new();
    clap_mangen::Man::new(table.after_long_help(Resettable::Reset))
        .render(&mut page)
        .context("cannot make the page")?;
    page.extend(verbatim("EXAMPLES", &examples).into_bytes());
    print(&page)
}

/// A section of a man page whose lines stay as they are: commands to copy must not be filled.
fn verbatim(title: &str, text: &str) -> String {
    if text.is_empty() {
        return String::new();
    }
    let mut section = format!(".SH {title}\n.nf\n");
    for line in text.lines() {
        // A dash as typed, not a hyphen; and no line that begins with a dot is a request.
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        section.push_str("\\&");
        section.push_str(&line);
        section.push('\n');
    }
    section + ".fi\n"
}

/// Prints a shell's completions.
pub fn completions(shell: clap_complete::Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut cli::table(), "ferry", &mut script);
    print(&script)
}

fn print(text: &[u8]) -> Result<()> {
    match std::io::stdout().write_all(text) {
        // A pager that was left early.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to standard output"),
    }
}
