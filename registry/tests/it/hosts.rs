//! Mirrors and settings of containerd's `hosts.toml`.

use crate::certificates::Certificates;
use crate::common;
use crate::credentials::by_tls;

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use common::{Fake, ONCE, Place, Reply, Request};
use ferry_registry::{Client, Error, Options, PullOptions, Remote, parse_hosts, pull};
use proptest::prelude::*;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig};

/// A name that no machine has: all requests go where the file says.
const REGISTRY: &str = "registry.invalid";

fn remote(directory: &Path) -> Result<Arc<Remote>, Error> {
    let options = Options { hosts: vec![directory.into()], limits: ONCE, ..Options::default() };
    Ok(Arc::new(Remote::open(&format!("oci:{REGISTRY}/a/b:1").parse().unwrap(), Client::new(options))?))
}

fn describe(directory: &Path, text: &str) {
    fs::create_dir_all(directory.join(REGISTRY)).unwrap();
    fs::write(directory.join(REGISTRY).join("hosts.toml"), text).unwrap();
}

/// Pulls the image that a place has pushed.
fn pull_to(place: &Place, store: &str, remote: &Arc<Remote>) -> Result<(), Error> {
    drop(ferry_image::Store::create(&place.at(store)).unwrap());
    let output = place.at(&format!("{store}.img"));
    pull(remote, &output, &place.at(store), &PullOptions::default(), &|_, _| {}).map(drop)?;
    place.is_whole(store);
    Ok(())
}

/// Copies the blobs of an image.
fn copy_blobs(from: &Fake, to: &Fake) {
    for layer in from.tagged("1").unwrap()["layers"].as_array().unwrap() {
        let name = layer["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        to.add_blob(&from.blob(name));
    }
}

fn paths(requests: &[Request]) -> Vec<&str> {
    requests.iter().map(|request| &*request.path).collect()
}

/// awslabs/soci-snapshotter pull request 2083: layers came from the registry itself.
#[test]
fn mirrors_are_tried_before_the_registry() {
    let place = Place::new();
    let mirror = Fake::start();
    let hosts = place.at("certs.d");
    let own = place.fake.address;
    // It has nothing yet: all of it comes from the registry.
    let text = format!(
        "server = \"http://{own}\"\n[host.\"http://127.0.0.1:1\"]\n[host.\"http://{0}\"]\n[host.\"http://{0}\".header]\n\
         x-team = \"a\"\n",
        mirror.address
    );
    describe(&hosts, &text);
    let asking = remote(&hosts).unwrap();
    pull_to(&place, "first", &asking).unwrap();
    let asked = mirror.requests();
    assert!(asked.iter().any(Request::is_blob) && asked.iter().any(Request::is_manifest), "{:?}", paths(&asked));
    for request in &asked {
        assert_eq!((&*request.query, request.headers["x-team"].as_str()), ("ns=registry.invalid", "a"), "{request:?}");
    }
    let served = place.fake.requests();
    assert!(served.iter().any(Request::is_blob));
    // That is another server, too.
    let is_told = |request: &Request| request.query == "ns=registry.invalid" && !request.headers.contains_key("x-team");
    assert!(served.iter().all(is_told), "{served:?}");
    assert!(asking.counts().requests >= (asked.len() + served.len()) as u64);
    // One that may not resolve tags, but has all blobs.
    copy_blobs(&place.fake, &mirror);
    describe(
        &hosts,
        &format!("server = \"http://{own}\"\n[host.\"http://{}\"]\ncapabilities = [\"pull\"]\n", mirror.address),
    );
    pull_to(&place, "second", &remote(&hosts).unwrap()).unwrap();
    assert!(!mirror.requests().iter().any(Request::is_manifest));
    assert!(!place.fake.requests().iter().any(Request::is_blob), "the mirror has them");
}

/// A registry behind a proxy's path, and one whose path is complete.
#[test]
fn paths_of_hosts_are_kept() {
    let place = Place::new();
    let hosts = place.at("certs.d");
    place.fake.fault(|request, reply| match request.path.starts_with("/proxy/v2/a/b/") {
        true => reply,
        false => Reply::of(404, ""),
    });
    for (store, text) in [
        ("added", format!("server = \"http://{}/proxy\"", place.fake.address)),
        ("kept", format!("server = \"http://{}/proxy/v2\"\noverride_path = true", place.fake.address)),
    ] {
        describe(&hosts, &text);
        pull_to(&place, store, &remote(&hosts).unwrap()).unwrap();
    }
}

/// aws/eks-anywhere pull request 10765: credentials as a header. They go to that host, and not where it redirects.
#[test]
fn headers_are_kept_from_other_servers() {
    let place = Place::new();
    let other = Fake::start();
    let hosts = place.at("certs.d");
    copy_blobs(&place.fake, &other);
    let to = other.address;
    place.fake.fault(move |request, reply| match request.headers.get("authorization").map(String::as_str) {
        Some("Basic word") if request.is_blob() => {
            Reply::of(307, "").with("location", format!("http://{to}{}", request.path))
        }
        Some("Basic word") => reply,
        _ => Reply::of(401, "").with("www-authenticate", "Basic realm=\"x\""),
    });
    let server = format!("server = \"http://{}\"\n", place.fake.address);
    describe(&hosts, &server);
    assert!(pull_to(&place, "without", &remote(&hosts).unwrap()).is_err());
    describe(&hosts, &format!("{server}[header]\nauthorization = \"Basic word\"\n"));
    pull_to(&place, "with", &remote(&hosts).unwrap()).unwrap();
    let asked = other.requests();
    assert!(!asked.is_empty() && asked.iter().all(|request| !request.headers.contains_key("authorization")));
}

/// A mirror that sends the wrong manifest is not believed; one that stops in the middle of a blob is continued by the registry.
#[test]
fn the_registry_completes_what_a_mirror_interrupts() {
    let place = Place::new();
    let hosts = place.at("certs.d");
    let mirror = Fake::start();
    let name = place.fake.tagged("1").unwrap();
    let manifest = place.fake.tag("1", &name);
    mirror.fault(|request, _| Reply::of(200, if request.is_manifest() { "{}" } else { "" }));
    describe(&hosts, &format!("server = \"http://{}\"\n[host.\"http://{}\"]", place.fake.address, mirror.address));
    let options = Options { hosts: vec![hosts.clone()], limits: ONCE, ..Options::default() };
    let reference = format!("oci:{REGISTRY}/a/b@sha256:{manifest}").parse().unwrap();
    let asking = Arc::new(Remote::open(&reference, Client::new(options)).unwrap());
    pull_to(&place, "by-digest", &asking).unwrap();
    assert!(!mirror.requests().is_empty());
}

/// Each blob in turn, an index or a pack, is damaged on a mirror, and comes whole from the next server.
#[test]
fn damaged_data_of_a_mirror_is_fetched_from_the_next_server() {
    let place = Place::new();
    let hosts = place.at("certs.d");
    let mirror = Fake::start();
    mirror.tag("1", &place.fake.tagged("1").unwrap());
    copy_blobs(&place.fake, &mirror);
    describe(&hosts, &format!("server = \"http://{}\"\n[host.\"http://{}\"]", place.fake.address, mirror.address));
    let manifest = mirror.tagged("1").unwrap();
    for (number, layer) in manifest["layers"].as_array().unwrap().iter().enumerate() {
        let name = layer["digest"].as_str().unwrap().to_owned();
        mirror.fault(move |request, mut reply| {
            if request.is_blob() && request.path.ends_with(&name) {
                reply.body.iter_mut().for_each(|byte| *byte ^= 1);
            }
            reply
        });
        place.fake.requests();
        pull_to(&place, &format!("store-{number}"), &remote(&hosts).unwrap()).unwrap();
        assert!(place.fake.requests().iter().any(Request::is_blob), "blob {number}");
        assert!(mirror.requests().iter().any(Request::is_blob));
    }
    // Where there is no other server, it is an error.
    place.fake.fault(|request, mut reply| {
        if request.is_blob() {
            reply.body.iter_mut().for_each(|byte| *byte ^= 1);
        }
        reply
    });
    let error = pull_to(&place, "damaged", &remote(&hosts).unwrap()).unwrap_err().to_string();
    assert!(error.contains("damaged") || error.contains("digest"), "{error}");
}

#[test]
fn authorities_of_a_host_are_trusted_and_others_are_not_unless_all_are() {
    let place = Place::new();
    let made = Certificates::new();
    made.authority("ours").signed("server", "ours", 3);
    let ca = made.path("ours.pem");
    let tls = by_tls(ca.parent().unwrap());
    let secret = Fake::start_at("127.0.0.1:0", Some(tls));
    secret.tag("1", &place.fake.tagged("1").unwrap());
    copy_blobs(&place.fake, &secret);
    let hosts = place.at("certs.d");
    let server = format!("server = \"https://{}\"\n", secret.address);
    for (store, more, works) in [
        ("none", String::new(), false),
        ("ca", format!("ca = {ca:?}\n"), true),
        ("all", "skip_verify = true\n".to_owned(), true),
    ] {
        describe(&hosts, &format!("{server}{more}"));
        let pulled = pull_to(&place, store, &remote(&hosts).unwrap());
        assert_eq!(pulled.is_ok(), works, "{store}: {:?}", pulled.err());
    }
    describe(&hosts, &format!("{server}ca = \"none.pem\"\n"));
    let error = remote(&hosts).unwrap_err().to_string();
    assert!(error.contains("none.pem"), "{error}");
}

/// A server's certificate, which can be replaced.
#[derive(Debug)]
struct Replaceable(Mutex<Arc<CertifiedKey>>);

impl ResolvesServerCert for Replaceable {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.lock().unwrap()))
    }
}

/// What uses a registry for weeks outlives its certificates.
#[test]
fn authorities_that_are_replaced_are_read_again() {
    let place = Place::new();
    let made = Certificates::new();
    for name in ["old", "new"] {
        made.authority(name).signed(&format!("of-{name}"), name, 3);
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let certified = |name: &str| {
        let certificate = CertificateDer::from_pem_file(made.path(&format!("{name}.pem"))).unwrap();
        let key = PrivateKeyDer::from_pem_file(made.path(&format!("{name}.key"))).unwrap();
        Arc::new(CertifiedKey::from_der(vec![certificate], key, &provider).unwrap())
    };
    let own = Arc::new(Replaceable(Mutex::new(certified("of-old"))));
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
    let config = config.unwrap().with_no_client_auth().with_cert_resolver(Arc::clone(&own) as Arc<_>);
    let secret = Fake::start_at("127.0.0.1:0", Some(Arc::new(config)));
    secret.tag("1", &place.fake.tagged("1").unwrap());
    copy_blobs(&place.fake, &secret);
    // Each request has a connection of its own.
    secret.fault(|_, reply| reply.with("connection", "close"));
    let (hosts, ca) = (place.at("certs.d"), made.path("ca.pem"));
    fs::copy(made.path("old.pem"), &ca).unwrap();
    describe(&hosts, &format!("server = \"https://{}\"\nca = {ca:?}\n", secret.address));
    let asking = remote(&hosts).unwrap();
    pull_to(&place, "first", &asking).unwrap();
    *own.0.lock().unwrap() = certified("of-new");
    fs::copy(made.path("new.pem"), &ca).unwrap();
    pull_to(&place, "second", &asking).unwrap();
    // An authority that is no longer in the files is not trusted.
    *own.0.lock().unwrap() = certified("of-old");
    let error = pull_to(&place, "third", &asking).unwrap_err().to_string();
    assert!(error.contains("UnknownIssuer"), "{error}");
}

/// A server that asks for a certificate by this authority.
fn asks_for(
    directory: &Path,
    authority: &Path,
    versions: &[&'static rustls::SupportedProtocolVersion],
) -> Arc<ServerConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(authority).unwrap()).unwrap();
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build().unwrap();
    let config = ServerConfig::builder_with_provider(provider).with_protocol_versions(versions).unwrap();
    let certificate = CertificateDer::from_pem_file(directory.join("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(directory.join("server.key")).unwrap();
    Arc::new(config.with_client_cert_verifier(verifier).with_single_cert(vec![certificate], key).unwrap())
}

/// As in containerd, the server says whose certificates it takes.
#[test]
fn of_several_certificates_the_one_is_sent_that_the_server_asks_for() {
    let place = Place::new();
    let made = Certificates::new();
    for name in ["one", "two", "three"] {
        made.authority(name).signed(&format!("of-{name}"), name, 3);
    }
    made.authority("ours").signed("server", "ours", 3);
    let ca = made.path("ours.pem");
    let directory = ca.parent().unwrap();
    // One file with both.
    let both = [made.path("of-three.pem"), made.path("of-three.key")].map(|path| fs::read(path).unwrap()).concat();
    fs::write(made.path("both.pem"), both).unwrap();
    let at = |name: &str| made.path(name).display().to_string();
    let all = format!(
        "[[{:?}, {:?}], [{:?}, {:?}], {:?}]",
        at("of-one.pem"),
        at("of-one.key"),
        at("of-two.pem"),
        at("of-two.key"),
        at("both.pem")
    );
    let first_two = all.replace(&format!(", {:?}]", at("both.pem")), "]");
    let hosts = place.at("certs.d");
    for (number, versions) in [&[&rustls::version::TLS13], &[&rustls::version::TLS12]].into_iter().enumerate() {
        for wanted in ["one", "two", "three"] {
            let tls = asks_for(directory, &made.path(&format!("{wanted}.pem")), versions);
            let secret = Fake::start_at("127.0.0.1:0", Some(tls));
            secret.tag("1", &place.fake.tagged("1").unwrap());
            copy_blobs(&place.fake, &secret);
            let server = format!("server = \"https://{}\"\n", secret.address);
            for (what, more, works) in [
                ("all", format!("ca = {ca:?}\nclient = {all}\n"), true),
                ("unverified", format!("skip_verify = true\nclient = {all}\n"), true),
                ("two", format!("ca = {ca:?}\nclient = {first_two}\n"), wanted != "three"),
                ("untrusted", format!("client = {all}\n"), false),
                ("none", format!("ca = {ca:?}\n"), false),
            ] {
                describe(&hosts, &format!("{server}{more}"));
                let pulled = pull_to(&place, &format!("{what}-{wanted}-{number}"), &remote(&hosts).unwrap());
                assert_eq!(pulled.is_ok(), works, "{what} {wanted}: {:?}", pulled.err());
            }
        }
    }
    // A key of another certificate.
    for others in [format!(", {:?}", at("both.pem")), String::new()] {
        let wrong = format!("client = [[{:?}, {:?}]{others}]\n", at("of-one.pem"), at("of-two.key"));
        describe(&hosts, &format!("server = \"https://127.0.0.1:1\"\n{wrong}"));
        let error = remote(&hosts).unwrap_err().to_string();
        assert!(error.contains("a certificate of this machine"), "{error}");
    }
}

proptest! {
    #[test]
    fn every_file_is_read_or_refused_with_one_sentence(text in "(\\[host\\.\"\\PC{0,20}\"\\]\n|[a-z_]{1,12} = [\"\\[]?\\PC{0,10}[\"\\]]?\n){0,6}") {
        match parse_hosts(&text, "https://h.example", Path::new("/etc")) {
            Ok(hosts) => {
                prop_assert!(!hosts.is_empty());
                for host in hosts {
                    prop_assert!(host.url.path().ends_with('/') && matches!(host.url.scheme(), "http" | "https"));
                }
            }
            Err(reason) => prop_assert!(!reason.contains('\n'), "{reason}"),
        }
    }
}
