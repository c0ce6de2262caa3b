//! Who learns what we are known by: the registry that the user named, and the server of tokens that it names where nobody could have
//! changed that name. Nobody else does, wherever anybody sends us.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../../exports/ninep/tests/common/certificates.rs"]
#[allow(dead_code, missing_docs, reason = "a test uses a part")]
mod certificates;
mod common;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use certificates::Certificates;
use common::{Fake, Place, Reply, Request};
use ferry_image::Store;
use ferry_registry::{Client, Options, Remote, Result, push};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;

/// `user:word` in base64.
const BASIC: &str = "Basic dXNlcjp3b3Jk";
const REDIRECTS: [u16; 4] = [301, 302, 307, 308];
/// The file of credentials, which only a process of its own can have in its environment.
const FILE: &str = "REGISTRY_AUTH_FILE";

/// Runs a test in a process of its own, with a file of credentials and authorities to trust. Answers whether this is that process.
fn apart(test: &str, authorities: Option<&Path>) -> bool {
    if std::env::var_os("FERRY_TEST_APART").is_some() {
        return true;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("auth.json"), "{}").unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env("FERRY_TEST_APART", "1")
        .env(FILE, folder.path().join("auth.json"));
    if let Some(authorities) = authorities {
        command.env("SSL_CERT_FILE", authorities).env_remove("SSL_CERT_DIR");
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}

/// Writes down credentials for these, and no others.
fn know(hosts: &[String]) {
    let auths: serde_json::Map<_, _> =
        hosts.iter().map(|host| (host.clone(), json!({"auth": BASIC.strip_prefix("Basic ")}))).collect();
    std::fs::write(std::env::var_os(FILE).unwrap(), json!({ "auths": auths }).to_string()).unwrap();
}

fn remote(place: &str) -> Arc<Remote> {
    let options = Options { plain_http: true, ..Options::default() };
    Arc::new(Remote::open(&format!("oci:{place}/a/b:1").parse().unwrap(), Client::new(options)).unwrap())
}

/// A registry that lets in who has the credentials, and whoever it is that it sends us to: it wants to know who we are, in every way that
/// there is, names a server of tokens of its own, and takes anything.
fn two() -> (Place, Fake) {
    let place = Place::new();
    know(&[place.fake.address.to_string()]);
    let greedy = Fake::start();
    let address = greedy.address;
    greedy.fault(move |request, _| match request.path.as_str() {
        "/token" => Reply::of(200, r#"{"token": "theirs"}"#),
        _ if request.query.contains("basic") => Reply::of(401, "").with("www-authenticate", "Basic realm=\"x\""),
        _ => Reply::of(401, "").with("www-authenticate", format!("Bearer realm=\"http://{address}/token\"")),
    });
    (place, greedy)
}

fn authorization(request: &Request) -> Option<&str> {
    request.headers.get("authorization").map(String::as_str)
}

/// Nobody was told anything, and nobody was asked for a token.
fn knows_nothing(fake: &Fake, what: &str) {
    let requests = fake.requests();
    assert!(!requests.is_empty(), "{what}: it was not asked at all");
    for request in requests {
        assert!(authorization(&request).is_none() && request.path != "/token", "{what}: {request:?}");
    }
}

/// `reply` to whom the registry knows, and a challenge to others.
fn to_known(request: &Request, reply: Reply) -> Reply {
    match authorization(request) {
        Some(BASIC) => reply,
        _ => Reply::of(401, "").with("www-authenticate", "Basic realm=\"x\""),
    }
}

#[test]
fn who_is_sent_on_tells_nobody_there_who_it_is() {
    if !apart("who_is_sent_on_tells_nobody_there_who_it_is", None) {
        return;
    }
    for status in REDIRECTS {
        for way in ["bearer", "basic"] {
            for is_blob in [false, true] {
                let (place, greedy) = two();
                let to = greedy.address;
                place.fake.fault(move |request, reply| {
                    let sends_on = if is_blob { request.is_blob() } else { request.is_manifest() };
                    match sends_on {
                        true => {
                            to_known(request, Reply::of(status, "").with("location", format!("http://{to}/x?{way}")))
                        }
                        false => to_known(request, reply),
                    }
                });
                let said = place.refused("copy");
                let what = format!("{status} {way}: {said}");
                assert!(said.contains(&format!("http://{to}/x")) && said.contains("answers 401"), "{what}");
                knows_nothing(&greedy, &what);
                let ours = place.fake.requests();
                assert!(ours.iter().any(|request| authorization(request) == Some(BASIC)), "{what}: {ours:?}");
                let others = ours.iter().filter_map(authorization).filter(|value| *value != BASIC);
                assert_eq!(others.count(), 0, "{what}: {ours:?}");
            }
        }
    }
}

#[test]
fn who_is_sent_on_and_back_is_not_let_in_by_that() {
    if !apart("who_is_sent_on_and_back_is_not_let_in_by_that", None) {
        return;
    }
    for status in REDIRECTS {
        let (place, other) = two();
        let (here, there) = (place.fake.address, other.address);
        other.fault(move |_, _| Reply::of(status, "").with("location", format!("http://{here}/v2/secret")));
        place.fake.fault(move |request, _| match request.path.as_str() {
            "/v2/secret" => Reply::of(403, ""),
            _ => to_known(request, Reply::of(status, "").with("location", format!("http://{there}/x"))),
        });
        assert!(place.refused("copy").contains("answers 403"));
        knows_nothing(&other, "sent on");
        let back = place.fake.requests().into_iter().find(|request| request.path == "/v2/secret").unwrap();
        assert_eq!(authorization(&back), None, "{status}");
    }
}

fn push_to(place: &Place, remote: &Remote) -> Result<ferry_registry::Pushed> {
    let store = Store::create(&place.at("store")).unwrap();
    push(remote, &place.at("image"), None, &store, &place.at("store"), 1, &|_, _| {})
}

/// Uploads go where the registry says, with what is uploaded and nothing else; who is asked to send it once more elsewhere does not.
#[test]
fn who_takes_uploads_does_not_learn_who_sends_them() {
    if !apart("who_takes_uploads_does_not_learn_who_sends_them", None) {
        return;
    }
    for way in ["bearer", "basic", "x"] {
        let (place, greedy) = two();
        let to = greedy.address;
        if way == "x" {
            greedy.fault(|_, _| Reply::of(201, ""));
        }
        place.fake.fault(move |request, reply| match request.method.as_str() {
            "HEAD" => to_known(request, Reply::of(404, "")),
            "POST" => to_known(request, Reply::of(202, "").with("location", format!("http://{to}/up?{way}"))),
            _ => to_known(request, reply),
        });
        let pushed = push_to(&place, &place.fake.remote());
        match way {
            "x" => _ = pushed.unwrap(),
            _ => assert!(pushed.unwrap_err().to_string().contains("answers 401")),
        }
        knows_nothing(&greedy, way);
    }
    for status in REDIRECTS {
        for method in ["POST", "PUT"] {
            let (place, greedy) = two();
            let to = greedy.address;
            place.fake.fault(move |request, reply| match request.method.as_str() {
                "HEAD" => to_known(request, Reply::of(404, "")),
                other if other == method => {
                    to_known(request, Reply::of(status, "").with("location", format!("http://{to}/up")))
                }
                _ => to_known(request, reply),
            });
            let said = push_to(&place, &place.fake.remote()).unwrap_err().to_string();
            assert!(said.contains(&format!("answers {status}")), "{method}: {said}");
            assert!(greedy.requests().is_empty(), "{method} {status}");
        }
    }
}

#[test]
fn servers_of_tokens_that_anybody_could_have_named_get_no_credentials() {
    if !apart("servers_of_tokens_that_anybody_could_have_named_get_no_credentials", None) {
        return;
    }
    let (place, tokens) = two();
    let (here, there) = (place.fake.address, tokens.address);
    let realm = |realm: String| {
        move |request: &Request, reply: Reply| match (request.path.as_str(), authorization(request)) {
            ("/token", Some(BASIC)) => Reply::of(200, r#"{"token": "ours"}"#),
            ("/token", _) => Reply::of(403, ""),
            (_, Some("Bearer ours" | "Bearer theirs")) => reply,
            _ => Reply::of(401, "").with("www-authenticate", format!("Bearer realm=\"{realm}\"")),
        }
    };
    place.fake.fault(realm(format!("http://{there}/token")));
    let said = place.refused("copy");
    assert!(said.contains(&format!("names http://{there}/token as its server of tokens")), "{said}");
    assert!(tokens.requests().is_empty());
    // By HTTPS it is no better: who can change the answer can name another.
    place.fake.fault(realm(format!("https://{there}/token")));
    assert!(place.refused("copy").contains("as its server of tokens"));
    // The registry itself may ask.
    place.fake.fault(realm(format!("http://{here}/token")));
    place.pull(&place.fake.remote(), "itself").unwrap();
    // Where it sends us on, nothing is told.
    for status in REDIRECTS {
        let known = realm(format!("http://{here}/token"));
        place.fake.fault(move |request, reply| match request.path.as_str() {
            "/token" => Reply::of(status, "").with("location", format!("http://{there}/elsewhere")),
            _ => known(request, reply),
        });
        assert!(place.refused("copy").contains("answers 401"));
        knows_nothing(&tokens, "a realm");
    }
    // Who has no credentials has nothing to lose.
    know(&[]);
    place.fake.fault(realm(format!("http://{there}/token")));
    place.pull(&place.fake.remote(), "anonymous").unwrap();
    assert!(tokens.requests().iter().all(|request| authorization(request).is_none()));
}

fn by_tls(folder: &Path) -> Arc<rustls::ServerConfig> {
    let certificate = CertificateDer::from_pem_file(folder.join("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(folder.join("server.key")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    Arc::new(config.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap())
}

#[test]
fn a_server_of_tokens_that_is_named_by_tls_gets_credentials_by_tls() {
    let name = "a_server_of_tokens_that_is_named_by_tls_gets_credentials_by_tls";
    let made = Certificates::new();
    made.authority("ours").signed("server", "ours", 3);
    if !apart(name, Some(&made.path("ours.pem"))) {
        return;
    }
    // The other process trusts the authority that this one's parent has made.
    let folder = Path::new(&std::env::var_os("SSL_CERT_FILE").unwrap()).parent().unwrap().to_path_buf();
    let tls = by_tls(&folder);
    let registry = Fake::start_at("127.0.0.1:0", Some(Arc::clone(&tls)));
    let tokens = Fake::start_at("127.0.0.1:0", Some(tls));
    let plain = Fake::start();
    let (here, there, other) = (registry.address, tokens.address, plain.address);
    know(&[here.to_string()]);
    tokens.fault(|_, _| Reply::of(200, r#"{"token": "t"}"#));
    let ask = |realm: String| {
        registry.fault(move |request, reply| match authorization(request) {
            Some("Bearer t") => reply,
            _ => Reply::of(401, "").with("www-authenticate", format!("Bearer realm=\"{realm}\"")),
        });
        let (folder, remote) = (tempfile::tempdir().unwrap(), remote(&format!("https://{here}")));
        let _held = Store::create(&folder.path().join("store")).unwrap();
        let pulled = ferry_registry::pull(
            &remote,
            &folder.path().join("image"),
            &folder.path().join("store"),
            &ferry_registry::PullOptions::default(),
            &|_, _| {},
        );
        pulled.unwrap_err().to_string()
    };
    assert!(ask(format!("https://{there}/token")).contains("there is no image"));
    let asked = tokens.requests();
    assert!(asked.len() == 1 && authorization(&asked[0]) == Some(BASIC), "{asked:?}");
    let told = registry.requests();
    assert!(told.iter().any(|request| authorization(request) == Some("Bearer t")), "{told:?}");
    // By HTTP anybody could listen.
    assert!(ask(format!("http://{other}/token")).contains("that would be without encryption"));
    // To another scheme, to another port.
    for status in REDIRECTS {
        for (to, said) in
            [(format!("http://{other}/x"), "without encryption"), (format!("https://{there}/x"), "answers 401")]
        {
            tokens.fault(|_, _| Reply::of(401, "").with("www-authenticate", "Basic realm=\"x\""));
            registry.fault(move |request, _| to_known(request, Reply::of(status, "").with("location", &to)));
            let remote = remote(&format!("https://{here}"));
            let folder = tempfile::tempdir().unwrap();
            let error = ferry_registry::pull_metadata(&remote, &folder.path().join("image"), None).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
        let asked = tokens.requests();
        assert!(!asked.is_empty() && asked.iter().all(|request| authorization(request).is_none()), "{asked:?}");
    }
    assert!(plain.requests().is_empty());
}

/// An entry that has a scheme is for no other one.
#[test]
fn credentials_for_https_are_not_told_without_encryption() {
    if !apart("credentials_for_https_are_not_told_without_encryption", None) {
        return;
    }
    let place = Place::new();
    know(&[format!("https://{}", place.fake.address)]);
    place.fake.fault(to_known);
    assert!(place.refused("copy").contains("answers 401"));
    assert!(place.fake.requests().iter().all(|request| authorization(request).is_none()));
    know(&[format!("http://{}", place.fake.address)]);
    place.pull(&place.fake.remote(), "copy").unwrap();
}

/// A registry elsewhere sends nobody to what listens on this machine, by whatever name. Here 0.0.0.0 stands for another machine: it is
/// the one address that leads here and is no loopback address.
#[test]
fn nobody_is_sent_to_this_machine() {
    if !apart("nobody_is_sent_to_this_machine", None) {
        return;
    }
    let place = Place::new();
    know(&[]);
    let victim = Fake::start_at("[::]:0", None);
    let (here, port) = (place.fake.address.port(), victim.address.port());
    let far = || remote(&format!("http://0.0.0.0:{here}"));
    place.pull(&far(), "plain").unwrap();
    for host in
        ["127.0.0.1", "127.1", "2130706433", "0.0.0.0", "[::ffff:127.0.0.1]", "[::1]", "[::]", "localhost", "LocalHost"]
    {
        let to = format!("http://{host}:{port}/x");
        for status in REDIRECTS {
            let to = to.clone();
            place.fake.fault(move |_, _| Reply::of(status, "").with("location", &to));
            let said = place.pull(&far(), "copy").unwrap_err().to_string();
            assert!(said.contains("that is this machine"), "{host}: {said}");
        }
        // A realm, and a place for uploads.
        let realm = to.clone();
        place.fake.fault(move |_, _| Reply::of(401, "").with("www-authenticate", format!("Bearer realm=\"{realm}\"")));
        let said = place.pull(&far(), "copy").unwrap_err().to_string();
        assert!(said.contains("that is this machine"), "{host}: {said}");
        place.fake.fault(move |request, reply| match request.method.as_str() {
            "HEAD" => Reply::of(404, ""),
            "POST" => Reply::of(202, "").with("location", &to),
            _ => reply,
        });
        let said = push_to(&place, &far()).unwrap_err().to_string();
        assert!(said.contains("that is this machine"), "{host}: {said}");
    }
    assert!(victim.requests().is_empty());
    // To where it was anybody may be sent.
    place.fake.fault(move |request, reply| match request.query.as_str() {
        "again" => reply,
        _ if request.is_blob() => {
            Reply::of(307, "").with("location", format!("http://0.0.0.0:{here}{}?again", request.path))
        }
        _ => reply,
    });
    place.pull(&far(), "itself").unwrap();
}
