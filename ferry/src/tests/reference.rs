//! The pages of `docs/reference/`: one for each command, made of the table of flags, and one with the keys of the configuration file.
//!
//! The test fails if a page is not what the table says. `make reference` writes the pages.

use std::fmt::Write;
use std::fs;

use clap::builder::StyledStr;
use clap::{Arg, Command};

use super::book::{PAGE_BYTES_MAX, root};
use crate::documents::configuration::{keys, value_of};
use crate::documents::{built, commands};
use crate::{config, disk, flags, virtiofsd};

/// Has the test write the pages instead of comparing them.
const WRITE: &str = "FERRY_WRITE_REFERENCE";

/// Says on each page where it comes from.
const ORIGIN: &str = "<!-- Generated from the table of flags by `make reference`. -->\n\n";

/// The heading in docs/SUMMARY.md below which the pages are listed.
const SUMMARY_HEADING: &str = "\n# Reference\n";

/// A page.
struct Page {
    file: String,
    title: String,
    /// Its depth in the summary.
    depth: usize,
    text: String,
}

/// The flags of a command that stand under one heading of its help; without one, they come first.
struct Section<'a> {
    heading: Option<&'a str>,
    flags: Vec<&'a Arg>,
}

/// The flags of a command that its page shows, heading by heading. Those of all commands are on the page of the program.
fn sections(command: &Command) -> Vec<Section<'_>> {
    let mut sections = vec![Section { heading: None, flags: Vec::new() }];
    let is_program = command.get_name() == "ferry";
    let is_shown = |arg: &&Arg| {
        !arg.is_hide_set()
            && !arg.is_positional()
            && !["help", "version"].contains(&arg.get_id().as_str())
            && (is_program || !arg.is_global_set())
    };
    for flag in command.get_arguments().filter(is_shown) {
        let heading = flag.get_help_heading();
        match sections.iter_mut().find(|section| section.heading == heading) {
            Some(section) => section.flags.push(flag),
            None => sections.push(Section { heading, flags: vec![flag] }),
        }
    }
    sections
}

/// The file name of the page of a command, or of one of its headings.
fn file_name(command: &Command, heading: Option<&str>) -> String {
    let words = command.get_display_name().unwrap_or(command.get_name()).to_owned() + "-" + heading.unwrap_or_default();
    let plain: String = words.to_lowercase().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let parts: Vec<_> = plain.split('-').filter(|part| !part.is_empty()).collect();
    parts.join("-") + ".md"
}

/// The name of a command as it is typed.
fn title(command: &Command) -> String {
    command.get_display_name().unwrap_or(command.get_name()).replace('-', " ")
}

/// Text outside of code, as Markdown.
fn escaped(text: &str) -> String {
    let parts = text.split('`').enumerate();
    let parts =
        parts.map(|(at, part)| if at % 2 == 1 { part.into() } else { part.replace('*', "\\*").replace('<', "\\<") });
    parts.collect::<Vec<_>>().join("`")
}

/// The paragraphs of a help text, each on one line that ends as a sentence.
fn paragraphs(text: &StyledStr) -> Vec<String> {
    let text = text.to_string();
    let one = |paragraph: &str| {
        let line = escaped(&paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
        if line.ends_with(['.', ':', '!']) { line } else { line + "." }
    };
    text.split("\n\n").filter(|paragraph| !paragraph.trim().is_empty()).map(one).collect()
}

/// The names of what is to be given after a flag.
fn values(arg: &Arg) -> String {
    arg.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// A flag as it is typed.
fn typed(flag: &Arg) -> String {
    let short = flag.get_short().map(|short| format!("-{short}"));
    let long = flag.get_long().map(|long| format!("--{long}"));
    let names = short.into_iter().chain(long).collect::<Vec<_>>().join(", ");
    if flag.get_action().takes_values() { format!("{names} {}", values(flag)) } else { names }
}

/// An item of a list: an argument with its help, its values and its default.
fn item(arg: &Arg) -> String {
    let name = if arg.is_positional() { values(arg) } else { typed(arg) };
    let mut text = arg.get_long_help().or(arg.get_help()).map(paragraphs).unwrap_or_default();
    let possible: Vec<_> = arg.get_possible_values().into_iter().filter(|value| !value.is_hide_set()).collect();
    let has_values = arg.get_action().takes_values() && !possible.is_empty();
    let is_explained = possible.iter().any(|value| value.get_help().is_some());
    if has_values && !is_explained {
        let names: Vec<_> = possible.iter().map(|value| format!("`{}`", value.get_name())).collect();
        text.push(format!("Values: {}.", names.join(", ")));
    }
    let default: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if arg.get_action().takes_values() && !default.is_empty() {
        text.push(format!("Default: `{}`.", default.join(" ")));
    }
    if arg.is_required_set() && !arg.is_positional() {
        text.push("Required.".into());
    }
    let mut item = format!("* `{name}`: {}\n", text.join(" "));
    for value in possible.iter().filter(|_| has_values && is_explained) {
        let help = value.get_help().map(paragraphs).unwrap_or_default().join(" ");
        let _ = writeln!(item, "  * `{}`: {help}", value.get_name());
    }
    item
}

/// The flags of a section; those that `ferry share` has as well are only named.
fn listed(section: &Section<'_>, share: Option<&Command>) -> String {
    let is_shared = |flag: &Arg| {
        let same = |other: &Arg| {
            let texts = |arg: &Arg| arg.get_long_help().or(arg.get_help()).map(ToString::to_string);
            other.get_id() == flag.get_id() && texts(other) == texts(flag)
        };
        share.is_some_and(|share| share.get_arguments().any(same))
    };
    let (shared, own): (Vec<&Arg>, Vec<&Arg>) = section.flags.iter().partition(|flag| is_shared(flag));
    let mut text: String = own.into_iter().map(item).collect();
    if let (Some(share), false) = (share, shared.is_empty()) {
        let names: Vec<_> = shared.iter().map(|flag| format!("`{}`", typed(flag))).collect();
        let page = place(share, section.heading);
        let _ = writeln!(text, "* As for [ferry share]({page}): {}.", names.join(", "));
    }
    text
}

/// Where the flags under a heading of a command are: on a page of their own, if they all do not fit on one.
fn place(command: &Command, heading: Option<&str>) -> String {
    let own = heading.filter(|_| !fits(command));
    file_name(command, own)
}

fn fits(command: &Command) -> bool {
    ORIGIN.len() + whole(command, None).len() <= PAGE_BYTES_MAX
}

/// The subcommands, sorted.
fn sorted(command: &Command) -> Vec<&Command> {
    let mut commands: Vec<_> = commands(command).collect();
    commands.sort_by_key(|command| command.get_name());
    commands
}

/// What a page begins with: what the command does, and how it is called.
fn head(command: &Command) -> String {
    let about = command.get_long_about().or(command.get_about()).map(paragraphs).unwrap_or_default();
    let mut text = format!("# {}\n\n{}\n\nUsage:\n\n", title(command), about.join("\n\n"));
    let usage = command.clone().render_usage().to_string();
    for line in usage.trim_start_matches("Usage:").lines() {
        let _ = writeln!(text, "* `{}`", line.trim());
    }
    let below = sorted(command);
    if !below.is_empty() {
        text.push_str("\n## Commands\n\n");
    }
    for command in below {
        let about = command.get_about().map(paragraphs).unwrap_or_default().join(" ");
        let _ = writeln!(text, "* [{}]({}): {about}", title(command), file_name(command, None));
    }
    let mut positionals: Vec<_> = command.get_positionals().filter(|arg| !arg.is_hide_set()).collect();
    positionals.sort_by_key(|arg| arg.get_index());
    let positionals: String = positionals.into_iter().map(item).collect();
    if !positionals.is_empty() {
        let _ = write!(text, "\n## Arguments\n\n{positionals}");
    }
    text
}

/// All of a command on one page.
fn whole(command: &Command, share: Option<&Command>) -> String {
    let mut text = head(command);
    for section in sections(command) {
        if !section.flags.is_empty() {
            let _ = write!(text, "\n## {}\n\n{}", section.heading.unwrap_or("Options"), listed(&section, share));
        }
    }
    text
}

/// The pages of a command: one, or one for each heading besides.
fn pages_of(command: &Command, depth: usize, share: Option<&Command>) -> Vec<Page> {
    let (file, title) = (file_name(command, None), title(command));
    let text = whole(command, share);
    if ORIGIN.len() + text.len() <= PAGE_BYTES_MAX {
        return vec![Page { file, title, depth, text }];
    }
    let mut main = head(command);
    let mut pages = Vec::new();
    for section in sections(command) {
        let flags = listed(&section, share);
        let Some(heading) = section.heading else {
            let _ = write!(main, "\n## Options\n\n{flags}\n## More options\n\n");
            continue;
        };
        let below = file_name(command, Some(heading));
        let _ = writeln!(main, "* [{heading}]({below})");
        let text = format!("# {title}: {heading}\n\nOptions of [{title}]({file}).\n\n{flags}");
        pages.push(Page { file: below, title: heading.into(), depth: depth + 1, text });
    }
    pages.insert(0, Page { file, title, depth, text: main });
    pages
}

/// The keys of one table that are flags of a command, heading by heading.
fn table_of(command: &Command, keys: &[String]) -> String {
    let mut text = String::new();
    let mut known = Vec::new();
    for section in sections(command) {
        let is_key = |flag: &&&Arg| flag.get_long().is_some_and(|long| keys.iter().any(|key| key == long));
        let flags: Vec<_> = section.flags.iter().filter(is_key).collect();
        if flags.is_empty() {
            continue;
        }
        let (heading, page) = (section.heading.unwrap_or("Options"), place(command, section.heading));
        let _ = write!(text, "\n[{heading}]({page}):\n\n| key | value |\n| --- | --- |\n");
        for flag in flags {
            let long = flag.get_long().unwrap_or_default();
            let _ = writeln!(text, "| `{long}` | {} |", value_of(flag));
            known.push(long);
        }
    }
    let others: Vec<_> =
        keys.iter().filter(|key| !known.contains(&key.as_str())).map(|key| format!("`{key}`")).collect();
    format!("Without a flag: {}.\n{text}", others.join(", "))
}

fn configuration(table: &Command) -> String {
    let [share, disk] = ["share", "disk"].map(|name| table.find_subcommand(name).expect("it is in the table"));
    let tables = ["share".to_owned(), "disk".to_owned()];
    let of_file: Vec<_> = keys::<config::File>().into_iter().filter(|key| !tables.contains(key)).collect();
    format!(
        "# The configuration file\n\n\
         `ferry share --config FILE` reads shares and disks from a TOML file. Each share is a `[[share]]` table, each disk a `[[disk]]` \
         table. Keys are the long flags without their dashes. Relative paths are relative to the directory of the file. An unknown key is \
         an error.\n\n\
         ## The process\n\n\
         These keys stand before the tables: {}. Their values are those of the flags \
         ([ferry share]({})).\n\n\
         ## `[[share]]`\n\n\
         `dir` is another name of `source`. {}\n\
         ## `[[disk]]`\n\n{}",
        of_file.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", "),
        place(share, Some("Confinement")),
        table_of(share, &keys::<flags::Share>().into_iter().filter(|key| key != "dir").collect::<Vec<_>>()),
        table_of(disk, &keys::<disk::Args>()),
    )
}

/// All pages, in the order of the summary.
fn pages() -> Vec<Page> {
    let table = built();
    let mut pages = Vec::new();
    add(&mut pages, &table, &table, 0);
    let mut drop_in = virtiofsd::table();
    drop_in.build();
    pages.extend(pages_of(&drop_in, 0, None));
    let title = "The configuration file".into();
    pages.push(Page { file: "configuration.md".into(), title, depth: 0, text: configuration(&table) });
    for page in &mut pages {
        page.text.insert_str(0, ORIGIN);
    }
    pages
}

/// Adds the pages of a command and of those below it.
fn add(pages: &mut Vec<Page>, table: &Command, command: &Command, depth: usize) {
    let has_flags_of_share = command.get_display_name() == Some("ferry-mount");
    pages.extend(pages_of(command, depth, table.find_subcommand("share").filter(|_| has_flags_of_share)));
    sorted(command).into_iter().for_each(|below| add(pages, table, below, depth + 1));
}

/// The summary with the list of these pages.
fn summary(text: &str, pages: &[Page]) -> String {
    let (before, rest) = text.split_once(SUMMARY_HEADING).expect("the summary has the heading");
    let (_, after) = rest.split_once("\n# ").expect("the summary has a heading after it");
    let line = |page: &Page| format!("{}- [{}](reference/{})\n", "  ".repeat(page.depth), page.title, page.file);
    format!("{before}{SUMMARY_HEADING}\n{}\n# {after}", pages.iter().map(line).collect::<String>())
}

#[test]
fn the_reference_matches_the_table_of_flags() {
    let directory = root().join("docs/reference");
    let summary_file = root().join("docs/SUMMARY.md");
    let pages = pages();
    let is = fs::read_to_string(&summary_file).expect("the summary is there");
    let wanted = summary(&is, &pages);
    if std::env::var_os(WRITE).is_some() {
        fs::create_dir_all(&directory).expect("the directory can be made");
        for entry in fs::read_dir(&directory).expect("the directory is there") {
            fs::remove_file(entry.expect("an entry").path()).expect("the page can be removed");
        }
        for page in &pages {
            fs::write(directory.join(&page.file), &page.text).expect("the page can be written");
        }
        fs::write(summary_file, wanted).expect("the summary can be written");
        return;
    }
    assert!(is == wanted, "docs/SUMMARY.md is stale: run make reference");
    let there = fs::read_dir(&directory).expect("the directory is there");
    let there = there.map(|entry| entry.expect("an entry").file_name().into_string().expect("the name is text"));
    let mut there: Vec<_> = there.collect();
    there.sort();
    let mut files: Vec<_> = pages.iter().map(|page| page.file.clone()).collect();
    files.sort();
    assert_eq!(there, files, "docs/reference is stale: run make reference");
    for Page { file, text, .. } in pages {
        let is = fs::read_to_string(directory.join(&file)).expect("the page is there");
        assert!(is == text, "docs/reference/{file} is stale: run make reference");
    }
}

#[test]
fn every_flag_is_in_the_reference() {
    let text: String = pages().into_iter().map(|page| page.text).collect();
    let mut waiting = vec![built()];
    let mut count = 0;
    while let Some(command) = waiting.pop() {
        for flag in sections(&command).iter().flat_map(|section| &section.flags) {
            assert!(text.contains(&format!("`{}`", typed(flag))), "{}: {}", title(&command), typed(flag));
            count += 1;
        }
        waiting.extend(commands(&command).cloned());
    }
    assert!(count > 150, "{count} flags were found");
}
