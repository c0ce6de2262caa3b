//! The files of integration tests against the programs that they belong to.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

fn directories(parent: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

/// The directories that hold a program of tests, `main.rs`, and modules beside it: `CRATE/tests/PROGRAM`.
fn programs(root: &Path) -> Vec<PathBuf> {
    let groups = ["", "exports", "sources"].map(|group| directories(&root.join(group)));
    let programs = groups.concat().into_iter().flat_map(|package| directories(&package.join("tests")));
    programs.filter(|directory| directory.join("main.rs").is_file()).collect()
}

/// A file that no `mod` names is not compiled, and its tests are not run.
#[test]
fn every_file_is_a_module_of_its_program() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace");
    let programs = programs(root);
    assert!(programs.len() > 10, "only {} programs: are they elsewhere?", programs.len());
    let mut missing = Vec::new();
    for directory in programs {
        let main = fs::read_to_string(directory.join("main.rs")).expect("it is listed");
        for entry in fs::read_dir(&directory).expect("it is a directory").flatten() {
            let path = entry.path();
            let module = path.file_stem().and_then(OsStr::to_str).expect("modules have names");
            if module != "main" && !main.lines().any(|line| line == format!("mod {module};")) {
                missing.push(path);
            }
        }
    }
    assert!(missing.is_empty(), "not in the main.rs beside them: {missing:#?}");
}
