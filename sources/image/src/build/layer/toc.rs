//! The table of contents of a layer: a JSON document with an entry for each member of the archive, and for each further
//! chunk of a file. eStargz and zstd:chunked have the same form.
//!
//! The document is untrusted until its digest was verified, and it may still be wrong. What readers could understand in
//! different ways is refused; the layer is then read as a whole.
//!
//! Sources: "eStargz: Standard-Compatible Extension to Container Image Layers for Lazy Pulling" of the
//! stargz-snapshotter, and the documentation of zstd:chunked in containers/storage.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ferry_vfs::Timespec;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::build::tar::{Kind, Member, components, device};
use crate::build::tree_builder::Refusal;
use crate::format::digest::{Algorithm, Digest, bytes_of_hex};
use crate::format::layer_index::{Chunk, Span};
use crate::format::object::ZEROS;

/// The maximum size of a document in bytes: half a million files.
pub(super) const TOC_BYTES_MAX: u64 = 160 << 20;
/// The maximum number of files, to limit memory.
const ITEMS_MAX: usize = 1 << 20;
/// The maximum number of chunks, to limit memory: 64 GiB in chunks of 64 KiB.
const CHUNKS_MAX: usize = 1 << 20;
/// The maximum memory of a file's extended attributes in bytes, and what each takes beside its name and its value.
const ATTRIBUTES_BYTES_MAX: usize = 1 << 20;
const ATTRIBUTE_BYTES: usize = 64;
/// The length of objects that files of zeros are divided into, in bytes.
const ZEROS_BYTES: u64 = 4 << 20;
/// Files that the converters of eStargz add to a layer: they say what to fetch first.
const LANDMARK: &[u8] = b".prefetch.landmark";
const LANDMARKS: [&[u8]; 2] = [LANDMARK, b".no.prefetch.landmark"];

#[derive(Deserialize)]
struct Document {
    version: u32,
    entries: Toc,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(default, borrow)]
    link_name: Cow<'a, str>,
    #[serde(default)]
    mode: u32,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    uid: u32,
    #[serde(default)]
    gid: u32,
    #[serde(default, borrow)]
    modtime: Option<Cow<'a, str>>,
    #[serde(default)]
    dev_major: i64,
    #[serde(default)]
    dev_minor: i64,
    #[serde(default)]
    xattrs: Option<Attributes>,
    #[serde(default, borrow)]
    digest: Option<Cow<'a, str>>,
    #[serde(default)]
    offset: u64,
    #[serde(default)]
    end_offset: u64,
    #[serde(default)]
    inner_offset: u64,
    #[serde(default)]
    chunk_offset: u64,
    #[serde(default)]
    chunk_size: u64,
    #[serde(default, borrow)]
    chunk_digest: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    chunk_type: Option<Cow<'a, str>>,
}

/// Extended attributes, with values in base64.
struct Attributes(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Attributes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(AttributesVisitor)
    }
}

struct AttributesVisitor;

impl<'de> Visitor<'de> for AttributesVisitor {
    type Value = Attributes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("extended attributes")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Attributes, A::Error> {
        let (mut all, mut bytes) = (BTreeMap::new(), 0);
        while let Some((name, value)) = entries.next_entry::<String, String>()? {
            bytes += name.len() + value.len() + ATTRIBUTE_BYTES;
            if bytes > ATTRIBUTES_BYTES_MAX {
                return Err(A::Error::custom("more than 1 MiB of extended attributes"));
            }
            all.insert(name, value);
        }
        Ok(Attributes(all))
    }
}

/// A member of a layer.
pub(super) struct Item {
    pub member: Member,
    /// The chunks of a file; spans have no end yet.
    pub chunks: Vec<Chunk>,
    /// The sum of their lengths.
    known: u64,
}

impl Item {
    /// Returns about how much memory this takes, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        let Member { path, link, xattrs, .. } = &self.member;
        let xattrs = xattrs.iter().map(|pair| size_of_val(pair) + pair.0.len() + pair.1.len());
        // Chunks are in the index, too.
        let chunks = 2 * self.chunks.len() * size_of::<Chunk>();
        size_of::<Self>() + path.len() + link.len() + xattrs.sum::<usize>() + chunks
    }
}

/// A parsed table of contents.
#[derive(Default)]
pub(super) struct Toc {
    pub items: Vec<Item>,
    /// The offsets at which streams can begin or end.
    pub edges: Vec<u64>,
    /// Files that begin before this offset are to be fetched first.
    pub landmark: u64,
}

/// Parses a table of contents whose digest was verified.
pub(super) fn parse(json: &[u8]) -> Result<Toc, Refusal> {
    let Document { version, entries } =
        serde_json::from_slice(json).map_err(|error| format!("its table of contents is invalid: {error}"))?;
    if version != 1 {
        return Err(format!("its table of contents has the version {version}, not 1"));
    }
    Ok(entries)
}

/// Entries become items one by one, because an entry takes ten times the memory of its JSON.
impl<'de> Deserialize<'de> for Toc {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Entries)
    }
}

struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Toc;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Toc, A::Error> {
        let mut toc = Toc::default();
        let (mut chunks_left, mut names) = (CHUNKS_MAX, HashMap::new());
        while let Some(entry) = entries.next_element::<Entry<'de>>()? {
            add_entry(&mut toc, &entry, &mut names, &mut chunks_left).map_err(A::Error::custom)?;
        }
        end_file(toc.items.last()).map_err(A::Error::custom)?;
        Ok(toc)
    }
}

/// Adds an entry; `names` are the paths of those before it.
fn add_entry(
    toc: &mut Toc,
    entry: &Entry<'_>,
    names: &mut HashMap<Vec<u8>, Kind>,
    chunks_left: &mut usize,
) -> Result<(), Refusal> {
    let named = |reason: Refusal| format!("{}: {reason}", entry.name.escape_default());
    for edge in [entry.offset, entry.end_offset] {
        // Entries of one stream name it again and again.
        if edge > 0 && toc.edges.last() != Some(&edge) {
            toc.edges.push(edge);
        }
    }
    if entry.kind == "chunk" {
        return add_chunk(toc, entry, chunks_left).map_err(named);
    }
    end_file(toc.items.last())?;
    let member = member(entry).map_err(named)?;
    let path = components(&member.path).map_err(named)?;
    if let [name] = &path[..]
        && LANDMARKS.contains(&name.as_bytes())
    {
        // Its chunks, if any, would be those of a small file.
        if name.as_bytes() == LANDMARK {
            toc.landmark = entry.offset;
        }
        return Ok(());
    }
    let key = path.iter().map(|name| name.as_bytes()).collect::<Vec<_>>().join(&b'/');
    if let Some(before) = names.insert(key, member.kind)
        && (before, member.kind) != (Kind::Directory, Kind::Directory)
    {
        return Err(named("two entries have this name".into()));
    }
    if toc.items.len() == ITEMS_MAX {
        return Err("more than 1,048,576 files".into());
    }
    let is_file = member.kind == Kind::File && member.bytes > 0;
    toc.items.push(Item { member, chunks: Vec::new(), known: 0 });
    if is_file { add_chunk(toc, entry, chunks_left).map_err(named) } else { Ok(()) }
}

/// Checks that the chunks of a file are the whole file.
fn end_file(item: Option<&Item>) -> Result<(), Refusal> {
    match item {
        Some(Item { member, known, .. }) if *known != member.bytes && member.kind == Kind::File => {
            Err(format!("{}: its chunks have {known} bytes, its size is {}", member.path.escape_ascii(), member.bytes))
        }
        _ => Ok(()),
    }
}

/// Adds the chunk of an entry to the last file.
fn add_chunk(toc: &mut Toc, entry: &Entry<'_>, left: &mut usize) -> Result<(), Refusal> {
    let Some(Item { member, chunks, known }) = toc.items.last_mut() else {
        return Err("a chunk before any file".into());
    };
    if member.kind != Kind::File || member.path != entry.name.as_bytes() {
        // Those of a landmark are not looked at.
        let is_landmark = LANDMARKS.contains(&entry.name.as_bytes());
        return if is_landmark { Ok(()) } else { Err("a chunk that does not follow its file".into()) };
    }
    let before = *known;
    let rest = member.bytes - before;
    let bytes = if entry.chunk_size == 0 { rest } else { entry.chunk_size };
    if entry.chunk_offset != before || bytes == 0 || bytes > rest {
        let (from, size) = (entry.chunk_offset, member.bytes);
        return Err(format!("a chunk of {bytes} bytes at {from}, where {before} of {size} bytes are known"));
    }
    *known += bytes;
    let is_first = chunks.is_empty();
    let mut push = |bytes, digest, span| {
        *left = left.checked_sub(1).ok_or("more than 1,048,576 chunks")?;
        chunks.push(Chunk { bytes, digest, span });
        Ok::<(), Refusal>(())
    };
    match entry.chunk_type.as_deref() {
        None | Some("") => {}
        Some("zeros") => {
            for from in (0..bytes).step_by(usize::try_from(ZEROS_BYTES).unwrap_or(usize::MAX)) {
                let span = Span { is_first: is_first && from == 0, ..Span::default() };
                push((bytes - from).min(ZEROS_BYTES), ZEROS, span)?;
            }
            return Ok(());
        }
        Some(other) => return Err(format!("a chunk of the unknown kind {other:?}")),
    }
    // A file of one chunk needs no second digest.
    let whole = entry.digest.as_ref().filter(|_| bytes == member.bytes);
    let digest = entry.chunk_digest.as_ref().filter(|digest| !digest.is_empty()).or(whole);
    let digest = digest.ok_or("a chunk without a digest: nothing proves its bytes")?;
    let digits = digest.strip_prefix("sha256:").and_then(|digits| bytes_of_hex(digits.as_bytes()));
    let digits =
        digits.ok_or_else(|| format!("{:?} is no digest by SHA-256", digest.chars().take(80).collect::<String>()))?;
    let digest = Digest::new(Algorithm::Sha256, digits);
    if digest == ZEROS {
        return Err("a digest of zeros".into());
    }
    push(bytes, digest, Span { from: entry.offset, to: 0, inner: entry.inner_offset, is_first })
}

fn member(entry: &Entry<'_>) -> Result<Member, Refusal> {
    let (kind, bits) = match &*entry.kind {
        "dir" => (Kind::Directory, 0o040_000),
        "reg" => (Kind::File, 0o100_000),
        "symlink" => (Kind::Symlink, 0o120_000),
        "hardlink" => (Kind::Link, 0),
        "char" => (Kind::Special, 0o020_000),
        "block" => (Kind::Special, 0o060_000),
        "fifo" => (Kind::Special, 0o010_000),
        other => return Err(format!("an entry of the unknown kind {:?}", other.chars().take(80).collect::<String>())),
    };
    // Programs write this for names that JSON cannot hold, so the archive may have another name.
    if [&entry.name, &entry.link_name].iter().any(|name| name.contains(char::REPLACEMENT_CHARACTER)) {
        return Err("a name that is not UTF-8 in the archive".into());
    }
    let rdev = match &*entry.kind {
        "char" | "block" => device(entry.dev_major, entry.dev_minor)?,
        _ => 0,
    };
    let mut xattrs = Vec::new();
    for (name, value) in entry.xattrs.iter().flat_map(|all| &all.0) {
        let value = STANDARD.decode(value.as_bytes()).map_err(|_| "an attribute that is not in base64")?;
        xattrs.push((name.as_bytes().to_vec(), value));
    }
    let mtime = match entry.modtime.as_deref() {
        None | Some("") => Timespec::default(),
        Some(text) => {
            time(text).ok_or_else(|| format!("its time {:?} is invalid", text.chars().take(80).collect::<String>()))?
        }
    };
    Ok(Member {
        offset: 0,
        path: entry.name.as_bytes().to_vec(),
        link: entry.link_name.as_bytes().to_vec(),
        kind,
        mode: bits | u16::try_from(entry.mode & 0o7777).unwrap_or_default(),
        uid: entry.uid,
        gid: entry.gid,
        rdev,
        mtime,
        bytes: if kind == Kind::File { entry.size } else { 0 },
        xattrs,
    })
}

/// Parses a time of RFC 3339.
fn time(text: &str) -> Option<Timespec> {
    let (date, rest) = text.split_at_checked(10)?;
    let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<i64>().ok())?;
    let [year, month, day] = fields(date, '-')?.map(number);
    let (clock, rest) = rest.strip_prefix(['T', 't'])?.split_at_checked(8)?;
    let [hour, minute, second] = fields(clock, ':')?.map(number);
    let (fraction, zone) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?),
        None => ("0", rest),
    };
    let zone = match zone {
        "Z" | "z" => 0,
        _ => {
            let sign = if zone.starts_with('-') { -1 } else { zone.starts_with('+').then_some(1)? };
            let (hours, minutes) = zone.get(1..).filter(|zone| zone.len() == 5)?.split_once(':')?;
            sign * (number(hours)? * 3600 + number(minutes)? * 60)
        }
    };
    let (year, month, day) = (year?, month?, day?);
    let (hour, minute, second) = (hour?, minute?, second?);
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let nsec = fraction.chars().chain("000000000".chars()).take(9).collect::<String>().parse().ok()?;
    // Years begin in March, so that the leap day is the last; 400 years have 146,097 days.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, year) = (year.div_euclid(400), year.rem_euclid(400));
    let days = era * 146_097 + year * 365 + year / 4 - year / 100 + (153 * month + 2) / 5 + day - 1 - 719_468;
    Some(Timespec { sec: days * 86_400 + hour * 3600 + minute * 60 + second - zone, nsec })
}

fn fields(text: &str, separator: char) -> Option<[&str; 3]> {
    text.split(separator).collect::<Vec<_>>().try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns why a table with these entries is refused.
    fn refusal(entries: &str) -> Refusal {
        let json = format!(r#"{{"version": 1, "entries": [{entries}]}}"#);
        parse(json.as_bytes()).err().expect("it is wrong")
    }

    #[test]
    fn entries_are_looked_at_one_by_one() {
        // What follows a wrong entry is not even parsed.
        let said = refusal(r#"{"type": "door", "name": "a"}, 7"#);
        assert!(said.contains(r#"a: an entry of the unknown kind "door" at line 1"#), "{said}");
    }

    #[test]
    fn attributes_are_limited_while_they_are_read() {
        let many: String = (0..20_000).map(|number| format!(r#""user.{number}":"","#)).collect();
        let said = refusal(&format!(r#"{{"type": "reg", "name": "a", "xattrs": {{{many} 7}}}}"#));
        assert!(said.contains("more than 1 MiB of extended attributes"), "{said}");
    }

    #[test]
    fn the_number_of_files_is_limited() {
        let mut entries = String::new();
        for number in 0..=ITEMS_MAX {
            entries.push_str(&format!(r#"{{"type":"fifo","name":"{number}"}},"#));
        }
        let said = refusal(&entries);
        assert!(said.contains("more than 1,048,576 files"), "{said}");
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        for (text, expected) in [
            ("1970-01-01T00:00:00Z", Some((0, 0))),
            ("1969-12-31T23:59:59.5Z", Some((-1, 500_000_000))),
            ("2000-02-29T00:00:00Z", Some((951_782_400, 0))),
            ("2023-11-14T22:13:20.123456789Z", Some((1_700_000_000, 123_456_789))),
            ("2023-11-15T00:13:20+02:00", Some((1_700_000_000, 0))),
            ("2023-11-14T20:13:20-02:00", Some((1_700_000_000, 0))),
            // What Go writes for no time.
            ("0001-01-01T00:00:00Z", Some((-62_135_596_800, 0))),
            ("", None),
            ("2023-13-01T00:00:00Z", None),
            ("2023-11-14", None),
            ("2023-11-14T22:13:20", None),
            ("2023-11-14T22:13:20.Z", Some((1_700_000_000, 0))),
            ("2023-11-14T22:13:20.5", None),
            ("+023-11-14T22:13:20Z", None),
            ("2023-11-14T22:13:20*02:00", None),
            ("äääää", None),
            ("2023-11-14T22:13:20+999999999999999999:00", None),
        ] {
            assert_eq!(time(text).map(|time| (time.sec, time.nsec)), expected, "{text}");
        }
    }
}
