//! Servers with TLS: with right and wrong certificates on either side, and such as speak no TLS.
#![cfg(feature = "tls")]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that cannot go on ends")]

use crate::certificates;
use crate::common;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use certificates::Certificates;
use common::{CX, PATIENCE, name, read, write};
use ferry_9p_client::{Cache, Client, Error, Options, Tcp, Tls};
use ferry_ninep::{Export, Listener};
use ferry_vfs::*;

/// A server with TLS, of a memory file system.
struct Sealed {
    certificates: Certificates,
    source: Arc<dyn FileSystem>,
    address: SocketAddr,
    listener: TcpListener,
    export: Option<Export>,
}

impl Sealed {
    /// On an address; clients have to have a certificate of `ca`, or need none.
    fn new(address: &str, checks_clients: bool) -> Self {
        let certificates = Certificates::new();
        certificates.authority("ca").authority("other").signed("server", "ca", 2);
        certificates.signed("friend", "ca", 2).signed("stranger", "other", 2);
        let source = Arc::new(ferry_mem::Mem::new(&ferry_mem::Options::default()).unwrap());
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let mut sealed = Self { certificates, source, address, listener, export: None };
        sealed.serve(checks_clients);
        sealed
    }

    fn serve(&mut self, checks_clients: bool) {
        let [ca, chain, key] = ["ca.pem", "server.pem", "server.key"].map(|file| self.certificates.path(file));
        let tls = ferry_ninep::Tls::read(&chain, &key, checks_clients.then_some(&*ca)).unwrap();
        // The port stays ours: a client that connects to itself could have it.
        let listener = Listener::Tls(self.listener.try_clone().unwrap(), tls);
        let export = Export::start(vec![listener], Arc::clone(&self.source), ferry_ninep::Options::default());
        self.export = Some(export.unwrap());
    }

    fn connect(&self, authority: &str, own: Option<&str>, options: Options) -> std::result::Result<Client, Error> {
        let path = |name: &str, kind: &str| self.certificates.path(&format!("{name}.{kind}"));
        let own = own.map(|name| (path(name, "pem"), path(name, "key")));
        let own = own.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()));
        let tcp = Tcp { host: self.address.ip().to_string(), port: self.address.port() };
        Client::connect(Arc::new(Tls::new(tcp, &path(authority, "pem"), own).unwrap()), options)
    }

    fn why(&self, authority: &str, own: Option<&str>) -> String {
        self.why_within(PATIENCE, authority, own)
    }

    fn why_within(&self, timeout: Duration, authority: &str, own: Option<&str>) -> String {
        self.connect(authority, own, Options { timeout, ..Options::default() }).unwrap_err().to_string()
    }
}

#[test]
fn data_flow_both_ways_and_after_a_restart() {
    for cache in [Cache::None, Cache::Auto] {
        let mut sealed = Sealed::new("127.0.0.1:0", true);
        let client = sealed.connect("ca", Some("friend"), Options { cache, patience: PATIENCE, ..Options::default() });
        let client = client.unwrap();
        let (made, handle) = client.create(&CX, Ino::ROOT, name("f"), &common::file(0o600), OFlags::RDWR).unwrap();
        let data: Vec<u8> = (0..5_000_001_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut at = 0;
        for bytes in [1, 2, 16_383, 16_384, 16_385, 70_000, 1_000_000].into_iter().cycle() {
            let piece = &data[at..data.len().min(at + bytes)];
            at += write(&client, made.ino, handle, at as u64, piece).unwrap();
            if at == data.len() {
                break;
            }
        }
        client.fsync(&CX, made.ino, handle, false).unwrap();
        std::thread::scope(|scope| {
            for reader in 0..4_u64 {
                let (client, data) = (&client, &data);
                scope.spawn(move || {
                    for step in 0..20 {
                        let from = (reader * 1_000_003 + step * 200_003) % 4_000_000;
                        let got = read(client, made.ino, handle, from, 300_000).unwrap();
                        assert!(got == data[from as usize..from as usize + 300_000], "{cache:?} at {from}");
                    }
                });
            }
        });
        sealed.export = None;
        sealed.serve(true);
        client.setattr(&CX, made.ino, None, &SetAttr { size: Some(4_999_999), ..SetAttr::default() }).unwrap();
        assert!(read(&client, made.ino, handle, 4_900_000, 200_000).unwrap() == data[4_900_000..4_999_999]);
    }
}

#[test]
fn an_unexpected_peer_is_refused_with_a_sentence() {
    let sealed = Sealed::new("127.0.0.1:0", true);
    let why = sealed.why("other", Some("friend"));
    assert!(why.contains("tls:127.0.0.1:") && why.contains("none of the authorities"), "{why}");
    let why = sealed.why("ca", None);
    assert!(why.contains("wants a client's certificate"), "{why}");
    let why = sealed.why("ca", Some("stranger"));
    assert!(why.contains("does not accept this client"), "{why}");
    // The certificate is for 127.0.0.1.
    let why = Sealed::new("127.0.0.2:0", false).why("ca", None);
    assert!(why.contains("for another name"), "{why}");
}

#[test]
fn servers_without_tls_are_recognized() {
    let plain = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut sealed = Sealed::new("127.0.0.1:0", false);
    sealed.address = plain.local_addr().unwrap();
    let server = Export::start(vec![plain.into()], Arc::clone(&sealed.source), ferry_ninep::Options::default());
    let why = sealed.why("ca", None);
    assert!(why.contains("cannot reach"), "{why}");
    drop(server);
    // One that says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    sealed.address = silent.local_addr().unwrap();
    let begun = std::time::Instant::now();
    sealed.why_within(Duration::from_secs(2), "ca", None);
    assert!(begun.elapsed() < PATIENCE);
}

#[test]
fn invalid_files_are_named() {
    let certificates = Certificates::new();
    certificates.authority("ca").authority("other").signed_as_version_1("old", "ca");
    let tcp = || Tcp { host: "localhost".into(), port: 564 };
    let path = |file: &str| certificates.path(file);
    let ca = path("ca.pem");
    for (authority, own, words) in [
        ("gone", None, "cannot read"),
        ("ca.key", None, "holds no certificate"),
        ("ca.pem", Some(("ca.pem", "other.pem")), "holds no private key"),
        ("ca.pem", Some(("ca.pem", "other.key")), "other.key cannot be used"),
        ("ca.pem", Some(("old.pem", "old.key")), "old.pem cannot be used: the certificate is of X.509 version 1"),
    ] {
        let own = own.map(|(certificate, key)| (path(certificate), path(key)));
        let own = own.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()));
        let error = Tls::new(tcp(), &path(authority), own).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    assert!(Tls::new(tcp(), &ca, Some((&ca, &path("ca.key")))).is_ok());
    let error = Tls::new(Tcp { host: "not a name".into(), port: 564 }, &ca, None).unwrap_err().to_string();
    assert!(error.contains("\"not a name\""), "{error}");
}
