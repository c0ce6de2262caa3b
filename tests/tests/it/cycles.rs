//! Files and directories of a crate do not depend on each other in a cycle, so that a reader can start at the bottom.
//!
//! The graph has an edge for each path that begins with `crate`, `super`, `self` or a child module, in `use` and elsewhere, to the file that
//! defines the named item. Declarations (`mod`), re-exports (`pub use`), tests and method calls add no edge.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// How many files of a crate are in cycles. The numbers may only decrease.
const KNOWN_FILES: &[(&str, usize)] = &[
    ("bench/driver", 19),
    ("bench/harness", 24),
    ("engine", 7),
    ("exports/fuse", 10),
    ("exports/ninep", 20),
    ("exports/virtiofs", 9),
    ("fs", 2),
    ("serve", 7),
    ("sources/dir", 10),
    ("sources/disk", 5),
    ("sources/mem", 10),
    ("sources/ninep", 16),
    ("state", 4),
    ("vfs", 4),
    ("vhost", 4),
];
/// How many directories of a crate are in cycles. The numbers may only decrease.
const KNOWN_DIRECTORIES: &[(&str, usize)] = &[];

/// A path, by its names.
type Names = Vec<String>;

#[derive(Default)]
struct Module {
    defined: BTreeSet<String>,
    reexports: BTreeMap<String, Names>,
    globs: Vec<Names>,
    /// Absolute paths that the module names.
    paths: BTreeSet<Names>,
}

type Modules = BTreeMap<Names, Module>;
type Graph = BTreeMap<Names, BTreeSet<Names>>;

/// Splits source text into identifiers and punctuation; comments and literals are left out.
fn tokens(text: &str) -> Vec<String> {
    let (bytes, mut at, mut found) = (text.as_bytes(), 0, Vec::new());
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    while at < bytes.len() {
        let rest = &text[at..];
        let raw = rest.trim_start_matches(['b', 'c']).strip_prefix('r').map(|rest| rest.trim_start_matches('#'));
        if rest.starts_with("//") {
            at += rest.find('\n').unwrap_or(rest.len());
        } else if rest.starts_with("/*") {
            at += rest.find("*/").map_or(rest.len(), |end| end + 2);
        } else if let Some(body) = raw.and_then(|rest| rest.strip_prefix('"')) {
            let head = rest.len() - body.len();
            let end = format!("\"{}", "#".repeat(rest[..head].matches('#').count()));
            at += head + body.find(&end).map_or(body.len(), |found| found + end.len());
        } else if bytes[at] == b'"' {
            at += 1;
            while at < bytes.len() && bytes[at] != b'"' {
                at += if bytes[at] == b'\\' { 2 } else { 1 };
            }
            at += 1;
        } else if bytes[at] == b'\'' {
            // A literal is closed after one character or an escape; otherwise it is a lifetime.
            let body: Vec<(usize, char)> = rest.char_indices().skip(1).take(2).collect();
            match body[..] {
                [(_, '\\'), (after, _)] => at += rest[after + 1..].find('\'').map_or(2, |end| after + end + 2),
                [_, (close, '\'')] => at += close + 1,
                _ => at += 1,
            }
        } else if is_word(bytes[at]) {
            let length = bytes[at..].iter().take_while(|byte| is_word(**byte)).count();
            found.push(rest[..length].to_owned());
            at += length;
        } else if rest.starts_with("::") {
            found.push("::".into());
            at += 2;
        } else {
            let length = rest.chars().next().map_or(1, char::len_utf8);
            if !rest.starts_with(char::is_whitespace) {
                found.push(rest[..length].to_owned());
            }
            at += length;
        }
    }
    found
}

/// Where the block that begins at a `{` ends.
fn block_end(tokens: &[String], from: usize) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(from) {
        depth += i32::from(token == "{") - i32::from(token == "}");
        if depth == 0 {
            return at;
        }
    }
    tokens.len()
}

/// Whether tokens begin so.
fn begins(tokens: &[String], with: &[&str]) -> bool {
    tokens.len() >= with.len() && tokens.iter().zip(with).all(|(token, with)| token == with)
}

/// The leaves of a `use` tree, each with the name that it gets here.
fn leaves(tokens: &[String], prefix: &Names, found: &mut Vec<(Names, String)>) -> usize {
    let (mut path, mut at) = (prefix.clone(), 0);
    loop {
        match tokens.get(at).map(String::as_str) {
            Some("{") => {
                at += 1;
                while tokens.get(at).is_some_and(|token| token != "}") {
                    at += leaves(&tokens[at..], &path, found).max(1);
                    at += usize::from(tokens.get(at).is_some_and(|token| token == ","));
                }
                return at + 1;
            }
            Some("as") => {
                found.push((path, tokens[at + 1].clone()));
                return at + 2;
            }
            Some("::") => at += 1,
            None | Some("," | "}" | ";") => {
                let name = path.last().cloned().unwrap_or_default();
                found.push((path, name));
                return at;
            }
            Some("self") if !path.is_empty() => at += 1,
            Some(name) => {
                path.push(name.to_owned());
                at += 1;
            }
        }
    }
}

/// A path as it is seen from the crate's root, if it leads into the crate. `inside` is the module that the path stands in.
fn absolute(path: &[String], inside: &[String], modules: &BTreeSet<Names>) -> Option<Names> {
    let mut base = inside.to_vec();
    let mut rest = path;
    match path.first()?.as_str() {
        "crate" => {
            base.clear();
            rest = &path[1..];
        }
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|name| name == "super") {
                base.pop();
                rest = &rest[1..];
            }
        }
        child if path.len() > 1 && modules.contains(&[inside, &[child.to_owned()]].concat()) => {}
        _ => return None,
    }
    base.extend(rest.iter().cloned());
    Some(base)
}

/// Notes what the tokens of a module define and name.
fn scan(tokens: &[String], inside: &Names, modules: &BTreeSet<Names>, found: &mut Module) {
    let (mut at, mut depth) = (0, 0);
    while at < tokens.len() {
        let rest = &tokens[at..];
        if begins(rest, &["#", "[", "cfg", "(", "test", ")", "]"]) {
            let item = rest.iter().position(|token| token == "{" || token == ";").unwrap_or(rest.len() - 1);
            at = if rest[item] == "{" { block_end(tokens, at + item) + 1 } else { at + item + 1 };
            continue;
        }
        match tokens[at].as_str() {
            "mod" if rest.get(2).is_some_and(|token| token == "{") => {
                let (end, inner) = (block_end(tokens, at + 2), [&inside[..], &[rest[1].clone()]].concat());
                scan(&tokens[at + 3..end.min(tokens.len())], &inner, modules, found);
                at = end + 1;
                continue;
            }
            "use" => {
                let mut all = Vec::new();
                let length = leaves(&rest[1..], &Vec::new(), &mut all);
                let before = at.checked_sub(1).map(|before| tokens[before].as_str());
                let is_public = before == Some("pub")
                    || (before == Some(")") && tokens[..at].iter().rev().take(4).any(|token| token == "pub"));
                for (path, name) in all {
                    let Some(path) = absolute(&path, inside, modules) else { continue };
                    match (is_public, name.as_str()) {
                        (true, "*") => found.globs.push(path[..path.len() - 1].to_vec()),
                        (true, _) => drop(found.reexports.insert(name, path)),
                        (false, _) => _ = found.paths.insert(path),
                    }
                }
                at += length + 1;
                continue;
            }
            "fn" | "struct" | "enum" | "trait" | "type" | "const" | "static" | "union"
                if depth == 0 && rest.len() > 1 =>
            {
                found.defined.insert(rest[1].clone());
            }
            "{" => depth += 1,
            "}" => depth -= 1,
            word if word.starts_with(|first: char| first.is_alphabetic())
                && rest.get(1).is_some_and(|token| token == "::") =>
            {
                let is_start = at == 0 || tokens[at - 1] != "::";
                let mut path = vec![word.to_owned()];
                let mut next = at + 1;
                while next + 1 < tokens.len()
                    && tokens[next] == "::"
                    && tokens[next + 1].starts_with(|first: char| first.is_alphabetic() || first == '_')
                {
                    path.push(tokens[next + 1].clone());
                    next += 2;
                }
                if let Some(path) = absolute(&path, inside, modules).filter(|_| is_start) {
                    found.paths.insert(path);
                }
                at = next;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
}

/// The module that defines what a path names. `seen` has the paths that re-exports have led through.
fn home(path: Names, modules: &Modules, seen: &mut BTreeSet<Names>) -> Names {
    let mut here = Names::new();
    for (at, name) in path.iter().enumerate() {
        let below = [&here[..], std::slice::from_ref(name)].concat();
        let Some(module) = modules.get(&here) else { break };
        if modules.contains_key(&below) {
            here = below;
            continue;
        }
        if module.defined.contains(name) || !seen.insert(path.clone()) {
            break;
        }
        if let Some(target) = module.reexports.get(name) {
            return home([&target[..], &path[at + 1..]].concat(), modules, seen);
        }
        let is_defined = |found: &Names| modules.get(found).is_some_and(|module| module.defined.contains(name));
        for glob in &module.globs {
            let found = home([&glob[..], &path[at..]].concat(), modules, seen);
            if is_defined(&found) {
                return found;
            }
        }
        break;
    }
    here
}

/// The modules of a crate, by the files below its `src`.
fn read(src: &Path) -> Modules {
    fn walk(directory: &Path, inside: &Names, found: &mut Vec<(Names, PathBuf)>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let below = [&inside[..], std::slice::from_ref(&stem)].concat();
            if path.is_dir() && !(inside.is_empty() && stem == "bin") {
                walk(&path, &below, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let is_main = inside.is_empty() && stem == "main";
                if is_main && directory.join("lib.rs").exists() {
                    continue;
                }
                found.push((if is_main || matches!(&*stem, "lib" | "mod") { inside.clone() } else { below }, path));
            }
        }
    }
    let mut files = Vec::new();
    walk(src, &Vec::new(), &mut files);
    let names: BTreeSet<Names> = files.iter().map(|(name, _)| name.clone()).collect();
    let parse = |(name, path): (Names, PathBuf)| {
        let mut module = Module::default();
        scan(&tokens(&fs::read_to_string(path).unwrap()), &name, &names, &mut module);
        (name, module)
    };
    files.into_iter().map(parse).collect()
}

fn graph(modules: &Modules) -> Graph {
    let edges = |(name, module): (&Names, &Module)| {
        let targets = module.paths.iter().map(|path| home(path.clone(), modules, &mut BTreeSet::new()));
        (name.clone(), targets.filter(|target| target != name).collect())
    };
    modules.iter().map(edges).collect()
}

/// The nodes that can be reached.
fn reachable(graph: &Graph, from: &Names) -> BTreeSet<Names> {
    let (mut found, mut left) = (BTreeSet::new(), vec![from]);
    while let Some(node) = left.pop() {
        left.extend(graph.get(node).into_iter().flatten().filter(|next| found.insert((*next).clone())));
    }
    found
}

/// The cycles of a graph: nodes that reach each other.
fn cycles(graph: &Graph) -> BTreeSet<Vec<Names>> {
    let reach: BTreeMap<&Names, BTreeSet<Names>> = graph.keys().map(|node| (node, reachable(graph, node))).collect();
    let together = |node: &Names| -> Vec<Names> {
        reach[node].iter().filter(|other| reach.get(other).is_some_and(|back| back.contains(node))).cloned().collect()
    };
    graph.keys().filter(|node| reach[node].contains(*node)).map(together).filter(|cycle| cycle.len() > 1).collect()
}

/// The edges between directories: between those children of a module that have modules of their own.
fn directory_graphs(graph: &Graph) -> Graph {
    let directories: BTreeSet<&[String]> =
        graph.keys().flat_map(|module| (0..module.len()).map(|length| &module[..length])).collect();
    let mut found = Graph::new();
    for (from, to) in graph.iter().flat_map(|(from, targets)| targets.iter().map(move |to| (from, to))) {
        let shared = from.iter().zip(to).take_while(|(from, to)| from == to).count();
        let (Some(from), Some(to)) = (from.get(..=shared), to.get(..=shared)) else { continue };
        if directories.contains(from) && directories.contains(to) {
            found.entry(from.to_vec()).or_default().insert(to.to_vec());
        }
    }
    found
}

/// Compares the cycles of each crate with the known ones; returns a description of each difference.
fn compare(what: &str, found: &BTreeMap<String, (Graph, BTreeSet<Vec<Names>>)>, known: &[(&str, usize)]) -> String {
    let mut text = String::new();
    for (name, (graph, cycles)) in found {
        let now: usize = cycles.iter().map(Vec::len).sum();
        let known = known.iter().find(|(known, _)| known == name).map_or(0, |(_, count)| *count);
        if now == known {
            continue;
        }
        let advice = if now > known { "remove the new cycle" } else { "lower the number in cycles.rs" };
        text += &format!("{name}: {now} {what} are in cycles, {known} are known: {advice}\n");
        for cycle in cycles {
            for from in cycle {
                let targets = graph[from].iter().filter(|to| cycle.contains(to)).map(|to| to.join("::"));
                text += &format!("  {} -> {}\n", from.join("::"), targets.collect::<Vec<_>>().join(", "));
            }
            text += "\n";
        }
    }
    text
}

#[test]
fn no_files_or_directories_of_a_crate_depend_on_each_other_in_a_cycle() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let members = manifest.split_once("members = [").unwrap().1.split_once(']').unwrap().0;
    let (mut files, mut directories) = (BTreeMap::new(), BTreeMap::new());
    for member in members.split('"').skip(1).step_by(2) {
        let src = root.join(member).join("src");
        if src.is_dir() {
            let graph = graph(&read(&src));
            let directory_graphs = directory_graphs(&graph);
            directories.insert(member.to_owned(), (directory_graphs.clone(), cycles(&directory_graphs)));
            files.insert(member.to_owned(), (graph.clone(), cycles(&graph)));
        }
    }
    let count: usize = files.values().flat_map(|(graph, _)| graph.values()).map(BTreeSet::len).sum();
    assert!(count > 1000, "only {count} edges were found");
    let unknown = |known: &[(&str, usize)]| known.iter().any(|(name, _)| !files.contains_key(*name));
    assert!(!unknown(KNOWN_DIRECTORIES) && !unknown(KNOWN_FILES), "a crate in cycles.rs does not exist");
    let wrong = compare("directories", &directories, KNOWN_DIRECTORIES) + &compare("files", &files, KNOWN_FILES);
    assert!(wrong.is_empty(), "\n{wrong}");
}

#[test]
fn cycles_are_found_through_reexports_but_not_in_tests() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("lib.rs", "mod a; mod b; mod c; pub use a::one::A;");
    write("a/mod.rs", "pub(crate) mod one; pub(crate) use one::A as B;");
    write(
        "a/one.rs",
        "pub struct A; /* crate::c */ const X: &str = \"crate::c::C\"; #[cfg(test)] mod tests { use crate::b::B; }",
    );
    write("b/mod.rs", "pub(crate) mod two; pub(crate) use two::*;");
    write("b/two.rs", "use crate::{a::B as Other, A}; pub struct B(Other, A); pub const CHAR: char = '\"';");
    write("c.rs", "fn c() { crate::b::B; } pub struct C;");
    let none: BTreeSet<Vec<Names>> = BTreeSet::new();
    let found = graph(&read(directory.path()));
    let names = |text: &str| -> Names { text.split("::").map(str::to_owned).collect() };
    assert_eq!(found[&names("b::two")], [names("a::one")].into());
    assert_eq!(found[&names("c")], [names("b::two")].into());
    assert_eq!((cycles(&found), cycles(&directory_graphs(&found))), (none.clone(), none.clone()));
    // The directories depend on each other, though no two files do.
    write("a/three.rs", "use super::super::b::B;");
    let found = graph(&read(directory.path()));
    assert_eq!((cycles(&found), cycles(&directory_graphs(&found))), (none, [vec![names("a"), names("b")]].into()));
    write("a/one.rs", "pub struct A; fn a() -> crate::b::B { todo!() }");
    assert_eq!(cycles(&graph(&read(directory.path()))), [vec![names("a::one"), names("b::two")]].into());
}
