//! Errors of requests to a registry.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use ferry_image::error_chain;

use crate::manifest::{MANIFEST_BYTES_MAX, Sha256};

/// Why an image could not be pushed or pulled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid reference.
    #[error("{text:?} is not the location of an image: {reason}; write oci:HOST/NAME:TAG or s3:BUCKET/PREFIX:TAG")]
    Reference {
        /// The reference.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An invalid environment variable.
    #[error("{what}: {reason}")]
    Setting {
        /// The variable, or what it sets.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The server would be contacted without encryption.
    #[error("{0} is not contacted without encryption; allow it with --plain-http")]
    Plain(String),
    /// A server redirects to a forbidden URL.
    #[error("{from} redirects to {to}: {reason}")]
    Redirect {
        /// The redirecting server.
        from: String,
        /// The URL that it names.
        to: String,
        /// Why that is forbidden.
        reason: &'static str,
    },
    /// A registry names a token server that must not get credentials.
    #[error(
        "{registry} names {realm} as its server of tokens; credentials are sent there only if both use https, or if it is the registry itself"
    )]
    Realm {
        /// The registry.
        registry: String,
        /// The token server.
        realm: String,
    },
    /// A server is not reachable, or the connection was lost.
    #[error("{url}: {why}{}", advice(.why))]
    Transport {
        /// The URL of the request.
        url: String,
        /// The cause.
        why: Box<ureq::Error>,
    },
    /// A response is incomplete.
    #[error("{url}: the response ends after {received} of {wanted} bytes")]
    Short {
        /// The URL of the request.
        url: String,
        /// The number of bytes received.
        received: u64,
        /// The number of bytes requested.
        wanted: u64,
    },
    /// A server refuses a request.
    #[error("{url}: the server answers {status}{}", explanation(.text))]
    Status {
        /// The URL of the request.
        url: String,
        /// The status of HTTP.
        status: u16,
        /// The text of the response.
        text: String,
        /// How long to wait before the next attempt.
        retry_after: Option<Duration>,
    },
    /// There is no such image.
    #[error("there is no image {0}")]
    NoImage(String),
    /// An invalid response.
    #[error("{url}: {reason}")]
    Response {
        /// The URL of the request.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// A manifest that does not describe an image of Ferry.
    #[error("the manifest of {name} is not that of a Ferry image: {reason}")]
    Manifest {
        /// The image.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// An image has too many parts for one manifest.
    #[error(
        "{name}: the manifest of its {parts} parts has {bytes} bytes, and registries accept {MANIFEST_BYTES_MAX}: split the tree into several images"
    )]
    TooManyParts {
        /// The image.
        name: String,
        /// The number of blobs.
        parts: usize,
        /// The length of its manifest in bytes.
        bytes: u64,
    },
    /// A blob has another digest than the manifest says, from all servers that have it.
    #[error("{name}: the blob sha256:{blob} came damaged")]
    Damaged {
        /// The image.
        name: String,
        /// The expected digest.
        blob: Sha256,
    },
    /// A container image that cannot be used.
    #[error("the container image {name}: {reason}")]
    Container {
        /// The image.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A server sends whole blobs only.
    #[error("{url}: the server sends whole blobs only, not the requested parts")]
    NoRanges {
        /// The URL of the request.
        url: String,
    },
    /// An image or a store is not usable.
    #[error(transparent)]
    Image(#[from] ferry_image::Error),
    /// An object is not available.
    #[error("{0}")]
    Object(ferry_image::ObjectError),
    /// A file cannot be used.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Two independent errors.
    #[error("{}; {}", error_chain(.0), error_chain(.1))]
    Both(Box<Error>, Box<Error>),
    /// The pull failed; a part of the image is kept.
    #[error("the image is not complete; what came so far is kept for the next try: {0}")]
    Incomplete(Box<Error>),
    /// The consumer of the bytes failed.
    #[error("{0}")]
    Sink(io::Error),
}

impl From<ferry_image::ObjectError> for Error {
    fn from(bad: ferry_image::ObjectError) -> Self {
        Self::Object(bad)
    }
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns whether a retry of the request may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        use ureq::Error as U;
        match self {
            // A proxy sends whole blobs until it has them.
            Self::Short { .. } | Self::NoRanges { .. } => true,
            // 499 and 520 to 527 are from proxies, for failures of the server behind them.
            Self::Status { status, .. } => {
                matches!(status, 408 | 425 | 429 | 499 | 500 | 502..=504 | 520..=527)
            }
            // An invalid certificate stays invalid.
            Self::Transport { why, .. } if matches!(tls_error(why), Some(rustls::Error::InvalidCertificate(_))) => {
                false
            }
            Self::Transport { why, .. } => matches!(
                **why,
                U::Io(_) | U::Timeout(_) | U::HostNotFound | U::ConnectionFailed | U::Protocol(_) | U::BodyStalled
            ),
            _ => false,
        }
    }

    /// Returns how long the server wants the client to wait before the next attempt.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

/// Returns the error of TLS, if that is the cause.
fn tls_error(why: &ureq::Error) -> Option<&rustls::Error> {
    match why {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(error) => error.get_ref()?.downcast_ref(),
        _ => None,
    }
}

/// Returns the remedy for an untrusted certificate.
fn advice(why: &ureq::Error) -> &'static str {
    match tls_error(why) {
        Some(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer)) => {
            "; no authority that this host trusts has signed its certificate: set SSL_CERT_FILE to a PEM file with the authorities to trust"
        }
        _ => "",
    }
}

fn explanation(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupted_handshakes_are_retried_and_invalid_certificates_are_not() {
        let is_transient = |why: rustls::Error| {
            let why = Box::new(io::Error::new(io::ErrorKind::InvalidData, why).into());
            Error::Transport { url: "https://registry.invalid".into(), why }.is_transient()
        };
        assert!(is_transient(rustls::Error::AlertReceived(rustls::AlertDescription::InternalError)));
        assert!(!is_transient(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer)));
    }

    #[test]
    fn failures_of_proxies_are_retried_and_refusals_are_not() {
        let is_transient = |status| {
            Error::Status { url: String::new(), status, text: String::new(), retry_after: None }.is_transient()
        };
        for status in [429, 499, 503, 520, 527] {
            assert!(is_transient(status), "{status}");
        }
        for status in [400, 404, 416, 501, 505, 528] {
            assert!(!is_transient(status), "{status}");
        }
    }
}
