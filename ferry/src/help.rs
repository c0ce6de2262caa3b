//! Help texts with commands to paste, which clap would break when it wraps lines.
//!
//! So clap gets marks instead of examples, and instead of spaces in commands in backticks. The marks in its output are replaced
//! afterwards.
//!
//! A command with many flags shows those without a heading, and the headings; `--help-all` shows all flags.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};

use clap::builder::StyledStr;
use clap::error::ErrorKind;
use clap::{Arg, Command};

/// Surrounds the number of an example. No text contains this character.
const EXAMPLE: char = '\u{e000}';
/// Stands for a space that lines do not break at.
const SPACE: char = '\u{e001}';

/// The flag that shows all flags of a command.
pub const ALL: &str = "help-all";

/// Whether a command line has that flag.
pub fn wants_all(args: &[OsString]) -> bool {
    let mut flags = args.iter().take_while(|arg| *arg != "--");
    flags.any(|arg| arg.to_str().and_then(|arg| arg.strip_prefix("--")) == Some(ALL))
}

/// Returns the table of flags with marks. `all`: help shows all flags of each command.
pub fn marked(table: Command, all: bool) -> Command {
    mark(table, all, &mut 0)
}

/// Hides the flags under headings, if the command has many flags; returns the list of the headings.
fn hide_groups(command: Command) -> (Command, Option<String>) {
    if !command.get_arguments().any(|arg| arg.get_id() == ALL) {
        return (command, None);
    }
    let mut headings = Vec::new();
    for heading in command.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(Arg::get_help_heading) {
        if !headings.contains(&heading) {
            headings.push(heading);
        }
    }
    let groups: String = headings.into_iter().map(|heading| format!("\n  {heading}")).collect();
    let command = command.mut_args(|arg| match arg.get_help_heading() {
        Some(_) => arg.hide_short_help(true).hide_long_help(true),
        None => arg,
    });
    (command, Some(format!("More options, which --{ALL} shows:{groups}")))
}

fn mark(command: Command, all: bool, number: &mut usize) -> Command {
    let (command, groups) = if all { (command, None) } else { hide_groups(command) };
    let mut command = command.mut_args(mark_arg);
    if let Some(groups) = &groups {
        command = command.after_help(groups);
    }
    if let Some(about) = command.get_about().map(join_commands) {
        command = command.about(about);
    }
    if let Some(about) = command.get_long_about().map(join_commands) {
        command = command.long_about(about);
    }
    if command.get_after_long_help().is_some() {
        let groups = groups.map(|groups| groups + "\n\n").unwrap_or_default();
        command = command.after_long_help(format!("{groups}{EXAMPLE}{number}{EXAMPLE}"));
        *number += 1;
    }
    let names: Vec<_> = command.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    names.into_iter().fold(command, |command, name| command.mut_subcommand(name, |command| mark(command, all, number)))
}

fn mark_arg(arg: Arg) -> Arg {
    let (help, long) = (arg.get_help().map(join_commands), arg.get_long_help().map(join_commands));
    let arg = if let Some(help) = help { arg.help(help) } else { arg };
    if let Some(long) = long { arg.long_help(long) } else { arg }
}

/// Makes one word of each command in backticks.
fn join_commands(text: &StyledStr) -> String {
    let text = text.to_string();
    let parts = text.split('`').enumerate();
    let parts = parts.map(|(at, part)| if at % 2 == 1 { part.replace(' ', &SPACE.to_string()) } else { part.into() });
    parts.collect::<Vec<_>>().join("`")
}

/// Collects the texts that the marks stand for, in their order.
fn examples(command: &Command, found: &mut Vec<String>) {
    found.extend(command.get_after_long_help().map(ToString::to_string));
    command.get_subcommands().for_each(|command| examples(command, found));
}

/// Replaces the marks.
fn unmarked(text: &str, table: &Command) -> String {
    let mut texts = Vec::new();
    examples(table, &mut texts);
    let text = text.replace(SPACE, " ");
    let parts = text.split(EXAMPLE).enumerate();
    let text_of = |number: &str| number.parse().ok().and_then(|number: usize| texts.get(number)).cloned();
    parts.map(|(at, part)| if at % 2 == 1 { text_of(part).unwrap_or_default() } else { part.into() }).collect()
}

/// Prints clap's error (help, the version, or a mistake on the command line) and exits.
pub fn exit(error: &clap::Error, table: &Command) -> ! {
    if error.kind() != ErrorKind::DisplayHelp {
        error.exit();
    }
    let mut out = std::io::stdout().lock();
    let is_styled = out.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let text = error.render();
    let text = if is_styled { text.ansi().to_string() } else { text.to_string() };
    // A pager may end early.
    let _ = out.write_all(unmarked(&text, table).as_bytes()).and_then(|()| out.flush());
    std::process::exit(error.exit_code())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All commands, each by the words that lead to it.
    fn paths(command: &Command, path: &[String]) -> Vec<Vec<String>> {
        let below = command.get_subcommands().flat_map(|below| {
            let path = [path, &[below.get_name().to_owned()]].concat();
            paths(below, &path)
        });
        std::iter::once(path.to_vec()).chain(below).collect()
    }

    fn help(path: &[String], flag: &str, columns: usize) -> String {
        let line = ["ferry".to_owned()].into_iter().chain(path.iter().cloned()).chain([flag.to_owned()]);
        let table = marked(crate::cli::table(), wants_all(&[flag.into()])).term_width(columns);
        let error = table.try_get_matches_from(line).expect_err("help is asked for");
        assert_eq!(error.kind(), ErrorKind::DisplayHelp, "{path:?}");
        unmarked(&error.render().to_string(), &crate::cli::table())
    }

    #[test]
    fn help_never_breaks_a_command() {
        let table = crate::cli::table();
        for (columns, path) in
            [80, 100].into_iter().flat_map(|columns| paths(&table, &[]).into_iter().map(move |path| (columns, path)))
        {
            let command =
                path.iter().try_fold(&table, |command, name| command.find_subcommand(name)).expect("one of them");
            let is_long = command.get_arguments().any(|arg| arg.get_id() == ALL);
            let long = help(&path, if is_long { "--help-all" } else { "--help" }, columns);
            let lines: Vec<_> = long.lines().collect();
            assert!(!long.contains([EXAMPLE, SPACE]), "{long}");
            // Examples are there, line by line, as they are written.
            let examples = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            let examples: Vec<_> = examples.lines().collect();
            assert!(
                examples.is_empty() || lines.windows(examples.len()).any(|lines| lines == examples),
                "{path:?}: {long}"
            );
            // Commands in texts are whole.
            for text in [&long, &help(&path, "-h", columns)] {
                for line in text.lines().filter(|line| !examples.contains(line)) {
                    assert_eq!(line.matches('`').count() % 2, 0, "{path:?} at {columns} columns: {line}");
                }
            }
        }
    }

    #[test]
    fn long_commands_show_few_flags_and_the_names_of_the_groups() {
        let table = crate::cli::table();
        for name in ["share", "mount"] {
            let path = [name.to_owned()];
            let command = table.find_subcommand(name).expect("one of them");
            let has = |text: &str, arg: &Arg| {
                let long = format!("--{}", arg.get_long().unwrap_or_default());
                let mut flags = text.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
                flags.any(|line| line.split([' ', ',']).any(|word| word == long))
            };
            let (few, all) = (help(&path, "--help", 100), help(&path, "--help-all", 100));
            // Examples to copy are there in both; they have flags, too.
            let examples = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            assert!(!examples.is_empty() && few.contains(&examples) && all.contains(&examples), "{few}");
            let (few, all) = (few.replace(&examples, ""), all.replace(&examples, ""));
            let flags: Vec<_> =
                command.get_arguments().filter(|arg| arg.get_long().is_some() && !arg.is_hide_set()).collect();
            let shown = flags.iter().filter(|flag| has(&few, flag)).count();
            assert!((7..=12).contains(&shown), "{name} shows {shown} flags: {few}");
            for flag in flags {
                assert!(has(&all, flag), "{name} --help-all lacks {}: {all}", flag.get_id());
                if let Some(heading) = flag.get_help_heading() {
                    assert!(
                        !has(&few, flag) && few.contains(&format!("\n  {heading}\n")),
                        "{name}, {}: {few}",
                        flag.get_id()
                    );
                }
            }
        }
    }
}
