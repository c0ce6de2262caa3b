//! Credentials and tokens go to the registry that the user named, and to a realm that it names by TLS. Redirects, realms and upload
//! locations elsewhere get none, and a redirect never leads to this machine from another one.
use crate::certificates;
use crate::common;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use certificates::Certificates;
use common::{Fake, ONCE, Place, Reply, Request};
use ferry_image::Store;
use ferry_registry::{Client, Options, PullOptions, Remote, Result, pull, push};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;

/// `user:word` in base64.
const BASIC: &str = "Basic dXNlcjp3b3Jk";
const REDIRECTS: [u16; 4] = [301, 302, 307, 308];
/// The credentials file. A test that sets it in the environment needs a separate process.
const FILE: &str = "REGISTRY_AUTH_FILE";

/// Runs a test in a child process with a credentials file. Returns whether this is that process.
fn apart(test: &str, authorities: Option<&Path>) -> bool {
    let trusted = authorities.map(|file| ("SSL_CERT_FILE", file.as_os_str()));
    apart_with(test, trusted.as_slice(), None)
}

/// The same with additional environment variables and host names.
fn apart_with(test: &str, environment: &[(&str, &OsStr)], hosts: Option<&Path>) -> bool {
    if std::env::var_os("FERRY_TEST_APART").is_some() {
        return true;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("auth.json"), "{}").unwrap();
    let program = std::env::current_exe().unwrap();
    let mut command = match hosts {
        Some(hosts) => {
            let mut command = Command::new("unshare");
            command.args(["-m", "sh", "-c", "mount --bind \"$1\" /etc/hosts && shift && exec \"$@\"", "-"]);
            command.arg(hosts).arg(program);
            command
        }
        None => Command::new(program),
    };
    command.args(["--exact", &format!("credentials::{test}"), "--nocapture"]).env("FERRY_TEST_APART", "1");
    command.env(FILE, directory.path().join("auth.json")).env_remove("SSL_CERT_DIR").envs(environment.iter().copied());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}

/// Writes a file with credentials for these registries only.
fn know(hosts: &[String]) {
    let auths: serde_json::Map<_, _> =
        hosts.iter().map(|host| (host.clone(), json!({"auth": BASIC.strip_prefix("Basic ")}))).collect();
    std::fs::write(std::env::var_os(FILE).unwrap(), json!({ "auths": auths }).to_string()).unwrap();
}

fn remote(place: &str) -> Arc<Remote> {
    let options = Options { plain_http: true, ..Options::default() };
    Arc::new(Remote::open(&format!("oci:{place}/a/b:1").parse().unwrap(), Client::new(options)).unwrap())
}

/// A registry with an image, and a hostile server: it answers every request with a challenge, and names its own realm.
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

/// Asserts that a server received requests without credentials, and that its realm received none.
fn knows_nothing(fake: &Fake, what: &str) {
    let requests = fake.requests();
    assert!(!requests.is_empty(), "{what}: it was not asked at all");
    for request in requests {
        assert!(authorization(&request).is_none() && request.path != "/token", "{what}: {request:?}");
    }
}

/// `reply` to a request with the credentials, a challenge to others.
fn to_known(request: &Request, reply: Reply) -> Reply {
    match authorization(request) {
        Some(BASIC) => reply,
        _ => Reply::of(401, "").with("www-authenticate", "Basic realm=\"x\""),
    }
}

#[test]
fn redirects_do_not_leak_credentials() {
    if !apart("redirects_do_not_leak_credentials", None) {
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
fn a_redirect_back_does_not_restore_credentials() {
    if !apart("a_redirect_back_does_not_restore_credentials", None) {
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

fn push_to(place: &Place, remote: &Remote) -> Result<ferry_registry::PushOutcome> {
    let store = Store::create(&place.at("store")).unwrap();
    push(remote, &place.at("image"), None, &store, &place.at("store"), 1, &|_, _| {})
}

/// An upload goes to the location that the registry names, without credentials; a redirect of an upload is not followed.
#[test]
fn upload_locations_elsewhere_get_no_credentials() {
    if !apart("upload_locations_elsewhere_get_no_credentials", None) {
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
fn realms_named_without_tls_get_no_credentials() {
    if !apart("realms_named_without_tls_get_no_credentials", None) {
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
    // HTTPS is no better: an attacker who can change the response can name another realm.
    place.fake.fault(realm(format!("https://{there}/token")));
    assert!(place.refused("copy").contains("as its server of tokens"));
    // The registry itself may ask.
    place.fake.fault(realm(format!("http://{here}/token")));
    place.pull(&place.fake.remote(), "itself").unwrap();
    // Servers that it redirects to get no credentials.
    for status in REDIRECTS {
        let known = realm(format!("http://{here}/token"));
        place.fake.fault(move |request, reply| match request.path.as_str() {
            "/token" => Reply::of(status, "").with("location", format!("http://{there}/elsewhere")),
            _ => known(request, reply),
        });
        assert!(place.refused("copy").contains("answers 401"));
        knows_nothing(&tokens, "a realm");
    }
    // Without credentials, none can leak.
    know(&[]);
    place.fake.fault(realm(format!("http://{there}/token")));
    place.pull(&place.fake.remote(), "anonymous").unwrap();
    assert!(tokens.requests().iter().all(|request| authorization(request).is_none()));
}

pub fn by_tls(directory: &Path) -> Arc<rustls::ServerConfig> {
    let certificate = CertificateDer::from_pem_file(directory.join("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(directory.join("server.key")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    Arc::new(config.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap())
}

#[test]
fn a_realm_named_by_tls_gets_credentials_by_tls() {
    let name = "a_realm_named_by_tls_gets_credentials_by_tls";
    let made = Certificates::new();
    made.authority("ours").signed("server", "ours", 3);
    if !apart(name, Some(&made.path("ours.pem"))) {
        return;
    }
    // The child process trusts the authority that its parent created.
    let directory = Path::new(&std::env::var_os("SSL_CERT_FILE").unwrap()).parent().unwrap().to_path_buf();
    let tls = by_tls(&directory);
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
        let (directory, remote) = (tempfile::tempdir().unwrap(), remote(&format!("https://{here}")));
        let _held = Store::create(&directory.path().join("store")).unwrap();
        let pulled = ferry_registry::pull(
            &remote,
            &directory.path().join("image"),
            &directory.path().join("store"),
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
    // Plain HTTP can be read by others.
    assert!(ask(format!("http://{other}/token")).contains("that would be without encryption"));
    // To another scheme, to another port.
    for status in REDIRECTS {
        for (to, said) in
            [(format!("http://{other}/x"), "without encryption"), (format!("https://{there}/x"), "answers 401")]
        {
            tokens.fault(|_, _| Reply::of(401, "").with("www-authenticate", "Basic realm=\"x\""));
            registry.fault(move |request, _| to_known(request, Reply::of(status, "").with("location", &to)));
            let remote = remote(&format!("https://{here}"));
            let directory = tempfile::tempdir().unwrap();
            let error = ferry_registry::pull_metadata(&remote, &directory.path().join("image"), directory.path(), None)
                .unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
        let asked = tokens.requests();
        assert!(!asked.is_empty() && asked.iter().all(|request| authorization(request).is_none()), "{asked:?}");
    }
    assert!(plain.requests().is_empty());
}

/// An entry without TLS in its key may be used with it, but not the other way round.
#[test]
fn credentials_for_https_are_not_sent_by_http() {
    if !apart("credentials_for_https_are_not_sent_by_http", None) {
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

/// A proxy that connects to this machine, whatever host is requested.
fn proxy() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let copy = |mut from: TcpStream, mut to: TcpStream| {
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(std::net::Shutdown::Write);
        });
    };
    let serve = move |client: TcpStream| -> std::io::Result<()> {
        let mut head = BufReader::new(client.try_clone()?);
        let mut line = String::new();
        head.read_line(&mut line)?;
        let port = line.split([' ', ':']).nth(2).and_then(|port| port.parse::<u16>().ok());
        while line.trim() != "" {
            line.clear();
            head.read_line(&mut line)?;
        }
        let server = TcpStream::connect(("127.0.0.1", port.ok_or(std::io::ErrorKind::InvalidData)?))?;
        (&client).write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
        copy(client.try_clone()?, server.try_clone()?);
        copy(server, client);
        Ok(())
    };
    std::thread::spawn(move || listener.incoming().flatten().for_each(|client| drop(serve(client))));
    address
}

/// The HTTP library reads `NO_PROXY` in its own way: as beginnings and ends of names.
#[test]
fn servers_that_no_proxy_does_not_name_are_reached_by_the_proxy() {
    let by_proxy = format!("http://{}", proxy());
    let others = OsStr::new("registry*,regis.,*invalid");
    let environment = [("ALL_PROXY", OsStr::new(&by_proxy)), ("NO_PROXY", others), ("no_proxy", others)];
    if !apart_with("servers_that_no_proxy_does_not_name_are_reached_by_the_proxy", &environment, None) {
        return;
    }
    let place = Place::new();
    let far = remote(&format!("http://registry.invalid:{}", place.fake.address.port()));
    place.pull(&far, "copy").unwrap();
}

/// The registry counts as another machine because it is reached through a proxy.
#[test]
fn redirects_to_this_machine_are_refused() {
    let name = "redirects_to_this_machine_are_refused";
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, for names of hosts of its own");
        return;
    }
    let hosts = tempfile::NamedTempFile::new().unwrap();
    let text = "127.0.0.1 localhost\n127.0.0.1 four.test\n::1 six.test\n0.0.0.0 any.test\n::ffff:127.0.0.1 mapped.test\n\
        169.254.169.254 link.test\n127.0.0.1 both.test\n169.254.1.1 both.test\n";
    std::fs::write(hosts.path(), text).unwrap();
    let by_proxy = format!("http://{}", proxy());
    let environment = [("http_proxy", OsStr::new(&by_proxy)), ("no_proxy", OsStr::new("*.test,127.0.0.1"))];
    if !apart_with(name, &environment, Some(hosts.path())) {
        return;
    }
    let place = Place::new();
    let victim = Fake::start_at("[::]:0", None);
    let (here, port) = (place.fake.address.port(), victim.address.port());
    let far = || remote(&format!("http://registry.invalid:{here}"));
    place.pull(&far(), "plain").unwrap();
    let literals = ["127.0.0.1", "127.1", "2130706433", "0.0.0.0", "[::ffff:127.0.0.1]", "[::1]", "[::]", "LocalHost"];
    let names = ["four.test", "six.test", "any.test", "mapped.test", "link.test", "both.test"];
    for host in literals.into_iter().chain(names) {
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
    // Any registry may redirect to itself, and one on this machine to this machine, also if its name does not show where it is.
    let near = || remote(&format!("http://four.test:{here}"));
    let sent = [(&far as &dyn Fn() -> Arc<Remote>, "registry.invalid"), (&near, "any.test"), (&near, "127.0.0.1")];
    for (ask, to) in sent {
        place.fake.fault(move |request, reply| match request.query.as_str() {
            "again" => reply,
            _ if request.is_blob() => {
                Reply::of(307, "").with("location", format!("http://{to}:{here}{}?again", request.path))
            }
            _ => reply,
        });
        place.pull(&ask(), &format!("by-{to}")).unwrap();
    }
}

/// Kubernetes issue 4673, buildpacks-community/kpack issue 1353: a secret that was changed counted after a restart only;
/// awslabs/soci-snapshotter issue 1148, oras-project/oras-go issue 1227: what is too old is refused with 403 or 400, without a challenge.
#[test]
fn credentials_that_change_are_used_at_once_and_wrong_ones_are_named_and_not_shown() {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    let place = Place::new();
    let directory = place.at("secrets");
    std::fs::create_dir(&directory).unwrap();
    let address = place.fake.address.to_string();
    let know = |password: &str| {
        let auth = STANDARD.encode(format!("me:{password}"));
        std::fs::write(directory.join(".new"), json!({"auths": {&address: {"auth": auth}}}).to_string()).unwrap();
        std::fs::rename(directory.join(".new"), directory.join("team.json")).unwrap();
    };
    // Each registry has tokens of its own, or none.
    for (status, bearer) in [(401, false), (401, true), (403, true), (403, false), (400, true)] {
        let (expected, to) = (Arc::new(Mutex::new(String::new())), place.fake.address);
        let asked = Arc::clone(&expected);
        place.fake.fault(move |request, reply| {
            let password = asked.lock().unwrap().clone();
            let basic = format!("Basic {}", STANDARD.encode(format!("me:{password}")));
            let challenge = match bearer {
                true => format!("Bearer realm=\"http://{to}/token\""),
                false => "Basic realm=\"x\"".into(),
            };
            let wanted = if bearer { format!("Bearer {password}") } else { basic.clone() };
            match (request.path.as_str(), authorization(request)) {
                ("/token", Some(found)) if found == basic => Reply::of(200, json!({"token": password}).to_string()),
                ("/token", _) => Reply::of(401, "who"),
                (_, Some(found)) if found == wanted => reply,
                (_, Some(_)) if status != 401 => Reply::of(status, "your authorization token has expired"),
                _ => Reply::of(401, "").with("www-authenticate", challenge),
            }
        });
        let options = Options { credentials: Some(directory.clone()), limits: ONCE, ..Options::default() };
        let remote = Remote::open(&format!("oci:{address}/a/b:1").parse().unwrap(), Client::new(options)).unwrap();
        let remote = Arc::new(remote);
        let what = format!("{status}, tokens {bearer}");
        let look = |remote: &Arc<Remote>| {
            let output = place.at("image");
            let _ = std::fs::remove_file(&output);
            drop(Store::create(&place.at("store-of-secrets")).unwrap());
            pull(remote, &output, &place.at("store-of-secrets"), &PullOptions::default(), &|_, _| {}).map(drop)
        };
        for password in ["one-password", "two-password"] {
            *expected.lock().unwrap() = password.into();
            let error = look(&remote).expect_err(&what).to_string();
            know(password);
            look(&remote).unwrap_or_else(|error| panic!("{what}: {error}"));
            // Of 400 it is not known that it is about them.
            if password.starts_with("two") && status != 400 {
                assert!(error.contains(&address) && error.contains("team.json"), "{what}: {error}");
                for secret in ["one-password", password, &STANDARD.encode("me:one-password")] {
                    assert!(!error.contains(secret), "{what}: {error}");
                }
            }
        }
        std::fs::remove_file(directory.join("team.json")).unwrap();
        *expected.lock().unwrap() = "three-password".into();
        let error = look(&remote).expect_err(&what).to_string();
        assert!(error.contains("there are no credentials for") && error.contains("secrets"), "{what}: {error}");
    }
}

/// A program that a file names is asked each time; what it says is never shown.
#[test]
fn credential_helpers_are_called() {
    let name = "credential_helpers_are_called";
    let directory = tempfile::tempdir().unwrap();
    let script = "#!/bin/sh\nread server\ncase $1-$server in\n\
        get-127.0.0.1:*) echo '{\"Username\": \"user\", \"Secret\": \"word\"}';;\n\
        *) echo 'credentials not found in native keychain'; exit 1;;\nesac\n";
    for (program, text) in [
        ("docker-credential-good", script),
        ("docker-credential-none", "#!/bin/sh\necho credentials not found in native keychain; exit 1\n"),
        ("docker-credential-bad", "#!/bin/sh\necho secret-text; exit 3\n"),
        ("docker-credential-odd", "#!/bin/sh\necho secret-text\n"),
        ("docker-credential-token", "#!/bin/sh\necho '{\"Username\": \"<token>\", \"Secret\": \"secret-text\"}'\n"),
    ] {
        let path = directory.path().join(program);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", directory.path().display(), std::env::var("PATH").unwrap());
    if !apart_with(name, &[("PATH", OsStr::new(&path))], None) {
        return;
    }
    let place = Place::new();
    place.fake.fault(to_known);
    let address = place.fake.address.to_string();
    let write =
        |config: serde_json::Value| std::fs::write(std::env::var_os(FILE).unwrap(), config.to_string()).unwrap();
    for (config, expected) in [
        (json!({"credHelpers": {&address: "good"}}), None),
        (json!({"credsStore": "good"}), None),
        // An entry of the file is before the store of all.
        (json!({"credsStore": "bad", "auths": {&address: {"auth": "dXNlcjp3b3Jk"}}}), None),
        (json!({"credHelpers": {&address: "none"}}), Some("there are no credentials for")),
        (json!({"credHelpers": {&address: "bad"}}), Some("it ended with exit status: 3")),
        (json!({"credHelpers": {&address: "odd"}}), Some("no user and password")),
        (json!({"credHelpers": {&address: "token"}}), Some("identity token")),
        (json!({"credHelpers": {&address: "missing"}}), Some("no such program")),
        (json!({"credHelpers": {&address: "../good"}}), Some("no name of a program")),
    ] {
        write(config.clone());
        let outcome = push_to(&place, &remote(&address)).map_err(|error| error.to_string());
        match (outcome, expected) {
            (Ok(_), None) => {}
            (Err(error), Some(expected)) => {
                assert!(error.contains(expected) && error.contains(&address), "{config}: {error}");
                assert!(!error.contains("secret-text"), "{error}");
            }
            (outcome, _) => panic!("{config}: {outcome:?}"),
        }
    }
}
