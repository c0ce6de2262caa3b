//! THREAT-MODEL.md against the tests that it names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// One numbered row: its id, and the tests that it names as (file, function).
struct Promise {
    id: String,
    tests: Vec<(String, String)>,
}

/// The rows of all tables whose last column is headed `tests`.
fn promises(document: &str) -> Vec<Promise> {
    let mut found = Vec::new();
    let mut in_table = false;
    for line in document.lines() {
        let cells: Vec<&str> = line.trim().trim_matches('|').split(" | ").map(str::trim).collect();
        if !line.starts_with('|') {
            in_table = false;
        } else if cells.first() == Some(&"id") {
            assert_eq!(cells.last(), Some(&"tests"), "a numbered table has its tests last: {line}");
            in_table = true;
        } else if in_table && !line.starts_with("| ---") {
            let id = cells[0].to_owned();
            let mut file = "";
            let mut tests = Vec::new();
            for word in cells.last().expect("split yields one cell at least").split('`').skip(1).step_by(2) {
                if word.contains('/') {
                    file = word;
                } else {
                    tests.push((file.to_owned(), word.to_owned()));
                }
            }
            found.push(Promise { id, tests });
        }
    }
    found
}

/// The names of the functions of a file that stand below `#[test]`.
fn tests_of(source: &str) -> BTreeSet<&str> {
    let mut names = BTreeSet::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim) {
        match line.strip_prefix("fn ") {
            Some(rest) if is_test => {
                names.extend(rest.split('(').next());
                is_test = false;
            }
            Some(_) => {}
            None if line == "#[test]" => is_test = true,
            // Other attributes and comments may stand between.
            None if is_test && (line.starts_with("#[") || line.starts_with("//")) => {}
            None => is_test = false,
        }
    }
    names
}

#[test]
fn every_promise_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace");
    let document = fs::read_to_string(root.join("THREAT-MODEL.md")).expect("THREAT-MODEL.md is readable");
    let promises = promises(&document);
    assert!(promises.len() > 50, "only {} numbered promises: is the form of the tables another?", promises.len());

    let mut ids = BTreeSet::new();
    let mut sources: BTreeMap<&str, String> = BTreeMap::new();
    let mut wrong = Vec::new();
    for promise in &promises {
        if !ids.insert(&promise.id) {
            wrong.push(format!("{}: the number stands twice", promise.id));
        }
        if promise.tests.is_empty() {
            wrong.push(format!("{}: names no test", promise.id));
        }
        for (file, test) in &promise.tests {
            let source = sources.entry(file).or_insert_with(|| fs::read_to_string(root.join(file)).unwrap_or_default());
            if !tests_of(source).contains(test.as_str()) {
                wrong.push(format!("{}: `{file}` has no test `{test}`", promise.id));
            }
        }
    }
    assert!(wrong.is_empty(), "THREAT-MODEL.md:\n{}", wrong.join("\n"));
}
