//! Layers that look random: of every kind of member, again and again by the same names, through links, and whiteouts.

use std::fmt;

/// Where choices come from.
pub trait Choices {
    /// A number below an end, which is not 0.
    fn below(&mut self, end: usize) -> usize;
}

fn one<T: Copy>(choices: &mut impl Choices, of: &[T]) -> T {
    of[choices.below(of.len())]
}

/// A member of a layer's archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// `typeflag`.
    pub kind: u8,
    pub path: String,
    /// What a link leads to.
    pub target: String,
    pub data: Vec<u8>,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", char::from(self.kind), self.path, self.target)
    }
}

pub const FILE: u8 = b'0';
pub const LINK: u8 = b'1';
pub const SYMLINK: u8 = b'2';
pub const DIR: u8 = b'5';

/// Few names, so that they meet.
const NAMES: [&str; 6] = ["a", "b", "d", "lib", "usr", "x"];
/// Those that are mostly directories.
const DIRS: [&str; 4] = ["d", "lib", "usr", "usr/lib"];
const TARGETS: [&str; 12] =
    ["a", "d", "usr/lib", "/usr", "/", "..", "../..", "../d/./x", "/lib/../a", "b/nowhere/../x", "lib", "./usr//lib/"];

/// A path whose last name is one of these, or of others once in a while.
fn path(choices: &mut impl Choices, last: &[&str], seldom: usize) -> String {
    let mut names = Vec::new();
    for _ in 0..choices.below(3) {
        let is_other = choices.below(20) == 0;
        names.push(one(choices, if is_other { &NAMES[..] } else { &DIRS }));
    }
    let is_other = choices.below(seldom) == 0;
    names.push(one(choices, if is_other { &NAMES } else { last }));
    names.join("/")
}

fn member(choices: &mut impl Choices, files: &mut Vec<String>) -> Member {
    let mut member = Member { kind: FILE, path: String::new(), target: String::new(), data: Vec::new() };
    member.path = path(choices, &["a", "b", "x"], 3);
    match choices.below(12) {
        0..=3 => {
            member.data = vec![b'f'; choices.below(3) * 700];
            member.data.extend(member.path.bytes());
            files.push(member.path.clone());
        }
        4..=6 => {
            member.path = path(choices, &DIRS, 5) + "/";
            member.kind = DIR;
        }
        7 | 8 => {
            member.path = path(choices, &NAMES, 1);
            member.target = one(choices, &TARGETS).into();
            member.kind = SYMLINK;
        }
        9 if !files.is_empty() => {
            member.target = files[choices.below(files.len())].clone();
            member.kind = LINK;
        }
        9 | 10 => {
            let at = member.path.rfind('/').map_or(0, |slash| slash + 1);
            member.path.insert_str(at, ".wh.");
        }
        _ => member.path.push_str("/.wh..wh..opq"),
    }
    member.path.insert_str(0, one(choices, &["", "", "./", "/"]));
    member
}

/// One to four layers of some members. The first one begins with the root.
pub fn layers(choices: &mut impl Choices) -> Vec<Vec<Member>> {
    let mut files = Vec::new();
    let root = Member { kind: DIR, path: "./".into(), target: String::new(), data: Vec::new() };
    let mut layers = vec![vec![root]];
    layers.resize(1 + choices.below(4), Vec::new());
    for layer in &mut layers {
        for _ in 0..1 + choices.below(10) {
            layer.push(member(choices, &mut files));
        }
    }
    layers
}
