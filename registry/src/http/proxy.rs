//! The proxy of the environment, and which servers are reached without it, by the rules of containerd and Docker (Go,
//! golang.org/x/net/http/httpproxy).

use std::net::IpAddr;

use ureq::{Proxy, ProxyProtocol};
use url::{Host, Url};

use crate::resolver::is_loopback;

/// The variables that name a proxy, in the order of the HTTP library.
const VARIABLES: [&str; 6] = ["ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"];

/// Returns the proxy of the environment. The library's own one would also decide by its own rules which servers are reached without it.
pub(super) fn of_environment() -> Option<Proxy> {
    find(|name| std::env::var(name).ok())
}

fn find(variable: impl Fn(&str) -> Option<String>) -> Option<Proxy> {
    let proxy = VARIABLES.iter().find_map(|name| Proxy::new(&variable(name)?).ok())?;
    let is_http = matches!(proxy.protocol(), ProxyProtocol::Http | ProxyProtocol::Https);
    if !is_http {
        tracing::warn!("a proxy of the type {} cannot be used: servers are reached directly", proxy.protocol());
    }
    Some(proxy).filter(|_| is_http)
}

/// Returns the list of servers that are reached directly. A variable without a text counts as one that is not set.
fn exceptions(variable: impl Fn(&str) -> Option<String>) -> String {
    let names = ["NO_PROXY", "no_proxy"];
    names.iter().find_map(|name| variable(name).filter(|list| !list.is_empty())).unwrap_or_default()
}

/// Returns whether a request goes to its server directly: to this machine, and to servers that `NO_PROXY` names. A request without
/// encryption to this machine must not leave it.
pub(super) fn is_direct(url: &Url) -> bool {
    let list = exceptions(|name| std::env::var(name).ok());
    is_loopback(url) || list.split(',').any(|entry| names(entry.trim(), url))
}

/// Returns whether an entry of `NO_PROXY` names the server: `*`, an address, a network (`10.0.0.0/8`), a domain with those below it,
/// or only those below it (`.example`). All but networks may have a port.
fn names(entry: &str, url: &Url) -> bool {
    if entry == "*" {
        return true;
    }
    let address = match url.host() {
        Some(Host::Ipv4(address)) => Some(IpAddr::V4(address)),
        Some(Host::Ipv6(address)) => Some(IpAddr::V6(address)),
        _ => None,
    };
    if let Some((network, bits)) = entry.split_once('/') {
        let network = network.parse().ok().zip(bits.parse().ok());
        return network.zip(address).is_some_and(|((network, bits), address)| contains(network, bits, address));
    }
    let (name, port) = match entry.rsplit_once(':') {
        // More than one colon is an address without a port.
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => (name, port.parse().ok()),
        _ => (entry, None),
    };
    if port.is_some_and(|port: u16| url.port_or_known_default() != Some(port)) {
        return false;
    }
    let name = name.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
    match (url.host(), address) {
        (_, Some(address)) => name.parse() == Ok(address),
        (Some(Host::Domain(host)), _) => {
            let host = host.trim_end_matches('.');
            let domain = name.strip_prefix("*.").map(|domain| format!(".{domain}")).unwrap_or(name);
            match domain.strip_prefix('.') {
                Some("") => false,
                Some(_) => host.ends_with(&domain),
                None => !domain.is_empty() && (host == domain || host.ends_with(&format!(".{domain}"))),
            }
        }
        _ => false,
    }
}

fn contains(network: IpAddr, bits: u8, address: IpAddr) -> bool {
    let equal = |network: u128, address: u128, length: u8| {
        bits <= length && (bits == 0 || (network ^ address) >> (length - bits) == 0)
    };
    match (network, address.to_canonical()) {
        (IpAddr::V4(network), IpAddr::V4(address)) => equal(network.to_bits().into(), address.to_bits().into(), 32),
        (IpAddr::V6(network), IpAddr::V6(address)) => equal(network.to_bits(), address.to_bits(), 128),
        _ => false,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use super::*;

    #[test]
    fn entries_name_what_they_name_for_containerd() {
        let url = |host: &str| Url::parse(&format!("https://{host}/v2/")).unwrap();
        for (entry, named, others) in [
            ("*", &["a.example", "10.1.2.3"][..], &[][..]),
            ("corp.example", &["corp.example", "r.corp.example", "CORP.example."], &["notcorp.example", "example"]),
            (".svc", &["r.ns.svc"], &["svc", "rsvc"]),
            ("*.svc", &["r.ns.svc"], &["svc"]),
            ("10.0.0.0/8", &["10.200.3.4", "[::ffff:10.1.2.3]"], &["11.0.0.1", "ten.example"]),
            ("fd00::/8", &["[fd12::1]"], &["[fe80::1]", "10.0.0.1"]),
            ("0.0.0.0/0", &["203.0.113.1"], &["[fd12::1]"]),
            ("203.0.113.1", &["203.0.113.1:5000"], &["203.0.113.2", "r.203.0.113.1.example"]),
            ("r.example:5000", &["r.example:5000", "x.r.example:5000"], &["r.example"]),
            ("[fd12::1]:5000", &["[fd12::1]:5000"], &["[fd12::1]"]),
            ("fd12::1", &["[fd12::1]", "[fd12::1]:5000"], &["[fd12::2]"]),
            ("", &[], &["r.example"]),
            (".", &[], &["r.example"]),
            ("10.0.0.0/99", &[], &["10.0.0.1"]),
            ("x/y", &[], &["x", "10.0.0.1"]),
        ] {
            assert!(named.iter().all(|host| names(entry, &url(host))), "{entry}: {named:?}");
            assert!(!others.iter().any(|host| names(entry, &url(host))), "{entry}: {others:?}");
        }
    }

    #[test]
    fn variables_without_a_text_are_not_set() {
        fn variable(set: &'static [(&'static str, &'static str)]) -> impl Fn(&str) -> Option<String> {
            move |name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        }
        let list = |set| exceptions(variable(set));
        assert_eq!(list(&[("NO_PROXY", ""), ("no_proxy", ".svc")]), ".svc");
        assert_eq!(list(&[("NO_PROXY", "a.example"), ("no_proxy", ".svc")]), "a.example");
        assert_eq!(list(&[]), "");
        let proxy = |set| find(variable(set)).map(|proxy| format!("{}:{}", proxy.host(), proxy.port()));
        let expected = Some("p.example:8080");
        assert_eq!(proxy(&[("ALL_PROXY", ""), ("https_proxy", "http://p.example:8080")]).as_deref(), expected);
        assert_eq!(proxy(&[("HTTP_PROXY", "p.example:8080")]).as_deref(), expected);
        assert_eq!(proxy(&[("ALL_PROXY", "socks5://p.example:8080")]), None, "the library cannot use it");
        assert_eq!(proxy(&[]), None);
    }

    #[test]
    fn this_machine_is_always_direct() {
        for host in ["localhost:5000", "127.0.0.1:5000", "[::1]:5000"] {
            assert!(is_direct(&Url::parse(&format!("http://{host}/v2/")).unwrap()), "{host}");
        }
    }
}
