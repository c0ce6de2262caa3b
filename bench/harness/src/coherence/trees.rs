//! What the guests look at: a repository, packages of node, and crates.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::process;

/// How large the trees are.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Directories of the repository, with [`Size::FILES`] each.
    pub dirs: usize,
    /// Packages of node.
    pub packages: usize,
    /// Crates, with [`Size::MODULES`] each.
    pub crates: usize,
}

impl Size {
    /// Files in each directory of the repository.
    pub const FILES: usize = 100;
    /// Modules in each crate.
    pub const MODULES: usize = 20;
    /// Of a full run: a repository of 50,000 files.
    pub const FULL: Self = Self { dirs: 500, packages: 400, crates: 12 };
    /// Of a quick run.
    pub const QUICK: Self = Self { dirs: 20, packages: 40, crates: 2 };
}

/// How long a program may take that prepares a tree.
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(120);

/// Makes all trees in the directory.
pub fn make(directory: &Path, size: Size) -> Result<()> {
    repository(&directory.join("tree"), size.dirs)?;
    packages(&directory.join("packages"), size.packages)?;
    crates(&directory.join("crates"), size.crates)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn repository(directory: &Path, dirs: usize) -> Result<()> {
    for dir in 0..dirs {
        let dir = directory.join(dir.to_string());
        fs::create_dir_all(&dir)?;
        (0..Size::FILES).try_for_each(|file| write(&dir.join(file.to_string()), "x"))?;
    }
    // Files as old as the index would be read each time.
    let script = "find . -exec touch -d 2020-01-01 {} + && git init -q && git add -A && git -c user.name=bench -c user.email=bench commit -qm all";
    let mut command = Command::new("sh");
    command.args(["-c", script]).current_dir(directory);
    process::run(command, directory.parent().unwrap_or(directory), TIMEOUT)
        .context("git cannot make the repository")?;
    Ok(())
}

/// Each package needs the one before it.
fn packages(directory: &Path, count: usize) -> Result<()> {
    let all = (0..count).map(|number| format!("\"p{number}\": \"1.0.0\"")).collect::<Vec<_>>().join(", ");
    let modules = directory.join("node_modules");
    fs::create_dir_all(&modules)?;
    write(
        &directory.join("package.json"),
        &format!("{{\"name\": \"all\", \"version\": \"1.0.0\", \"dependencies\": {{{all}}}}}"),
    )?;
    for number in 0..count {
        let package = modules.join(format!("p{number}"));
        fs::create_dir(&package)?;
        let needs = number.checked_sub(1).map_or(String::new(), |before| format!("\"p{before}\": \"1.0.0\""));
        let text = format!("{{\"name\": \"p{number}\", \"version\": \"1.0.0\", \"dependencies\": {{{needs}}}}}");
        write(&package.join("package.json"), &text)?;
        write(&package.join("index.js"), "")?;
    }
    Ok(())
}

fn crates(directory: &Path, count: usize) -> Result<()> {
    fs::create_dir_all(directory)?;
    write(&directory.join("Cargo.toml"), "[workspace]\nmembers = [\"c*\"]\nresolver = \"2\"\n")?;
    for number in 0..count {
        let source = directory.join(format!("c{number}/src"));
        fs::create_dir_all(&source)?;
        let needs = number
            .checked_sub(1)
            .map_or(String::new(), |before| format!("c{before} = {{ path = \"../c{before}\" }}\n"));
        let manifest = format!(
            "[package]\nname = \"c{number}\"\nversion = \"1.0.0\"\nedition = \"2021\"\n[dependencies]\n{needs}"
        );
        write(&directory.join(format!("c{number}/Cargo.toml")), &manifest)?;
        let modules = (0..Size::MODULES).map(|module| format!("pub mod m{module};\n")).collect::<String>();
        write(&source.join("lib.rs"), &modules)?;
        (0..Size::MODULES).try_for_each(|module| write(&source.join(format!("m{module}.rs")), "pub fn f() {}\n"))?;
    }
    Ok(())
}

/// Makes a disk with ext4 that has a copy of the directory.
pub fn disk(file: &Path, directory: &Path, mkfs: &Path) -> Result<()> {
    fs::File::create(file)?.set_len(2 << 30)?;
    let mut command = Command::new(mkfs);
    command.args(["-q", "-F", "-N", "200000", "-d"]).arg(directory).arg(file);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {}", mkfs.display()))?;
    ensure!(output.status.success(), "mkfs.ext4: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trees_are_what_their_programs_take() {
        let directory = tempfile::tempdir().unwrap();
        make(directory.path(), Size { dirs: 2, packages: 3, crates: 2 }).unwrap();
        let says = |dir: &str, words: &[&str]| {
            let output =
                Command::new(words[0]).args(&words[1..]).current_dir(directory.path().join(dir)).output().unwrap();
            assert!(output.status.success(), "{words:?}: {output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!(says("tree", &["git", "status", "--porcelain"]), "");
        assert_eq!(says("tree", &["git", "ls-files"]).lines().count(), 2 * Size::FILES);
        let metadata = says("crates", &["cargo", "metadata", "--offline", "--format-version", "1", "--no-deps"]);
        assert!(metadata.contains("\"name\":\"c1\""), "{metadata}");
        let manifest = fs::read_to_string(directory.path().join("packages/node_modules/p2/package.json")).unwrap();
        let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
        assert_eq!(manifest["dependencies"]["p1"], "1.0.0");
    }
}
