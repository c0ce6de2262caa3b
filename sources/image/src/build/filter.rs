//! Selects what a source contributes to an image, and normalizes it.

use ferry_vfs::Timespec;

use crate::format::composefs::view::OPAQUE;
use crate::format::tree::Tree;

/// The maximum length of a pattern in bytes: no path is longer.
const PATTERN_BYTES_MAX: usize = 4096;

/// How an image of a single layer represents what the layer removes from lower layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whiteouts {
    /// Whiteouts are left out.
    Drop,
    /// As in overlayfs: a device 0:0, and an attribute of opaque directories.
    Overlay,
    /// Whiteout files are kept like all others.
    Keep,
}

/// What an image excludes, and which attributes all inodes share.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Excluded paths, with everything below them. Only for directories.
    pub exclude: Vec<Pattern>,
    /// User and group of all inodes, instead of their own.
    pub owner: Option<(u32, u32)>,
    /// The time of everything, in seconds since 1970.
    pub mtime: Option<i64>,
    /// Omit extended attributes, including labels, ACLs and capabilities.
    pub skip_xattrs: bool,
}

impl Filter {
    pub(crate) fn excludes(&self, path: &[u8]) -> bool {
        self.exclude.iter().any(|pattern| pattern.matches(path))
    }

    /// Applies the common attributes to a tree.
    pub(crate) fn apply(&self, tree: &mut Tree, whiteouts: Option<Whiteouts>) {
        for node in &mut tree.nodes {
            if let Some((uid, gid)) = self.owner {
                (node.uid, node.gid) = (uid, gid);
            }
            if let Some(sec) = self.mtime {
                node.mtime = Timespec { sec, nsec: 0 };
            }
            if self.skip_xattrs {
                // Requested by the caller, and not an attribute of the source.
                let is_mark = |name: &[u8]| whiteouts == Some(Whiteouts::Overlay) && name == OPAQUE;
                node.xattrs.retain(|(name, _)| is_mark(name));
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    Byte(u8),
    /// `?`: any byte but `/`.
    AnyByte,
    /// `*`: any number of bytes but `/`.
    AnyBytes,
    /// `**`: any number of bytes.
    AnyPath,
}

/// A pattern for names, as in shells: `?` is any byte and `*` any number of bytes but `/`, `**` is any number of bytes,
/// and `\` escapes the next byte. With a `/` in it or before it, it matches a path from the top of the tree, otherwise
/// a name in any directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    tokens: Vec<Token>,
    is_path: bool,
}

impl Pattern {
    /// Parses a pattern.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub fn new(text: &[u8]) -> Result<Self, &'static str> {
        if text.len() > PATTERN_BYTES_MAX {
            return Err("it is longer than any path");
        }
        if text.ends_with(b"/") {
            return Err("it has a / at its end: files are meant, too, so leave it out");
        }
        let is_path = text.contains(&b'/');
        let text = text.strip_prefix(b"/").unwrap_or(text);
        if text.split(|byte| *byte == b'/').any(|part| matches!(part, b"" | b"." | b"..")) {
            return Err("a part of it is empty, . or ..: paths begin at the top of the tree");
        }
        let mut tokens = Vec::new();
        let mut bytes = text.iter().copied();
        while let Some(byte) = bytes.next() {
            let token = match byte {
                b'*' if tokens.last() == Some(&Token::AnyBytes) => {
                    tokens.pop();
                    Token::AnyPath
                }
                b'*' if tokens.last() == Some(&Token::AnyPath) => continue,
                b'*' => Token::AnyBytes,
                b'?' => Token::AnyByte,
                b'[' => {
                    return Err(
                        "sets of letters in [ ] are not known: write a pattern for each, or \\[ for the letter",
                    );
                }
                b'\\' => Token::Byte(bytes.next().ok_or("nothing follows its last \\")?),
                byte => Token::Byte(byte),
            };
            tokens.push(token);
        }
        Ok(Self { tokens, is_path })
    }

    /// Returns whether a path from the top of the tree, without a leading `/`, matches. It takes at most time
    /// proportional to the product of both lengths.
    #[must_use]
    pub fn matches(&self, path: &[u8]) -> bool {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
        let text = if self.is_path { path } else { name };
        // The tokens that may come next.
        let mut now = vec![false; self.tokens.len() + 1];
        self.reach(&mut now, 0);
        for byte in text {
            let mut next = vec![false; now.len()];
            for at in (0..self.tokens.len()).filter(|at| now[*at]) {
                match self.tokens[at] {
                    Token::Byte(wanted) if wanted == *byte => self.reach(&mut next, at + 1),
                    Token::AnyByte if *byte != b'/' => self.reach(&mut next, at + 1),
                    Token::AnyBytes if *byte != b'/' => self.reach(&mut next, at),
                    Token::AnyPath => self.reach(&mut next, at),
                    _ => {}
                }
            }
            now = next;
        }
        now[self.tokens.len()]
    }

    /// Marks a token as possible, and those after it if it may match nothing.
    fn reach(&self, next: &mut [bool], at: usize) {
        let mut at = at;
        next[at] = true;
        while matches!(self.tokens.get(at), Some(Token::AnyBytes | Token::AnyPath)) {
            at += 1;
            next[at] = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_names_or_paths() {
        for (pattern, path, expected) in [
            ("*.o", "a.o", true),
            ("*.o", "dir/a.o", true),
            ("*.o", "a.o/b", false),
            ("*.o", "a.c", false),
            ("*", ".hidden", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("tmp", "var/tmp", true),
            ("/tmp", "var/tmp", false),
            ("/tmp", "tmp", true),
            ("var/tmp", "var/tmp", true),
            ("var/tmp", "srv/var/tmp", false),
            ("var/*", "var/tmp", true),
            ("var/*", "var/tmp/x", false),
            ("var/**", "var/tmp/x", true),
            ("**/x", "var/tmp/x", true),
            ("**/x", "x", false),
            ("var/?", "var/", false),
            (r"\*", "*", true),
            (r"\*", "a", false),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "aXbY", false),
        ] {
            let read = Pattern::new(pattern.as_bytes()).expect(pattern);
            assert_eq!(read.matches(path.as_bytes()), expected, "{pattern} {path}");
        }
        for odd in ["", "/", "core/", "/var/tmp/", "a//b", "../a", "a/.", "[ab]", "a\\"] {
            assert!(Pattern::new(odd.as_bytes()).is_err(), "{odd}");
        }
    }

    #[test]
    fn many_stars_end_soon() {
        let pattern = Pattern::new("*a".repeat(500).as_bytes()).expect("it is one");
        assert!(!pattern.matches("a".repeat(400).as_bytes()));
        assert!(pattern.matches("a".repeat(600).as_bytes()));
    }
}
