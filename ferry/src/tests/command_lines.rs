//! Every command line of README.md, of `docs/` and of the help is one that the program takes, and those for VMMs ask for no more
//! queues than are offered.

use std::ffi::OsString;
use std::path::Path;

use clap::error::ErrorKind;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::book::documents;
use crate::{cli, groups, helper};

/// The digest that stands for the word DIGEST.
const DIGEST: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// The fenced blocks of a document but for those in other languages than the shell's, or the examples of a help: each a text.
fn texts() -> Vec<(String, Vec<String>)> {
    let is_read = |path: &Path| path == Path::new("README.md") || path.starts_with("docs");
    let documents = documents().into_iter().filter(|(path, _)| is_read(path));
    let mut texts: Vec<_> = documents.map(|(path, text)| (path.display().to_string(), blocks(&text))).collect();
    let mut table = cli::table();
    table.build();
    let mut commands = vec![&table];
    while let Some(command) = commands.pop() {
        let examples = command.get_after_long_help().map(ToString::to_string);
        texts.push((format!("the help of {}", command.get_name()), examples.into_iter().collect()));
        commands.extend(command.get_subcommands());
    }
    texts
}

fn blocks(document: &str) -> Vec<String> {
    let fenced = document.split("\n```").skip(1).step_by(2);
    fenced
        .filter_map(|block| ["sh\n", "console\n", "\n"].iter().find_map(|kind| block.strip_prefix(kind)))
        .map(String::from)
        .collect()
}

/// The words of a line as the shell reads them, up to a comment or a description, which follows two blanks.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut characters = line.trim().chars().peekable();
    while let Some(character) = characters.next() {
        match (character, quote) {
            (end, Some(begun)) if end == begun => quote = None,
            ('\'' | '"', None) => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (' ', None) => {
                words.extend(word.take());
                if matches!(characters.peek(), Some(' ' | '#' | '(' | '|' | '>')) {
                    return words;
                }
            }
            (other, _) => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    words
}

/// Lines, with those that go on on the next one put together.
fn lines(text: &str) -> Vec<String> {
    text.replace("\\\n", " ").lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// Returns the error of clap about a line. The help and the version are no errors.
fn mistake(line: impl IntoIterator<Item = OsString>) -> Option<String> {
    let error = groups::parse(line).err()?;
    let is_output = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    (!is_output).then(|| error.to_string())
}

/// What the program says about a line that is not one of its own.
fn refusal(line: &str) -> Option<String> {
    let words = words(line);
    let first = words.first()?;
    let fill_in = |word: &String| match word.as_str() {
        "DIGEST" => DIGEST.into(),
        "$FROM" => "oci:registry.example/os/base:12".into(),
        word => word.into(),
    };
    if words.len() > 2 && words[..3] == ["mount", "-t", "ferry"] {
        let args = words[3..].iter().map(OsString::from);
        return match helper::read(args) {
            Ok(helper::HelperCommand::Mount(line)) => mistake(line),
            Ok(_) => None,
            Err(error) => Some(error),
        };
    }
    if first.rsplit('/').next() != Some("ferry") || words.len() == 1 {
        return None;
    }
    let args = std::iter::once("ferry".into()).chain(words[1..].iter().map(fill_in)).map(|word: String| word.into());
    mistake(args)
}

#[test]
fn every_shown_command_line_is_valid() {
    let mut taken = 0;
    for (place, texts) in texts() {
        for line in
            texts.iter().flat_map(|text| text.replace("\\\n", " ").lines().map(String::from).collect::<Vec<_>>())
        {
            assert_eq!(refusal(&line), None, "{place}: {line}");
            taken += usize::from(line.trim().starts_with("ferry ") || line.contains("mount -t ferry"));
        }
    }
    assert!(taken > 90, "{taken} lines were found");
    // It would be noticed.
    for wrong in [
        "ferry share /a --virtiofs s --quick",
        "mount -t ferry mem /mnt -o fast",
        "ferry disk a --vhost-user s --queues 257",
    ] {
        assert!(refusal(wrong).is_some(), "{wrong}");
    }
}

#[test]
fn options_of_kernel_modules_are_in_one_file_everywhere() {
    let places: Vec<_> = texts()
        .into_iter()
        .map(|(place, texts)| (place, texts.concat()))
        .chain(documents().into_iter().map(|(path, text)| (path.display().to_string(), text)))
        .flat_map(|(place, text)| {
            let files = text.split("/etc/modprobe.d/").skip(1).map(|rest| rest.starts_with("ferry.conf"));
            files.map(|is_ours| (place.clone(), is_ours)).collect::<Vec<_>>()
        })
        .collect();
    assert!(places.len() >= 2 && places.iter().all(|(_, is_ours)| *is_ours), "{places:?}");
}

/// The number behind a word in a line.
fn number(line: &str, word: &str) -> Option<usize> {
    let (_, rest) = line.split_once(word)?;
    rest.split(|character: char| !character.is_ascii_digit()).next()?.parse().ok()
}

/// How many queues shares and disks offer by default on a machine with one CPU.
fn queues_on_one_cpu() -> (usize, usize) {
    let on_one = || {
        let all = sched_getaffinity(None).expect("this thread is there");
        let mut one = CpuSet::new();
        one.set((0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).expect("it runs on one"));
        sched_setaffinity(None, &one).expect("it may run on fewer");
        (ferry_virtiofs::Options::default().queues, ferry_blk::Options::default().queues)
    };
    std::thread::spawn(on_one).join().expect("no panic")
}

#[test]
fn vmm_recipes_use_at_most_the_offered_queues_on_one_cpu() {
    let (of_shares, of_disks) = queues_on_one_cpu();
    let mut found = 0;
    for (place, text) in
        texts().into_iter().flat_map(|(place, texts)| texts.into_iter().map(move |text| (place.clone(), text)))
    {
        let (mut tag, mut flag) = (None, None);
        for line in lines(&text) {
            if line.starts_with("ferry share ") {
                let words = words(&line);
                let value = |name: &str| words.iter().position(|word| word == name).map(|at| words[at + 1].clone());
                (tag, flag) = (value("--tag"), value("--queues").and_then(|queues| queues.parse::<usize>().ok()));
            }
            let is_disk = line.contains("blk") || line.contains("--disk ");
            let asked =
                ["num-request-queues=", "num-queues=", "num_queues="].iter().find_map(|word| number(&line, word));
            if let Some(asked) = asked {
                found += 1;
                let offered = if is_disk { of_disks } else { flag.unwrap_or(of_shares) };
                assert!(asked <= offered, "{place}: {line}: {offered} are offered");
            }
            // The generic device of QEMU has to be told all of it.
            match (number(&line, "virtio-id="), number(&line, "num_vqs="), number(&line, "config_size=")) {
                (Some(26), queues, config) => {
                    assert_eq!((queues, config), (flag.map(|queues| queues + 1), Some(40)), "{place}: {line}")
                }
                (Some(9), queues, config) => {
                    let bytes = tag.as_ref().map(|tag| tag.len() + 2);
                    assert_eq!((queues, config), (Some(1), bytes), "{place}: {line}");
                }
                _ => continue,
            }
            found += 1;
        }
    }
    assert!(found >= 9, "{found} lines for VMMs were found");
}
