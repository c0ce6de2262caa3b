//! Parses the addresses that 9P is served on, and the users that its clients act as.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::size::deserialize_from_str;

/// `VMADDR_CID_ANY` of Linux: the vsock clients of every virtual machine.
pub const ANY_CID: u32 = u32::MAX;

/// An address that 9P is served on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A unix socket for a virtual machine monitor (vhost-user).
    VhostUser(PathBuf),
    /// A TCP port on an address of this machine.
    Tcp(String, u16),
    /// The same, with TLS.
    Tls(String, u16),
    /// A vsock port of one of this machine's context identifiers, or of all.
    Vsock(u32, u32),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORMS: &str = "unix:PATH, tcp:HOST:PORT, tls:HOST:PORT, vsock:CID:PORT or vhost-user:SOCKET";
        let wrong = |what: &str| Err(format!("{text:?} {what}; write {FORMS}"));
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { wrong("has no path") } else { Ok(Self::Unix(path.into())) };
        }
        if let Some(path) = text.strip_prefix("vhost-user:") {
            return if path.is_empty() { wrong("has no path") } else { Ok(Self::VhostUser(path.into())) };
        }
        let Some((kind @ ("tcp" | "tls" | "vsock"), rest)) = text.split_once(':') else {
            return wrong("is not an address for 9P");
        };
        let Some((host, port)) = rest.rsplit_once(':') else { return wrong("has no port") };
        if kind == "vsock" {
            let cid = if matches!(host, "any" | "-1") { Some(ANY_CID) } else { host.parse().ok() };
            return match (cid, port.parse()) {
                (None, _) => wrong("has a CID that is neither a number nor any"),
                // The maximum is the wildcard port.
                (Some(cid), Ok(port)) if port != u32::MAX => Ok(Self::Vsock(cid, port)),
                _ => wrong("has a port that is not a number from 0 to 4294967294"),
            };
        }
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        match port.parse() {
            Ok(_) if host.is_empty() => wrong("has no host"),
            Ok(port) if kind == "tls" => Ok(Self::Tls(host.into(), port)),
            Ok(port) => Ok(Self::Tcp(host.into(), port)),
            Err(_) => wrong("has a port that is not a number from 0 to 65535"),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::VhostUser(path) => write!(f, "vhost-user:{}", path.display()),
            Self::Tcp(host, port) if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "tcp:{host}:{port}"),
            Self::Tls(host, port) if host.contains(':') => write!(f, "tls:[{host}]:{port}"),
            Self::Tls(host, port) => write!(f, "tls:{host}:{port}"),
            Self::Vsock(ANY_CID, port) => write!(f, "vsock:any:{port}"),
            Self::Vsock(cid, port) => write!(f, "vsock:{cid}:{port}"),
        }
    }
}

impl Address {
    /// Resolves its path relative to a directory.
    pub fn in_directory(self, directory: &Path) -> Self {
        match self {
            Self::Unix(path) => Self::Unix(directory.join(path)),
            Self::VhostUser(path) => Self::VhostUser(directory.join(path)),
            other => other,
        }
    }

    /// Returns the path of a unix socket.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Unix(path) | Self::VhostUser(path) => Some(path),
            Self::Tcp(..) | Self::Tls(..) | Self::Vsock(..) => None,
        }
    }

    /// Whether two sockets can have this address: TCP port 0 selects a free port.
    pub fn is_any(&self) -> bool {
        matches!(self, Self::Tcp(_, 0) | Self::Tls(_, 0))
    }
}

/// The users that 9P clients act as: `client`, `only=UID,...` or `UID:GID`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Users {
    #[default]
    Client,
    Only(Vec<u32>),
    One(u32, u32),
}

impl FromStr for Users {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} does not name users; write client, only=UID,UID..., or UID:GID");
        // The maximum is the invalid id.
        let id = |text: &str| text.parse().ok().filter(|id| *id != u32::MAX).ok_or_else(wrong);
        if text == "client" {
            return Ok(Self::Client);
        }
        if let Some(list) = text.strip_prefix("only=") {
            return Ok(Self::Only(list.split(',').map(id).collect::<Result<_, _>>()?));
        }
        let (uid, gid) = text.split_once(':').ok_or_else(wrong)?;
        Ok(Self::One(id(uid)?, id(gid)?))
    }
}

deserialize_from_str!(Address, Users);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, address) in [
            ("unix:/run/s", Address::Unix("/run/s".into())),
            ("unix:a:b", Address::Unix("a:b".into())),
            ("vhost-user:s", Address::VhostUser("s".into())),
            ("tcp:127.0.0.1:564", Address::Tcp("127.0.0.1".into(), 564)),
            ("tcp:[::1]:0", Address::Tcp("::1".into(), 0)),
            ("tcp:localhost:5640", Address::Tcp("localhost".into(), 5640)),
            ("tls:[::]:0", Address::Tls("::".into(), 0)),
            ("tls:host:564", Address::Tls("host".into(), 564)),
            ("vsock:2:564", Address::Vsock(2, 564)),
            ("vsock:any:100000", Address::Vsock(ANY_CID, 100_000)),
        ] {
            assert_eq!(text.parse(), Ok(address.clone()), "{text}");
            assert_eq!(address.to_string(), text);
        }
        assert_eq!("vsock:-1:5".parse(), Ok(Address::Vsock(ANY_CID, 5)));
        for (text, words) in [
            ("/run/s", "not an address for 9P"),
            ("unix:", "no path"),
            ("vhost-user:", "no path"),
            ("tcp:564", "no port"),
            ("tcp::564", "no host"),
            ("tcp:h:65536", "not a number"),
            ("tcp:h:", "not a number"),
            ("rdma:2:564", "not an address for 9P"),
            ("tls:564", "no port"),
            ("vsock:564", "no port"),
            ("vsock:host:564", "has a CID"),
            ("vsock:2:4294967295", "not a number"),
        ] {
            let error = text.parse::<Address>().expect_err(text);
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn users_are_read() {
        for (text, users) in [
            ("client", Users::Client),
            ("only=0,1000", Users::Only(vec![0, 1000])),
            ("1000:100", Users::One(1000, 100)),
        ] {
            assert_eq!(text.parse(), Ok(users), "{text}");
        }
        for text in ["", "root", "1000", "only=", "only=a", "1:2:3", "4294967295:0", "-1:0"] {
            assert!(text.parse::<Users>().is_err(), "{text}");
        }
    }
}
