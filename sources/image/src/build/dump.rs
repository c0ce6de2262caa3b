//! Reads dump files: a tree as text, with a line per name (composefs-dump(5)).

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use ferry_vfs::{FileType, Name, Timespec};

use crate::build::tree_builder::{NAME_BYTES, Refusal, TreeBuilder, names_of};
use crate::format::composefs::fits;
use crate::format::composefs::view::CONTENT_BYTES_MAX;
use crate::format::digest::{Algorithm, Digest};
use crate::format::error::{Error, IoContext, Result};
use crate::format::tree::{Content, Node, Tree, set_xattr};

/// The maximum line length in bytes: an escaped path, 32 KiB of attributes and 5000 bytes of a file fit.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// The maximum length of a path or link (`PATH_MAX` without the zero).
const PATH_BYTES_MAX: usize = 4095;
/// The maximum length of a chain of hard links.
const LINKS_MAX: usize = 40;

/// Reads a dump file.
pub(crate) fn read(input: impl Read, source: &Path) -> Result<Tree> {
    let mut input = BufReader::new(input);
    let mut reading = DumpReader::default();
    let mut line = Vec::new();
    let refused = |at: String, reason: Refusal| Error::Input { path: source.into(), at, reason };
    for number in 1.. {
        line.clear();
        input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line).doing("read", source)?;
        if line.is_empty() {
            break;
        }
        if line.last() == Some(&b'\n') {
            line.pop();
        } else if line.len() as u64 == LINE_BYTES_MAX {
            return Err(refused(format!("line {number}"), "longer than 1 MiB".into()));
        }
        reading.line(&line, number).map_err(|reason| refused(format!("line {number}"), reason))?;
    }
    let tree = reading.finish();
    tree.map_err(|(number, reason)| {
        refused(number.map_or("at its end".into(), |number| format!("line {number}")), reason)
    })
}

/// A hard link, created after all inodes: its line, its path, and the target's path.
struct Link {
    number: usize,
    path: Vec<u8>,
    target: Vec<u8>,
}

#[derive(Default)]
struct DumpReader {
    builder: TreeBuilder,
    links: Vec<Link>,
}

impl DumpReader {
    fn line(&mut self, line: &[u8], number: usize) -> Result<(), Refusal> {
        let mut fields = line.split(|byte| *byte == b' ');
        let mut field = |what: &str| fields.next().ok_or_else(|| format!("the field {what} is missing"));
        let path = unescape(field("PATH")?)?;
        if path.is_empty() {
            return Err("an empty path".into());
        }
        let names = names_of(&path)?;
        if path.ends_with(b"/") && !names.is_empty() {
            return Err("a path that ends with a slash".into());
        }
        let mut fixed: Vec<&[u8]> = ["SIZE", "MODE", "NLINK", "UID", "GID", "RDEV", "MTIME"]
            .into_iter()
            .map(&mut field)
            .collect::<Result<_, _>>()?;
        // A line may omit these; then they are empty, as for mkcomposefs.
        fixed.extend(["PAYLOAD", "CONTENT", "DIGEST"].into_iter().map(|what| field(what).unwrap_or_default()));
        if fixed[1].starts_with(b"@") {
            let target = optional(fixed[7])?.ok_or("a hard link without a target")?;
            let target = joined(&names_of(&target)?);
            let path = joined(&names);
            if path == target {
                return Err("a hard link to itself".into());
            }
            self.builder.charge(NAME_BYTES + path.len() + target.len())?;
            self.links.push(Link { number, path, target });
            return Ok(());
        }
        let mut node = node(&fixed)?;
        for pair in fields.filter(|pair| !pair.is_empty()) {
            let at = pair.iter().position(|byte| *byte == b'=').ok_or("an attribute without =")?;
            let (name, value) = (unescape(&pair[..at])?, unescape(&pair[at + 1..])?);
            if !(1..=255).contains(&name.len()) || name.contains(&0) {
                return Err(format!("{} cannot be the name of an attribute", name.escape_ascii()));
            }
            set_xattr(&mut node.xattrs, &name, &value);
        }
        if !fits(&node.xattrs) {
            return Err("more than 32 KiB of extended attributes".into());
        }
        if names.is_empty() { self.builder.root(node) } else { self.builder.add(&names, node).map(drop) }
    }

    fn finish(mut self) -> Result<Tree, (Option<usize>, Refusal)> {
        let targets: HashMap<&[u8], &[u8]> =
            self.links.iter().map(|link| (link.path.as_slice(), link.target.as_slice())).collect();
        for link in &self.links {
            let refused = |reason: &str| (Some(link.number), Refusal::from(reason));
            let mut target = link.target.as_slice();
            let mut steps = 0;
            while let Some(next) = targets.get(target) {
                target = next;
                steps += 1;
                if steps > LINKS_MAX {
                    return Err(refused("hard links that lead to each other"));
                }
            }
            // Both were parsed before.
            let names = |path| names_of(path).map_err(|reason| (Some(link.number), reason));
            let found =
                self.builder.find(&names(target)?).ok_or_else(|| refused("the hard link's target is not there"))?;
            self.builder.link(&names(&link.path)?, found).map_err(|reason| (Some(link.number), reason))?;
        }
        self.builder.finish().map_err(|reason| (None, reason))
    }
}

fn joined(names: &[Name<'_>]) -> Vec<u8> {
    names.iter().map(|name| name.as_bytes()).collect::<Vec<_>>().join(&b'/')
}

/// The inode that the fields after the path describe.
fn node(fields: &[&[u8]]) -> Result<Node, Refusal> {
    let [size, mode, nlink, uid, gid, rdev, mtime, payload, content, digest] = fields else {
        return Err("too few fields".into());
    };
    let bytes: u64 = number(size, "size")?;
    let mode = std::str::from_utf8(mode).ok().and_then(|mode| u16::from_str_radix(mode, 8).ok());
    let mode = mode.ok_or("the mode is not a 16-bit octal number")?;
    let rdev: u32 = number(rdev, "device")?;
    let payload = optional(payload)?;
    if payload.as_ref().is_some_and(|payload| payload.len() > PATH_BYTES_MAX || payload.contains(&0)) {
        return Err("the payload is longer than 4095 bytes, or contains a NUL".into());
    }
    let content = optional(content)?;
    if let Some(content) = content.as_ref().filter(|content| content.len() as u64 != bytes) {
        return Err(format!("{} bytes of content, but a size of {bytes}", content.len()));
    }
    let kind = FileType::from_raw_mode(mode.into());
    let content = match kind {
        FileType::Directory => Content::Directory(Vec::new()),
        FileType::Symlink => {
            Content::Inline(payload.filter(|target| !target.is_empty()).ok_or("a link without a target")?)
        }
        FileType::RegularFile => match content {
            Some(content) if content.len() > CONTENT_BYTES_MAX => {
                return Err(format!("{bytes} bytes of content: more than 5000 must be in the object store"));
            }
            Some(content) => Content::Inline(content),
            None if bytes == 0 => Content::Inline(Vec::new()),
            None => Content::Elsewhere { bytes, path: payload, digest: digest_of(digest)? },
        },
        FileType::Unknown => return Err(format!("the mode {mode:o} has no valid file type")),
        _ => Content::None,
    };
    let is_device = matches!(kind, FileType::BlockDevice | FileType::CharacterDevice);
    Ok(Node {
        mode,
        uid: number(uid, "user")?,
        gid: number(gid, "group")?,
        rdev: if is_device { rdev } else { 0 },
        mtime: time(mtime)?,
        nlink: number(nlink, "number of links")?,
        xattrs: Vec::new(),
        content,
    })
}

fn digest_of(field: &[u8]) -> Result<Option<Digest>, Refusal> {
    let Some(text) = optional(field)? else { return Ok(None) };
    let digest = Digest::from_hex(Algorithm::Verity, &text.to_ascii_lowercase());
    digest.map(Some).ok_or_else(|| "the digest is not 64 hexadecimal digits".into())
}

fn number<T: std::str::FromStr>(field: &[u8], what: &str) -> Result<T, Refusal> {
    let text = std::str::from_utf8(field).ok();
    text.and_then(|text| text.parse().ok()).ok_or_else(|| format!("{} is not a valid {what}", field.escape_ascii()))
}

/// Parses seconds and nanoseconds. The latter are a number, not a fraction.
fn time(field: &[u8]) -> Result<Timespec, Refusal> {
    let wrong = || format!("{} is not a time in seconds and nanoseconds", field.escape_ascii());
    let at = field.iter().position(|byte| *byte == b'.').ok_or_else(wrong)?;
    let (sec, nsec) = (number(&field[..at], "time")?, number(&field[at + 1..], "time")?);
    if nsec < 1_000_000_000 { Ok(Timespec { sec, nsec }) } else { Err(wrong()) }
}

/// Parses a field that may be absent.
fn optional(field: &[u8]) -> Result<Option<Vec<u8>>, Refusal> {
    if field == b"-" { Ok(None) } else { unescape(field).map(Some) }
}

fn unescape(field: &[u8]) -> Result<Vec<u8>, Refusal> {
    let wrong = || format!("{} has an unknown escape", field.escape_ascii());
    let mut bytes = Vec::with_capacity(field.len());
    let mut left = field.iter();
    while let Some(byte) = left.next() {
        bytes.push(match (byte, if *byte == b'\\' { left.next() } else { None }) {
            (b'\\', Some(b'\\')) => b'\\',
            (b'\\', Some(b'n')) => b'\n',
            (b'\\', Some(b'r')) => b'\r',
            (b'\\', Some(b't')) => b'\t',
            (b'\\', Some(b'x')) => {
                let mut digit = || left.next().and_then(|digit| char::from(*digit).to_digit(16));
                let (high, low) = (digit().ok_or_else(wrong)?, digit().ok_or_else(wrong)?);
                u8::try_from(high << 4 | low).map_err(|_| wrong())?
            }
            (b'\\', _) => return Err(wrong()),
            _ => *byte,
        });
    }
    Ok(bytes)
}
