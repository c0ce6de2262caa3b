//! The man pages and completions that `make install` writes.

use crate::common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{ferry, run};

fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// The names of commands as `--help` lists them, each with those above it.
fn commands(path: &[String]) -> Vec<Vec<String>> {
    let output = run(ferry().args(path).arg("-h"));
    let text = String::from_utf8(output.stdout).unwrap();
    let Some((_, rest)) = text.split_once("\nCommands:\n") else { return vec![path.to_vec()] };
    let lines = rest.lines().take_while(|line| line.starts_with("  "));
    let names = lines.filter(|line| !line.starts_with("   ")).filter_map(|line| line.split_whitespace().next());
    let below = names.filter(|name| *name != "help").flat_map(|name| commands(&[path, &[name.to_owned()]].concat()));
    std::iter::once(path.to_vec()).chain(below).collect()
}

#[test]
fn each_command_has_a_man_page() {
    let directory = tempfile::tempdir().unwrap();
    assert!(run(ferry().args(["man", "--all"]).arg(directory.path())).status.success());
    let all = commands(&[]);
    assert!(all.len() > 20, "{all:?}");
    for path in &all {
        let name = std::iter::once("ferry").chain(path.iter().map(String::as_str)).collect::<Vec<_>>().join("-");
        let page = fs::read_to_string(directory.path().join(format!("{name}.1")))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let title = format!(".TH \"{name}\" \"1\" \"\" \"ferry {}\" \"Ferry\"\n", env!("CARGO_PKG_VERSION"));
        assert!(page.starts_with(&title), "{name}: {page:.100}");
        // The same page by itself.
        assert_eq!(run(ferry().arg("man").args(path)).stdout, page.as_bytes(), "{name}");
    }
    let of_file = fs::read(directory.path().join("ferry.toml.5")).unwrap();
    assert_eq!(run(ferry().args(["man", "ferry.toml"])).stdout, of_file);
    let drop_in = fs::read_to_string(directory.path().join("ferry-virtiofsd.1")).unwrap();
    assert!(drop_in.contains("\nferry\\-virtiofsd \\- ") && drop_in.contains("socket\\-path"), "{drop_in:.500}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), all.len() + 2, "pages of no command");
}

#[test]
fn man_pages_are_without_warnings() {
    let directory = tempfile::tempdir().unwrap();
    assert!(run(ferry().args(["man", "--all"]).arg(directory.path())).status.success());
    let pages: Vec<_> = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    if is_installed("man") {
        for page in &pages {
            let mut command = Command::new("man");
            command.args(["--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z"]).arg(page);
            let output =
                run(command.env("LC_ALL", "C.UTF-8").env("MANROFFSEQ", "").env("MANWIDTH", "80").stdin(Stdio::null()));
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && said.is_empty(), "{}: {said}", page.display());
        }
    } else {
        ferry_skip::skip!("no man: apt-get install man-db");
    }
    // It has no --version.
    if Path::new("/usr/bin/mandoc").exists() {
        // The pages have no date, so that they are the same in each build; and the generator puts a line break before the values of flags.
        let known = ["missing date", "skipping paragraph macro: br"];
        let output = run(Command::new("mandoc").args(["-T", "lint", "-W", "warning"]).args(&pages));
        let said = String::from_utf8_lossy(&output.stdout);
        let wrong: Vec<_> = said.lines().filter(|line| !known.iter().any(|words| line.contains(words))).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
    } else {
        ferry_skip::skip!("no mandoc: apt-get install mandoc");
    }
}

/// Each shell reads its completions, and has them offer commands and flags where it can be asked.
#[test]
fn shells_take_the_completions() {
    let directory = tempfile::tempdir().unwrap();
    for (shell, check) in [("bash", &["-n"][..]), ("zsh", &["-n"]), ("fish", &["--no-execute"])] {
        if !is_installed(shell) {
            ferry_skip::skip!("no {shell}: apt-get install {shell}");
            continue;
        }
        let file = directory.path().join(shell);
        for (program, bytes_min) in [("ferry-agent", 100), ("ferry", 1000)] {
            let script = run(ferry().args(["completions", shell, program]));
            assert!(script.status.success() && script.stdout.len() > bytes_min, "{shell}, {program}");
            fs::write(&file, script.stdout).unwrap();
            let output = run(Command::new(shell).args(check).arg(&file));
            assert!(output.status.success() && output.stderr.is_empty(), "{shell}, {program}: {output:?}");
        }
    }
    if is_installed("bash") {
        let ask = "source \"$1\"; COMP_WORDS=(ferry im) COMP_CWORD=1; _ferry ferry im ferry; echo \"${COMPREPLY[*]}\"; \
                   COMP_WORDS=(ferry share --virt) COMP_CWORD=2; _ferry ferry --virt share; echo \"${COMPREPLY[*]}\"";
        let output = run(Command::new("bash").args(["-c", ask, "bash"]).arg(directory.path().join("bash")));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "image\n--virtiofs\n", "{output:?}");
    }
}
