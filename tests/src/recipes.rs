//! The command blocks of README.md and `docs/`, and the examples of the help. They run as written, in separate
//! namespaces, so that the paths that they use are free.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::mounts::{ferry, program};
use crate::{Place, directory};

/// Longer than any of them takes on a loaded machine.
const LIMIT: &str = "300";

/// What all scripts begin with. `serve` runs a server in the background, and waits until it is up. `umount` retries for a minute
/// what is busy.
const PRELUDE: &str = r#"
set -eu
mount --make-rprivate /
umount --all --lazy --types fuse.ferry
# The program may lie below a directory that is covered.
touch "$HOME/.ferry"; mount --bind "$FERRY" "$HOME/.ferry"
for place in /srv /run /mnt /var/lib /tmp; do mount -t tmpfs tmpfs $place; done
mkdir -p /srv/src /srv/doc /var/lib/ferry /tmp/bin "$HOME/project"
echo from-host | tee /srv/src/from-host /srv/doc/from-host "$HOME/project/from-host" >/dev/null
ln -s "$HOME/.ferry" /tmp/bin/ferry
PATH=/tmp/bin:$PATH:/usr/sbin:/sbin
cd "$HOME"
# What has just used a mount may still have it open.
umount() {
    for attempt in $(seq 600); do
        if error=$(command umount "$@" 2>&1); then return; fi
        case $error in
        *busy*) sleep 0.1 ;;
        *) break ;;
        esac
    done
    echo "$error" >&2
    fuser -vm /mnt >&2 || true
    return 1
}
servers=0
serve() {
    servers=$((servers + 1))
    "$@" >server$servers 2>&1 &
    server=$!
    for try in $(seq 600); do
        if grep -qE 'sharing|serving|offering|mounted' server$servers; then return; fi
        kill -0 $server || break
        sleep 0.1
    done
    echo "it does not serve: $*" >&2
    cat server$servers >&2
    exit 1
}
"#;

/// A block of a document.
#[derive(Clone, Debug)]
pub struct Block {
    /// The document.
    pub file: String,
    /// The word behind the fence: `sh`, `xml`, or nothing.
    pub language: String,
    /// Its lines.
    pub lines: Vec<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().into()
}

/// The pages of the book, and README.md.
fn documents() -> Vec<PathBuf> {
    let (mut files, mut directories) = (vec![root().join("README.md")], vec![root().join("docs")]);
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.extension() {
                _ if path.is_dir() => directories.push(path),
                Some(end) if end == "md" => files.push(path),
                _ => {}
            }
        }
    }
    files.sort();
    files
}

/// All fenced blocks but diagrams (`text`).
pub fn blocks() -> Vec<Block> {
    let mut found = Vec::new();
    for path in documents() {
        let file = path.strip_prefix(root()).unwrap().display().to_string();
        let text = fs::read_to_string(&path).unwrap();
        let mut block: Option<Block> = None;
        for line in text.lines() {
            match (line.trim_start().strip_prefix("```"), &mut block) {
                (Some(language), None) => {
                    block = Some(Block { file: file.clone(), language: language.into(), lines: Vec::new() });
                }
                (Some(_), Some(_)) => found.extend(block.take()),
                (None, Some(block)) => block.lines.push(line.into()),
                (None, None) => {}
            }
        }
        assert!(block.is_none(), "{file}: a block has no end");
    }
    found.retain(|block| block.language != "text");
    found
}

/// The lines of the block that begins so. README.md may repeat it word for word.
#[track_caller]
pub fn block(first: &str) -> Vec<String> {
    let found = blocks().into_iter().map(|block| block.lines);
    let found: BTreeSet<_> = found.filter(|lines| lines.first().is_some_and(|line| line.starts_with(first))).collect();
    assert_eq!(found.len(), 1, "{} different blocks begin with {first:?}", found.len());
    found.into_iter().next().unwrap()
}

/// Whether a line is a server that stays in the foreground.
pub fn serves(line: &str) -> bool {
    line.starts_with("ferry share ") || line.starts_with("ferry disk ") && line.contains("--vhost-user ")
}

/// Lines as a script: servers go into the background, and `after` says what is to be done after each line.
pub fn script(lines: &[String], after: impl Fn(&str) -> String) -> String {
    let one = |line: &String| {
        let run = if serves(line) { format!("serve {line}") } else { line.clone() };
        format!("echo '+' {} >&2\n{run}\n{}\n", quoted(line), after(line))
    };
    lines.iter().map(one).collect()
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// The command lines among the examples of the help and the man pages of the program and of all its commands.
pub fn help_lines() -> BTreeSet<String> {
    let commands: [&[&str]; 8] = [&[], &["share"], &["disk"], &["mount"], &["image"], &["log"], &["fsck"], &["try"]];
    let runs = ["ferry ", "mount ", "umount ", "fusermount3 ", "ln ", "echo ", "crosvm ", "qemu-io "];
    let mut lines = BTreeSet::new();
    for command in commands {
        // The help breaks lines at the width of a terminal.
        let output = ferry(["man"].iter().chain(command)).output().unwrap();
        let page =
            String::from_utf8(output.stdout).unwrap().replace("\\-", "-").replace("\\e", "\\").replace("\\&", "");
        let (_, examples) =
            page.split_once("\nExamples:\n").unwrap_or_else(|| panic!("ferry {command:?} has no examples"));
        let commands = examples.lines().filter_map(|line| line.strip_prefix("  "));
        let commands = commands.filter(|line| runs.iter().any(|word| line.starts_with(word)));
        lines.extend(commands.map(|line| without_description(line).to_owned()));
    }
    lines
}

/// A line without what describes it.
pub fn without_description(line: &str) -> &str {
    let end = ["   ", "    #", " #"].iter().filter_map(|gap| line.find(gap)).min();
    line[..end.unwrap_or(line.len())].trim_end()
}

/// Whether scripts can be run here.
pub fn may_run() -> bool {
    let may = rustix::process::geteuid().is_root();
    if !may {
        ferry_skip::skip!("recipes are run by root alone: they mount on /mnt, in namespaces of their own");
    }
    may
}

/// Runs a script in namespaces of its own, on these CPUs or on all. Returns what it wrote on standard output.
#[track_caller]
pub fn run(cpus: Option<&str>, variables: &[(&str, &Path)], script: &str) -> String {
    let home: TempDir = directory(Place::Disk);
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", LIMIT]);
    if let Some(cpus) = cpus {
        command.args(["taskset", "-c", cpus]);
    }
    command.args(["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]);
    command.arg(format!("{PRELUDE}{script}"));
    command.env("HOME", home.path()).env("FERRY", program()).env_remove("FERRY_LOG").stdin(Stdio::null());
    let cache = ferry_guest::Cache::from_env().unwrap();
    command.env("FERRY_CACHE", cache.path()).envs(variables.iter().copied());
    let output = command.output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out
}
