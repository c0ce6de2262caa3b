//! What can go wrong between here and a registry.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use ferry_image::told;

/// Why an image could not be pushed or pulled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A reference that is none.
    #[error("{text:?} is no place of an image: {reason}; write oci:HOST/NAME:TAG or s3:BUCKET/PREFIX:TAG")]
    Reference {
        /// What was written.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A setting of the environment that cannot be used.
    #[error("{what}: {reason}")]
    Setting {
        /// Which one.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Somebody would have to be asked without encryption.
    #[error("{0} is not asked without encryption, unless --plain-http says so")]
    Plain(String),
    /// A server sends elsewhere, where we do not go.
    #[error("{from} sends on to {to}: {reason}")]
    Redirect {
        /// Who does.
        from: String,
        /// Where to.
        to: String,
        /// Why not.
        reason: &'static str,
    },
    /// A registry names a server of tokens that cannot be trusted with credentials.
    #[error(
        "{registry} names {realm} as its server of tokens; credentials go there only if both are asked by https, or it is the registry itself"
    )]
    Realm {
        /// Who names it.
        registry: String,
        /// Which one.
        realm: String,
    },
    /// A server cannot be reached, or is gone in the middle.
    #[error("{url}: {why}{}", advice(.why))]
    Transport {
        /// What was asked for.
        url: String,
        /// What came of it.
        why: Box<ureq::Error>,
    },
    /// An answer breaks off.
    #[error("{url}: the answer breaks off after {got} of {wanted} bytes")]
    Short {
        /// What was asked for.
        url: String,
        /// How much came.
        got: u64,
        /// How much was to come.
        wanted: u64,
    },
    /// A server says no.
    #[error("{url}: the server answers {status}{}", said(.text))]
    Status {
        /// What was asked for.
        url: String,
        /// The status of HTTP.
        status: u16,
        /// What the server says beside it.
        text: String,
        /// When to ask again.
        after: Option<Duration>,
    },
    /// There is no such image.
    #[error("there is no image {0}")]
    NoImage(String),
    /// An answer that makes no sense.
    #[error("{url}: {reason}")]
    Answer {
        /// What was asked for.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// A manifest that tells of no image of Ferry's.
    #[error("the manifest of {name} tells of no image of Ferry's: {reason}")]
    Manifest {
        /// Whose.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A container image as podman and docker have them.
    #[error(
        "{name} is a container image, which holds archives: fetch it by \"skopeo copy {options}docker://{place} oci:DIR\", and make an image of Ferry's of it by \"ferry image build oci:DIR -o IMAGE --store STORE\""
    )]
    Container {
        /// Which one.
        name: String,
        /// What skopeo wants to be told first.
        options: &'static str,
        /// What skopeo calls it.
        place: String,
    },
    /// An image or a store cannot be used.
    #[error(transparent)]
    Image(#[from] ferry_image::Error),
    /// An object cannot be had.
    #[error("{0}")]
    Object(ferry_image::ObjectError),
    /// A file cannot be used.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// What was to be done with it.
        what: &'static str,
        /// Which one.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Two things went wrong that do not depend on each other.
    #[error("{}; {}", told(.0), told(.1))]
    Both(Box<Error>, Box<Error>),
    /// It ended before all was here; some of it is.
    #[error("the image is not complete; what came so far is kept for the next try: {0}")]
    Incomplete(Box<Error>),
    /// Who takes the bytes wants no more.
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
    /// Whether the same request may have another outcome soon.
    pub(crate) fn may_pass(&self) -> bool {
        use ureq::Error as U;
        match self {
            Self::Short { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504),
            // Who shows a certificate that is no good shows it again.
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

    /// How long the server wants to be left alone.
    pub(crate) fn after(&self) -> Option<Duration> {
        match self {
            Self::Status { after, .. } => *after,
            _ => None,
        }
    }
}

/// What is wrong with the encryption, if that is it.
fn tls_error(why: &ureq::Error) -> Option<&rustls::Error> {
    match why {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(error) => error.get_ref()?.downcast_ref(),
        _ => None,
    }
}

/// What helps against a certificate that nobody here vouches for.
fn advice(why: &ureq::Error) -> &'static str {
    match tls_error(why) {
        Some(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer)) => {
            "; nobody whom this host trusts has signed its certificate: SSL_CERT_FILE names a file in PEM with other authorities to trust"
        }
        _ => "",
    }
}

fn said(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handshake_that_breaks_off_may_pass_and_a_certificate_that_is_no_good_may_not() {
        let may_pass = |why: rustls::Error| {
            let why = Box::new(io::Error::new(io::ErrorKind::InvalidData, why).into());
            Error::Transport { url: "https://registry.invalid".into(), why }.may_pass()
        };
        assert!(may_pass(rustls::Error::AlertReceived(rustls::AlertDescription::InternalError)));
        assert!(!may_pass(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer)));
    }
}
