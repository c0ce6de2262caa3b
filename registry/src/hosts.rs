//! containerd's `hosts.toml`: the servers that have the images of a registry, and how to contact each of them.
//!
//! ```text
//! DIR/registry.example/hosts.toml, DIR/registry.example_5000_/hosts.toml, DIR/_default/hosts.toml
//!
//! server = "https://registry.example"            the registry itself, asked last; its keys are those of a host
//! [host."https://mirror.example"]                asked before it, in the order of the file
//!   capabilities = ["pull", "resolve"]
//!   ca = "ca.pem"                                relative to the file, as all paths
//!   client = [["cert.pem", "key.pem"]]           of several, the server's request selects one
//!   skip_verify = true
//!   override_path = true                         its URL has no "/v2" to be added
//!   [host."https://mirror.example".header]
//!     x-team = "a"
//! ```
//!
//! A directory without that file is as docker has it: `*.crt` are authorities, and `*.cert` certificates of this machine with the keys
//! `*.key`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;
use ureq::http::{HeaderName, HeaderValue};
use url::Url;

use crate::error::{self, Error};
use crate::resolver::is_loopback;

/// The maximum length of a file in bytes: some hundred hosts.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// The maximum number of servers of a registry: each may have to fail before the next one is asked.
const HOSTS_MAX: usize = 16;
/// The maximum number of certificates of this machine for a server: each is read whenever a registry is opened.
const CLIENTS_MAX: usize = 16;
/// The maximum number of files in a directory with certificates, for the same reason.
const FILES_MAX: usize = 256;

/// A server that has the images of a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Where it is, with the path of its API, which ends with a slash.
    pub url: Url,
    /// It has blobs, and manifests by their digests.
    pub pulls: bool,
    /// It may say which image a tag names.
    pub resolves: bool,
    /// Files with authorities to trust, besides those of this machine.
    pub authorities: Vec<PathBuf>,
    /// Files with certificates of this machine, each with the file of its key.
    pub clients: Vec<(PathBuf, PathBuf)>,
    /// Whether any certificate will do.
    pub skip_verify: bool,
    /// Headers for all requests to it.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

#[derive(Deserialize)]
struct Hosts {
    #[serde(default)]
    host: BTreeMap<String, Spanned<Entry>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    /// Of the file only.
    server: Option<String>,
    capabilities: Option<Vec<String>>,
    ca: Option<Texts>,
    client: Option<Client>,
    skip_verify: bool,
    header: BTreeMap<String, Texts>,
    override_path: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Client {
    One(String),
    Many(Vec<Texts>),
}

impl From<Texts> for Vec<String> {
    fn from(texts: Texts) -> Self {
        match texts {
            Texts::One(text) => vec![text],
            Texts::Many(texts) => texts,
        }
    }
}

impl Host {
    /// A registry that no file describes.
    pub(crate) fn of(url: Url) -> Self {
        let (authorities, clients, headers) = Default::default();
        Self { url, pulls: true, resolves: true, authorities, clients, skip_verify: false, headers }
    }

    fn new(text: &str, entry: Entry, directory: &Path) -> Result<Self, String> {
        let mut url = url(text)?;
        if !entry.override_path && !url.path().ends_with("/v2") && !url.path().ends_with("/v2/") {
            url.set_path(&format!("{}/v2", url.path().trim_end_matches('/')));
        }
        if !url.path().ends_with('/') {
            url.set_path(&format!("{}/", url.path()));
        }
        let can = |word: &str| entry.capabilities.as_ref().is_none_or(|all| all.iter().any(|found| found == word));
        let (pulls, resolves) = (can("pull"), can("resolve"));
        let mut headers = Vec::new();
        for (name, values) in entry.header {
            // No value is shown: it may be a secret.
            let wrong = || format!("{:?} of {text} is no header with a value", shortened(&name));
            let header: HeaderName = name.parse().map_err(|_| wrong())?;
            for value in Vec::from(values) {
                headers.push((header.clone(), value.parse().map_err(|_| wrong())?));
            }
        }
        let at = |path: String| directory.join(path);
        let clients = entry.client.map_or(Ok(Vec::new()), pairs).map_err(|why| format!("client of {text} {why}"))?;
        let clients = clients.into_iter().map(|(certificate, key)| (at(certificate), at(key))).collect();
        let authorities = entry.ca.map(Vec::from).unwrap_or_default().into_iter().map(at).collect();
        Ok(Self { url, pulls, resolves, authorities, clients, skip_verify: entry.skip_verify, headers })
    }
}

/// Returns the files of each certificate: a file without a key has it, too.
fn pairs(client: Client) -> Result<Vec<(String, String)>, String> {
    let all = match client {
        Client::One(text) => vec![Texts::One(text)],
        Client::Many(all) => all,
    };
    if all.len() > CLIENTS_MAX {
        return Err(format!("has {} certificates: {CLIENTS_MAX} are possible", all.len()));
    }
    all.into_iter().map(pair).collect()
}

fn pair(files: Texts) -> Result<(String, String), String> {
    let mut files = Vec::from(files);
    files.retain(|file| !file.is_empty());
    match <[String; 2]>::try_from(files) {
        Ok([certificate, key]) => Ok((certificate, key)),
        Err(mut alone) if alone.len() == 1 => Ok((alone[0].clone(), alone.remove(0))),
        Err(_) => Err("has to be certificates, or certificates with their keys".into()),
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

/// Returns the URL of a server. Without a scheme, other machines are contacted by HTTPS.
fn url(text: &str) -> Result<Url, String> {
    let wrong = |why: &str| format!("{:?} is no server, which is written https://HOST: {why}", shortened(text));
    let url = match text.split_once("://") {
        Some(_) => Url::parse(text),
        None => Url::parse(&format!("http://{text}")).and_then(|here| match is_loopback(&here) {
            true => Ok(here),
            false => Url::parse(&format!("https://{text}")),
        }),
    };
    let url = url.map_err(|error| wrong(&error.to_string()))?;
    match url.scheme() {
        "http" | "https" if !url.has_host() => Err(wrong("it has no host")),
        "http" | "https" if url.query().is_some() || url.fragment().is_some() => Err(wrong("it has a query")),
        "http" | "https" if !url.username().is_empty() || url.password().is_some() => {
            Err("a server has a user or a password in its URL: the file with credentials has those".into())
        }
        "http" | "https" => Ok(url),
        _ => Err(wrong("it is neither https nor http")),
    }
}

/// Parses a file's text: the servers of a registry in the order in which they are asked, the registry itself last. `server` is its
/// address if the file names none; relative paths are relative to `directory`.
///
/// # Errors
///
/// What is wrong with it. Keys that are not known are left out, as containerd does.
pub fn parse_hosts(text: &str, server: &str, directory: &Path) -> Result<Vec<Host>, String> {
    // The message of the library would quote the line, and headers can be secrets.
    let wrong = |error: toml::de::Error| match error.span() {
        Some(span) => {
            let line = text.get(..span.start).unwrap_or_default().matches('\n').count() + 1;
            format!("line {line}: {}", error.message())
        }
        None => error.message().to_owned(),
    };
    let hosts: Hosts = toml::from_str(text).map_err(wrong)?;
    let own: Entry = toml::from_str(text).map_err(wrong)?;
    let mut hosts: Vec<_> = hosts.host.into_iter().collect();
    if hosts.len() >= HOSTS_MAX {
        return Err(format!("it has {} hosts: {} are possible", hosts.len(), HOSTS_MAX - 1));
    }
    hosts.sort_by_key(|(_, entry)| entry.span().start);
    let mut found = Vec::new();
    for (url, entry) in hosts {
        found.push(Host::new(&url, entry.into_inner(), directory)?);
    }
    let server = own.server.clone().filter(|server| !server.is_empty()).unwrap_or_else(|| server.to_owned());
    found.push(Host::new(&server, own, directory)?);
    Ok(found)
}

/// Returns the entry of a registry whose directory has only certificates.
fn with_certificates(directory: &Path) -> Result<Entry, String> {
    let wrong = |error: std::io::Error| error.to_string();
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(wrong)? {
        names.push(entry.map_err(wrong)?.file_name());
        if names.len() > FILES_MAX {
            return Err(format!("it has more than {FILES_MAX} files"));
        }
    }
    // The order of a directory is random.
    names.sort();
    let (mut authorities, mut clients) = (Vec::new(), Vec::new());
    for name in names.iter().filter_map(|name| name.to_str()) {
        if name.ends_with(".crt") {
            authorities.push(name.to_owned());
        } else if let Some(stem) = name.strip_suffix(".cert") {
            let key = format!("{stem}.key");
            let has_key = directory.join(&key).exists();
            let files = [Some(name.to_owned()), Some(key).filter(|_| has_key)];
            clients.push(Texts::Many(files.into_iter().flatten().collect()));
        }
    }
    Ok(Entry { ca: Some(Texts::Many(authorities)), client: Some(Client::Many(clients)), ..Entry::default() })
}

/// Returns the servers of a registry by the first of its directories that exists in these, as containerd finds them, or `None` without any.
pub(crate) fn find(directories: &[PathBuf], registry: &str, server: &str) -> error::Result<Option<Vec<Host>>> {
    let by_port = registry.rsplit_once(':').map(|(host, port)| format!("{host}_{port}_"));
    let names = by_port.as_deref().into_iter().chain([registry, "_default"]);
    let names: Vec<&str> = names.filter(|name| !matches!(*name, "" | "." | "..") && !name.contains('/')).collect();
    for directory in directories.iter().flat_map(|directory| names.iter().map(|name| directory.join(name))) {
        let path = directory.join("hosts.toml");
        let invalid = |reason: String| Error::Setting { what: path.display().to_string(), reason };
        let mut text = String::new();
        match fs::File::open(&path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)) {
            Err(error) if error.kind() == ErrorKind::NotADirectory => continue,
            Err(error) if error.kind() == ErrorKind::NotFound && !directory.exists() => continue,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let host = with_certificates(&directory).and_then(|entry| Host::new(server, entry, &directory));
                let what = directory.display().to_string();
                return host.map(|host| Some(vec![host])).map_err(|reason| Error::Setting { what, reason });
            }
            Err(error) => return Err(invalid(error.to_string())),
            Ok(bytes) if bytes as u64 > FILE_BYTES_MAX => {
                return Err(invalid(format!("it has more than {FILE_BYTES_MAX} bytes")));
            }
            Ok(_) => {}
        }
        return parse_hosts(&text, server, &directory).map(Some).map_err(invalid);
    }
    Ok(None)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<Host>, String> {
        parse_hosts(text, "https://registry.example", Path::new("/etc/certs.d/r"))
    }

    #[test]
    fn hosts_are_tried_in_the_order_of_the_file() {
        let found = parse(
            r#"
            server = "https://up.example"
            skip_verify = true
            unknown = 1
            [host."https://z.example/proxy"]
              capabilities = ["pull"]
              ca = ["a.pem", "/b.pem"]
              client = [["c.pem", "c.key"]]
              [host."https://z.example/proxy".header]
                x-team = ["a", "b"]
            [host."localhost:5000"]
              override_path = true
              dial_timeout = "1s"
              client = ["d.pem", ["e.pem", "e.key"], ["f.pem", ""]]
            [host."a.example:8443/x/v2/"]
              client = "both.pem"
            "#,
        )
        .unwrap();
        let urls: Vec<_> = found.iter().map(|host| host.url.as_str()).collect();
        let expected = [
            "https://z.example/proxy/v2/",
            "http://localhost:5000/",
            "https://a.example:8443/x/v2/",
            "https://up.example/v2/",
        ];
        assert_eq!(urls, expected);
        let [first, second, third, last] = &found[..] else { panic!("four") };
        assert!(first.pulls && !first.resolves && second.pulls && second.resolves);
        assert_eq!(first.authorities, ["/etc/certs.d/r/a.pem", "/b.pem"].map(PathBuf::from));
        let pairs = |host: &Host| {
            let text = |path: &PathBuf| path.strip_prefix("/etc/certs.d/r").unwrap().display().to_string();
            host.clients.iter().map(|(certificate, key)| [text(certificate), text(key)].join(" ")).collect::<Vec<_>>()
        };
        assert_eq!(pairs(first), ["c.pem c.key"]);
        assert_eq!(pairs(second), ["d.pem d.pem", "e.pem e.key", "f.pem f.pem"]);
        assert_eq!(pairs(third), ["both.pem both.pem"]);
        assert_eq!(first.headers.len(), 2);
        assert!(!first.skip_verify && last.skip_verify);
        assert_eq!(parse("").unwrap(), [Host::of("https://registry.example/v2/".parse().unwrap())]);
    }

    #[test]
    fn invalid_files_are_refused_without_showing_secrets() {
        for (text, expected) in [
            ("server = 1", "invalid type"),
            ("server = \"ftp://h\"", "neither https nor http"),
            ("server = \"https://u:secret@h\"", "the file with credentials has those"),
            ("[host.\"https://\"]", "is no server"),
            ("[host.\"https://h?secret\"]", "it has a query"),
            ("[host.\"https://h\"]\nclient = [[\"a\", \"b\"], []]", "certificates with their keys"),
            ("[host.\"https://h\"]\nclient = [[\"a\", \"b\", \"c\"]]", "certificates with their keys"),
            ("[host.\"https://h\"]\nheader = { \"a b\" = \"secret\" }", "is no header with a value"),
            ("[host.\"https://h\"]\nheader = { a = \"secret\\n\" }", "is no header with a value"),
            ("a = \"secret", "line 1: "),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected) && error.lines().count() == 1, "{text}: {error}");
            assert!(!error.contains("secret") || text.contains("?secret"), "{error}");
        }
        let many: String = (0..HOSTS_MAX).map(|number| format!("[host.\"https://h{number}\"]\n")).collect();
        assert!(parse(&many).unwrap_err().contains("are possible"));
        let many = format!("client = {:?}", ["a"; CLIENTS_MAX + 1]);
        assert!(parse(&many).unwrap_err().contains("are possible"));
    }

    #[test]
    fn files_are_found_as_containerd_finds_them() {
        let directory = tempfile::tempdir().unwrap();
        let add = |name: &str| {
            fs::create_dir(directory.path().join(name)).unwrap();
            fs::write(directory.path().join(name).join("hosts.toml"), format!("server = \"https://of-{name}\""))
                .unwrap();
        };
        let directories = [directory.path().join("none"), directory.path().to_owned()];
        let found =
            |registry: &str| find(&directories, registry, "https://x").unwrap().map(|all| all[0].url.to_string());
        assert_eq!(found("h.example"), None);
        // As docker has it.
        let of_docker = directory.path().join("d.example");
        fs::create_dir(&of_docker).unwrap();
        for name in ["z.crt", "a.crt", "a.cert", "a.key", "both.cert", "other"] {
            fs::write(of_docker.join(name), "").unwrap();
        }
        let docker = || find(&directories, "d.example", "https://d.example").unwrap().unwrap();
        let [host] = &docker()[..] else { panic!("one") };
        let at = |name: &str| of_docker.join(name);
        let expected = Host {
            authorities: vec![at("a.crt"), at("z.crt")],
            clients: vec![(at("a.cert"), at("a.key")), (at("both.cert"), at("both.cert"))],
            ..Host::of("https://d.example/v2/".parse().unwrap())
        };
        assert_eq!(*host, expected);
        add("h.example");
        add("h.example_5000_");
        assert_eq!(found("h.example").unwrap(), "https://of-h.example/v2/");
        assert_eq!(found("h.example:5000").unwrap(), "https://of-h.example_5000_/v2/");
        assert_eq!(found(".."), None);
        add("_default");
        assert_eq!(docker(), [expected]);
        assert_eq!(found("other.example").unwrap(), "https://of-_default/v2/");
        assert_eq!(found("..").unwrap(), "https://of-_default/v2/");
        fs::write(directory.path().join("_default/hosts.toml"), vec![b'#'; 300 << 10]).unwrap();
        assert!(find(&directories, "x", "https://x").unwrap_err().to_string().contains("more than"));
    }
}
