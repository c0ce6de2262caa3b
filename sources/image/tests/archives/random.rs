//! Layers that look random, the same for each seed.

use std::fmt::Write as _;

use super::bundle::{DIR, FILE, LINK, SYMLINK, member};
use crate::common::composefs::Random;

/// The archives of an image's layers, and what is in them for people.
pub struct Layers {
    pub archives: Vec<Vec<u8>>,
    pub text: String,
}

/// Few names, so that they meet.
const NAMES: [&str; 6] = ["a", "b", "d", "lib", "usr", "x"];
/// Those that are mostly directories.
const DIRS: [&str; 4] = ["d", "lib", "usr", "usr/lib"];
const TARGETS: [&str; 12] =
    ["a", "d", "usr/lib", "/usr", "/", "..", "../..", "../d/./x", "/lib/../a", "b/nowhere/../x", "lib", "./usr//lib/"];

/// A path whose last name is one of these, or of others once in a while.
fn path(random: &mut Random, last: &[&str], seldom: u64) -> String {
    let mut names = Vec::new();
    for _ in 0..random.below(3) {
        let is_other = random.below(20) == 0;
        names.push(random.one(if is_other { &NAMES[..] } else { &DIRS }));
    }
    let is_other = random.below(seldom) == 0;
    names.push(random.one(if is_other { &NAMES } else { last }));
    names.join("/")
}

fn one(random: &mut Random, text: &mut String, files: &mut Vec<String>) -> Vec<u8> {
    let mut path = path(random, &["a", "b", "x"], 3);
    let mut target = String::new();
    let mut data = Vec::new();
    let kind = match random.below(12) {
        0..=3 => {
            data = vec![b'f'; usize::try_from(random.below(3) * 700).expect("it is small")];
            data.extend(path.bytes());
            files.push(path.clone());
            FILE
        }
        4..=6 => {
            path = self::path(random, &DIRS, 5);
            path.push('/');
            DIR
        }
        7 | 8 => {
            path = self::path(random, &NAMES, 1);
            target = random.one(&TARGETS).into();
            SYMLINK
        }
        9 if !files.is_empty() => {
            target = files[usize::try_from(random.below(files.len() as u64)).expect("an index")].clone();
            LINK
        }
        9 | 10 => {
            let at = path.rfind('/').map_or(0, |slash| slash + 1);
            path.insert_str(at, ".wh.");
            FILE
        }
        _ => {
            path.push_str("/.wh..wh..opq");
            FILE
        }
    };
    let lead = random.one(&["", "", "./", "/"]);
    writeln!(text, "  {} {lead}{path} {target}", char::from(kind)).expect("strings take all");
    member(&format!("{lead}{path}"), kind, &target, &data)
}

/// One to four layers of some members.
pub fn random_layers(seed: u64) -> Layers {
    let mut random = Random::new(seed);
    let (mut text, mut files) = (String::new(), Vec::new());
    let archives = (0..1 + random.below(4)).map(|layer| {
        writeln!(text, "layer {layer}").expect("strings take all");
        let mut bytes = if layer == 0 { member("./", DIR, "", b"") } else { Vec::new() };
        for _ in 0..1 + random.below(10) {
            bytes.extend(one(&mut random, &mut text, &mut files));
        }
        bytes.resize(bytes.len() + 1024, 0);
        bytes
    });
    let archives = archives.collect();
    Layers { archives, text }
}
