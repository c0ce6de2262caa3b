//! 9P inside TLS: with right and wrong certificates, and with clients that speak no TLS or stop in the middle.

#![cfg(feature = "tls")]
use crate::certificates;
use crate::common;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use certificates::Certificates;
use common::{Client, MSIZE, PATIENCE, ROOT};
use ferry_mem::Mem;
use ferry_ninep::{Error, Export, Limits, Listener, Options, Tls, TlsError};
use ferry_vfs::OFlags;
use ferry_wire::ninep::{Fid, Reply, Request, Tag, VERSION};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

type Sealed = StreamOwned<ClientConnection, TcpStream>;

impl common::Stream for Sealed {
    fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.sock.set_read_timeout(timeout).unwrap();
    }
}

/// A server of memory by TLS.
struct Server {
    export: Export,
    address: SocketAddr,
    certificates: Certificates,
}

impl Server {
    /// Clients have to have a certificate of `ca`, or need none.
    fn new(checks_clients: bool, limits: Limits) -> Self {
        let certificates = Certificates::new();
        certificates.authority("ca").signed("server", "ca", 2);
        let ca = certificates.path("ca.pem");
        let (chain, key) = (certificates.path("server.pem"), certificates.path("server.key"));
        let tls = Tls::read(&chain, &key, checks_clients.then_some(&*ca)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let source = Arc::new(Mem::new(&ferry_mem::Options::default()).unwrap());
        let options = Options { limits, ..Options::default() };
        let export = Export::start(vec![Listener::Tls(listener, tls)], source, options).unwrap();
        Self { export, address, certificates }
    }

    fn tcp(&self) -> TcpStream {
        TcpStream::connect(self.address).unwrap()
    }

    /// A client that trusts `ca` and shows a certificate, or none.
    fn connect(&self, certificate: Option<&str>) -> Client<Sealed> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.certificates.path("ca.pem")).unwrap()).unwrap();
        let builder = ClientConfig::builder().with_root_certificates(roots);
        let config = match certificate {
            None => builder.with_no_client_auth(),
            Some(name) => {
                let chain = CertificateDer::from_pem_file(self.certificates.path(&format!("{name}.pem"))).unwrap();
                let key = PrivateKeyDer::from_pem_file(self.certificates.path(&format!("{name}.key"))).unwrap();
                builder.with_client_auth_cert(vec![chain], key).unwrap()
            }
        };
        let connection = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
        Client::new(StreamOwned::new(connection, self.tcp()))
    }

    #[track_caller]
    fn settles(&self, is_right: impl Fn(&ferry_ninep::Usage) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !is_right(&self.export.usage()) {
            assert!(Instant::now() < end, "it stays so: {:?}", self.export.usage());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn attached(mut client: Client<Sealed>) -> Client<Sealed> {
    assert_eq!(client.hello(MSIZE), MSIZE);
    client.attach(ROOT, 0).unwrap();
    client
}

/// Whether the server refuses such a connection: it disconnects without a reply.
fn is_refused(client: &mut Client<Sealed>) -> bool {
    let mut message = Vec::new();
    Request::Version { msize: MSIZE, version: VERSION }.encode(Tag::NONE, &mut message);
    let sent = client.stream.write_all(&message);
    sent.is_err() || client.stream.read(&mut [0]).map_or(true, |count| count == 0)
}

#[test]
fn data_goes_both_ways_in_all_sizes() {
    let server = Server::new(false, Limits::default());
    let mut client = attached(server.connect(None));
    client.create(Fid(1), "f", OFlags::RDWR, 0o600).unwrap();
    let data: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24).to_le_bytes()[0]).collect();
    let mut at = 0;
    for bytes in [1, 2, 16_383, 16_384, 16_385, 70_000, 1_000_000].into_iter().cycle() {
        let piece = &data[at..data.len().min(at + bytes)];
        assert_eq!(client.write(Fid(1), at as u64, piece), Ok(u32::try_from(piece.len()).unwrap()));
        at += piece.len();
        if at == data.len() {
            break;
        }
    }
    let mut back = Vec::new();
    while back.len() < data.len() {
        back.extend(client.read(Fid(1), back.len() as u64, 700_001).unwrap());
    }
    assert!(back == data);
    drop(client);
    server.settles(|usage| usage.connections == 0 && usage.buffered_bytes == 0);
}

/// Messages that lie in one record are all served, although the socket tells of the first only; and replies that the
/// client lets lie reach it in the end.
#[test]
fn requests_in_one_record_and_replies_not_taken() {
    let server = Server::new(false, Limits::default());
    let mut client = attached(server.connect(None));
    let mut burst = Vec::new();
    for tag in 0..200 {
        Request::Getattr { fid: ROOT, mask: 0 }.encode(Tag(tag), &mut burst);
    }
    client.stream.write_all(&burst).unwrap();
    let tags: std::collections::BTreeSet<u16> = (0..200).map(|_| client.receive().0.0).collect();
    assert_eq!(tags.len(), 200);

    client.create(Fid(1), "f", OFlags::RDWR, 0o600).unwrap();
    let data: Vec<u8> = (0..1_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
    client.write(Fid(1), 0, &data).unwrap();
    for tag in 0..30 {
        client.send(Tag(tag), &Request::Read { fid: Fid(1), offset: 0, bytes_max: 1_000_000 });
    }
    // Sockets hold some of 30 MB only.
    std::thread::sleep(Duration::from_millis(200));
    assert!(attached(server.connect(None)).getattr(ROOT).is_ok(), "others are served meanwhile");
    for _ in 0..30 {
        let (_, message) = client.receive();
        assert!(matches!(Reply::decode(&message), Ok((_, Reply::Read(read))) if read == data));
    }
    assert!(client.getattr(ROOT).is_ok());
    server.settles(|usage| usage.buffered_bytes == 0 && usage.requests == 0);
}

#[test]
fn only_clients_with_the_right_certificate_come_in() {
    let server = Server::new(true, Limits::default());
    server
        .certificates
        .signed("friend", "ca", 2)
        .authority("other")
        .signed("stranger", "other", 2)
        .signed("late", "ca", -1);
    for wrong in [None, Some("stranger"), Some("late")] {
        assert!(is_refused(&mut server.connect(wrong)), "{wrong:?}");
    }
    let mut friend = attached(server.connect(Some("friend")));
    assert!(friend.getattr(ROOT).is_ok());
    server.settles(|usage| usage.connections == 1);
}

/// Another implementation of TLS.
#[test]
fn openssl_is_served() {
    let server = Server::new(true, Limits::default());
    server.certificates.signed("friend", "ca", 2);
    let (address, ca) = (server.address.to_string(), server.certificates.path("ca.pem"));
    let (chain, key) = (server.certificates.path("friend.pem"), server.certificates.path("friend.key"));
    let mut openssl = Command::new("openssl");
    openssl.args(["s_client", "-quiet", "-verify_return_error", "-connect", &address, "-CAfile"]).arg(ca);
    openssl.arg("-cert").arg(chain).arg("-key").arg(key);
    let spawned = openssl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = spawned.unwrap();
    let mut message = Vec::new();
    Request::Version { msize: 8192, version: VERSION }.encode(Tag::NONE, &mut message);
    child.stdin.as_mut().unwrap().write_all(&message).unwrap();
    let mut answer = [0; 21];
    let read = child.stdout.as_mut().unwrap().read_exact(&mut answer);
    let _ = child.kill();
    let ended = child.wait_with_output().unwrap();
    read.unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&ended.stderr)));
    assert_eq!(Reply::decode(&answer).unwrap().1, Reply::Version { msize: 8192, version: VERSION });
}

#[test]
fn clients_without_tls_are_disconnected() {
    let server = Server::new(false, Limits::default());
    let mut plain = Vec::new();
    Request::Version { msize: MSIZE, version: VERSION }.encode(Tag::NONE, &mut plain);
    let mut state = 1_u64;
    let garbage: Vec<u8> = (0..100_000)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state.to_be_bytes()[0]
        })
        .collect();
    // The last two begin like a record of a handshake: of a message that is none, and of one that never ends.
    let endless = [&[22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff][..], &garbage[..0x3ffc]].concat();
    for bytes in [&plain[..], &garbage, b"GET / HTTP/1.1\r\n\r\n", &[22, 3, 1, 0, 4, 99, 0, 0, 0], &endless.repeat(8)] {
        let mut stream = server.tcp();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = stream.write_all(bytes);
        // At most an alert, and the end.
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        let reset = read.is_err_and(|error| error.kind() != std::io::ErrorKind::ConnectionReset);
        assert!(!reset && answer.len() < 20, "{:?}: {answer:?}", bytes.get(..20));
    }
    server.settles(|usage| usage.connections == 0 && usage.buffered_bytes == 0);
    assert!(attached(server.connect(None)).getattr(ROOT).is_ok());
}

#[test]
fn a_handshake_that_stalls_ends() {
    let server = Server::new(true, Limits { slow_timeout: Duration::from_secs(2), ..Limits::default() });
    server.certificates.signed("friend", "ca", 2);
    let mut friend = attached(server.connect(Some("friend")));
    let mut silent = server.tcp();
    let mut half = server.tcp();
    // The beginning of a ClientHello.
    half.write_all(&[22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3]).unwrap();
    // One that drips.
    let mut drip = server.tcp();
    drip.write_all(&[22, 3, 1, 0x20, 0]).unwrap();
    drip.set_nodelay(true).unwrap();
    let begin = Instant::now();
    let ended = loop {
        if begin.elapsed() > PATIENCE {
            break false;
        }
        std::thread::sleep(Duration::from_millis(50));
        if drip.write_all(&[1]).is_err() {
            break true;
        }
    };
    assert!(ended, "the one that drips is still there");
    for stream in [&mut silent, &mut half] {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    }
    server.settles(|usage| usage.connections == 1);
    assert!(friend.getattr(ROOT).is_ok(), "who has attached stays");
}

#[test]
fn errors_in_the_certificate_files_are_reported() {
    let made = Certificates::new();
    made.authority("ca").signed("a", "ca", 2).signed("b", "ca", 2).signed("late", "ca", -1);
    made.signed_as_version_1("old", "ca");
    fs::write(made.path("empty"), "nothing\n").unwrap();
    let broken = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
    fs::write(made.path("broken"), broken).unwrap();
    for (chain, key, ca, words) in [
        ("gone.pem", "a.key", None, "cannot read"),
        ("a.pem", "gone.key", None, "cannot read"),
        ("a.pem", "a.key", Some("gone"), "cannot read"),
        ("empty", "a.key", None, "holds no certificate"),
        ("a.key", "a.key", None, "holds no certificate"),
        ("a.pem", "a.pem", None, "holds no private key"),
        ("a.pem", "a.key", Some("empty"), "holds no certificate"),
        ("broken", "a.key", None, "cannot be used"),
        ("a.pem", "b.key", None, "does not belong to the certificate"),
        ("late.pem", "late.key", None, "has expired"),
        ("old.pem", "old.key", None, "X.509 version 1"),
    ] {
        let ca = ca.map(|name| made.path(name));
        let error = Tls::read(&made.path(chain), &made.path(key), ca.as_deref()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(words) && text.contains(made.path("").to_str().unwrap()), "{chain}, {key}: {text}");
        assert_eq!(words == "has expired", matches!(error, TlsError::Expired(..)), "{text}");
    }
    assert!(Tls::read(&made.path("a.pem"), &made.path("a.key"), Some(&made.path("ca.pem"))).is_ok());
}

/// On other addresses, TLS without client certificates admits all clients, as TCP does.
#[test]
fn other_machines_need_a_certificate_or_leave() {
    let made = Certificates::new();
    made.authority("ca").signed("a", "ca", 2);
    let start = |ca: Option<&str>, remote| {
        let ca = ca.map(|name| made.path(name));
        let tls = Tls::read(&made.path("a.pem"), &made.path("a.key"), ca.as_deref()).unwrap();
        let source = Arc::new(Mem::new(&ferry_mem::Options::default()).unwrap());
        let listener = Listener::Tls(TcpListener::bind("0.0.0.0:0").unwrap(), tls);
        Export::start(vec![listener], source, Options { remote, ..Options::default() }).map(drop)
    };
    assert!(matches!(start(None, false), Err(Error::Remote(_))));
    assert!(start(None, true).is_ok() && start(Some("ca.pem"), false).is_ok());
}
