//! Name resolution, with a check of the addresses that a redirect may lead to.
//!
//! The check applies to the resolved addresses, and the connection uses those that pass. A name that resolves
//! differently later (DNS rebinding) has no effect.

use std::fmt;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;
use url::{Host, Url};

/// Why a redirect is refused.
pub(crate) const THIS_MACHINE: &str = "that is this machine, or a service of its own link";

/// A name only resolves to this machine, or to link-local addresses.
#[derive(Debug)]
pub(crate) struct ThisMachine;

impl fmt::Display for ThisMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(THIS_MACHINE)
    }
}

impl std::error::Error for ThisMachine {}

/// Resolves names to addresses of other machines only.
#[derive(Debug, Default)]
pub(crate) struct RemoteResolver(DefaultResolver);

impl Resolver for RemoteResolver {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let all = self.0.resolve(uri, config, timeout)?;
        // The user chose the proxy of the environment.
        if config.proxy().is_some_and(|proxy| proxy.uri() == uri) {
            return Ok(all);
        }
        let mut others = self.empty();
        let is_other = |address: &&SocketAddr| !is_this_machine(**address) && !is_link_local(address.ip());
        all.iter().filter(is_other).for_each(|address| others.push(*address));
        if others.is_empty() { Err(ureq::Error::Other(Box::new(ThisMachine))) } else { Ok(others) }
    }
}

/// Resolves the name of the origin, the server that the user named, and records whether that is another machine. An origin on this
/// machine may redirect to this machine: a registry and its blob store often run beside each other.
#[derive(Debug, Default)]
pub(crate) struct OriginResolver {
    resolver: DefaultResolver,
    /// The origin may have answered from another machine.
    pub is_remote: Arc<AtomicBool>,
}

impl Resolver for OriginResolver {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let all = self.resolver.resolve(uri, config, timeout)?;
        // The addresses behind a proxy are not known here.
        if config.proxy().is_some() || all.iter().any(|address| !is_this_machine(*address)) {
            self.is_remote.store(true, Ordering::Release);
        }
        Ok(all)
    }
}

/// Returns whether an address is link-local, as those of cloud metadata services.
fn is_link_local(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// Returns whether a connection to an address ends on this machine.
fn is_this_machine(address: SocketAddr) -> bool {
    let ip = address.ip().to_canonical();
    if ip.is_loopback() || ip.is_unspecified() {
        return true;
    }
    // Linux takes an address of its own as the source of packets to that address. Connecting a UDP socket sends nothing. If it fails
    // there is no route, and TCP fails as well.
    let any: IpAddr = if ip.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let source = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((ip, address.port().max(1)))?;
        socket.local_addr()
    });
    source.is_ok_and(|source| source.ip() == ip)
}

/// Returns a URL without secrets.
pub(crate) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    // URLs that cannot have credentials have none.
    let _ = url.set_username("").and_then(|()| url.set_password(None));
    url.into()
}

/// Returns whether a URL has a loopback address, or the name `localhost`.
pub(crate) fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.to_canonical().is_loopback(),
        None => false,
    }
}

/// Returns whether a URL refers to this machine, as far as that shows without a lookup.
pub(crate) fn names_this_machine(url: &Url) -> bool {
    let is_here = |ip: IpAddr| ip.to_canonical().is_loopback() || ip.to_canonical().is_unspecified();
    match url.host() {
        Some(Host::Domain(name)) => {
            let name = name.trim_end_matches('.');
            name == "localhost" || name.ends_with(".localhost")
        }
        Some(Host::Ipv4(address)) => is_here(address.into()),
        Some(Host::Ipv6(address)) => is_here(address.into()),
        None => false,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use std::time::Duration;

    use super::*;

    fn resolve(url: &str) -> Result<Vec<SocketAddr>, ureq::Error> {
        let timeout = NextTimeout { after: Duration::from_secs(30).into(), ..NextTimeout::default() };
        let found = RemoteResolver::default().resolve(&url.parse().unwrap(), &Config::default(), timeout);
        found.map(|addresses| addresses.iter().copied().collect())
    }

    #[test]
    fn addresses_and_names_of_this_machine_are_refused() {
        let mut here: Vec<String> =
            ["127.0.0.1", "127.255.255.254", "0.0.0.0", "[::1]", "[::]", "localhost", "LOCALHOST"]
                .map(String::from)
                .into();
        here.extend(["[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::ffff:0.0.0.0]"].map(String::from));
        // This machine's own address in its network, if it has one.
        let own = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
            socket.connect("192.0.2.77:9")?;
            socket.local_addr()
        });
        here.extend(own.map(|own| own.ip().to_string()));
        // Services of the link.
        here.extend(["169.254.169.254", "[::ffff:169.254.169.254]", "[fe80::1]"].map(String::from));
        for host in here {
            let error = resolve(&format!("http://{host}:80/x")).unwrap_err();
            assert!(matches!(&error, ureq::Error::Other(why) if why.is::<ThisMachine>()), "{host}: {error}");
        }
        // From the blocks for documentation, which are unused.
        for host in ["203.0.113.9", "[2001:db8::9]", "[::ffff:203.0.113.9]"] {
            assert_eq!(resolve(&format!("https://{host}/x")).unwrap()[0].port(), 443, "{host}");
        }
    }
}
