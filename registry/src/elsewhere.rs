//! Addresses that a server may send us to: other machines, whatever their names say.
//!
//! The check is made on what a name resolves to, and the connection goes to the addresses that passed it: a name that means another
//! address a moment later gains nothing.

use std::fmt;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;
use url::{Host, Url};

/// A name or an address means this machine.
#[derive(Debug)]
pub(crate) struct ThisMachine;

impl fmt::Display for ThisMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("that is this machine")
    }
}

impl std::error::Error for ThisMachine {}

/// Resolves names to addresses of other machines only.
#[derive(Debug, Default)]
pub(crate) struct Elsewhere(DefaultResolver);

impl Resolver for Elsewhere {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let all = self.0.resolve(uri, config, timeout)?;
        // The proxy of the environment is the user's choice.
        if config.proxy().is_some_and(|proxy| proxy.uri() == uri) {
            return Ok(all);
        }
        let mut others = self.empty();
        all.iter().filter(|address| !is_this_machine(**address)).for_each(|address| others.push(*address));
        if others.is_empty() { Err(ureq::Error::Other(Box::new(ThisMachine))) } else { Ok(others) }
    }
}

/// Whether a connection to an address ends here.
fn is_this_machine(address: SocketAddr) -> bool {
    let ip = address.ip().to_canonical();
    if ip.is_loopback() || ip.is_unspecified() {
        return true;
    }
    // The source of what is sent to an address of this machine is that address. A UDP socket sends nothing when it connects; where it
    // cannot, there is no way to the address, and TCP will say so.
    let any: IpAddr = if ip.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let source = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((ip, address.port().max(1)))?;
        socket.local_addr()
    });
    source.is_ok_and(|source| source.ip() == ip)
}

/// Whether a URL names this machine by an address or a name of it that all machines have.
pub(crate) fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.to_canonical().is_loopback(),
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
        let found = Elsewhere::default().resolve(&url.parse().unwrap(), &Config::default(), timeout);
        found.map(|addresses| addresses.iter().copied().collect())
    }

    #[test]
    fn every_address_and_name_of_this_machine_is_found_out() {
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
        for host in here {
            let error = resolve(&format!("http://{host}:80/x")).unwrap_err();
            assert!(matches!(&error, ureq::Error::Other(why) if why.is::<ThisMachine>()), "{host}: {error}");
        }
        // Of the blocks for documentation, which are nobody's.
        for host in ["203.0.113.9", "[2001:db8::9]", "[::ffff:203.0.113.9]"] {
            assert_eq!(resolve(&format!("https://{host}/x")).unwrap()[0].port(), 443, "{host}");
        }
    }
}
