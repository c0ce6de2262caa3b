//! Registry credentials: from the files of podman and docker, a directory of such files, and the programs that these name.
//!
//! They are looked for each time that a server asks for them, because secrets change while a program runs.

use std::collections::HashMap;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use url::Url;

use crate::credential_helper;
use crate::error::{Error, Result};

/// The maximum length of a file in bytes, as of a secret of Kubernetes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The maximum number of files in a directory.
const FILES_MAX: usize = 256;
/// The name that the key of a secret of Kubernetes has as a file.
const SECRET_NAME: &str = ".dockerconfigjson";

/// A file as docker and podman write it.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Config {
    auths: HashMap<String, Entry>,
    #[serde(rename = "credHelpers")]
    helpers: HashMap<String, String>,
    #[serde(rename = "credsStore")]
    store: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
}

impl Entry {
    /// Returns `USER:PASSWORD` in base64, if it has both.
    fn basic(&self) -> std::result::Result<Option<String>, &'static str> {
        let text = |field: &Option<String>| field.as_deref().map(str::trim).unwrap_or_default().to_owned();
        let auth = text(&self.auth);
        if auth.is_empty() {
            let (user, password) = (text(&self.username), self.password.as_deref().unwrap_or_default());
            let both = !user.is_empty() && !password.is_empty();
            return Ok(both.then(|| STANDARD.encode(format!("{user}:{password}"))));
        }
        let plain = STANDARD.decode(&auth).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        match plain {
            Some(plain) if plain.contains(':') => Ok(Some(auth)),
            _ => Err("is not USER:PASSWORD in base64"),
        }
    }
}

/// Parses a file, as docker and podman write it; returns `USER:PASSWORD` in base64 of the first of these names that it has.
///
/// # Errors
///
/// It is invalid. No part of it is shown, because it could be a secret.
pub fn parse_credentials(text: &[u8], names: &[String]) -> std::result::Result<Option<String>, String> {
    let config = parse(text)?;
    Ok(find_in(&config, ("https", names))?.map(|(_, basic)| basic))
}

fn parse(text: &[u8]) -> std::result::Result<Config, String> {
    serde_json::from_slice(text).map_err(|error| format!("no JSON as podman writes it, line {}", error.line()))
}

/// Returns the place of the most specific name that a file has, and its credentials.
fn find_in(
    config: &Config,
    (scheme, names): (&str, &[String]),
) -> std::result::Result<Option<(usize, String)>, String> {
    let mut invalid = None;
    for (place, name) in names.iter().enumerate() {
        for (key, entry) in entries(&config.auths, name, scheme, matches) {
            match entry.basic() {
                Ok(Some(basic)) => return Ok(Some((place, basic))),
                Ok(None) => {}
                Err(wrong) if key == name => return Err(format!("the entry of {name} {wrong}")),
                // Another entry may be meant for this registry.
                Err(wrong) => invalid = invalid.or_else(|| Some(format!("an entry for {name} {wrong}"))),
            }
        }
    }
    invalid.map_or(Ok(None), Err)
}

/// Returns the entries of a name: first that with exactly this key, and last those with a pattern. `is_of` compares keys without their scheme
/// with the name.
fn entries<'a, T>(
    all: &'a HashMap<String, T>,
    name: &str,
    scheme: &str,
    is_of: impl Fn(&str, &str) -> bool,
) -> Vec<(&'a String, &'a T)> {
    let is_of = |(key, _): &(&String, &T)| *key == name || bare(key, scheme).is_some_and(|key| is_of(&key, name));
    let mut found: Vec<_> = all.iter().filter(is_of).collect();
    found.sort_unstable_by_key(|(key, _)| (*key != name, key.contains('*'), *key));
    found
}

/// Returns the host and the repository of a key, without the scheme, the version of the API and a slash at the end, as kubelet reads keys.
/// `None`: it is for TLS, without which its secret must not be sent, or for no registry.
fn bare(key: &str, scheme: &str) -> Option<String> {
    let rest = match key.split_once("://") {
        Some((found, rest)) => Some(rest).filter(|_| found == "http" || found == scheme)?,
        None => key,
    };
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let path = path.strip_prefix("v1/").or_else(|| path.strip_prefix("v2/")).unwrap_or(path).trim_end_matches('/');
    Some(if path.is_empty() { host.to_owned() } else { format!("{host}/{path}") })
}

/// Returns whether a key is a name, or has a pattern for each label of the name's host, as kubelet compares hosts.
fn matches(key: &str, name: &str) -> bool {
    fn split(text: &str) -> (&str, &str, &str) {
        let (host, path) = text.split_once('/').unwrap_or((text, ""));
        let (host, port) = host.rsplit_once(':').unwrap_or((host, ""));
        (host, port, path)
    }
    let ((patterns, port, path), (host, own_port, own_path)) = (split(key), split(name));
    (port, path) == (own_port, own_path)
        && patterns.split('.').count() == host.split('.').count()
        && patterns.split('.').zip(host.split('.')).all(|(pattern, label)| matches_label(pattern, label))
}

/// Returns whether a label of a host matches a pattern, in which each `*` is any text.
fn matches_label(pattern: &str, label: &str) -> bool {
    let Some((begin, rest)) = pattern.split_once('*') else { return pattern == label };
    let (middle, end) = rest.rsplit_once('*').unwrap_or(("", rest));
    let inner = label.strip_prefix(begin).and_then(|left| left.strip_suffix(end));
    let is_in_order = |inner: &str| {
        let mut left = Some(inner);
        middle.split('*').for_each(|piece| left = left.and_then(|left| left.split_once(piece)).map(|(_, rest)| rest));
        left.is_some()
    };
    inner.is_some_and(is_in_order)
}

/// Credentials that were found.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Found {
    /// `USER:PASSWORD` in base64.
    pub basic: String,
    /// Where they are from, for messages.
    pub from: String,
}

/// The credentials for a repository on a server.
pub(crate) struct Credentials {
    /// The server, as docker calls it.
    host: String,
    scheme: String,
    /// The names of its entries without the scheme, the most specific first.
    names: Vec<String>,
    /// A file that comes first, if it is there.
    first: Option<PathBuf>,
    /// The file, or the directory with files.
    named: Option<PathBuf>,
}

impl Credentials {
    /// `named`: a file, or a directory of which all files are read; otherwise `REGISTRY_AUTH_FILE`, which may be either, too; otherwise
    /// podman's file, and docker's. An entry with `https://` is not used without TLS, one with a path only for the repositories below it.
    ///
    /// # Errors
    ///
    /// The named file is missing, or a file is invalid.
    pub(crate) fn new(base: &Url, host: &str, repository: &str, named: Option<&Path>) -> Result<Self> {
        let by_port = base.port_or_known_default().map(|port| format!("{host}:{port}"));
        // The name under which docker logs in to docker.io.
        let hub = (host == "docker.io").then(|| "index.docker.io".to_owned());
        let hosts: Vec<String> = [Some(host.to_owned()), by_port, hub].into_iter().flatten().collect();
        let directories =
            std::iter::successors(Some(repository), |path| path.rsplit_once('/').map(|(directory, _)| directory));
        let below = directories.flat_map(|path| hosts.iter().map(move |host| format!("{host}/{path}")));
        let names = below.chain(hosts.iter().cloned()).collect();
        let variable = || std::env::var_os("REGISTRY_AUTH_FILE").filter(|value| !value.is_empty()).map(PathBuf::from);
        let credentials = Self {
            scheme: base.scheme().into(),
            host: host.into(),
            names,
            first: None,
            named: named.map(PathBuf::from).or_else(variable),
        };
        credentials.read()?;
        Ok(credentials)
    }

    fn keys(&self) -> (&str, &[String]) {
        (&self.scheme, &self.names)
    }

    /// Looks into this file first; it may be missing.
    pub(crate) fn after(self, first: Option<PathBuf>) -> Self {
        Self { first, ..self }
    }

    /// Returns what there is at this moment.
    ///
    /// # Errors
    ///
    /// The named file is missing, a file is invalid, or a program that it names fails.
    pub(crate) fn find(&self) -> Result<Option<Found>> {
        if let Some(file) = &self.first {
            let found = read_file(file).and_then(|config| match config {
                Some(config) => find_in(&config, self.keys()),
                None => Ok(None),
            });
            match found {
                Ok(Some((_, basic))) => return Ok(Some(Found { basic, from: file.display().to_string() })),
                Ok(None) => {}
                Err(reason) => tracing::warn!("{}: {reason}; other credentials are tried", file.display()),
            }
        }
        let files = self.read()?;
        for (file, config) in &files {
            let helper = self.names.iter().find_map(|name| {
                // Their keys are no patterns for docker and podman.
                let helpers = entries(&config.helpers, name, &self.scheme, |key, name| key == name);
                helpers.first().map(|(_, helper)| *helper)
            });
            if let Some(found) = helper.map_or(Ok(None), |helper| self.ask(helper, file))? {
                return Ok(Some(found));
            }
        }
        let mut best: Option<(usize, Found)> = None;
        for (file, config) in &files {
            match find_in(config, self.keys()) {
                Ok(Some((place, basic))) if best.as_ref().is_none_or(|(other, _)| place < *other) => {
                    best = Some((place, Found { basic, from: file.display().to_string() }));
                }
                Ok(_) => {}
                Err(reason) => self.refuse(file, reason)?,
            }
        }
        if let Some((_, found)) = best {
            return Ok(Some(found));
        }
        for (file, config) in &files {
            if let Some(found) = config.store.as_ref().map_or(Ok(None), |helper| self.ask(helper, file))? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Returns where there are no credentials, for messages.
    pub(crate) fn missing(&self) -> String {
        match &self.named {
            Some(named) => format!("there are no credentials for {} in {}", self.host, named.display()),
            None => format!("there are no credentials for {}", self.host),
        }
    }

    /// Whether all files of a directory are read: others may have written some of them.
    fn is_directory(&self) -> bool {
        self.named.as_ref().is_some_and(|named| named.is_dir())
    }

    /// Returns the files that exist.
    fn read(&self) -> Result<Vec<(PathBuf, Config)>> {
        let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let files = match &self.named {
            Some(directory) if self.is_directory() => {
                in_directory(directory).map_err(|reason| invalid(directory, reason))?
            }
            Some(file) => vec![file.clone()],
            None => {
                let podman = var("XDG_RUNTIME_DIR").map(|directory| directory.join("containers/auth.json"));
                let docker = var("DOCKER_CONFIG").or_else(|| var("HOME").map(|home| home.join(".docker")));
                podman.into_iter().chain(docker.map(|directory| directory.join("config.json"))).collect()
            }
        };
        let mut configs = Vec::new();
        for file in files {
            match read_file(&file) {
                Ok(Some(config)) => configs.push((file, config)),
                // Or it was replaced at this moment.
                Ok(None) if self.named.is_none() || self.is_directory() => {}
                Ok(None) => self.refuse(&file, "there is no such file".into())?,
                Err(reason) => self.refuse(&file, reason)?,
            }
        }
        Ok(configs)
    }

    /// Returns the error for a file. In a directory, one that is wrong must not keep the others from use.
    fn refuse(&self, file: &Path, reason: String) -> Result<()> {
        let error = invalid(file, reason);
        if !self.is_directory() {
            return Err(error);
        }
        tracing::warn!("{error}; the file is left out");
        Ok(())
    }

    /// Asks a program that a file names.
    fn ask(&self, helper: &str, file: &Path) -> Result<Option<Found>> {
        if self.is_directory() {
            tracing::warn!("{}: no program is started that a file of a directory names", file.display());
            return Ok(None);
        }
        let server = if self.host == "docker.io" { "https://index.docker.io/v1/" } else { &self.host };
        match credential_helper::ask(helper, server) {
            Ok(found) => Ok(found.map(|(user, secret)| Found {
                basic: STANDARD.encode(format!("{user}:{secret}")),
                from: format!("docker-credential-{helper}, which {} names", file.display()),
            })),
            Err(reason) => {
                let what = format!("docker-credential-{helper}, which {} names for {}", file.display(), self.host);
                let error = Error::Setting { what, reason };
                if self.named.is_some() {
                    return Err(error);
                }
                // Of a user's own file, which other programs use, too.
                tracing::warn!("{error}");
                Ok(None)
            }
        }
    }
}

/// Returns the contents of a file, if it exists.
fn read_file(file: &Path) -> std::result::Result<Option<Config>, String> {
    let mut text = Vec::new();
    match std::fs::File::open(file).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text)) {
        Ok(_) if text.len() as u64 > FILE_BYTES_MAX => Err(format!("it has more than {FILE_BYTES_MAX} bytes")),
        Ok(_) => parse(&text).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

fn invalid(file: &Path, reason: String) -> Error {
    Error::Setting { what: format!("the credentials in {}", file.display()), reason }
}

/// Returns the files of a directory with credentials, in the order of their names. Kubernetes replaces them by a link to another directory.
fn in_directory(directory: &Path) -> std::result::Result<Vec<PathBuf>, String> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(|error| error.to_string())? {
        let name = entry.map_err(|error| error.to_string())?.file_name();
        let text = name.to_string_lossy();
        if text == SECRET_NAME || text.ends_with(".json") && !text.starts_with('.') {
            files.push(directory.join(&name));
        }
    }
    if files.len() > FILES_MAX {
        return Err(format!("it has {} files: {FILES_MAX} are possible", files.len()));
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn credentials(directory: &Path, repository: &str) -> Result<Credentials> {
        Credentials::new(&"https://h.example/v2/".parse().unwrap(), "h.example", repository, Some(directory))
    }

    fn plain(found: Result<Option<Found>>) -> Option<String> {
        found.unwrap().map(|found| String::from_utf8(STANDARD.decode(found.basic).unwrap()).unwrap())
    }

    #[test]
    fn entries_match_a_host_or_repositories_below_a_path() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("auth.json");
        let text = r#"{"auths": {"h.example": {"auth": "YTpiYg==\n"}, "h.example/team": {"username": "team", "password": "x:y"},
            "https://h.example/team/app": {"auth": "!"}, "h.example/team/app": {"auth": "YXBwOnA="}, "other.example": {}}}"#;
        fs::write(&file, text).unwrap();
        for (repository, expected) in [
            ("os", "a:bb"),
            ("team/app", "app:p"),
            ("team/app/x", "app:p"),
            ("team/other", "team:x:y"),
            ("teams/a", "a:bb"),
        ] {
            assert_eq!(
                plain(credentials(&file, repository).unwrap().find()).as_deref(),
                Some(expected),
                "{repository}"
            );
        }
        for (text, reason) in [
            (
                r#"{"auths": {"h.example": {"auth": "c2VjcmV0"}}}"#,
                "the entry of h.example is not USER:PASSWORD in base64",
            ),
            (r#"{"auths": {"h.example": "secret"}}"#, "line 1"),
        ] {
            fs::write(&file, text).unwrap();
            let found = credentials(&file, "a").and_then(|credentials| credentials.find());
            let error = found.err().unwrap().to_string();
            assert!(error.contains(reason) && error.contains("auth.json") && !error.contains("c2VjcmV0"), "{error}");
            assert!(!error.contains("\"secret"), "{error}");
        }
        fs::remove_file(&file).unwrap();
        assert!(credentials(&file, "a").is_err());
    }

    /// But a path has whole names of directories.
    #[test]
    fn keys_are_read_as_kubelet_reads_them() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("auth.json");
        for (key, expected) in [
            ("https://h.example/", true),
            ("https://h.example/v1/", true),
            ("h.example/", true),
            ("h.example/v2/", true),
            ("https://h.example/team", true),
            ("https://h.example:443/v2/team/", true),
            ("http://h.example/", true),
            ("http://h.example/v2/team", true),
            ("*.example", true),
            ("https://*.*/team/", true),
            ("h.ex*l*:443/v1/", true),
            ("h*h.example", false),
            ("h.e*x*m*a*e", false),
            ("*", false),
            ("*.h.example", false),
            ("*.example:5000", false),
            ("*.example/tea", false),
            ("ftp://h.example/", false),
            ("https://h.example/tea", false),
            ("https://h.example/v2", false),
            ("https://h.example.com/", false),
        ] {
            fs::write(&file, serde_json::json!({"auths": {key: {"auth": "YTpi"}}}).to_string()).unwrap();
            let found = plain(credentials(&file, "team/app").unwrap().find());
            assert_eq!(found.is_some(), expected, "{key}");
        }
    }

    #[test]
    fn an_exact_key_counts_before_others() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("auth.json");
        for (text, expected) in [
            (r#"{"*.example": {"auth": "YTox"}, "https://h.example": {"auth": "YToy"}}"#, Ok("a:2")),
            (r#"{"h.example": {"auth": "YToz"}, "https://h.example": {"auth": "YToy"}}"#, Ok("a:3")),
            (r#"{"https://h.example/team": {"auth": "!"}, "h.example": {"auth": "YToz"}}"#, Ok("a:3")),
            (r#"{"http://h.example/team": {"auth": "!"}, "*.example/team": {"auth": "YToy"}}"#, Ok("a:2")),
            (r#"{"https://h.example/team": {"auth": "!"}}"#, Err("an entry for h.example/team is not")),
            (r#"{"h.example/team": {"auth": "!"}, "h.example": {"auth": "YToz"}}"#, Err("the entry of h.example/team")),
        ] {
            fs::write(&file, format!("{{\"auths\": {text}}}")).unwrap();
            let found = credentials(&file, "team/app").unwrap().find();
            match expected {
                Ok(expected) => assert_eq!(plain(found).as_deref(), Some(expected), "{text}"),
                Err(reason) => assert!(found.err().unwrap().to_string().contains(reason), "{text}"),
            }
        }
    }

    /// As Kubernetes mounts secrets: files are links through a link that is replaced.
    #[test]
    fn files_of_a_directory_are_read_each_time() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let entry = |name: &str, auth: &str| format!(r#"{{"auths": {{"{name}": {{"auth": "{auth}"}}}}}}"#);
        let of_directory = credentials(directory.path(), "team/app").unwrap();
        assert_eq!(plain(of_directory.find()), None);
        assert!(of_directory.missing().contains("h.example in /"), "{}", of_directory.missing());
        for (version, auth) in [("..1", "YTox"), ("..2", "YToy")] {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join(SECRET_NAME), entry("h.example", auth)).unwrap();
        }
        std::os::unix::fs::symlink("..1", at("..data")).unwrap();
        std::os::unix::fs::symlink(Path::new("..data").join(SECRET_NAME), at(SECRET_NAME)).unwrap();
        assert_eq!(plain(of_directory.find()).as_deref(), Some("a:1"));
        std::os::unix::fs::symlink("..2", at("..new")).unwrap();
        fs::rename(at("..new"), at("..data")).unwrap();
        assert_eq!(plain(of_directory.find()).as_deref(), Some("a:2"));
        // What is wrong, or names a program, keeps the others from nothing; the most specific entry counts, wherever it is.
        fs::write(at("0.json"), "{").unwrap();
        fs::write(at("1.json"), r#"{"credHelpers": {"h.example": "none"}, "credsStore": "none"}"#).unwrap();
        fs::write(at(".new.json"), entry("h.example/team/app", "eDp4")).unwrap();
        assert_eq!(plain(of_directory.find()).as_deref(), Some("a:2"));
        fs::write(at("z.json"), entry("h.example/team", "dDp0")).unwrap();
        assert_eq!(plain(of_directory.find()).as_deref(), Some("t:t"));
    }

    #[test]
    fn the_credentials_of_a_pull_come_first_if_there_are_any() {
        let directory = tempfile::tempdir().unwrap();
        let (named, first) = (directory.path().join("named"), directory.path().join("first"));
        let write = |file: &Path, entry: &str, auth: &str| {
            fs::write(file, format!(r#"{{"auths": {{"{entry}": {{"auth": "{auth}"}}}}}}"#)).unwrap();
        };
        write(&named, "h.example/team/app", "YTox");
        let find = || plain(credentials(&named, "team/app").unwrap().after(Some(first.clone())).find());
        assert_eq!(find().as_deref(), Some("a:1"), "it is missing");
        write(&first, "other.example/team/app", "YToy");
        assert_eq!(find().as_deref(), Some("a:1"), "of another registry");
        write(&first, "h.example/team/app", "YToz");
        assert_eq!(find().as_deref(), Some("a:3"));
        for cut_off in ["", "{"] {
            fs::write(&first, cut_off).unwrap();
            assert_eq!(
                find().as_deref(),
                Some("a:1"),
                "it is of a version that did not sync it before a loss of power"
            );
        }
    }

    #[test]
    fn helpers_in_the_file_are_called() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("auth.json");
        fs::write(&file, r#"{"credHelpers": {"h.example": "ferry-none"}}"#).unwrap();
        let error = credentials(&file, "a").unwrap().find().err().unwrap().to_string();
        assert!(error.contains("docker-credential-ferry-none") && error.contains("h.example"), "{error}");
        fs::write(&file, r#"{"credHelpers": {"other.example": "ferry-none"}}"#).unwrap();
        assert_eq!(plain(credentials(&file, "a").unwrap().find()), None);
    }

    proptest! {
        #[test]
        fn every_file_is_read_or_refused(auth in "\\PC*", name in "[a-c/]{1,5}") {
            let text = serde_json::json!({"auths": {&name: {"auth": auth}}}).to_string();
            match parse_credentials(text.as_bytes(), &["a".into(), "b".into()]) {
                Ok(Some(basic)) => prop_assert!(STANDARD.decode(basic).is_ok_and(|plain| plain.contains(&b':'))),
                Ok(None) => {}
                Err(reason) => prop_assert!(!reason.contains('\n'), "{reason}"),
            }
            let _ = parse_credentials(auth.as_bytes(), &[name]);
        }
    }
}
