//! composefs's own programs, and trees for them.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use ferry_guest::Cache;
use ferry_image::Image;

use super::Bench;

/// A program of composefs.
pub fn tool(name: &str) -> Command {
    let cache = Cache::from_env().expect("there is a place for a cache");
    Command::new(cache.composefs().expect("composefs's programs are there, or can be fetched").join("bin").join(name))
}

/// What mkcomposefs makes of something, or what it says. Relative paths are in the bench's directory.
pub fn mkcomposefs(bench: &Bench, source: &Path, version: Option<u32>, options: &[&str]) -> Result<Vec<u8>, String> {
    let mut command = tool("mkcomposefs");
    if let Some(version) = version {
        command.arg(format!("--min-version={version}")).arg(format!("--max-version={version}"));
    }
    let output = command.args(options).arg(source).arg("theirs.image").current_dir(bench.directory.path()).output();
    let output = output.expect("it starts");
    if output.status.success() {
        return Ok(fs::read(bench.path("theirs.image")).expect("it made an image"));
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// What `ferry image dump` writes.
pub fn dump_of(image: &Image) -> Vec<u8> {
    let mut text = Vec::new();
    ferry_image::dump(image, &mut text).expect("the image is whole");
    text
}

/// Numbers that look random, the same for each seed (splitmix64).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::try_from(self.below(of.len() as u64)).expect("it is an index")]
    }
}

fn escape(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        match byte {
            b'!'..=b'~' if !b"\\=".contains(byte) => text.push(char::from(*byte)),
            _ => write!(text, "\\x{byte:02x}").expect("strings take all"),
        }
        text
    })
}

const XATTRS: [&str; 15] = [
    "user.a",
    "user.b",
    "user.abc",
    "trusted.x",
    "trusted.overlay.opaque",
    "trusted.overlay.foo",
    "trusted.overlay.overlay.bar",
    "security.selinux",
    "system.posix_acl_access",
    "system.posix_acl_default",
    "user.overlay.w",
    "foo.bar",
    "lustre.q",
    "user.a-name-that-is-quite-a-bit-longer-than-the-others-for-its-hash-takes-blocks-of-sixteen-bytes",
    "user.overlay.opaque",
];

struct Tree {
    random: Random,
    text: String,
    values: Vec<Vec<u8>>,
    times: Vec<(i64, u32)>,
    /// Of ten inodes, how many have attributes.
    attributed: u64,
    large_id: u64,
}

impl Tree {
    fn of(seed: u64) -> Self {
        let mut random = Random(seed);
        let mut time = || {
            let later = i64::try_from(random.below(1 << 33)).expect("it is small");
            (random.one(&[0, 1, -5, 1_700_000_000, later]), random.one(&[0, 5, 999_999_999]))
        };
        let times: Vec<_> = (0..1 + seed % 5).map(|_| time()).collect();
        let mut values: Vec<Vec<u8>> =
            [&b""[..], b"1", b"2", b"12", &[b'y'; 100], &[0xff, 0]].map(<[u8]>::to_vec).into();
        for length in [10, 100, 3000] {
            values.push(vec![b'q'; usize::try_from(random.below(length)).expect("it is small")]);
        }
        let (attributed, large_id) = (random.one(&[0, 1, 6]), random.one(&[1000, 70_000]));
        Self { random, text: String::new(), values, times, attributed, large_id }
    }

    /// Users, devices, times: the fields from UID to MTIME.
    fn owners(&mut self, rdev: u32) -> String {
        let id = [0, 0, 7, self.large_id];
        let (uid, gid, (sec, nsec)) = (self.random.one(&id), self.random.one(&id), self.random.one(&self.times));
        format!("{uid} {gid} {rdev} {sec}.{nsec}")
    }

    fn xattrs(&mut self) -> String {
        let mut text = String::new();
        if self.random.below(10) < self.attributed {
            for _ in 0..self.random.below(5) {
                let value = usize::try_from(self.random.below(self.values.len() as u64)).expect("it is an index");
                let name = self.random.one(&XATTRS);
                // composefs-info does not show ACLs without a value, which do not exist.
                let value = if name.starts_with("system.") && self.values[value].is_empty() { 1 } else { value };
                write!(text, " {}={}", escape(name.as_bytes()), escape(&self.values[value])).expect("strings take all");
            }
        }
        text
    }

    fn line(&mut self, path: &[u8], size: u64, mode: u32, nlink: u64, rdev: u32, rest: &str) {
        let (owners, xattrs) = (self.owners(rdev), self.xattrs());
        let path = escape(path);
        writeln!(self.text, "{path} {size} {mode:o} {nlink} {owners} {rest}{xattrs}").expect("strings take all");
    }

    fn name(&mut self) -> Vec<u8> {
        if self.random.below(10) < 3 {
            let long = [b'n'; 255];
            let known: [&[u8]; 12] =
                [b"a", b"ff", b"00", b"7f", b"z", b"-", b"!", b"...", b"\x01", b"\xc3\xa4", b"\xff\xfe", &long];
            return self.random.one(&known).to_vec();
        }
        let length = self.random.one(&[1, 2, 3, 8, 40, 200]);
        (0..length).map(|_| self.random.one(b"abcdefgh0123._-")).collect()
    }

    /// Something that is no directory.
    fn leaf(&mut self, path: &[u8], files: &[Vec<u8>]) {
        let bits = u32::try_from(self.random.below(0o10000)).expect("it is small");
        match self.random.below(10) {
            0 => {
                let kind = self.random.one(&[0o010_000, 0o140_000]);
                self.line(path, 0, kind | bits, 1, 0, "- - -");
            }
            1 => {
                let (kind, nlink) = (self.random.one(&[0o020_000, 0o060_000]), self.random.below(5));
                let rdev = self.random.one(&[0, 0, 5, 259, 0x1234_5678]);
                self.line(path, 0, kind | bits, nlink, rdev, "- - -");
            }
            2 | 3 => {
                let lengths = [1, 10, 100, 1024, 2048, 2049, 3000, 4000, 4031, 4032, 4033, 4063, 4064, 4065, 4095];
                let length = self.random.one(&lengths);
                self.line(path, length as u64, 0o120_777, 1, 0, &format!("{} - -", "s".repeat(length)));
            }
            4..=6 => {
                let length = self.random.one(&[0, 1, 5, 63, 64, 65, 2048, 2049, 4095, 4096, 4097, 5000]);
                let content = if length == 0 { "-".into() } else { "c".repeat(length) };
                self.line(path, length as u64, 0o100_000 | bits, 1, 0, &format!("- {content} -"));
            }
            9 if !files.is_empty() => {
                let target = &files[usize::try_from(self.random.below(files.len() as u64)).expect("an index")];
                let (path, target) = (escape(path), escape(target));
                writeln!(self.text, "{path} 0 @100644 1 0 0 0 0.0 {target} - -").expect("strings take all");
            }
            _ => {
                let sizes = [
                    1,
                    65,
                    4096,
                    4097,
                    70_000,
                    u32::MAX.into(),
                    1 << 32,
                    1 << 43,
                    (1 << 43) + 1,
                    1 << 51,
                    (1 << 52) - 5,
                    1015 << 43,
                    (1016 << 43) - 4000,
                    (1 << 53) - 1,
                    1 << 53,
                ];
                let size = self.random.one(&sizes);
                let number = self.random.one(&[5, seed_of(path)]);
                let digest = format!("{number:064x}");
                let known = if self.random.below(10) < 9 { &digest } else { "-" };
                let rest = format!("{}/{} - {known}", &digest[..2], &digest[2..]);
                self.line(path, size, 0o100_000 | bits, 1, 0, &rest);
            }
        }
    }

    /// A directory full of names.
    fn many(&mut self, path: &[u8]) {
        let (count, longest) = (self.random.one(&[10, 100, 150, 160, 170, 300]), self.random.one(&[1, 20]));
        for number in 0..count {
            let length = usize::try_from(self.random.below(longest)).expect("it is small");
            let name = format!("/f{number}-{}", "x".repeat(length));
            self.line(&[path, name.as_bytes()].concat(), 0, 0o100_644, 1, 0, "- - -");
        }
    }
}

fn seed_of(path: &[u8]) -> u64 {
    path.iter().fold(7, |sum: u64, byte| sum.wrapping_mul(131).wrapping_add((*byte).into()))
}

/// A dump file with a tree of a size and kind that depend on the seed: every kind of file, attributes that are shared and that
/// have to be escaped, hard links, whiteouts, files of more than one chunk.
pub fn random_dump(seed: u64) -> String {
    let mut tree = Tree::of(seed);
    let size = tree.random.one(&[5, 30, 300]);
    tree.line(b"/", 0, 0o040_755, 1, 0, "- - -");
    let (mut directories, mut files, mut used) = (vec![Vec::new()], Vec::new(), std::collections::HashSet::new());
    for _ in 0..size {
        let newest = directories.len().saturating_sub(20);
        let parent =
            newest + usize::try_from(tree.random.below((directories.len() - newest) as u64)).expect("an index");
        let name = tree.name();
        let path = [&directories[parent], &b"/"[..], &name].concat();
        if name == b"." || name == b".." || !used.insert(path.clone()) {
            continue;
        }
        if tree.random.below(10) < 2 {
            let (mode, nlink) = (u32::try_from(tree.random.below(0o10000)).expect("it is small"), tree.random.below(5));
            tree.line(&path, 0, 0o040_000 | mode, nlink, 0, "- - -");
            if tree.random.below(4) == 0 {
                tree.many(&path);
            }
            directories.push(path);
        } else {
            tree.leaf(&path, &files);
            files.push(path);
        }
    }
    tree.text
}
