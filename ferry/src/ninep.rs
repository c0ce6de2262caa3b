//! The 9P export's flags as a user writes them, and the sockets that they mean.

use std::fmt;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::cli::Share;
use crate::exports;
use crate::socket::Bound;

/// Where 9P clients come from: `unix:PATH` or `tcp:HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP port on an address of this machine.
    Tcp(String, u16),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| Err(format!("{text:?} {what}; write unix:PATH or tcp:HOST:PORT"));
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { wrong("has no path") } else { Ok(Self::Unix(path.into())) };
        }
        let Some(rest) = text.strip_prefix("tcp:") else { return wrong("is no address for 9P") };
        let Some((host, port)) = rest.rsplit_once(':') else { return wrong("has no port") };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        match port.parse() {
            Ok(_) if host.is_empty() => wrong("has no host"),
            Ok(port) => Ok(Self::Tcp(host.into(), port)),
            Err(_) => wrong("has a port that is no number from 0 to 65535"),
        }
    }
}

impl TryFrom<String> for Address {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(host, port) if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "tcp:{host}:{port}"),
        }
    }
}

impl Address {
    /// The same, its path seen from a folder.
    pub fn in_folder(self, folder: &Path) -> Self {
        match self {
            Self::Unix(path) => Self::Unix(folder.join(path)),
            tcp @ Self::Tcp(..) => tcp,
        }
    }
}

/// As whom 9P clients act: `client`, `only=UID,...` or `UID:GID`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Users(pub ferry_ninep::Users);

impl FromStr for Users {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} says no users; write client, only=UID,UID..., or UID:GID");
        // The greatest number stands for "nobody at all".
        let id = |text: &str| text.parse().ok().filter(|id| *id != u32::MAX).ok_or_else(wrong);
        if text == "client" {
            return Ok(Self(ferry_ninep::Users::Client));
        }
        if let Some(list) = text.strip_prefix("only=") {
            return Ok(Self(ferry_ninep::Users::Only(list.split(',').map(id).collect::<Result<_, _>>()?)));
        }
        let (uid, gid) = text.split_once(':').ok_or_else(wrong)?;
        Ok(Self(ferry_ninep::Users::Squash { uid: id(uid)?, gid: id(gid)? }))
    }
}

impl TryFrom<String> for Users {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// A socket for 9P clients, before it is served.
#[derive(Debug)]
pub struct Listening {
    listener: ferry_ninep::Listener,
    /// The socket's file, which goes when this does.
    bound: Option<Bound>,
    /// What clients are to be told.
    address: String,
}

impl Listening {
    /// Makes the socket of a share that has one.
    pub fn of(share: &Share) -> Result<Option<Self>> {
        let listening = match &share.ninep {
            None => return Ok(None),
            Some(Address::Unix(path)) => {
                let bound = Bound::bind(path)?;
                let address = format!("unix:{}", crate::share::shown(path));
                Self { listener: bound.listener()?.into(), bound: Some(bound), address }
            }
            Some(address @ Address::Tcp(host, port)) => {
                let listener =
                    TcpListener::bind((host.as_str(), *port)).with_context(|| format!("cannot listen on {address}"))?;
                // Port 0 is any that is free.
                let bound = listener.local_addr().with_context(|| format!("cannot listen on {address}"))?;
                Self { listener: listener.into(), bound: None, address: format!("tcp:{bound}") }
            }
        };
        Ok(Some(listening))
    }

    /// What clients are to be told.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Serves the socket. What comes along is to be dropped after the export.
    pub fn serve(
        self,
        source: std::sync::Arc<dyn ferry_vfs::FileSystem>,
        share: &Share,
    ) -> Result<(ferry_ninep::Export, Option<Bound>)> {
        let options = ferry_ninep::Options {
            name: exports::name(share),
            read_only: share.read_only,
            xattr: !share.no_xattr,
            users: share.ninep_users.clone().map_or_else(ferry_ninep::Users::default, |users| users.0),
            remote: share.ninep_remote,
            ..ferry_ninep::Options::default()
        };
        let export = match ferry_ninep::Export::start(vec![self.listener], source, options) {
            Err(ferry_ninep::Error::Remote(address)) => anyhow::bail!(
                "tcp:{address} can be reached from other machines, and 9P believes whoever connects; \
                 listen on 127.0.0.1, or add --9p-remote"
            ),
            other => other?,
        };
        Ok((export, self.bound))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, address) in [
            ("unix:/run/s", Address::Unix("/run/s".into())),
            ("unix:a:b", Address::Unix("a:b".into())),
            ("tcp:127.0.0.1:564", Address::Tcp("127.0.0.1".into(), 564)),
            ("tcp:[::1]:0", Address::Tcp("::1".into(), 0)),
            ("tcp:localhost:5640", Address::Tcp("localhost".into(), 5640)),
        ] {
            assert_eq!(text.parse(), Ok(address.clone()), "{text}");
            assert_eq!(address.to_string(), text);
        }
        for (text, words) in [
            ("/run/s", "no address for 9P"),
            ("unix:", "no path"),
            ("tcp:564", "no port"),
            ("tcp::564", "no host"),
            ("tcp:h:65536", "no number"),
            ("tcp:h:", "no number"),
            ("vsock:2:564", "no address for 9P"),
        ] {
            let error = text.parse::<Address>().expect_err(text);
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn users_are_read() {
        for (text, users) in [
            ("client", ferry_ninep::Users::Client),
            ("only=0,1000", ferry_ninep::Users::Only(vec![0, 1000])),
            ("1000:100", ferry_ninep::Users::Squash { uid: 1000, gid: 100 }),
        ] {
            assert_eq!(text.parse(), Ok(Users(users)), "{text}");
        }
        for text in ["", "root", "1000", "only=", "only=a", "1:2:3", "4294967295:0", "-1:0"] {
            assert!(text.parse::<Users>().is_err(), "{text}");
        }
    }
}
