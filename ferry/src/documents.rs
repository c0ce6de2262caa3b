//! The man pages and the completions, generated from the table of flags.

pub mod configuration;
mod roff;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use clap::Command;
use clap::builder::Resettable;

use self::roff::{titled, verbatim};
use crate::cli::{self, Program};
use crate::output::print;
use crate::virtiofsd;

/// The name that this program has as virtiofsd's replacement.
const DROP_IN: &str = "ferry-virtiofsd";

/// Prints the page of the program, of a command (`image build`), or of the configuration file.
pub fn man(command: &[String]) -> Result<()> {
    let table = built();
    if command == [configuration::NAME] {
        return print(titled(configuration::NAME, configuration::SECTION, &configuration::page(&table)));
    }
    let mut found = &table;
    for name in command {
        found = found.find_subcommand(name).with_context(|| {
            let names = commands(found).map(Command::get_name).collect::<Vec<_>>().join(", ");
            let of = found.get_display_name().unwrap_or("ferry").replace('-', " ");
            if names.is_empty() {
                format!("{of} has no commands, so it has no page {name:?}")
            } else {
                format!("{of} has no command {name:?}; its commands are {names}")
            }
        })?;
    }
    print(&page(found)?)
}

/// Writes the pages of the program, of its commands and names, and of the configuration file to a directory, with the names that
/// man(1) expects.
pub fn man_pages(directory: &Path) -> Result<()> {
    let table = built();
    let file = directory.join(format!("{}.{}", configuration::NAME, configuration::SECTION));
    let page_of_file = titled(configuration::NAME, configuration::SECTION, &configuration::page(&table));
    fs::write(&file, page_of_file).with_context(|| format!("cannot write {}", file.display()))?;
    let mut drop_in = virtiofsd::table();
    drop_in.build();
    let file = directory.join(DROP_IN).with_extension("1");
    fs::write(&file, named_page(&drop_in, DROP_IN)?).with_context(|| format!("cannot write {}", file.display()))?;
    let mut waiting = vec![&table];
    while let Some(command) = waiting.pop() {
        let file = directory.join(command.get_display_name().unwrap_or("ferry")).with_extension("1");
        fs::write(&file, page(command)?).with_context(|| format!("cannot write {}", file.display()))?;
        waiting.extend(commands(command));
    }
    Ok(())
}

/// Returns the table of flags with full names of commands. The command `help` has no page.
pub fn built() -> Command {
    let mut table = cli::table().disable_help_subcommand(true);
    table.build();
    table
}

/// Returns the commands of a command that have pages.
pub fn commands(of: &Command) -> impl Iterator<Item = &Command> {
    of.get_subcommands().filter(|command| !command.is_hide_set())
}

fn page(command: &Command) -> Result<Vec<u8>> {
    named_page(command, command.get_display_name().unwrap_or("ferry"))
}

fn named_page(command: &Command, name: &str) -> Result<Vec<u8>> {
    let examples = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    let command = command.clone().display_name(name).after_long_help(Resettable::Reset);
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page).context("cannot make the page")?;
    page.extend(verbatim("EXAMPLES", &examples).into_bytes());
    Ok(titled(name, "1", &page))
}

/// Prints a shell's completions of a program.
pub fn completions(shell: clap_complete::Shell, program: Program) -> Result<()> {
    let (mut table, name) = match program {
        Program::Ferry => (cli::table(), "ferry"),
        Program::FerryAgent => (ferry_agent::table(), "ferry-agent"),
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut table, name, &mut script);
    print(&script)
}
