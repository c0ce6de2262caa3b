//! The 9P export of a share, and its socket.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ferry_engine::PollLimit;
use ferry_ninep::Identity;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::flags::{Acl, Address, Share, Users};
use crate::paths::absolute;
use crate::service_manager;
use crate::socket::{ListenSocket, retry_in_use};

/// The backlog of connections, as for TCP.
const VSOCK_BACKLOG: i32 = 128;

/// Adds the groups that users have on this host.
fn with_groups(users: &Users) -> Result<ferry_ninep::Users> {
    Ok(match users {
        Users::Client => ferry_ninep::Users::Client,
        Users::Only(uids) => ferry_ninep::Users::Only(uids.iter().map(|uid| identity(*uid)).collect::<Result<_>>()?),
        Users::One(uid, gid) => ferry_ninep::Users::Squash { uid: *uid, gid: *gid },
    })
}

/// Returns a user of this host. The user of this process has the groups of the process.
fn identity(uid: u32) -> Result<Identity> {
    if uid == rustix::process::geteuid().as_raw() {
        let groups = rustix::process::getgroups().context("cannot tell the groups of this process")?;
        let groups = groups.into_iter().map(|gid| gid.as_raw()).collect();
        return Ok(Identity { uid, gid: rustix::process::getegid().as_raw(), groups });
    }
    let flag = format!("--9p-users only={uid}");
    let found = nix::unistd::User::from_uid(uid.into()).with_context(|| format!("{flag}: cannot look up the user"))?;
    let user = found.with_context(|| {
        format!("{flag}: this host has no user {uid}, so its groups are unknown; write UID:GID, for one user")
    })?;
    let name = std::ffi::CString::new(user.name).with_context(|| format!("{flag}: the user's name has a NUL"))?;
    let groups = nix::unistd::getgrouplist(&name, user.gid)
        .with_context(|| format!("{flag}: cannot look up the groups of the user"))?;
    Ok(Identity { uid, gid: user.gid.as_raw(), groups: groups.into_iter().map(nix::unistd::Gid::as_raw).collect() })
}

#[derive(Debug)]
enum Listener {
    Clients(ferry_ninep::Listener),
    Vmm(UnixListener),
}

/// A socket for 9P clients that is not served yet.
#[derive(Debug)]
pub struct NinepSocket {
    listener: Listener,
    /// The file of a unix socket, which is removed with this.
    pub bound: Option<ListenSocket>,
    /// The address for clients.
    pub address: String,
    /// The users that clients act as, looked up before the sandbox hides the tables of users.
    users: ferry_ninep::Users,
}

impl NinepSocket {
    /// Creates the socket of a share, if it has one.
    pub fn of(share: &Share) -> Result<Option<Self>> {
        let group = share.socket_group.as_deref();
        let Some(address) = &share.ninep else { return Ok(None) };
        let users = with_groups(share.ninep_users.as_ref().unwrap_or(&Users::Client))?;
        let (listener, bound, address) = match address {
            Address::Unix(path) => {
                let bound = ListenSocket::bind_for(path, group)?;
                let address = format!("unix:{}", absolute(path));
                (Listener::Clients(bound.listener()?.into()), Some(bound), address)
            }
            Address::VhostUser(path) => {
                let bound = ListenSocket::bind_for(path, group)?;
                let address = format!("vhost-user:{}", absolute(path));
                (Listener::Vmm(bound.listener()?), Some(bound), address)
            }
            Address::Tcp(host, port) => {
                let (listener, bound) = tcp(host, *port).with_context(|| format!("cannot listen on {address}"))?;
                (Listener::Clients(listener.into()), None, format!("tcp:{bound}"))
            }
            Address::Tls(host, port) => {
                // The files first: their errors should appear even if the port is in use.
                let tls_listener = tls_listener(share)?;
                let (listener, bound) = tcp(host, *port).with_context(|| format!("cannot listen on {address}"))?;
                (Listener::Clients(tls_listener(listener)), None, format!("tls:{bound}"))
            }
            Address::Vsock(cid, port) => {
                let listener = vsock(*cid, *port).with_context(|| format!("cannot listen on {address}"))?;
                (Listener::Clients(listener), None, address.to_string())
            }
        };
        Ok(Some(Self { listener, bound, address, users }))
    }

    /// Serves the socket. Drop the returned socket after the export.
    pub fn serve(
        self,
        source: Arc<dyn ferry_vfs::FileSystem>,
        share: &Share,
        (name, limiter, poll): (&str, Arc<ferry_ninep::RateLimiter>, PollLimit),
    ) -> Result<(ferry_ninep::Export, Option<ListenSocket>)> {
        let options =
            ferry_ninep::Options { name: name.into(), limiter: Some(limiter), poll, ..options(share, self.users) };
        let started = match self.listener {
            Listener::Clients(listener) => ferry_ninep::Export::start(vec![listener], source, options),
            Listener::Vmm(listener) => {
                let device = ferry_ninep::DeviceOptions::of(share.tag_or_default().as_str());
                ferry_ninep::Export::vhost_user(listener, source, device, options)
            }
        };
        let export = match started {
            Err(ferry_ninep::Error::Remote(address)) => anyhow::bail!(
                "other machines can reach {address}, and 9P does not verify users; \
                 listen on 127.0.0.1, or add --9p-remote, or use tls: with --tls-client-ca"
            ),
            Err(error @ ferry_ninep::Error::Unchecked(_)) => {
                anyhow::bail!(
                    "--9p-users: {error}; omit the flag if clients may do anything with {}",
                    share.source.display()
                )
            }
            Err(error @ ferry_ninep::Error::Users { .. }) => anyhow::bail!(
                "--9p-users: {error}. Start it as root (without --modcaps=-setuid and -setgid), or as that user: only=UID \
                 also admits its groups"
            ),
            other => other?,
        };
        Ok((export, self.bound))
    }
}

/// Returns the options of the export.
fn options(share: &Share, users: ferry_ninep::Users) -> ferry_ninep::Options {
    let default = ferry_ninep::Options::default();
    let seconds = |given: Option<u64>| given.map(Duration::from_secs);
    ferry_ninep::Options {
        poll: default.poll,
        limiter: None,
        name: share.name(),
        read_only: share.read_only,
        xattr: !share.no_xattr,
        events: share.events,
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

/// Listens on an address of this machine; returns the address.
fn tcp(host: &str, port: u16) -> std::io::Result<(TcpListener, SocketAddr)> {
    let in_use = |error: &std::io::Error| error.kind() == std::io::ErrorKind::AddrInUse;
    let listener = match service_manager::take_tcp(host, port) {
        Some(listener) => listener,
        None => retry_in_use(|| TcpListener::bind((host, port)), in_use)?,
    };
    // Port 0 selects a free port.
    let bound = listener.local_addr()?;
    Ok((listener, bound))
}

/// Returns the function that adds TLS to a TCP socket.
#[cfg(feature = "tls")]
fn tls_listener(share: &Share) -> Result<impl FnOnce(TcpListener) -> ferry_ninep::Listener> {
    let (Some(certificate), Some(key)) = (&share.tls_cert, &share.tls_key) else {
        bail!("9P with TLS needs --tls-cert FILE and --tls-key FILE, both in PEM");
    };
    let tls = ferry_ninep::Tls::read(certificate, key, share.tls_client_ca.as_deref())?;
    Ok(|listener| ferry_ninep::Listener::Tls(listener, tls))
}

#[cfg(not(feature = "tls"))]
fn tls_listener(_: &Share) -> Result<fn(TcpListener) -> ferry_ninep::Listener> {
    bail!("this ferry was built without TLS: build it with the feature tls")
}

/// Listens for virtual machines, or the host.
fn vsock(cid: u32, port: u32) -> Result<ferry_ninep::Listener> {
    let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)
        .context("this kernel has no vsock: modprobe vmw_vsock_virtio_transport, vhost_vsock or vsock_loopback")?;
    match socket.bind(&SockAddr::vsock(cid, port)) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrNotAvailable => {
            bail!("{cid} is not a CID of this machine; write any, or 2 on a host, or 1 for this machine alone")
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
