//! The origin of a client.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd};

use socket2::SockRef;

/// The length of the network part of an IPv6 address: one host may use all addresses of it.
const NETWORK_BYTES: usize = 8;

/// The origin of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Peer {
    /// A user of this host, on a unix socket.
    User(u32),
    /// An IPv4 address.
    V4(Ipv4Addr),
    /// A network of IPv6.
    V6([u8; NETWORK_BYTES]),
    /// A virtual machine, by vsock.
    Machine(u32),
    /// The virtual machine of a device.
    Guest,
    /// Unknown.
    Unknown,
}

impl Peer {
    /// Returns the peer of a connection.
    pub(crate) fn of(socket: BorrowedFd<'_>) -> Self {
        let Ok(address) = SockRef::from(&socket).peer_addr() else { return Self::Unknown };
        if let Some((cid, _)) = address.as_vsock_address() {
            return Self::Machine(cid);
        }
        match address.as_socket() {
            Some(address) => Self::at(address.ip()),
            None => rustix::net::sockopt::socket_peercred(socket.as_fd())
                .map_or(Self::Unknown, |peer| Self::User(peer.uid.as_raw())),
        }
    }

    fn at(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => Self::V6(address.octets().first_chunk().copied().unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_network_are_one_client() {
        let at = |text: &str| Peer::at(text.parse().unwrap());
        assert_eq!(at("2001:db8:1:2::1"), at("2001:db8:1:2:ffff::7"));
        assert_ne!(at("2001:db8:1:2::1"), at("2001:db8:1:3::1"));
        assert_eq!(at("::ffff:192.0.2.1"), at("192.0.2.1"));
        assert_ne!(at("192.0.2.1"), at("192.0.2.2"));
    }
}
