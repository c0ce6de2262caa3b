//! Credentials of pulls, for the lazy images of the same repository.
//!
//! `ROOT/lazy/KEY/credentials.json` has those of the last pull that succeeded, for the process of the image, which reads it each time that a
//! registry asks. It must outlive restarts: containers that run fetch data at any time. Only root can read it.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, rename};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ferry_vfs::sync::lock;

use super::labels::repository_of;
use crate::cri_api::PullImageRequest;
use crate::error::{IoContext, Result};

/// The name of the file beside an image.
pub(crate) const FILE: &str = "credentials.json";
/// How long the credentials of a pull that has begun are known. Its layers are prepared in this time.
const PULL_TIME: Duration = Duration::from_secs(3600);
/// The maximum number of repositories that are being pulled; those of the oldest pulls are forgotten.
const REPOSITORIES_MAX: usize = 1000;

/// The credentials of a pull.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// The registry and the repository: `HOST/NAME`.
    pub repository: String,
    /// `USER:PASSWORD` in base64.
    basic: String,
}

impl Credentials {
    /// Returns the credentials of a pull, if it has any that can be used: a user and a password.
    pub fn of(pull: &PullImageRequest) -> Option<Self> {
        let (image, auth) = (pull.image.as_ref()?, pull.auth.as_ref()?);
        let repository = repository_of(&image.image)?;
        let host = repository.split('/').next().unwrap_or_default();
        let server = host_of(&auth.server_address);
        if !server.is_empty() && server != host {
            return None;
        }
        let basic = match auth.auth.trim() {
            "" if auth.username.is_empty() || auth.password.is_empty() => return None,
            "" => STANDARD.encode(format!("{}:{}", auth.username, auth.password)),
            basic => basic.to_owned(),
        };
        STANDARD.decode(&basic).is_ok_and(|plain| plain.contains(&b':')).then_some(Self { repository, basic })
    }

    /// Reads the file beside an image, if there is one with credentials of this repository.
    pub fn read(directory: &Path, repository: &str) -> Option<Self> {
        let json: serde_json::Value = serde_json::from_slice(&fs::read(directory.join(FILE)).ok()?).ok()?;
        let basic = json.get("auths")?.get(repository)?.get("auth")?.as_str()?.to_owned();
        Some(Self { repository: repository.into(), basic })
    }

    /// Writes the file beside an image.
    ///
    /// # Errors
    ///
    /// It cannot be written.
    pub fn write(&self, directory: &Path) -> Result<()> {
        let (file, new) = (directory.join(FILE), directory.join(".credentials.json"));
        let text = serde_json::json!({"auths": {&self.repository: {"auth": self.basic}}}).to_string();
        let mut options = OpenOptions::new();
        let created = options.write(true).create(true).truncate(true).mode(0o600).open(&new);
        let write = |mut created: File| created.write_all(text.as_bytes()).and_then(|()| created.sync_all());
        created.and_then(write).doing("write to", &new)?;
        rename(&new, &file).doing("create", file)
    }
}

/// Returns the registry of a server's address, which may be a URL.
fn host_of(address: &str) -> &str {
    let address = address.split_once("://").map_or(address, |(_, rest)| rest);
    match address.split('/').next().unwrap_or_default() {
        "index.docker.io" | "registry-1.docker.io" => "docker.io",
        host => host,
    }
}

/// The credentials of the pulls that have begun.
#[derive(Debug, Default)]
pub(crate) struct PullCredentials(Mutex<BTreeMap<String, (Instant, Credentials)>>);

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("repository", &self.repository).finish_non_exhaustive()
    }
}

impl PullCredentials {
    /// Remembers the credentials of a pull.
    pub fn add(&self, credentials: &Credentials) {
        let mut all = lock(&self.0);
        all.retain(|_, (when, _)| when.elapsed() < PULL_TIME);
        if all.len() >= REPOSITORIES_MAX
            && let Some(oldest) = all.iter().min_by_key(|(_, (when, _))| *when).map(|(name, _)| name.clone())
        {
            all.remove(&oldest);
        }
        all.insert(credentials.repository.clone(), (Instant::now(), credentials.clone()));
    }

    /// Returns those of a repository.
    pub fn get(&self, repository: &str) -> Option<Credentials> {
        let all = lock(&self.0);
        all.get(repository).filter(|(when, _)| when.elapsed() < PULL_TIME).map(|(_, credentials)| credentials.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use proptest::prelude::*;

    use super::*;
    use crate::cri_api::{AuthConfig, ImageSpec};

    fn pull(image: &str, [username, password, auth, server_address]: [&str; 4]) -> PullImageRequest {
        let [username, password, auth, server_address] = [username, password, auth, server_address].map(str::to_owned);
        PullImageRequest {
            image: Some(ImageSpec { image: image.into() }),
            auth: Some(AuthConfig { username, password, auth, server_address }),
        }
    }

    #[test]
    fn users_and_passwords_are_kept_for_the_repository_of_a_pull() {
        for (image, auth, expected) in [
            ("h:5000/a/b:1", ["me", "x:y", "", ""], Some(("h:5000/a/b", "bWU6eDp5"))),
            ("h.io/a@sha256:0", ["", "", "bWU6eA==", "https://h.io/v2/"], Some(("h.io/a", "bWU6eA=="))),
            ("debian", ["me", "x", "", "https://index.docker.io/v1/"], Some(("docker.io/library/debian", "bWU6eA=="))),
            ("team/app:2", ["me", "x", "", ""], Some(("docker.io/team/app", "bWU6eA=="))),
            // Of another server, without a password, and what is neither.
            ("h.io/a:1", ["me", "x", "", "other"], None),
            ("h.io/a:1", ["me", "", "", ""], None),
            ("h.io/a:1", ["", "", "!", ""], None),
            ("h.io/a:1", ["", "", "c2VjcmV0", ""], None),
            ("", ["me", "x", "", ""], None),
        ] {
            let found = Credentials::of(&pull(image, auth));
            let found = found.as_ref().map(|found| (&*found.repository, &*found.basic));
            assert_eq!(found, expected, "{image} {auth:?}");
        }
        assert_eq!(Credentials::of(&PullImageRequest::default()), None);
    }

    #[test]
    fn the_file_is_for_root_and_the_log_has_no_secrets() {
        let directory = tempfile::tempdir().unwrap();
        let credentials = Credentials::of(&pull("h.io/a:1", ["me", "x", "", ""])).unwrap();
        assert!(!format!("{credentials:?}").contains("bWU6eA"));
        for _ in 0..2 {
            credentials.write(directory.path()).unwrap();
            let file = directory.path().join(FILE);
            assert_eq!(fs::read_to_string(&file).unwrap(), r#"{"auths":{"h.io/a":{"auth":"bWU6eA=="}}}"#);
            assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
            assert_eq!(Credentials::read(directory.path(), "h.io/a"), Some(credentials.clone()));
            assert_eq!(Credentials::read(directory.path(), "h.io/b"), None);
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        fs::write(directory.path().join(FILE), "[1").unwrap();
        assert_eq!(Credentials::read(directory.path(), "h.io/a"), None);
    }

    proptest! {
        #[test]
        fn every_pull_is_understood_or_ignored(image in "\\PC{0,40}", auth in "\\PC{0,20}", server in "\\PC{0,20}") {
            if let Some(found) = Credentials::of(&pull(&image, ["me", "word", &auth, &server])) {
                prop_assert!(found.repository.contains('/'));
            }
        }
    }

    #[test]
    fn the_oldest_pulls_are_forgotten() {
        let known = PullCredentials::default();
        for number in 0..=REPOSITORIES_MAX {
            let image = format!("h.io/{number}:1");
            known.add(&Credentials::of(&pull(&image, ["me", "x", "", ""])).unwrap());
        }
        assert!(known.get("h.io/0").is_none() && known.get("h.io/1").is_some());
    }
}
