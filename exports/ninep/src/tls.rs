//! TLS 1.3 for TCP sockets, by rustls; without session resumption, so that certificates are checked each time.

use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use ferry_pem::DateTime;
use ferry_pem::{PemError, certificates, explain_version, private_key};
use rustix::io::Errno;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::CertificateDer;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{InconsistentKeys, RootCertStore, ServerConfig, ServerConnection};

use crate::stream::{give, take};

/// The maximum of buffered outgoing bytes: four records.
const UNSENT_BYTES_MAX: usize = 64 << 10;
/// Reads without data in a row before other connections are served: a handshake takes three.
const LOOKS_MAX: usize = 16;

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file has no certificate or key.
    #[error(transparent)]
    Pem(#[from] PemError),
    /// A certificate is invalid.
    #[error("{path} holds a certificate that cannot be used: {what}", path = .0.display(), what = .1)]
    Certificate(PathBuf, String),
    /// The two files are not a pair.
    #[error("the key in {} does not belong to the certificate in {}", .key.display(), .certificate.display())]
    Mismatch {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
    },
    /// The certificate has expired.
    #[error("the certificate in {path} has expired, on {what}; clients refuse it: renew it", path = .0.display(), what = .1)]
    Expired(PathBuf, String),
    /// The certificate is not valid yet.
    #[error("the certificate in {path} is valid only from {what} on; clients refuse it until then: is this machine's clock right?", path = .0.display(), what = .1)]
    Early(PathBuf, String),
    /// The key's type is not supported.
    #[error("the key in {path} cannot be used: {what}", path = .0.display(), what = .1)]
    Key(PathBuf, String),
}

/// The identity of a server, and the clients that it accepts.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ServerConfig>,
    /// Clients must have a certificate.
    pub(crate) checks_clients: bool,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("checks_clients", &self.checks_clients).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads a server's certificate chain, its key, and the authorities one of which must have signed a client's
    /// certificate; all in PEM. Without authorities every client is accepted.
    ///
    /// # Errors
    ///
    /// [`TlsError`]: a file is missing, invalid, or does not match the others.
    pub fn read(certificate: &Path, key: &Path, client_ca: Option<&Path>) -> Result<Self, TlsError> {
        let chain = certificates(certificate)?;
        if let Some(own) = chain.first() {
            check_times(certificate, own)?;
        }
        let secret = private_key(key)?;
        let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsError::Key(key.into(), error.to_string()))?;
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(file) => builder.with_client_cert_verifier(authorities(file)?),
        };
        let mut config = builder.with_single_cert(chain, secret).map_err(|error| match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                TlsError::Mismatch { certificate: certificate.into(), key: key.into() }
            }
            rustls::Error::InvalidCertificate(_) => TlsError::Certificate(certificate.into(), explained(&error)),
            _ => TlsError::Key(key.into(), error.to_string()),
        })?;
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Self { config: Arc::new(config), checks_clients: client_ca.is_some() })
    }
}

fn check_times(path: &Path, certificate: &CertificateDer<'_>) -> Result<(), TlsError> {
    let unusable = |what: &str| TlsError::Certificate(path.into(), what.into());
    let (from, until) =
        ferry_pem::validity(certificate).ok_or_else(|| unusable("it does not say from when to when it is valid"))?;
    // `YYYY-MM-DD`, and then the time.
    let day = |time: DateTime| time.to_string().split('T').next().unwrap_or_default().to_owned();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    if now.as_secs() > until.unix_duration().as_secs() {
        return Err(TlsError::Expired(path.into(), day(until)));
    }
    if now < from.unix_duration() {
        return Err(TlsError::Early(path.into(), day(from)));
    }
    Ok(())
}

fn authorities(path: &Path) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>, TlsError> {
    let unusable = |what: String| TlsError::Certificate(path.into(), what);
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        check_times(path, &certificate)?;
        roots.add(certificate).map_err(|error| unusable(error.to_string()))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(default_provider()))
        .build()
        .map_err(|error: VerifierBuilderError| unusable(error.to_string()))
}

/// The TLS channel of a client.
#[derive(Debug)]
pub(crate) struct Channel {
    connection: ServerConnection,
    /// Why it failed.
    failure: Option<String>,
    unread: bool,
}

/// The socket in the form that rustls requires.
struct Socket<'a>(BorrowedFd<'a>);

impl Read for Socket<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(take(self.0, bytes)?)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(give(self.0, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

impl Channel {
    pub(crate) fn new(tls: &Tls) -> Option<Self> {
        let mut connection = ServerConnection::new(Arc::clone(&tls.config)).ok()?;
        connection.set_buffer_limit(Some(UNSENT_BYTES_MAX));
        Some(Self { connection, failure: None, unread: false })
    }

    pub(crate) fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    pub(crate) fn unread(&self) -> bool {
        self.unread
    }

    pub(crate) fn unsent(&self) -> bool {
        self.connection.wants_write()
    }

    /// Reads data; handles other records on the way.
    pub(crate) fn recv(&mut self, fd: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<usize, Errno> {
        for _ in 0..LOOKS_MAX {
            match self.connection.reader().read(bytes) {
                Ok(count) => {
                    self.unread = count > 0 && self.process(fd)?;
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // 9P messages carry their lengths, so an unannounced end makes no difference.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                Err(error) => return Err(errno(&error)),
            }
            self.unread = false;
            self.connection.read_tls(&mut Socket(fd)).map_err(|error| errno(&error))?;
            self.unread = self.process(fd)?;
            self.flush(fd)?;
        }
        // If the socket still has data, epoll reports it at once.
        Err(Errno::AGAIN)
    }

    /// Decrypts received bytes; returns whether there is something to read, even the end.
    fn process(&mut self, fd: BorrowedFd<'_>) -> Result<bool, Errno> {
        match self.connection.process_new_packets() {
            Ok(state) => Ok(state.plaintext_bytes_to_read() > 0 || state.peer_has_closed()),
            Err(error) => {
                self.failure.get_or_insert(explained(&error));
                // Sends the alert, if there is room for it.
                let _ = self.flush(fd);
                Err(Errno::PROTO)
            }
        }
    }

    /// Accepts data, unless earlier data is unsent.
    pub(crate) fn send(&mut self, fd: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Errno> {
        self.flush(fd)?;
        if self.unsent() {
            return Err(Errno::AGAIN);
        }
        let count = self.connection.writer().write(bytes).map_err(|error| errno(&error))?;
        self.flush(fd)?;
        Ok(count)
    }

    pub(crate) fn flush(&mut self, fd: BorrowedFd<'_>) -> Result<bool, Errno> {
        let mut some = false;
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut Socket(fd)) {
                Ok(count) => some |= count > 0,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(errno(&error)),
            }
        }
        Ok(some)
    }

    pub(crate) fn close(&mut self, fd: BorrowedFd<'_>) -> Option<String> {
        self.connection.send_close_notify();
        let _ = self.flush(fd);
        self.failure.take()
    }
}

/// Returns the likely cause of a failure.
fn explained(error: &rustls::Error) -> String {
    if let Some(remedy) = explain_version(error) {
        return remedy;
    }
    match error {
        rustls::Error::InvalidMessage(_) => format!("it does not speak TLS, or not as it should ({error})"),
        rustls::Error::NoCertificatesPresented => "it sent no certificate, and one is required".into(),
        rustls::Error::AlertReceived(alert) => format!("it does not accept this server: alert {alert:?}"),
        other => other.to_string(),
    }
}
