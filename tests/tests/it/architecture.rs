//! ARCHITECTURE.md, `docs/design/` and `docs/conformance.md` against the code that they name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use ferry_wire::fuse::Opcode;
use ferry_wire::ninep::kind;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace")
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The overview, the design pages and the pages about conformance.
fn pages() -> Vec<PathBuf> {
    let docs = root().join("docs");
    let mut found = vec![root().join("ARCHITECTURE.md"), docs.join("conformance.md")];
    for directory in ["design", "conformance"] {
        let Ok(entries) = fs::read_dir(docs.join(directory)) else { continue };
        found.extend(entries.map(|entry| entry.expect("docs can be listed").path()));
    }
    found.retain(|path| path.extension().is_some_and(|end| end == "md"));
    found
}

/// The parts of a line between backquotes, each with the text that stands before it.
fn quoted(line: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = line.split('`').collect();
    parts.windows(2).step_by(2).map(|pair| (pair[0], pair[1])).collect()
}

/// Whether this is the path of a file of the project, rather than of the host or a program's argument.
fn is_path(code: &str) -> bool {
    let ends = [".rs", ".md", ".toml", "/"];
    let clean = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    code.contains('/')
        && !code.starts_with('/')
        && ends.iter().any(|end| code.ends_with(end))
        && code.chars().all(clean)
}

/// A file, and what follows it on the same line: names of what it defines.
fn references(line: &str) -> Vec<(&str, Vec<&str>)> {
    let mut found: Vec<(&str, Vec<&str>)> = Vec::new();
    for (before, code) in quoted(line) {
        if is_path(code) {
            found.push((code, Vec::new()));
        } else if before.chars().all(|c| c == ' ' || c == ',')
            && code.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            && let Some((_, names)) = found.last_mut()
        {
            names.push(code);
        } else {
            // What comes behind other words belongs to no file.
            found.push(("", Vec::new()));
        }
    }
    found.retain(|(path, _)| !path.is_empty());
    found
}

/// Whether a word stands in a text on its own.
fn has_word(source: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    source
        .match_indices(word)
        .any(|(at, _)| !source[..at].ends_with(is_part) && !source[at + word.len()..].starts_with(is_part))
}

/// The rows of the tables of requests: what they are of, and the functions as (file, name).
fn rows(overview: &str) -> BTreeMap<String, Vec<(String, String)>> {
    let (_, section) = overview.split_once("## Where is X").expect("there is a section of tables of requests");
    let section = section.split("\n## ").next().expect("split yields one part at least");
    let mut rows = BTreeMap::new();
    let mut of = "";
    for line in section.lines().filter(|line| line.starts_with('|') && !line.starts_with("| ---")) {
        let mut cells = line.trim_matches('|').split(" | ").map(str::trim);
        let (Some(first), Some(last), None) = (cells.next(), cells.next(), cells.next()) else {
            panic!("a row of two cells: {line}");
        };
        if last == "function" {
            of = first;
            continue;
        }
        let functions: Vec<(String, String)> = references(last)
            .into_iter()
            .flat_map(|(file, names)| names.into_iter().map(move |name| (file.to_owned(), name.to_owned())))
            .collect();
        let (names, _) = first.split_once(" (").unwrap_or((first, ""));
        for name in names.split(", ") {
            let key = format!("{of}: {name}");
            assert!(rows.insert(key, functions.clone()).is_none(), "{name} has two rows");
        }
    }
    rows
}

/// A name as it is compared: the code has `CopyFileRange64`, the protocol `COPY_FILE_RANGE_64`.
fn plain(name: &str) -> String {
    name.replace(['_', '-'], "").to_lowercase()
}

/// The names behind `prefix` in the lines of a source, up to `end`.
fn declared<'a>(source: &'a str, prefix: &str, end: char) -> BTreeSet<&'a str> {
    source.lines().filter_map(|line| line.trim_start().strip_prefix(prefix)?.split(end).next()).collect()
}

/// The variants of an enum, one on each line that is indented once.
fn variants<'a>(source: &'a str, name: &str) -> BTreeSet<&'a str> {
    let (_, body) = source.split_once(&format!("pub enum {name} {{\n")).expect("the enum is there");
    let body = body.split("\n}").next().expect("split yields one part at least");
    let lines = body.lines().filter_map(|line| line.strip_prefix("    "));
    let starts = lines.filter(|line| line.starts_with(|c: char| c.is_ascii_uppercase()));
    starts.filter_map(|line| line.split([' ', '(', ',', '{']).next()).collect()
}

#[test]
fn every_function_of_the_table_is_in_its_file() {
    let rows = rows(&text(&root().join("ARCHITECTURE.md")));
    let mut wrong = BTreeSet::new();
    for (row, functions) in &rows {
        if functions.is_empty() {
            wrong.insert(format!("{row}: names no function"));
        }
        for (file, name) in functions {
            let source = fs::read_to_string(root().join(file)).unwrap_or_default();
            if !has_word(&source, &format!("fn {name}")) {
                wrong.insert(format!("`{file}` has no `fn {name}`"));
            }
        }
    }
    assert!(wrong.is_empty(), "ARCHITECTURE.md, \"Where is X\":\n{wrong:#?}");
}

#[test]
fn every_request_has_a_row() {
    let rows = rows(&text(&root().join("ARCHITECTURE.md")));
    let known: BTreeSet<String> = rows.keys().map(|row| plain(row)).collect();
    let mut requests: BTreeSet<String> = Opcode::ALL.iter().map(|code| format!("FUSE opcode: {code:?}")).collect();

    let numbers = text(&root().join("wire/src/ninep/numbers.rs"));
    let (_, messages) = numbers.split_once("requests! {\n").expect("the T messages are in a list");
    let messages = declared(messages, "T", ' ');
    assert_eq!(messages.len(), kind::ALL.len(), "the T messages are declared otherwise: {messages:?}");
    requests.extend(messages.iter().map(|name| format!("9P message: T{name}")));

    let disk = text(&root().join("wire/src/blk/request.rs"));
    let kinds = declared(&disk, "const T_", ':');
    assert!(kinds.len() >= 6, "the types of virtio-blk are declared otherwise: {kinds:?}");
    requests.extend(kinds.iter().map(|name| format!("virtio request: blk {name}")));
    requests.extend(["fs request", "9p request"].map(|name| format!("virtio request: {name}")));

    let program = text(&root().join("ferry/src/image.rs"));
    let commands = variants(&program, "Command");
    assert!(commands.len() >= 14, "the commands of images are declared otherwise: {commands:?}");
    requests.extend(commands.iter().map(|name| format!("`ferry image` command: {name}")));

    let missing: Vec<&String> = requests.iter().filter(|request| !known.contains(&plain(request))).collect();
    assert!(missing.is_empty(), "ARCHITECTURE.md has no row for {missing:#?}");
    let surplus = rows.keys().filter(|row| row.starts_with("FUSE") || row.starts_with("9P") || row.starts_with('`'));
    let asked: BTreeSet<String> = requests.iter().map(|request| plain(request)).collect();
    let surplus: Vec<&String> = surplus.filter(|row| !asked.contains(&plain(row))).collect();
    assert!(surplus.is_empty(), "ARCHITECTURE.md has rows for what is no request: {surplus:#?}");
}

#[test]
fn every_named_file_exists_and_has_the_named_items() {
    let mut wrong = BTreeSet::new();
    for page in pages() {
        let shown = page.strip_prefix(root()).unwrap_or(&page).display().to_string();
        let page = text(&page);
        assert!(page.lines().all(|line| line.matches('`').count() % 2 == 0), "{shown}: a quotation ends in its line");
        // A name may stand in the line after its file's.
        for (file, names) in references(&page.replace('\n', " ")) {
            let path = root().join(file);
            if !path.exists() {
                wrong.insert(format!("{shown}: there is no `{file}`"));
            } else if path.is_file() {
                let source = text(&path);
                let absent = names.into_iter().filter(|name| !has_word(&source, name));
                wrong.extend(absent.map(|name| format!("{shown}: `{file}` has no `{name}`")));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_design_page_is_listed() {
    let index = text(&root().join("docs/design/README.md"));
    let pages =
        pages().into_iter().filter(|page| page.parent().is_some_and(|directory| directory.ends_with("docs/design")));
    let names = pages.map(|page| page.file_name().unwrap_or_default().to_string_lossy().into_owned());
    let missing: Vec<_> = names.filter(|name| name != "README.md" && !index.contains(&format!("({name})"))).collect();
    assert!(missing.is_empty(), "docs/design/README.md does not list {missing:?}");
}
