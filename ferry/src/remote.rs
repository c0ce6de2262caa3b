//! The source `9p:`: how the flags of a share reach a server.

use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ferry_9p_client::{Client, Connector, Stream, Tcp, Transport, Unix, Vsock};
use ferry_vfs::FileSystem;

use crate::flags::{Address, Cache, Server, Share};
use crate::sandbox::ServerAccess;
use crate::size::Size;

/// Returns a transport with TLS.
#[cfg(feature = "tls")]
fn tls_transport(tcp: Tcp, flags: &Flags) -> Result<Arc<dyn Transport>> {
    let Some(authorities) = &flags.server_ca else {
        bail!("9P with TLS needs --server-ca FILE: the authorities that sign the server's certificate, in PEM");
    };
    let own = flags.client_cert.as_deref().zip(flags.client_key.as_deref());
    Ok(Arc::new(ferry_9p_client::Tls::new(tcp, authorities, own)?))
}

#[cfg(not(feature = "tls"))]
fn tls_transport(_: Tcp, _: &Flags) -> Result<Arc<dyn Transport>> {
    bail!("this ferry was built without TLS: build it with the feature tls");
}

/// The flags of a share that are for its server.
#[derive(Clone, Debug, PartialEq)]
pub struct Flags {
    /// With the tree of `--9p-tree`, if it is given.
    options: ferry_9p_client::Options,
    server_ca: Option<PathBuf>,
    client_cert: Option<PathBuf>,
    client_key: Option<PathBuf>,
}

impl Flags {
    /// Returns the flags of a share.
    pub fn of(share: &Share) -> Self {
        let default = ferry_9p_client::Options::default();
        let bytes = |size: Size| usize::try_from(size.0).unwrap_or(usize::MAX);
        let options = ferry_9p_client::Options {
            tree: share.ninep_tree.clone().unwrap_or_default().into_os_string().into_vec(),
            uid: share.ninep_user.unwrap_or(default.uid),
            msize: share.msize.map_or(default.msize, |size| u32::try_from(size.0).unwrap_or(u32::MAX)),
            depth: share.in_flight.map_or(default.depth, usize::from),
            connections: share.connections.map_or(default.connections, usize::from),
            cache: match share.cache {
                // The kernel of the mount caches names and attributes; this is about data.
                Cache::None | Cache::Metadata => ferry_9p_client::Cache::None,
                Cache::Auto => ferry_9p_client::Cache::Auto,
                Cache::Always => ferry_9p_client::Cache::Always,
            },
            cache_bytes: share.cache_size.map_or(default.cache_bytes, bytes),
            patience: share.patience.map_or(default.patience, Duration::from_secs),
            read_only: share.read_only,
            ..default
        };
        let Share { server_ca, client_cert, client_key, .. } = share.clone();
        Self { options, server_ca, client_cert, client_key }
    }

    /// Resolves the server's address and reads its files, for use inside a sandbox. It does not connect.
    pub fn prepare(&self, server: Server) -> Result<PreparedServer> {
        let (transport, mut options) = (self.transport(&server.place)?, self.options.clone());
        if options.tree.is_empty() {
            options.tree = server.tree;
        }
        let mut reach = ServerAccess::default();
        let mut socket = None;
        let unreachable = |reason| ferry_9p_client::Error::Unreachable { address: transport.address(), reason };
        match server.place {
            Address::Unix(path) => {
                let path = path.canonicalize().map_err(unreachable)?;
                let (directory, name) = path.parent().zip(path.file_name()).context("the socket has no name")?;
                socket = Some((directory.to_owned(), name.to_owned()));
                reach.by_path = true;
            }
            Address::Tcp(host, port) | Address::Tls(host, port) => {
                reach.by_name = host.parse::<IpAddr>().is_err();
                reach.port = Some(port);
                // This also makes the C library load its modules for lookups now.
                (host.as_str(), port).to_socket_addrs().map_err(unreachable)?;
            }
            Address::Vsock(..) | Address::VhostUser(_) => {}
        }
        Ok(PreparedServer { transport, options, reach, socket })
    }

    fn transport(&self, place: &Address) -> Result<Arc<dyn Transport>> {
        Ok(match place.clone() {
            Address::Unix(path) => Arc::new(Unix(path)),
            Address::Tcp(host, port) => Arc::new(Tcp { host, port }),
            Address::Tls(host, port) => tls_transport(Tcp { host, port }, self)?,
            Address::Vsock(cid, port) => Arc::new(Vsock { cid, port }),
            Address::VhostUser(path) => {
                bail!("{} is the socket of a device, which only virtual machines use", path.display())
            }
        })
    }
}

/// A server that can be connected to inside a sandbox.
pub struct PreparedServer {
    transport: Arc<dyn Transport>,
    options: ferry_9p_client::Options,
    pub reach: ServerAccess,
    /// The directory and the name of its socket.
    socket: Option<(PathBuf, OsString)>,
}

impl PreparedServer {
    /// Returns the directory of its socket, which must stay visible.
    pub fn directory(&self) -> Option<&Path> {
        self.socket.as_ref().map(|(directory, _)| directory.as_path())
    }

    /// Moves its socket's directory to `place`, if there is one.
    pub fn seen_at(self, place: Option<&Path>) -> Self {
        let transport: Arc<dyn Transport> = match (&self.socket, place) {
            (Some((_, name)), Some(place)) => {
                Arc::new(RelocatedUnix { socket: Unix(place.join(name)), address: self.transport.address() })
            }
            // The user's path may be short enough for a socket address where the absolute one is not.
            _ => self.transport,
        };
        Self { transport, ..self }
    }

    /// Connects on this thread.
    pub fn connect(self, connector: Connector) -> Result<Arc<dyn FileSystem>> {
        let client = Client::connect_by(connector, self.transport, self.options)?;
        // umount(8) looks up the mount point first: with a cached root it does not wait for a lost server.
        if let Err(error) = client.refresh_root() {
            tracing::debug!("cannot read the root of the 9P server: {error}");
        }
        Ok(Arc::new(client))
    }
}

/// A unix socket whose path inside the sandbox differs from the user's path.
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
