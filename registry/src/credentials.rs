//! Registry credentials, from the files of podman and docker.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use url::Url;

use crate::error::{Error, Result};

#[derive(Deserialize, Default)]
struct Config {
    #[serde(default)]
    auths: HashMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    auth: Option<String>,
}

/// Returns `USER:PASSWORD` in base64 for a registry, from a named file or `REGISTRY_AUTH_FILE`, podman's file, or docker's.
/// An entry with a scheme applies to that scheme only.
///
/// # Errors
///
/// The named file is missing, or a file is invalid.
pub(crate) fn basic(base: &Url, host: &str, named: Option<&Path>) -> Result<Option<String>> {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let files = match named.map(PathBuf::from).or_else(|| var("REGISTRY_AUTH_FILE")) {
        Some(file) => vec![(file, true)],
        None => {
            let podman = var("XDG_RUNTIME_DIR").map(|folder| folder.join("containers/auth.json"));
            let docker = var("DOCKER_CONFIG").or_else(|| var("HOME").map(|home| home.join(".docker")));
            let docker = docker.map(|folder| folder.join("config.json"));
            podman.into_iter().chain(docker).map(|file| (file, false)).collect()
        }
    };
    for (file, is_required) in files {
        let invalid =
            |reason: String| Error::Setting { what: format!("the credentials in {}", file.display()), reason };
        let text = match std::fs::read(&file) {
            Ok(text) => text,
            Err(error) if !is_required && error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(invalid(error.to_string())),
        };
        // serde's message could quote a password.
        let config: Config = serde_json::from_slice(&text)
            .map_err(|error| invalid(format!("no JSON as podman writes it, line {}", error.line())))?;
        let scheme = base.scheme();
        // The name under which docker logs in to docker.io.
        let host = host.to_owned();
        let by_port = base.port_or_known_default().map(|port| format!("{host}:{port}"));
        let hub = (host == "docker.io").then(|| "index.docker.io".to_owned());
        let hosts = [Some(host.clone()), by_port, hub].into_iter().flatten().flat_map(|name| {
            let paths = ["", "/v1/", "/v2/"].map(|path| format!("{scheme}://{name}{path}"));
            [name].into_iter().chain(paths)
        });
        let auth = hosts.filter_map(|host| config.auths.get(&host)).next().and_then(|entry| entry.auth.clone());
        if let Some(auth) = auth.filter(|auth| !auth.is_empty()) {
            let plain = STANDARD.decode(&auth).ok().and_then(|bytes| String::from_utf8(bytes).ok());
            if !plain.is_some_and(|plain| plain.contains(':')) {
                return Err(invalid(format!("the entry of {host} is not USER:PASSWORD in base64")));
            }
            return Ok(Some(auth));
        }
    }
    Ok(None)
}
