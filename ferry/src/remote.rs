//! The source `9p:`: addresses of servers, and the flags for them.

use std::ffi::{OsStr, OsString};
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ferry_9p_client::{Client, Connector, Stream, Tcp, Transport, Unix, Vsock};
use ferry_vfs::FileSystem;

use crate::cli::{Cache, Share};
use crate::ninep::{ANY_CID, Address};
use crate::sandbox::ServerAccess;

/// How servers are named.
const FORMS: &str = "unix:PATH, tcp:HOST:PORT[/TREE], tls:HOST:PORT[/TREE] or vsock:CID:PORT[/TREE]";

/// A 9P server and one of its trees: `unix:PATH`, or `tcp:HOST:PORT`, `tls:HOST:PORT` or `vsock:CID:PORT` with `/TREE`. (What follows `unix:`
/// is a path to its end: `--9p-tree` names a tree there.)
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    place: Address,
    /// Empty: the server's only one.
    tree: Vec<u8>,
}

impl Server {
    /// Reads what stands behind `9p:`.
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

    /// Whether the address names one of its trees.
    pub fn has_tree(&self) -> bool {
        !self.tree.is_empty()
    }

    /// Whether TLS is spoken there.
    pub fn is_tls(&self) -> bool {
        matches!(self.place, Address::Tls(..))
    }

    /// The same, its path seen from a folder.
    pub fn in_folder(self, folder: &Path) -> Self {
        Self { place: self.place.in_folder(folder), ..self }
    }

    /// The address as a user writes it.
    pub fn word(self) -> OsString {
        let mut bytes = match &self.place {
            Address::Unix(path) => [b"unix:", path.as_os_str().as_bytes()].concat(),
            other => other.to_string().into_bytes(),
        };
        bytes.extend(self.tree);
        OsString::from_vec(bytes)
    }

    fn transport(&self, flags: &Flags) -> Result<Arc<dyn Transport>> {
        Ok(match self.place.clone() {
            Address::Unix(path) => Arc::new(Unix(path)),
            Address::Tcp(host, port) => Arc::new(Tcp { host, port }),
            Address::Tls(host, port) => sealed(Tcp { host, port }, flags)?,
            Address::Vsock(cid, port) => Arc::new(Vsock { cid, port }),
            Address::VhostUser(path) => bail!("{} is the socket of a device, which guests use", path.display()),
        })
    }
}

/// A port where TLS is spoken.
#[cfg(feature = "tls")]
fn sealed(tcp: Tcp, flags: &Flags) -> Result<Arc<dyn Transport>> {
    let Some(authorities) = &flags.server_ca else {
        bail!("9P with TLS needs --server-ca FILE: whoever must have signed the server's certificate, in PEM");
    };
    let own = flags.client_cert.as_deref().zip(flags.client_key.as_deref());
    Ok(Arc::new(ferry_9p_client::Tls::new(tcp, authorities, own)?))
}

#[cfg(not(feature = "tls"))]
fn sealed(_: Tcp, _: &Flags) -> Result<Arc<dyn Transport>> {
    bail!("this ferry was built without TLS: build it with the feature tls");
}

/// What the flags of a share say about how a server is used.
#[derive(Clone, Debug, PartialEq)]
pub struct Flags {
    read_only: bool,
    cache: Cache,
    msize: Option<u32>,
    in_flight: Option<u16>,
    connections: Option<u16>,
    user: Option<u32>,
    tree: Option<PathBuf>,
    patience: Option<Duration>,
    cache_bytes: Option<usize>,
    server_ca: Option<PathBuf>,
    client_cert: Option<PathBuf>,
    client_key: Option<PathBuf>,
}

impl Flags {
    /// Those of a share.
    pub fn of(share: &Share) -> Self {
        let msize = share.msize.map(|size| u32::try_from(size.0).unwrap_or(u32::MAX));
        let Share { read_only, cache, in_flight, connections, ninep_user: user, .. } = *share;
        let patience = share.patience.map(Duration::from_secs);
        let cache_bytes = share.cache_size.map(|size| usize::try_from(size.0).unwrap_or(usize::MAX));
        let Share { ninep_tree: tree, server_ca, client_cert, client_key, .. } = share.clone();
        Self {
            read_only,
            cache,
            msize,
            in_flight,
            connections,
            user,
            tree,
            patience,
            cache_bytes,
            server_ca,
            client_cert,
            client_key,
        }
    }

    /// Reads what it takes to reach a server from behind walls, and sees whether it has an address; it is not connected to.
    pub fn prepare(&self, server: Server) -> Result<PreparedServer> {
        let (transport, options) = (server.transport(self)?, self.options(&server));
        let mut reach = ServerAccess::default();
        let mut socket = None;
        let unreachable = |reason| ferry_9p_client::Error::Unreachable { address: transport.address(), reason };
        match server.place {
            Address::Unix(path) => {
                let path = path.canonicalize().map_err(unreachable)?;
                let (folder, name) = path.parent().zip(path.file_name()).context("a socket has a name")?;
                socket = Some((folder.to_owned(), name.to_owned()));
                reach.by_path = true;
            }
            Address::Tcp(host, port) | Address::Tls(host, port) => {
                reach.by_name = host.parse::<IpAddr>().is_err();
                reach.port = Some(port);
                // The C library has what it loads for that loaded afterwards.
                (host.as_str(), port).to_socket_addrs().map_err(unreachable)?;
            }
            Address::Vsock(..) | Address::VhostUser(_) => {}
        }
        Ok(PreparedServer { transport, options, reach, socket })
    }

    fn options(&self, server: &Server) -> ferry_9p_client::Options {
        let default = ferry_9p_client::Options::default();
        ferry_9p_client::Options {
            tree: self.tree.as_ref().map_or_else(|| server.tree.clone(), |tree| tree.as_os_str().as_bytes().to_vec()),
            uid: self.user.unwrap_or(default.uid),
            msize: self.msize.unwrap_or(default.msize),
            depth: self.in_flight.map_or(default.depth, usize::from),
            connections: self.connections.map_or(default.connections, usize::from),
            cache: match self.cache {
                Cache::None => ferry_9p_client::Cache::None,
                // Names and attributes are kept by the mount's kernel; this is about data.
                Cache::Metadata => ferry_9p_client::Cache::None,
                Cache::Auto => ferry_9p_client::Cache::Auto,
                Cache::Always => ferry_9p_client::Cache::Always,
            },
            cache_bytes: self.cache_bytes.unwrap_or(default.cache_bytes),
            patience: self.patience.unwrap_or(default.patience),
            read_only: self.read_only,
            ..default
        }
    }
}

/// A client that has seen the root, so that umount(8), which looks at a mount point first, does not wait for a server that is gone.
fn with_known_root(client: Client) -> Arc<dyn FileSystem> {
    if let Err(error) = client.refresh_root() {
        tracing::debug!("the root of the 9P server cannot be looked at: {error}");
    }
    Arc::new(client)
}

/// A server on its way to who uses it from behind walls.
pub struct PreparedServer {
    transport: Arc<dyn Transport>,
    options: ferry_9p_client::Options,
    reach: ServerAccess,
    /// The folder and the name of its socket.
    socket: Option<(PathBuf, OsString)>,
}

impl PreparedServer {
    /// The folder in which its socket has to be seen.
    pub fn folder(&self) -> Option<&Path> {
        self.socket.as_ref().map(|(folder, _)| folder.as_path())
    }

    /// What it takes to reach it.
    pub fn reach(&self) -> ServerAccess {
        self.reach.clone()
    }

    /// The same, its folder seen in another place, if there is one.
    pub fn seen_at(self, place: Option<&Path>) -> Self {
        let transport: Arc<dyn Transport> = match (&self.socket, place) {
            (Some((_, name)), Some(place)) => {
                Arc::new(RelocatedUnix { socket: Unix(place.join(name)), address: self.transport.address() })
            }
            // By the path that its user gave: a short one need not be short when all of it is written out.
            _ => self.transport,
        };
        Self { transport, ..self }
    }

    /// Connects to it by this thread.
    pub fn connect(self, connector: Connector) -> Result<Arc<dyn FileSystem>> {
        Ok(with_known_root(Client::connect_by(connector, self.transport, self.options)?))
    }
}

/// A unix socket that has another place here than where its user knows it.
#[derive(Debug)]
struct RelocatedUnix {
    socket: Unix,
    address: String,
}

impl Transport for RelocatedUnix {
    fn connect(&self, timeout: Duration) -> io::Result<Stream> {
        self.socket.connect(timeout)
    }

    fn address(&self) -> String {
        self.address.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
