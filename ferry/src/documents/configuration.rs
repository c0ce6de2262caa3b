//! The man page of the configuration file, ferry.toml(5), made of the table of flags and the keys that the parser knows.

use std::any::TypeId;

use clap::{Arg, ArgAction, Command};
use clap_mangen::roff::{Roff, bold, italic, roman};
use serde::de::DeserializeOwned;

use super::roff::verbatim;
use crate::flags::as_keys;
use crate::{config, disk, flags};

/// The name of the page.
pub const NAME: &str = "ferry.toml";

/// The section of file formats.
pub const SECTION: &str = "5";

/// A file with the two kinds of tables, and one of a share that a socket unit starts.
const EXAMPLE: &str = "\
# /etc/ferry/web.toml, for ferry-share@web.service
[[share]]
source = \"/srv/web\"
virtiofs = \"/run/ferry-share/web.sock\"
tag = \"web\"
read-only = true

[[disk]]
file = \"/srv/web.raw\"
vhost-user = \"/run/ferry-share/web-disk.sock\"";

/// Returns the page.
pub fn page(table: &Command) -> Vec<u8> {
    let [share, disk] = ["share", "disk"].map(|name| table.find_subcommand(name).expect("it is in the table"));
    let of_file: Vec<_> = keys::<config::File>();
    let mut page = Roff::new();
    page.control("SH", ["NAME"]).text([roman("ferry.toml - configuration file of ferry share")]);
    page.control("SH", ["SYNOPSIS"]).text([bold("ferry share --config"), roman(" "), italic("FILE")]);
    page.control("SH", ["DESCRIPTION"]).text([roman(
        "A file in TOML that lists what one process serves: a [[share]] table for each share, and a [[disk]] table for each disk. \
         Keys are the long flags of ferry-share(1) and ferry-disk(1) without their dashes. Relative paths are relative to the directory \
         of the file. An unknown key is an error.",
    )]);
    page.control("SH", ["THE PROCESS"]).text([roman("These keys stand before the tables.")]);
    add_keys(&mut page, share, &of_file);
    page.control("SH", ["SHARES"]).text([roman("Keys of a [[share]] table.")]);
    page.control("TP", []).text([bold("source"), roman(" (string, required)")]);
    page.text([roman(help(positional(share)).join(" ") + " The key dir is the same.")]);
    add_keys(&mut page, share, &keys::<flags::Share>());
    page.control("SH", ["DISKS"]).text([roman("Keys of a [[disk]] table.")]);
    page.control("TP", []).text([bold("file"), roman(" (string, required)")]);
    page.text([roman(help(positional(disk)).join(" "))]);
    add_keys(&mut page, disk, &keys::<disk::Args>());
    page.control("SH", ["FILES"]);
    page.control("TP", []).text([italic("/etc/ferry/NAME.toml")]);
    page.text([roman(
        "The configuration of ferry-share@NAME.service, ferry-disk@NAME.service or ferry-mount@NAME.service.",
    )]);
    let end = verbatim("EXAMPLES", EXAMPLE) + ".SH \"SEE ALSO\"\nferry(1), ferry\\-share(1), ferry\\-disk(1)\n";
    [page.render().into_bytes(), end.into_bytes()].concat()
}

/// The argument without a flag.
fn positional(command: &Command) -> &Arg {
    command.get_positionals().next().expect("it has a source or a file")
}

/// The keys that a table of the configuration file may have.
pub fn keys<T: DeserializeOwned>() -> Vec<String> {
    let error = toml::from_str::<T>("no-such-key = 1").err().expect("there is no such key");
    error.message().split('`').skip(3).step_by(2).map(String::from).collect()
}

/// What may stand behind a key, by what its flag takes.
pub fn value_of(flag: &Arg) -> &'static str {
    let parser = flag.get_value_parser().type_id();
    let is_number = [TypeId::of::<u16>(), TypeId::of::<u32>(), TypeId::of::<u64>()].iter().any(|id| parser == *id);
    match flag.get_action() {
        ArgAction::SetTrue => "`true`",
        ArgAction::Append => "list of strings",
        _ if is_number => "number",
        _ => "string",
    }
}

/// The paragraphs of a help text, in the words of the file.
fn help(arg: &Arg) -> Vec<String> {
    let text = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let paragraphs = text.split("\n\n").map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
    paragraphs.filter(|text| !text.is_empty()).map(|text| as_keys(&text.replace('`', ""))).map(sentence).collect()
}

/// The same with a full stop at its end.
fn sentence(text: String) -> String {
    if text.ends_with(['.', ':', '!']) { text } else { text + "." }
}

/// Adds those flags of a command that are keys, heading by heading.
fn add_keys(page: &mut Roff, command: &Command, keys: &[String]) {
    let is_key = |flag: &&Arg| flag.get_long().is_some_and(|long| keys.iter().any(|key| key == long));
    let flags: Vec<_> = command.get_arguments().filter(is_key).collect();
    let mut headings: Vec<Option<&str>> = flags.iter().map(|flag| flag.get_help_heading()).collect();
    let mut seen = Vec::new();
    headings.retain(|heading| {
        !seen.contains(heading) && {
            seen.push(*heading);
            true
        }
    });
    for heading in headings {
        if let Some(heading) = heading {
            page.control("SS", [heading]);
        }
        for flag in flags.iter().filter(|flag| flag.get_help_heading() == heading) {
            add_key(page, flag);
        }
    }
}

fn add_key(page: &mut Roff, flag: &Arg) {
    let long = flag.get_long().unwrap_or_default();
    page.control("TP", []).text([bold(long), roman(format!(" ({})", value_of(flag).replace('`', "")))]);
    for (at, paragraph) in help(flag).into_iter().enumerate() {
        if at > 0 {
            page.control("IP", []);
        }
        page.text([roman(paragraph)]);
    }
    let values: Vec<_> = flag.get_possible_values().into_iter().filter(|value| !value.is_hide_set()).collect();
    if !flag.get_action().takes_values() {
        return;
    }
    for value in values {
        let words = value.get_help().map(|text| format!(": {}", sentence(as_keys(&text.to_string().replace('`', "")))));
        page.control("IP", []).text([bold(value.get_name()), roman(words.unwrap_or_else(|| ".".into()))]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_on_the_page() {
        let table = super::super::built();
        let page = String::from_utf8(page(&table)).expect("text");
        let all = [keys::<config::File>(), keys::<flags::Share>(), keys::<disk::Args>()].concat();
        assert!(all.len() > 80, "{all:?}");
        for key in all.iter().filter(|key| !["share", "disk", "dir"].contains(&key.as_str())) {
            assert!(page.contains(&format!("\\fB{}\\fR (", key.replace('-', "\\-"))), "{key}");
        }
    }

    /// The page's example is a file that the program takes.
    #[test]
    fn the_example_is_a_configuration() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join(NAME);
        std::fs::write(&file, EXAMPLE).expect("a file");
        let read = config::read(&file).expect("a good file");
        assert_eq!((read.shares.len(), read.disks.len()), (1, 1));
    }
}
