//! The documents: README.md and the book in `docs/`. Their links lead somewhere, and they stay short.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The longest front page.
const README_BYTES_MAX: usize = 8 << 10;
/// The longest description of the whole.
const ARCHITECTURE_BYTES_MAX: usize = 14 << 10;
/// The longest page of the book.
pub const PAGE_BYTES_MAX: usize = 10 << 10;
/// The longest list of changes.
const CHANGELOG_BYTES_MAX: usize = 8 << 10;

/// The directory of the workspace.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is in a workspace")
}

/// The pages of the book and the documents beside it, by their paths below the workspace.
pub fn documents() -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut directories = vec![root().join("docs")];
    let mut files: Vec<PathBuf> =
        ["README.md", "ARCHITECTURE.md", "THREAT-MODEL.md", "CHANGELOG.md"].map(|name| root().join(name)).into();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).expect("the directory is there") {
            let path = entry.expect("an entry").path();
            match path.extension() {
                _ if path.is_dir() => directories.push(path),
                Some(end) if end == "md" => files.push(path),
                _ => {}
            }
        }
    }
    for file in files {
        let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        found.insert(file.strip_prefix(root()).expect("it is below the root").into(), text);
    }
    found
}

/// The lines of a document that are in no fenced block, without code.
fn prose(text: &str) -> Vec<String> {
    let mut is_code = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            lines.push(line.split('`').step_by(2).collect());
        }
    }
    lines
}

/// The targets of the links and pictures of a document.
fn links(text: &str) -> Vec<String> {
    let targets = |line: String| {
        let parts: Vec<_> =
            line.split("](").skip(1).filter_map(|part| part.split(')').next()).map(String::from).collect();
        parts
    };
    prose(text).into_iter().flat_map(targets).collect()
}

/// The anchors of a document, as GitHub and mdBook make them of its headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut is_code = false;
    let mut found = BTreeSet::new();
    for line in text.lines() {
        is_code ^= line.trim_start().starts_with("```");
        let Some(title) = (!is_code).then(|| line.trim_start_matches('#')).filter(|title| title.len() < line.len())
        else {
            continue;
        };
        let kept = |c: &char| c.is_alphanumeric() || [' ', '-', '_'].contains(c);
        let anchor: String = title.trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-");
        let again = (1..).map(|number| format!("{anchor}-{number}"));
        let free = std::iter::once(anchor.clone()).chain(again).find(|anchor| !found.contains(anchor));
        found.extend(free);
    }
    found
}

/// A path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

/// What is wrong with a link of a document.
fn broken(documents: &BTreeMap<PathBuf, String>, document: &Path, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let directory = document.parent().expect("it is a file");
    let target = if file.is_empty() { document.to_owned() } else { plain(&directory.join(file)) };
    if !root().join(&target).exists() {
        return Some(format!("{}: {link}: there is no {}", document.display(), target.display()));
    }
    let missing = anchor.filter(|anchor| documents.get(&target).is_none_or(|text| !anchors(text).contains(*anchor)));
    missing.map(|anchor| format!("{}: {link}: {} has no heading {anchor:?}", document.display(), target.display()))
}

#[test]
fn every_link_leads_somewhere() {
    let documents = documents();
    let mut count = 0;
    let mut wrong = Vec::new();
    for (document, text) in &documents {
        for link in links(text) {
            count += 1;
            wrong.extend(broken(&documents, document, &link));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(count > 80, "{count} links were found");
    // A broken one is found.
    let readme = Path::new("README.md");
    for link in ["docs/guide/no-page.md", "CHANGELOG.md#no-heading", "#no-heading"] {
        assert!(broken(&documents, readme, link).is_some(), "{link}");
    }
    assert_eq!(links("a [b](c.md) `[d](e)`, ![f](g.svg)\n```\n[h](i)\n```\n[j](#k)"), ["c.md", "g.svg", "#k"]);
    assert_eq!(
        anchors("# A `b`: c\n## A b c\n## A b c\n").into_iter().collect::<Vec<_>>(),
        ["a-b-c", "a-b-c-1", "a-b-c-2"]
    );
}

#[test]
fn documents_are_short() {
    let too_long = |(document, text): (PathBuf, String)| {
        let max = match document.to_str() {
            Some("README.md") => README_BYTES_MAX,
            Some("ARCHITECTURE.md") => ARCHITECTURE_BYTES_MAX,
            Some("CHANGELOG.md") => CHANGELOG_BYTES_MAX,
            _ if document.starts_with("docs") => PAGE_BYTES_MAX,
            _ => return None,
        };
        (text.len() > max).then(|| format!("{} has {} bytes, and {max} are the most", document.display(), text.len()))
    };
    let wrong: Vec<_> = documents().into_iter().filter_map(too_long).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_readme_begins_with_two_commands() {
    let text = &documents()[Path::new("README.md")];
    let first = text.split("```").nth(1).expect("it has a block");
    let commands: Vec<_> = first.lines().skip(1).filter_map(|line| line.split('#').next()).map(str::trim).collect();
    assert_eq!(commands, ["make demo", "make test"]);
}

#[test]
fn the_summary_lists_every_page() {
    let documents = documents();
    let summary = Path::new("docs/SUMMARY.md");
    let listed: Vec<_> = links(&documents[summary]).iter().map(|link| Path::new("docs").join(link)).collect();
    let pages = documents.keys().filter(|path| path.starts_with("docs") && *path != summary);
    let missing: Vec<_> = pages.filter(|page| listed.iter().filter(|path| path == page).count() != 1).collect();
    assert!(missing.is_empty(), "not in docs/SUMMARY.md, or not once: {missing:?}");
}
