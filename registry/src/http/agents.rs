//! The agents of a client, and the certificates in files that they use. Both are replaced while a process serves an image for weeks.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sha2::Digest as _;
use ureq::Agent;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};
use ureq::unversioned::transport::{Connector, DefaultConnector};

use super::proxy;
use crate::error::{Error, Result};
use crate::hosts::Host;
use crate::identities::{self, Identity};
use crate::resolver::{OriginResolver, RemoteResolver, shown};

/// The maximum number of idle connections.
pub(super) const IDLE_MAX: usize = 32;
/// The time between two reads of the files after failures of TLS: a read takes some milliseconds, and a server may fail for long.
const READ_PAUSE: Duration = Duration::from_secs(5);
/// The time between two looks at whether a host's own files have changed.
const LOOK_PAUSE: Duration = Duration::from_secs(10);

/// One agent for each kind of server.
#[derive(Debug)]
pub(super) struct Agents {
    /// For requests to the origin.
    pub origin: Agent,
    /// For requests to other servers: it never connects to this machine.
    pub remote: Agent,
    /// For requests to other servers, if the origin is on this machine.
    pub any: Agent,
}

impl Agents {
    fn new(
        trusted: &[Certificate<'static>],
        client: Option<ClientCert>,
        connector: impl Connector,
        skip_verify: bool,
        is_remote: &Arc<AtomicBool>,
    ) -> Self {
        let trusted = RootCerts::new_with_certs(trusted);
        let (provider, proxy) = (provider(), proxy::of_environment());
        let config = |client: Option<ClientCert>| {
            let tls = TlsConfig::builder()
                .root_certs(trusted.clone())
                .client_cert(client)
                .disable_verification(skip_verify)
                .unversioned_rustls_crypto_provider(Arc::clone(&provider))
                .build();
            Agent::config_builder()
                .http_status_as_error(false)
                .max_redirects(0)
                .max_redirects_will_error(false)
                .tls_config(tls)
                .proxy(proxy.clone())
                .max_idle_connections(IDLE_MAX)
                .max_idle_connections_per_host(IDLE_MAX)
                .user_agent(concat!("ferry/", env!("CARGO_PKG_VERSION")))
                .build()
        };
        // The host's certificate is for no other one.
        let (origin, others) = (config(client), config(None));
        let mut resolver = OriginResolver::default();
        resolver.is_remote = Arc::clone(is_remote);
        Self {
            origin: Agent::with_parts(origin, connector, resolver),
            any: others.new_agent(),
            remote: Agent::with_parts(others, DefaultConnector::default(), RemoteResolver::default()),
        }
    }

    fn of_host(host: &Host, found: Certificates, is_remote: &Arc<AtomicBool>) -> Result<Self> {
        let Certificates { trusted, mut identities } = found;
        if identities.is_empty() {
            return Ok(Self::new(&trusted, None, DefaultConnector::default(), host.skip_verify, is_remote));
        }
        let connector = identities::connector(&identities, &trusted, host.skip_verify, &provider());
        let connector = connector.map_err(|reason| Error::Setting {
            what: format!("a certificate of this machine for {}", shown(&host.url)),
            reason,
        })?;
        // The library knows one, which it always sends. It panics if the key is of another certificate, which is checked by now.
        match identities.pop() {
            Some(Identity { certificates, key }) if identities.is_empty() => {
                let client = Some(ClientCert::new_with_certs(&certificates, key));
                Ok(Self::new(&trusted, client, DefaultConnector::default(), host.skip_verify, is_remote))
            }
            _ => Ok(Self::new(&trusted, None, connector, host.skip_verify, is_remote)),
        }
    }
}

/// The certificates in the files.
struct Certificates {
    /// The authorities to trust.
    trusted: Vec<Certificate<'static>>,
    /// Those of this machine.
    identities: Vec<Identity>,
}

impl Certificates {
    /// Reads the authorities that this machine trusts, and the files of a host.
    fn read(host: Option<&Host>) -> Result<Self> {
        let (mut trusted, mut identities) = (authorities(), Vec::new());
        for path in host.iter().flat_map(|host| &host.authorities) {
            trusted.extend(pem(path)?.0);
        }
        for (certificate, key) in host.iter().flat_map(|host| &host.clients) {
            let invalid = |path: &Path| Error::Setting {
                what: format!("the certificate in {}", path.display()),
                reason: "it has no certificate or no key in PEM".into(),
            };
            let (certificates, _) = pem(certificate)?;
            let key = pem(key)?.1.ok_or_else(|| invalid(key))?;
            if certificates.is_empty() {
                return Err(invalid(certificate));
            }
            identities.push(Identity { certificates, key });
        }
        Ok(Self { trusted, identities })
    }

    /// Returns whether servers can be reached with them: without an authority only one that is not verified.
    fn are_enough(&self, host: Option<&Host>) -> bool {
        !self.trusted.is_empty() || host.is_some_and(|host| host.skip_verify)
    }

    /// Returns a digest of all of them.
    fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = sha2::Sha256::new();
        let mut add = |der: &[u8]| hasher.update(sha2::Sha256::digest(der));
        self.trusted.iter().for_each(|one| add(one.der()));
        for Identity { certificates, key } in &self.identities {
            certificates.iter().for_each(|one| add(one.der()));
            add(key.der());
        }
        hasher.finalize().into()
    }
}

/// What tells one version of a file from another: its inode, the time of its last change, and its length.
type Stamp = Option<(u64, i64, i64, u64)>;

fn stamps(host: Option<&Host>) -> Vec<Stamp> {
    let files = |host: &Host| {
        let clients = host.clients.iter().flat_map(|(certificate, key)| [certificate, key]);
        host.authorities.iter().chain(clients).cloned().collect::<Vec<PathBuf>>()
    };
    let stamp = |path: PathBuf| {
        let found = fs::metadata(path).ok()?;
        Some((found.ino(), found.mtime(), found.mtime_nsec(), found.size()))
    };
    host.map(files).unwrap_or_default().into_iter().map(stamp).collect()
}

/// Agents that are made again when the certificates in the files have changed.
#[derive(Debug)]
pub(super) struct RenewedAgents {
    host: Option<Host>,
    is_remote: Arc<AtomicBool>,
    current: Mutex<Current>,
}

#[derive(Debug)]
struct Current {
    agents: Arc<Agents>,
    fingerprint: [u8; 32],
    stamps: Vec<Stamp>,
    /// When the stamps were compared.
    looked: Instant,
    /// When the files were read again.
    read: Option<Instant>,
    /// The error of that, which is logged once.
    error: Option<String>,
}

impl RenewedAgents {
    /// Creates agents that trust the authorities of this machine.
    pub(super) fn new(is_remote: Arc<AtomicBool>) -> Self {
        let found = Certificates { trusted: authorities(), identities: Vec::new() };
        let agents = Agents::new(&found.trusted, None, DefaultConnector::default(), false, &is_remote);
        Self::with(None, is_remote, Vec::new(), found.fingerprint(), agents)
    }

    /// Creates agents for a server of a `hosts.toml`.
    pub(super) fn of_host(host: &Host, is_remote: Arc<AtomicBool>) -> Result<Self> {
        // Before the files are read, so that a later change is noticed.
        let stamps = stamps(Some(host));
        let found = Certificates::read(Some(host))?;
        let fingerprint = found.fingerprint();
        let agents = Agents::of_host(host, found, &is_remote)?;
        Ok(Self::with(Some(host.clone()), is_remote, stamps, fingerprint, agents))
    }

    fn with(
        host: Option<Host>,
        is_remote: Arc<AtomicBool>,
        stamps: Vec<Stamp>,
        fingerprint: [u8; 32],
        agents: Agents,
    ) -> Self {
        let (agents, looked) = (Arc::new(agents), Instant::now());
        let current = Current { agents, fingerprint, stamps, looked, read: None, error: None };
        Self { host, is_remote, current: Mutex::new(current) }
    }

    /// Returns the agents. The files are read again if those of the host have changed: a server may refuse an old certificate of this
    /// machine after the handshake, by any status.
    pub(super) fn get(&self) -> Arc<Agents> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.looked.elapsed() >= LOOK_PAUSE {
            current.looked = Instant::now();
            let stamps = stamps(self.host.as_ref());
            if stamps != current.stamps && self.renew(&mut current) {
                current.stamps = stamps;
            }
        }
        Arc::clone(&current.agents)
    }

    /// Returns the agents after a failure of TLS.
    pub(super) fn get_after_failure(&self) -> Arc<Agents> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.read.is_none_or(|read| read.elapsed() >= READ_PAUSE) {
            self.renew(&mut current);
        }
        Arc::clone(&current.agents)
    }

    /// Reads the files, and makes the agents again if something has changed. What cannot be used is not taken: the files may be half
    /// replaced, or out of reach of a confined process. Returns whether the files could be read; otherwise that may be temporary.
    fn renew(&self, current: &mut Current) -> bool {
        current.read = Some(Instant::now());
        let host = self.host.as_ref();
        let found = Certificates::read(host);
        let is_read = found.as_ref().is_ok_and(|found| found.are_enough(host));
        let made = found.and_then(|found| {
            let fingerprint = found.fingerprint();
            if !is_read || fingerprint == current.fingerprint {
                return Ok(None);
            }
            let agents = match host {
                Some(host) => Agents::of_host(host, found, &self.is_remote)?,
                None => Agents::new(&found.trusted, None, DefaultConnector::default(), false, &self.is_remote),
            };
            Ok(Some((agents, fingerprint)))
        });
        let error = made.as_ref().err().map(Error::to_string);
        if let Some(error) = &error
            && current.error.as_ref() != Some(error)
        {
            tracing::warn!("{error}: connections use the certificates that were there before");
        }
        current.error = error;
        if let Ok(Some((agents, fingerprint))) = made {
            tracing::info!("certificates have changed: connections use the new ones");
            (current.agents, current.fingerprint) = (Arc::new(agents), fingerprint);
        }
        is_read
    }
}

/// Returns the authorities that this host trusts.
fn authorities() -> Vec<Certificate<'static>> {
    let found = rustls_native_certs::load_native_certs();
    for error in found.errors {
        tracing::debug!("cannot use a certificate of this host: {error}");
    }
    found.certs.iter().map(|one| Certificate::from_der(one).to_owned()).collect()
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Reads the certificates of a file, and its first key, by the parser of ureq, whose types they become.
fn pem(path: &Path) -> Result<(Vec<Certificate<'static>>, Option<PrivateKey<'static>>)> {
    let invalid = |reason: String| Error::Setting { what: path.display().to_string(), reason };
    let text = fs::read(path).map_err(|error| invalid(error.to_string()))?;
    let (mut certificates, mut key) = (Vec::new(), None);
    for item in parse_pem(&text) {
        match item.map_err(|error| invalid(error.to_string()))? {
            PemItem::Certificate(certificate) => certificates.push(certificate),
            PemItem::PrivateKey(found) => key = key.or(Some(found)),
            _ => {}
        }
    }
    Ok((certificates, key))
}

#[cfg(test)]
#[path = "../../../exports/ninep/tests/common/certificates.rs"]
#[allow(dead_code, missing_docs, unreachable_pub, reason = "a test uses a part")]
mod certificates;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use super::certificates::Certificates as Made;
    use super::*;

    /// A server may refuse an old certificate by a status, so there is no failure of TLS.
    #[test]
    fn a_certificate_that_is_replaced_is_used_without_a_failure() {
        let made = Made::new();
        made.authority("ours").signed("own", "ours", 3).signed("next", "ours", 3);
        let clients = vec![(made.path("own.pem"), made.path("own.key"))];
        let host = Host { clients, ..Host::of("https://registry.invalid/v2/".parse().unwrap()) };
        let agents = RenewedAgents::of_host(&host, Arc::default()).unwrap();
        let first = agents.get();
        let look = || {
            let mut current = agents.current.lock().unwrap();
            current.looked = current.looked.checked_sub(LOOK_PAUSE).unwrap();
            drop(current);
            agents.get()
        };
        assert!(Arc::ptr_eq(&first, &look()), "nothing has changed");
        // The certificate without its key.
        fs::rename(made.path("next.pem"), made.path("own.pem")).unwrap();
        assert!(Arc::ptr_eq(&first, &look()), "it is half replaced");
        fs::rename(made.path("next.key"), made.path("own.key")).unwrap();
        let second = look();
        assert!(!Arc::ptr_eq(&first, &second));
        fs::remove_file(made.path("own.pem")).unwrap();
        assert!(Arc::ptr_eq(&second, &look()), "it is away");
        // It cannot be read, as if no descriptor was left.
        fs::create_dir(made.path("own.pem")).unwrap();
        assert!(Arc::ptr_eq(&second, &look()));
        assert_ne!(agents.current.lock().unwrap().stamps, stamps(Some(&host)), "the change is looked at again");
    }

    #[test]
    fn authorities_are_needed_for_servers_that_are_verified() {
        let none = Certificates { trusted: Vec::new(), identities: Vec::new() };
        let verified = Host::of("https://registry.invalid/v2/".parse().unwrap());
        assert!(!none.are_enough(None) && !none.are_enough(Some(&verified)));
        assert!(none.are_enough(Some(&Host { skip_verify: true, ..verified })));
    }
}
