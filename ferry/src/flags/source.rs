//! Parses the source of a share.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::address::{ANY_CID, Address};

/// The prefix of persistent memory file systems.
const PMEM: &[u8] = b"pmem:";
/// The prefix of images.
const IMAGE: &[u8] = b"image:";
/// The prefix of layers of containers.
const LAYERS: &[u8] = b"layers:";
/// The prefix of 9P servers.
const NINEP: &[u8] = b"9p:";

/// The kind of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A directory of this host.
    Dir(PathBuf),
    /// A memory file system that ends with the process.
    Mem,
    /// A memory file system in this file or device.
    Pmem(PathBuf),
    /// The tree in this image.
    Image(PathBuf),
    /// Layers of container images, kept in this directory.
    Layers(PathBuf),
    /// The tree of a 9P server, by its address; [`Server`] parses it.
    Ninep(OsString),
}

impl Kind {
    /// Whether owners and types of files come from outside this host: from a server, or the author of an image.
    pub fn is_foreign(&self) -> bool {
        matches!(self, Self::Image(_) | Self::Layers(_) | Self::Ninep(_))
    }

    /// Parses `mem`, `pmem:PATH`, `image:PATH`, `layers:DIR`, `9p:ADDRESS`, or else a directory; `./mem` is a directory.
    pub fn of(word: &Path) -> Self {
        let bytes = word.as_os_str().as_bytes();
        if let Some(address) = bytes.strip_prefix(NINEP) {
            return Self::Ninep(OsStr::from_bytes(address).into());
        }
        if let Some(path) = bytes.strip_prefix(IMAGE) {
            return Self::Image(OsStr::from_bytes(path).into());
        }
        if let Some(path) = bytes.strip_prefix(LAYERS) {
            return Self::Layers(OsStr::from_bytes(path).into());
        }
        match bytes.strip_prefix(PMEM) {
            Some(path) => Self::Pmem(OsStr::from_bytes(path).into()),
            None if bytes == b"mem" => Self::Mem,
            None => Self::Dir(word.into()),
        }
    }

    /// The same source with its canonical path.
    pub fn canonical(self) -> Self {
        match self {
            Self::Dir(path) => Self::Dir(path.canonicalize().unwrap_or(path)),
            Self::Pmem(path) => Self::Pmem(path.canonicalize().unwrap_or(path)),
            Self::Image(path) => Self::Image(path.canonicalize().unwrap_or(path)),
            Self::Layers(path) => Self::Layers(path.canonicalize().unwrap_or(path)),
            other @ (Self::Mem | Self::Ninep(_)) => other,
        }
    }

    /// Returns the word for this source, with its path relative to a directory.
    pub fn word_in(self, directory: &Path) -> PathBuf {
        // The mount table shows it, so it has no `/./`.
        let plain = |path: PathBuf| directory.join(path).components().collect::<PathBuf>();
        let below = |prefix: &[u8], path: PathBuf| {
            let mut word = OsStr::from_bytes(prefix).to_owned();
            word.push(plain(path));
            word.into()
        };
        match self {
            Self::Mem => "mem".into(),
            Self::Dir(path) => plain(path),
            Self::Pmem(path) => below(PMEM, path),
            Self::Image(path) => below(IMAGE, path),
            Self::Layers(path) => below(LAYERS, path),
            Self::Ninep(address) => {
                let seen = Server::of(&address).map(|server| server.in_directory(directory).word());
                let mut word = OsStr::from_bytes(NINEP).to_owned();
                word.push(seen.unwrap_or(address));
                word.into()
            }
        }
    }
}

/// The forms of addresses.
const FORMS: &str = "unix:PATH, tcp:HOST:PORT[/TREE], tls:HOST:PORT[/TREE] or vsock:CID:PORT[/TREE]";

/// A 9P server and one of its trees: `unix:PATH`, or `tcp:HOST:PORT`, `tls:HOST:PORT` or `vsock:CID:PORT` with `/TREE`. A unix
/// path has no tree: `--9p-tree` names one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    pub place: Address,
    /// Empty: the server's only one.
    pub tree: Vec<u8>,
}

impl Server {
    /// Parses the part after `9p:`.
    pub fn of(text: &OsStr) -> Result<Self, String> {
        let bytes = text.as_bytes();
        if let Some(path) = bytes.strip_prefix(b"unix:").filter(|path| !path.is_empty()) {
            return Ok(Self { place: Address::Unix(OsStr::from_bytes(path).into()), tree: Vec::new() });
        }
        let end = bytes.iter().position(|byte| *byte == b'/').unwrap_or(bytes.len());
        let (address, tree) = bytes.split_at(end);
        let place = match String::from_utf8_lossy(address).parse() {
            Ok(place @ (Address::Tcp(_, 1..) | Address::Tls(_, 1..))) => place,
            Ok(place @ Address::Vsock(cid, _)) if cid != ANY_CID => place,
            _ => {
                let text = text.to_string_lossy();
                return Err(format!("9p:{text} names no 9P server; write 9p: and {FORMS}"));
            }
        };
        Ok(Self { place, tree: tree.to_vec() })
    }

    /// Whether the address names a tree.
    pub fn has_tree(&self) -> bool {
        !self.tree.is_empty()
    }

    /// Whether the address uses TLS.
    pub fn is_tls(&self) -> bool {
        matches!(self.place, Address::Tls(..))
    }

    /// Resolves its path relative to a directory.
    pub fn in_directory(self, directory: &Path) -> Self {
        Self { place: self.place.in_directory(directory), ..self }
    }

    /// Returns the address as a user writes it.
    pub fn word(self) -> OsString {
        let mut bytes = match &self.place {
            Address::Unix(path) => [b"unix:", path.as_os_str().as_bytes()].concat(),
            other => other.to_string().into_bytes(),
        };
        bytes.extend(self.tree);
        OsString::from_vec(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_mean_sources() {
        for (word, kind) in [
            ("mem", Kind::Mem),
            ("./mem", Kind::Dir("./mem".into())),
            ("/srv/mem", Kind::Dir("/srv/mem".into())),
            ("pmem:/dev/pmem0", Kind::Pmem("/dev/pmem0".into())),
            ("pmem:a", Kind::Pmem("a".into())),
            ("./pmem:a", Kind::Dir("./pmem:a".into())),
            ("pmem", Kind::Dir("pmem".into())),
            ("9p:unix:/s", Kind::Ninep("unix:/s".into())),
            ("./9p:unix", Kind::Dir("./9p:unix".into())),
            ("image:a.img", Kind::Image("a.img".into())),
            ("layers:a", Kind::Layers("a".into())),
        ] {
            assert_eq!(Kind::of(word.as_ref()), kind, "{word}");
        }
    }

    #[test]
    fn words_have_their_paths_from_a_directory() {
        for (word, seen) in [
            ("mem", "mem"),
            ("a", "/f/a"),
            (".", "/f"),
            ("./mem", "/f/mem"),
            ("/a", "/a"),
            ("pmem:a", "pmem:/f/a"),
            ("pmem:/a", "pmem:/a"),
            ("9p:unix:s", "9p:unix:/f/s"),
            ("image:a.img", "image:/f/a.img"),
            ("layers:a", "layers:/f/a"),
            ("9p:tcp:h:1/t", "9p:tcp:h:1/t"),
        ] {
            assert_eq!(Kind::of(word.as_ref()).word_in("/f".as_ref()), Path::new(seen), "{word}");
        }
    }

    #[test]
    fn servers_are_read_and_written() {
        for (text, place, tree) in [
            ("unix:/run/s", Address::Unix("/run/s".into()), ""),
            ("unix:a/b:c", Address::Unix("a/b:c".into()), ""),
            ("tcp:127.0.0.1:564", Address::Tcp("127.0.0.1".into(), 564), ""),
            ("tcp:[::1]:564/export/a", Address::Tcp("::1".into(), 564), "/export/a"),
            ("tcp:host:564/", Address::Tcp("host".into(), 564), "/"),
            ("tls:host:564/a", Address::Tls("host".into(), 564), "/a"),
            ("vsock:2:5640", Address::Vsock(2, 5640), ""),
        ] {
            let server = Server { place, tree: tree.into() };
            assert_eq!(Server::of(text.as_ref()), Ok(server.clone()), "{text}");
            assert_eq!(server.word(), text);
        }
        let none = ["", "/run/s", "unix:", "tcp:host", "tcp:host/a", "tcp:host:0", "tcp:host:x/a", "what:2:564"];
        for text in none.into_iter().chain(["tls:host:0", "vsock:any:564", "vhost-user:s"]) {
            let error = Server::of(text.as_ref()).expect_err(text);
            assert!(error.contains(&format!("9p:{text} names no 9P server; write 9p: and unix:PATH")), "{error}");
        }
    }
}
