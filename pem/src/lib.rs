//! Certificates and keys from files in PEM, for 9P over TLS and for registries.
//!
//! ```
//! use ferry_pem::PemError;
//!
//! let found = ferry_pem::certificates("/dev/null".as_ref());
//! assert!(matches!(found, Err(PemError::Missing { what: "certificate", .. })));
//! ```
#![forbid(unsafe_code)]

use std::io;
use std::path::{Path, PathBuf};

use rustls::CertificateError;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_cert::certificate::{CertificateInner, Raw};
pub use x509_cert::der::DateTime;
use x509_cert::der::{Decode, Encode};

/// Why a file has no certificate or key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PemError {
    /// The file cannot be read.
    #[error("cannot read {}", .0.display())]
    Unreadable(PathBuf, #[source] io::Error),
    /// The file has other contents.
    #[error("{path} holds no {what} in PEM (a part that begins with -----BEGIN {label}-----)", path = .path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
        /// The PEM label.
        label: &'static str,
    },
    /// A certificate is malformed.
    #[error("{path} holds a certificate that cannot be used: {what}", path = .0.display(), what = .1)]
    Certificate(PathBuf, String),
}

fn read(path: &Path) -> Result<Vec<u8>, PemError> {
    std::fs::read(path).map_err(|error| PemError::Unreadable(path.into(), error))
}

/// Reads the certificates of a file, at least one.
///
/// # Errors
///
/// [`PemError`]: the file cannot be read, or has none.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    let found = found.map_err(|error| PemError::Certificate(path.into(), error.to_string()))?;
    if found.is_empty() {
        return Err(PemError::Missing { path: path.into(), what: "certificate", label: "CERTIFICATE" });
    }
    Ok(found)
}

/// Reads the first key of a file.
///
/// # Errors
///
/// [`PemError`]: the file cannot be read, or has none.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, PemError> {
    let missing = |_| PemError::Missing { path: path.into(), what: "private key", label: "PRIVATE KEY" };
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(missing)
}

/// Returns the first and last second in which a certificate is valid (RFC 5280, section 4.1.2.5); `None`: it is malformed.
#[must_use]
pub fn validity(certificate: &CertificateDer<'_>) -> Option<(DateTime, DateTime)> {
    let certificate = CertificateInner::<Raw>::from_der(certificate).ok()?;
    let validity = certificate.tbs_certificate().validity();
    Some((validity.not_before.to_date_time(), validity.not_after.to_date_time()))
}

/// Returns the name of the authority that has signed a certificate, in DER (RFC 5280, section 4.1.2.4); `None`: it is malformed.
#[must_use]
pub fn issuer(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    CertificateInner::<Raw>::from_der(certificate).ok()?.tbs_certificate().issuer().to_der().ok()
}

/// Returns a remedy for a certificate of X.509 version 1, for which rustls has no variant.
#[must_use]
pub fn explain_version(error: &rustls::Error) -> Option<String> {
    let rustls::Error::InvalidCertificate(CertificateError::Other(inner)) = error else { return None };
    (inner.to_string() == "UnsupportedCertVersion").then(|| {
        "the certificate is of X.509 version 1, and TLS needs version 3: have it signed with extensions \
         (openssl x509 -req -copy_extensions copy); ferry share --help shows all of it"
            .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_certificates_have_neither_times_nor_issuer() {
        for bytes in [
            &b""[..],
            b"\x30",
            b"\x30\x80",
            b"\x30\x80\0\0",
            b"\x30\x84\xff\xff\xff\xff",
            b"\x30\x84\xff\xff\xff\xff\0",
            b"\x30\x02\x30\x00",
            &[0x30; 40],
            &[0xa0; 40],
        ] {
            let certificate = CertificateDer::from(bytes);
            assert!(validity(&certificate).is_none() && issuer(&certificate).is_none(), "{bytes:?}");
        }
    }
}
