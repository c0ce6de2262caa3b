//! `docs/conformance.md`: that its rows name tests that exist, and that `scripts/conformance` rewrites them.

use std::fs;
use std::path::Path;
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace")
}

fn page() -> String {
    fs::read_to_string(root().join("docs/conformance.md")).expect("docs/conformance.md is readable")
}

/// The rows of suites: the code in the first cell, and the cells.
fn rows(page: &str) -> Vec<(Vec<&str>, Vec<&str>)> {
    let rows = page.lines().filter(|line| line.starts_with('|'));
    let cells = rows.map(|line| line.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>());
    let with_code = cells.map(|cells| (cells[0].split('`').skip(1).step_by(2).collect::<Vec<_>>(), cells));
    with_code.filter(|(code, _)| !code.is_empty()).collect()
}

/// The source of a module of tests, wherever it lies below the directory.
fn module(directory: &Path, name: &str) -> Option<String> {
    let entries =
        fs::read_dir(directory).expect("tests can be listed").map(|entry| entry.expect("tests can be listed").path());
    let (directories, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let own = files.iter().find(|path| path.file_name().is_some_and(|file| file == format!("{name}.rs").as_str()));
    match own {
        Some(path) => fs::read_to_string(path).ok(),
        None => directories.iter().find_map(|directory| module(directory, name)),
    }
}

#[test]
fn every_row_names_tests_that_exist() {
    let page = page();
    let rows = rows(&page);
    assert!(rows.len() > 40, "only {} rows: is the form of the tables another?", rows.len());
    let columns = fs::read_to_string(root().join("scripts/xfstests")).expect("scripts/xfstests is readable");
    for (code, cells) in rows {
        assert_eq!(cells.len(), 8, "eight cells: {cells:?}");
        if cells[0].starts_with("xfstests") {
            assert!(columns.contains(code[0]), "scripts/xfstests has no column {}", code[0]);
            continue;
        }
        let source = module(&root().join("tests/tests"), code[0]).unwrap_or_default();
        assert!(source.contains("#[test]"), "{} is no module with tests", code[0]);
        for name in &code[1..] {
            assert!(source.contains(&format!("fn {name}(")), "{} has no {name}", code[0]);
        }
    }
}

#[test]
fn results_are_put_into_the_rows_that_they_are_of() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (copy, log, table) =
        (directory.path().join("page.md"), directory.path().join("test-all.log"), directory.path().join("table"));
    let head = "| suite | what runs | date | commit | passed | failed | skipped | why |";
    let rule = "| --- | --- | --- | --- | --- | --- | --- | --- |";
    let untouched = "| `qemu` | QEMU | 2026-01-02 | abc | 1 | 0 | 0 | |";
    let rows = [
        "| `fsx` | fsx | 2026-01-02 | abc | 7 | 0 | 0 | |",
        "| `mounts_suites` `posix` `git` | two of them | | | | | | |",
        "| xfstests `dir-uring` | a directory | | | | | | |",
        untouched,
    ];
    let write = |path: &Path, text: &str| fs::write(path, text).expect("a file in a temporary directory");
    write(&copy, &format!("# Title\n\n{head}\n{rule}\n{}\n", rows.join("\n")));
    write(
        &log,
        "     Running tests/fsx.rs (target/debug/deps/fsx-0123456789abcdef)\n\nrunning 3 tests\n\
         test fsx_direct ... ok\nskipped: fsx::fsx_cached: there is no /dev/fuse\ntest fsx_cached ... ok\n\
         test fsx_long ... FAILED\n\
         \x20    Running /home/me/ferry/target/test-all/deps/it-0123456789abcdef\n\
         test mounts_suites::posix::dir_uring ... ok\ntest mounts_suites::posix_of::another ... ok\n\
         test mounts_suites::git::mem ... ignored, long\ntest mounts_suites::build::dir ... FAILED\n\
         test qemu::of_another_crate ... ok\nskipped: 1\n",
    );
    write(
        &table,
        "| column | passed | failed | not run |\n| dir-uring | 172 | 1 | 449 | 27 | 3000 s | generic/120 |\n",
    );
    let status = Command::new(root().join("scripts/conformance"))
        .args([&log, &table])
        .env("CONFORMANCE_PAGE", &copy)
        .env("CONFORMANCE_DATE", "2026-11-27")
        .env("CONFORMANCE_COMMIT", "0123abc")
        .status()
        .expect("scripts/conformance runs");
    assert!(status.success(), "{status}");
    let expected = [
        "| `fsx` | fsx | 2026-11-27 | 0123abc | 1 | 1 | 1 | \
         fsx_cached: there is no /dev/fuse; failed: fsx_long |",
        "| `mounts_suites` `posix` `git` | two of them | 2026-11-27 | 0123abc | 1 | 0 | 1 | |",
        "| xfstests `dir-uring` | a directory | 2026-11-27 | 0123abc | 172 | 1 | 449 | failed: generic/120 |",
        untouched,
    ];
    let rewritten = fs::read_to_string(&copy).expect("the copy is there");
    assert_eq!(rewritten, format!("# Title\n\n{head}\n{rule}\n{}\n", expected.join("\n")));
    let left = fs::read_dir(directory.path()).expect("the directory can be listed").count();
    assert_eq!(left, 3, "the script leaves nothing else");
}

#[test]
fn a_missing_log_is_one_sentence() {
    let output =
        Command::new(root().join("scripts/conformance")).arg("/nonexistent/log").output().expect("the script runs");
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("cannot read /nonexistent/log: run make test-all"), "{said}");
}
