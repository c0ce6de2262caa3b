//! Changes of a tree, and what a tree looks like.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::Path;
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, mknodat};

/// A change. Paths are relative.
pub enum Change<'a> {
    File(&'a str, &'a str, u32),
    Dir(&'a str, u32),
    Link(&'a str, &'a str),
    Symlink(&'a str, &'a str),
    Fifo(&'a str),
    Remove(&'a str),
    Rename(&'a str, &'a str),
    Owner(&'a str, u32),
}

use Change::{Dir, Fifo, File, Link, Owner, Remove, Rename, Symlink};

/// Makes changes to a tree.
pub fn apply(root: &Path, changes: &[Change<'_>]) {
    for change in changes {
        let at = |path: &str| root.join(path);
        let mode = |path: &str, mode| fs::set_permissions(at(path), fs::Permissions::from_mode(mode));
        let outcome = match change {
            File(path, contents, bits) => fs::write(at(path), contents).and_then(|()| mode(path, *bits)),
            Dir(path, bits) => fs::create_dir(at(path)).and_then(|()| mode(path, *bits)),
            Link(from, to) => fs::hard_link(at(from), at(to)),
            Symlink(target, path) => symlink(target, at(path)).and_then(|()| lchown(at(path), Some(3), Some(4))),
            Fifo(path) => mknodat(CWD, at(path), FileType::Fifo, Mode::from_raw_mode(0o640), 0).map_err(Into::into),
            Remove(path) if at(path).is_dir() => fs::remove_dir_all(at(path)),
            Remove(path) => fs::remove_file(at(path)),
            // Overlayfs may not rename directories of lower layers: mv copies them then.
            Rename(from, to) => {
                Command::new("mv").arg(at(from)).arg(at(to)).status().map(|status| assert!(status.success()))
            }
            Owner(path, id) => chown(at(path), Some(*id), Some(*id)),
        };
        let (Dir(path, _) | File(path, ..) | Link(path, _) | Symlink(_, path) | Fifo(path) | Remove(path)) = change
        else {
            outcome.expect("the tree can be changed");
            continue;
        };
        outcome.unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

/// Everything in a tree, by path: kind, permissions, owner, and contents.
pub fn look(root: &Path) -> BTreeMap<String, String> {
    let mut seen = BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        let found = fs::symlink_metadata(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let contents = if found.is_dir() {
            let entries = fs::read_dir(&path).expect("it can be listed");
            left.extend(entries.map(|entry| entry.expect("it can be listed").path()));
            String::new()
        } else if found.is_symlink() {
            fs::read_link(&path).expect("it is a link").display().to_string()
        } else if found.is_file() {
            fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        } else {
            format!("device {}", found.rdev())
        };
        let name = path.strip_prefix(root).expect("it is below").display().to_string();
        seen.insert(name, format!("{:o} {}:{} {contents}", found.mode(), found.uid(), found.gid()));
    }
    seen
}
