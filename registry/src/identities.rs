//! TLS with several certificates of this machine, of which the server's request selects one, as in containerd.
//!
//! The HTTP library knows one certificate, which it always sends. This connector takes the place of its own.

use std::fmt;
use std::io::{Read, Write};
use std::sync::Arc;

use rustls::client::ResolvesClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{
    ALL_VERSIONS, ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, SignatureScheme, StreamOwned,
};
use ureq::tls::{Certificate, PrivateKey};
use ureq::unversioned::transport::{
    Buffers, ConnectProxyConnector, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, TcpConnector,
    Transport, TransportAdapter,
};

/// A certificate of this machine, those of the authorities between it and a known one, and its key.
pub(crate) struct Identity {
    pub certificates: Vec<Certificate<'static>>,
    pub key: PrivateKey<'static>,
}

/// The certificates of this machine, in the order of the file.
#[derive(Debug)]
struct Identities(Vec<Arc<CertifiedKey>>);

impl ResolvesClientCert for Identities {
    /// Returns the first certificate that the server can use, or none.
    fn resolve(&self, authorities: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let is_usable = |identity: &&Arc<CertifiedKey>| {
            let is_known = |certificate: &CertificateDer<'_>| {
                ferry_pem::issuer(certificate).is_some_and(|issuer| authorities.contains(&&*issuer))
            };
            identity.key.choose_scheme(schemes).is_some()
                && (authorities.is_empty() || identity.cert.iter().any(is_known))
        };
        self.0.iter().find(is_usable).cloned()
    }

    fn has_certs(&self) -> bool {
        !self.0.is_empty()
    }
}

/// Takes any certificate of a server; its signature has to be right.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Connects, also by a proxy, and by TLS with one of the certificates. Returns what is wrong with a certificate.
pub(crate) fn connector(
    identities: &[Identity],
    trusted: &[Certificate<'static>],
    skip_verify: bool,
    provider: &Arc<CryptoProvider>,
) -> Result<impl Connector + use<>, String> {
    let certified = identities.iter().map(|Identity { certificates, key }| {
        let certificates = certificates.iter().map(|one| CertificateDer::from(one.der().to_vec())).collect();
        let key = PrivateKeyDer::try_from(key.der().to_vec()).map_err(str::to_owned)?;
        let certified = CertifiedKey::from_der(certificates, key, provider);
        certified.map(Arc::new).map_err(|error| error.to_string())
    });
    let certified = certified.collect::<Result<Vec<_>, String>>()?;
    let builder = ClientConfig::builder_with_provider(Arc::clone(provider)).with_protocol_versions(ALL_VERSIONS);
    let builder = builder.map_err(|error| error.to_string())?;
    let builder = if skip_verify {
        builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyServer(Arc::clone(provider))))
    } else {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(trusted.iter().map(|one| CertificateDer::from(one.der())));
        builder.with_root_certificates(roots)
    };
    let config = builder.with_client_cert_resolver(Arc::new(Identities(certified)));
    let tcp = ().chain(ConnectProxyConnector::default()).chain(TcpConnector::default());
    Ok(tcp.chain(TlsConnector(Arc::new(config))))
}

#[derive(Debug)]
struct TlsConnector(Arc<ClientConfig>);

impl<In: Transport> Connector<In> for TlsConnector {
    type Out = Either<In, TlsTransport>;

    fn connect(&self, details: &ConnectionDetails<'_>, chained: Option<In>) -> Result<Option<Self::Out>, ureq::Error> {
        let Some(transport) = chained else { return Ok(None) };
        if !details.needs_tls() || transport.is_tls() {
            return Ok(Some(Either::A(transport)));
        }
        let host = details.uri.host().unwrap_or_default();
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|_| ureq::Error::Tls("the server has no name that a certificate can have"))?;
        let mut connection = ClientConnection::new(Arc::clone(&self.0), name)?;
        let mut socket = TransportAdapter::new(transport.boxed(), Arc::clone(&details.current_time));
        socket.set_timeout(details.timeout);
        connection.complete_io(&mut socket)?;
        let buffers = LazyBuffers::new(details.config.input_buffer_size(), details.config.output_buffer_size());
        Ok(Some(Either::B(TlsTransport { buffers, stream: StreamOwned::new(connection, socket) })))
    }
}

struct TlsTransport {
    buffers: LazyBuffers,
    stream: StreamOwned<ClientConnection, TransportAdapter>,
}

impl fmt::Debug for TlsTransport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TlsTransport").finish_non_exhaustive()
    }
}

impl Transport for TlsTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        self.stream.sock.set_timeout(timeout);
        let output = &self.buffers.output()[..amount];
        Ok(self.stream.write_all(output)?)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        self.stream.sock.set_timeout(timeout);
        let amount = self.stream.read(self.buffers.input_append_buf())?;
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    fn is_open(&mut self) -> bool {
        self.stream.sock.get_mut().is_open()
    }

    fn is_tls(&self) -> bool {
        true
    }
}
