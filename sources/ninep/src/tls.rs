//! TLS 1.3 for TCP, by rustls: the server is authenticated, and this client, too, if it has a certificate.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferry_pem::{PemError, certificates, explain_version, private_key};
use ferry_vfs::sync::lock;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, CertificateError, ClientConfig, ClientConnection, RootCertStore};

use crate::transport::{Stream, Tcp, Transport, ended_by};

/// The size of a read from the socket in bytes: several records.
const RAW_BYTES: usize = 64 << 10;
/// The size of encrypted pieces: nothing is decrypted meanwhile.
const PIECE_BYTES: usize = 64 << 10;

/// Why TLS cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file has no certificate or key.
    #[error(transparent)]
    Pem(#[from] PemError),
    /// A certificate or key is unusable.
    #[error("{path} cannot be used: {what}", path = .0.display(), what = .1)]
    Unusable(PathBuf, String),
    /// A certificate cannot contain this host name.
    #[error("{0:?} is no name or address that a certificate can be for")]
    Host(String),
}

/// A TCP port with TLS.
#[derive(Clone)]
pub struct Tls {
    tcp: Tcp,
    name: ServerName<'static>,
    config: Arc<ClientConfig>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the authorities for the server's certificate, which must be valid for this host, and this client's own
    /// certificate chain and key, if the server requires one; all in PEM.
    ///
    /// # Errors
    ///
    /// [`TlsError`]: a file is missing, invalid, or does not match the other.
    pub fn new(tcp: Tcp, authorities: &Path, own: Option<(&Path, &Path)>) -> Result<Self, TlsError> {
        let name = ServerName::try_from(tcp.host.clone()).map_err(|_| TlsError::Host(tcp.host.clone()))?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates(authorities)? {
            roots.add(certificate).map_err(|error| TlsError::Unusable(authorities.into(), error.to_string()))?;
        }
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| TlsError::Unusable(authorities.into(), error.to_string()))?
            .with_root_certificates(roots);
        let mut config = match own {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = certificates(certificate)?;
                let secret = private_key(key)?;
                let unusable = |error: rustls::Error| match error {
                    rustls::Error::InvalidCertificate(_) => TlsError::Unusable(certificate.into(), explained(&error)),
                    _ => TlsError::Unusable(key.into(), explained(&error)),
                };
                builder.with_client_auth_cert(chain, secret).map_err(unusable)?
            }
        };
        // Certificates are verified on each connection.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Self { tcp, name, config: Arc::new(config) })
    }
}

impl Transport for Tls {
    fn connect(&self, timeout: Duration) -> io::Result<Stream> {
        let mut socket = self.tcp.socket(timeout)?;
        let mut tls = ClientConnection::new(Arc::clone(&self.config), self.name.clone()).map_err(io::Error::other)?;
        tls.set_buffer_limit(None);
        // A silent server is disconnected during the handshake; afterwards it may be silent while no reply is due.
        socket.set_read_timeout(Some(timeout))?;
        while tls.is_handshaking() {
            tls.complete_io(&mut socket).map_err(meant)?;
        }
        socket.set_read_timeout(None)?;
        let (incoming, outgoing) = (socket.try_clone()?, socket.try_clone()?);
        let tls = Arc::new(Mutex::new(tls));
        let reader = Reader { tls: Arc::clone(&tls), socket: incoming, raw: vec![0; RAW_BYTES], from: 0, to: 0 };
        let writer = Writer { tls, socket: outgoing, sealed: Vec::new() };
        Ok(Stream { reader: Box::new(reader), writer: Box::new(writer), hang_up: ended_by(socket) })
    }

    fn address(&self) -> String {
        self.tcp.address().replacen("tcp:", "tls:", 1)
    }
}

/// The reader of the server's data. It never sends, so that it and the server cannot wait for each other to read: TLS's
/// own messages (the reply to a key update) are sent with the next request.
struct Reader {
    tls: Arc<Mutex<ClientConnection>>,
    socket: TcpStream,
    /// Encrypted bytes; those from `from` to `to` are not yet decrypted.
    raw: Vec<u8>,
    from: usize,
    to: usize,
}

impl Read for Reader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(count) = self.decipher(bytes)? {
                return Ok(count);
            }
            (self.from, self.to) = (0, self.socket.read(&mut self.raw)?);
            if self.to == 0 {
                return Ok(0);
            }
        }
    }
}

impl Reader {
    /// Returns decrypted data; `None` if more must arrive on the socket.
    fn decipher(&mut self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        let mut tls = lock(&self.tls);
        loop {
            match tls.reader().read(bytes) {
                Ok(count) => return Ok(Some(count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // 9P messages carry their lengths, so an unannounced end makes no difference.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Some(0)),
                Err(error) => return Err(error),
            }
            if self.from == self.to {
                return Ok(None);
            }
            let mut raw = &self.raw[self.from..self.to];
            self.from += tls.read_tls(&mut raw)?;
            tls.process_new_packets().map_err(|error| meant(io::Error::new(io::ErrorKind::InvalidData, error)))?;
        }
    }
}

/// The sending half. One thread at a time uses it, so records leave in order.
struct Writer {
    tls: Arc<Mutex<ClientConnection>>,
    socket: TcpStream,
    sealed: Vec<u8>,
}

impl Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(PIECE_BYTES);
        self.sealed.clear();
        {
            let mut tls = lock(&self.tls);
            tls.writer().write_all(&bytes[..count]).map_err(meant)?;
            while tls.wants_write() {
                tls.write_tls(&mut self.sealed)?;
            }
        }
        // Without the lock: the socket may take these only after the reader has read.
        self.socket.write_all(&self.sealed)?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the error with a remedy.
fn meant(error: io::Error) -> io::Error {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner {
        Some(inner) => io::Error::new(error.kind(), explained(inner)),
        None => error,
    }
}

/// Explains the likely cause of a failure.
fn explained(error: &rustls::Error) -> String {
    use rustls::Error as Tls;
    if let Some(remedy) = explain_version(error) {
        return remedy;
    }
    match error {
        Tls::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "its certificate is signed by none of the authorities that were given".into()
        }
        Tls::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => format!("its certificate is for another name ({error})"),
        Tls::AlertReceived(AlertDescription::CertificateRequired) => {
            "it wants a client's certificate, and none was given".into()
        }
        Tls::AlertReceived(alert) => format!("it does not accept this client: alert {alert:?}"),
        Tls::InvalidMessage(_) => format!("it does not speak TLS, or not as it should ({error})"),
        other => other.to_string(),
    }
}
