//! No error tells its cause twice: an error whose text has the cause does not also give it as its source, because
//! whoever prints an error prints its sources after it.

use std::fs;
use std::path::{Path, PathBuf};

/// Adds the source files below `directory`.
fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        if entry.file_type().unwrap().is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The texts of errors that tell their cause twice.
fn repeated(text: &str) -> Vec<String> {
    let errors = text.split("#[error(").skip(1).filter_map(|rest| rest.split_once(")]\n"));
    let mut found = Vec::new();
    for (message, rest) in errors {
        // The variant or the fields, up to where the next one or a function begins.
        let fields: Vec<&str> = rest
            .lines()
            .map(str::trim)
            .filter(|line| !line.starts_with("//"))
            .take_while(|line| !line.is_empty() && !line.contains("fn "))
            .collect();
        let unnamed = fields.iter().any(|line| line.contains("(#[source]") || line.contains("(#[from]"));
        let marked = fields.windows(2).filter(|pair| matches!(pair[0], "#[source]" | "#[from]"));
        let marked = marked.filter_map(|pair| pair[1].split_once(':')).map(|(name, _)| name.trim_start_matches("pub "));
        let is_source =
            |line: &&&str| line.trim_start_matches("pub ").starts_with("source:") || line.contains("{ source:");
        let named = fields.iter().filter(is_source).map(|_| "source");
        let is_told = |name: &str| message.contains(&format!("{{{name}}}")) || message.contains(&format!("{{{name}:"));
        if unnamed && is_told("0") || marked.chain(named).any(is_told) {
            found.push(message.to_owned());
        }
    }
    found
}

#[test]
fn no_error_repeats_its_cause() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), &mut files);
    assert!(files.len() > 500, "there are more than {} source files", files.len());
    let mut wrong = Vec::new();
    for file in files.iter().filter(|file| !file.ends_with("error_causes.rs")) {
        wrong.extend(repeated(&fs::read_to_string(file).unwrap()).into_iter().map(|text| (file, text)));
    }
    assert!(wrong.is_empty(), "a cause is in the text and is the source, too: {wrong:#?}");
}

#[test]
fn duplicate_causes_are_found() {
    let unnamed = "#[error(\"no socket: {0}\")]\nSocket(#[from] io::Error),\n";
    let named = "#[error(\"no socket: {source}\")]\nSocket {\n/// Why.\nsource: io::Error,\n},\n";
    let short = "#[error(\"no socket: {source}\")]\nSocket { source: io::Error },\n";
    let marked = "#[error(\"no socket: {why}\")]\nSocket {\n#[source]\nwhy: io::Error,\n},\n";
    let silent = "#[error(\"no socket\")]\nSocket(#[from] io::Error),\n";
    let alone = "#[error(\"no socket: {0}\")]\nSocket(io::Error),\n";
    assert_eq!([unnamed, named, short, marked, silent, alone].map(|text| repeated(text).len()), [1, 1, 1, 1, 0, 0]);
}
