//! The 9P export's flags as a user writes them, and the sockets that they mean.

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ferry_ninep::Identity;
use serde::Deserialize;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::cli::{Acl, Share};
use crate::exports;
use crate::service_manager;
use crate::socket::{Bound, retry_in_use};

/// `VMADDR_CID_ANY` of Linux: vsock clients of every virtual machine.
pub const ANY_CID: u32 = u32::MAX;

/// Connections that wait to be taken, as for TCP.
const VSOCK_BACKLOG: i32 = 128;

/// Where 9P clients come from.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A unix socket on which a virtual machine monitor finds a device.
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
            return wrong("is no address for 9P");
        };
        let Some((host, port)) = rest.rsplit_once(':') else { return wrong("has no port") };
        if kind == "vsock" {
            let cid = if matches!(host, "any" | "-1") { Some(ANY_CID) } else { host.parse().ok() };
            return match (cid, port.parse()) {
                (None, _) => wrong("has a CID that is neither a number nor any"),
                // The greatest number stands for "any port".
                (Some(cid), Ok(port)) if port != u32::MAX => Ok(Self::Vsock(cid, port)),
                _ => wrong("has a port that is no number from 0 to 4294967294"),
            };
        }
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        match port.parse() {
            Ok(_) if host.is_empty() => wrong("has no host"),
            Ok(port) if kind == "tls" => Ok(Self::Tls(host.into(), port)),
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
    /// The same, its path seen from a folder.
    pub fn in_folder(self, folder: &Path) -> Self {
        match self {
            Self::Unix(path) => Self::Unix(folder.join(path)),
            Self::VhostUser(path) => Self::VhostUser(folder.join(path)),
            other => other,
        }
    }

    /// Whether two sockets can have it: 0 is any TCP port that is free.
    pub fn is_any(&self) -> bool {
        matches!(self, Self::Tcp(_, 0) | Self::Tls(_, 0))
    }
}

/// As whom 9P clients act: `client`, `only=UID,...` or `UID:GID`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Users {
    #[default]
    Client,
    Only(Vec<u32>),
    One(u32, u32),
}

impl FromStr for Users {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} says no users; write client, only=UID,UID..., or UID:GID");
        // The greatest number stands for "nobody at all".
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

impl Users {
    /// The same with the groups that users have on this host.
    fn resolve(&self) -> Result<ferry_ninep::Users> {
        Ok(match self {
            Self::Client => ferry_ninep::Users::Client,
            Self::Only(uids) => ferry_ninep::Users::Only(uids.iter().map(|uid| identity(*uid)).collect::<Result<_>>()?),
            Self::One(uid, gid) => ferry_ninep::Users::Squash { uid: *uid, gid: *gid },
        })
    }
}

/// A user of this host. This process's own has the groups that the process has.
fn identity(uid: u32) -> Result<Identity> {
    if uid == rustix::process::geteuid().as_raw() {
        let groups = rustix::process::getgroups().context("cannot tell the groups of this process")?;
        let groups = groups.into_iter().map(|gid| gid.as_raw()).collect();
        return Ok(Identity { uid, gid: rustix::process::getegid().as_raw(), groups });
    }
    let flag = format!("--9p-users only={uid}");
    let found = nix::unistd::User::from_uid(uid.into()).with_context(|| format!("{flag}: cannot look up the user"))?;
    let user = found.with_context(|| {
        format!("{flag}: this host has no user {uid}, so it is not known which groups that one is in; write UID:GID, for one user")
    })?;
    let name = std::ffi::CString::new(user.name).with_context(|| format!("{flag}: the user's name has a NUL"))?;
    let groups = nix::unistd::getgrouplist(&name, user.gid)
        .with_context(|| format!("{flag}: cannot look up the groups of the user"))?;
    Ok(Identity { uid, gid: user.gid.as_raw(), groups: groups.into_iter().map(nix::unistd::Gid::as_raw).collect() })
}

impl TryFrom<String> for Users {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[derive(Debug)]
enum Listener {
    Clients(ferry_ninep::Listener),
    Vmm(UnixListener),
}

/// A socket for 9P clients, before it is served.
#[derive(Debug)]
pub struct Listening {
    listener: Listener,
    /// The socket's file, which goes when this does.
    bound: Option<Bound>,
    /// What clients are to be told.
    address: String,
    /// As whom clients act. This host's users are looked up where their tables can be seen.
    users: ferry_ninep::Users,
}

impl Listening {
    /// Makes the socket of a share that has one.
    pub fn of(share: &Share) -> Result<Option<Self>> {
        let group = share.socket_group.as_deref();
        let Some(address) = &share.ninep else { return Ok(None) };
        let users = share.ninep_users.clone().unwrap_or_default().resolve()?;
        let (listener, bound, address) = match address {
            Address::Unix(path) => {
                let bound = Bound::bind_for(path, group)?;
                let address = format!("unix:{}", crate::share::shown(path));
                (Listener::Clients(bound.listener()?.into()), Some(bound), address)
            }
            Address::VhostUser(path) => {
                let bound = Bound::bind_for(path, group)?;
                let address = format!("vhost-user:{}", crate::share::shown(path));
                (Listener::Vmm(bound.listener()?), Some(bound), address)
            }
            Address::Tcp(host, port) => {
                let (listener, bound) = tcp(host, *port).with_context(|| format!("cannot listen on {address}"))?;
                (Listener::Clients(listener.into()), None, format!("tcp:{bound}"))
            }
            Address::Tls(host, port) => {
                // The files first: what is wrong with them is to be told also where the port is in use.
                let seal = seal(share)?;
                let (listener, bound) = tcp(host, *port).with_context(|| format!("cannot listen on {address}"))?;
                (Listener::Clients(seal(listener)), None, format!("tls:{bound}"))
            }
            Address::Vsock(cid, port) => {
                let listener = vsock(*cid, *port).with_context(|| format!("cannot listen on {address}"))?;
                (Listener::Clients(listener), None, address.to_string())
            }
        };
        Ok(Some(Self { listener, bound, address, users }))
    }

    /// Serves in the place of the process that made it, which goes on being the one that removes its file.
    pub fn take_over(&mut self) -> Result<()> {
        self.bound.as_mut().map_or(Ok(()), Bound::take_over)
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
        name: &str,
    ) -> Result<(ferry_ninep::Export, Option<Bound>)> {
        let options = ferry_ninep::Options { name: name.into(), ..options(share, self.users) };
        let started = match self.listener {
            Listener::Clients(listener) => ferry_ninep::Export::start(vec![listener], source, options),
            Listener::Vmm(listener) => {
                let mut device = ferry_ninep::DeviceOptions::of(share.tag_or_default().as_str());
                if let Some(poll) = share.poll() {
                    device.poll = poll;
                }
                ferry_ninep::Export::vhost_user(listener, source, device, options)
            }
        };
        let export = match started {
            Err(ferry_ninep::Error::Remote(address)) => anyhow::bail!(
                "{address} can be reached from other machines, and 9P believes whoever connects; \
                 listen on 127.0.0.1, or add --9p-remote, or use tls: with --tls-client-ca"
            ),
            Err(error @ ferry_ninep::Error::Unchecked(_)) => {
                anyhow::bail!(
                    "--9p-users: {error}; leave the flag out if clients may do anything with {}",
                    share.source.display()
                )
            }
            Err(error @ ferry_ninep::Error::Users { .. }) => anyhow::bail!(
                "--9p-users: {error}. Start it as root (without --modcaps=-setuid and -setgid), or as that user: with only=UID \
                 its groups are let in, too"
            ),
            other => other?,
        };
        Ok((export, self.bound))
    }
}

/// How the flags of a share have it served.
fn options(share: &Share, users: ferry_ninep::Users) -> ferry_ninep::Options {
    let default = ferry_ninep::Options::default();
    let seconds = |given: Option<u64>| given.map(Duration::from_secs);
    ferry_ninep::Options {
        name: exports::name(share),
        read_only: share.read_only,
        xattr: !share.no_xattr,
        posix_acl: share.posix_acl == Acl::Always,
        users,
        remote: share.ninep_remote,
        msize_max: share.ninep_msize.map_or(default.msize_max, |size| u32::try_from(size.0).unwrap_or(u32::MAX)),
        read_ahead_bytes_max: if share.ninep_no_read_ahead { 0 } else { default.read_ahead_bytes_max },
        limits: ferry_ninep::Limits {
            connections_max: share
                .ninep_connections
                .map_or(default.limits.connections_max, |most| usize::try_from(most).unwrap_or(usize::MAX)),
            slow_timeout: seconds(share.ninep_slow).unwrap_or(default.limits.slow_timeout),
            idle_timeout: seconds(share.ninep_idle).or(default.limits.idle_timeout),
            ..default.limits
        },
    }
}

/// Listens on an address of this machine; returns which.
fn tcp(host: &str, port: u16) -> std::io::Result<(TcpListener, SocketAddr)> {
    let in_use = |error: &std::io::Error| error.kind() == std::io::ErrorKind::AddrInUse;
    let listener = match service_manager::take_tcp(host, port) {
        Some(listener) => listener,
        None => retry_in_use(|| TcpListener::bind((host, port)), in_use)?,
    };
    // Port 0 is any that is free.
    let bound = listener.local_addr()?;
    Ok((listener, bound))
}

/// What makes a TCP socket one with TLS.
#[cfg(feature = "tls")]
fn seal(share: &Share) -> Result<impl FnOnce(TcpListener) -> ferry_ninep::Listener> {
    let (Some(certificate), Some(key)) = (&share.tls_cert, &share.tls_key) else {
        bail!("9P with TLS needs --tls-cert FILE and --tls-key FILE, both in PEM");
    };
    let tls = ferry_ninep::Tls::read(certificate, key, share.tls_client_ca.as_deref())?;
    Ok(|listener| ferry_ninep::Listener::Tls(listener, tls))
}

#[cfg(not(feature = "tls"))]
fn seal(_: &Share) -> Result<fn(TcpListener) -> ferry_ninep::Listener> {
    bail!("this ferry was built without TLS: build it with the feature tls")
}

/// Listens for other virtual machines, or the host.
fn vsock(cid: u32, port: u32) -> Result<ferry_ninep::Listener> {
    let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)
        .context("this kernel has no vsock: modprobe vmw_vsock_virtio_transport, vhost_vsock or vsock_loopback")?;
    match socket.bind(&SockAddr::vsock(cid, port)) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrNotAvailable => {
            bail!("{cid} is no CID of this machine; write any, or 2 on a host, or 1 for this machine alone")
        }
        other => other?,
    }
    socket.listen(VSOCK_BACKLOG)?;
    Ok(ferry_ninep::Listener::Vsock(socket.into()))
}

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
            ("/run/s", "no address for 9P"),
            ("unix:", "no path"),
            ("vhost-user:", "no path"),
            ("tcp:564", "no port"),
            ("tcp::564", "no host"),
            ("tcp:h:65536", "no number"),
            ("tcp:h:", "no number"),
            ("rdma:2:564", "no address for 9P"),
            ("tls:564", "no port"),
            ("vsock:564", "no port"),
            ("vsock:host:564", "has a CID"),
            ("vsock:2:4294967295", "no number"),
        ] {
            let error = text.parse::<Address>().expect_err(text);
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn flags_become_options() {
        use clap::FromArgMatches;

        let of = |flags: &str| {
            let table = <Share as clap::Args>::augment_args(clap::Command::new("share"));
            let words = format!("share mem --9p unix:s {flags}");
            let matches = table.try_get_matches_from(words.split_whitespace()).expect(flags);
            options(&Share::from_arg_matches(&matches).expect(flags), ferry_ninep::Users::default())
        };
        let default = ferry_ninep::Options::default();
        let plain = of("");
        assert_eq!((plain.msize_max, plain.read_ahead_bytes_max), (default.msize_max, default.read_ahead_bytes_max));
        assert_eq!(format!("{:?}", plain.limits), format!("{:?}", default.limits));
        let set = of("--9p-msize 16M --9p-connections 7 --9p-slow 8 --9p-idle 9 --9p-no-read-ahead");
        assert_eq!((set.msize_max, set.read_ahead_bytes_max, set.limits.connections_max), (16 << 20, 0, 7));
        assert_eq!(set.limits.slow_timeout, Duration::from_secs(8));
        assert_eq!(set.limits.idle_timeout, Some(Duration::from_secs(9)));
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

    #[test]
    fn users_have_their_groups() {
        let own = identity(rustix::process::geteuid().as_raw()).expect("this process's own");
        assert_eq!(own.groups.len(), rustix::process::getgroups().expect("its groups").len());
        // Every host has these.
        let daemon = nix::unistd::User::from_name("daemon").expect("a table").expect("in it");
        let found = identity(daemon.uid.as_raw()).expect("its groups");
        assert_eq!((found.uid, found.gid), (daemon.uid.as_raw(), daemon.gid.as_raw()));
        assert!(found.groups.contains(&found.gid), "{found:?}");
        let error = identity(4_000_000_000).expect_err("nobody").to_string();
        assert!(error.contains("has no user 4000000000") && error.contains("write UID:GID"), "{error}");
    }
}
