//! The messages of CRI's image service that are read here. Source: `pkg/apis/runtime/v1/api.proto` of k8s.io/cri-api, service `ImageService`.
//!
//! They are written by hand, as in [`crate::api`], with the fields that are needed.

use prost::Message;

/// The service, as in the path of a call.
pub const IMAGE_SERVICE: &str = "/runtime.v1.ImageService/";
/// The length of the head of a message of gRPC: whether it is compressed, and its length.
const FRAME_HEAD_BYTES: usize = 5;

/// The request of PullImage. Other fields are not needed here.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PullImageRequest {
    /// The image.
    #[prost(message, optional, tag = "1")]
    pub image: Option<ImageSpec>,
    /// The credentials.
    #[prost(message, optional, tag = "2")]
    pub auth: Option<AuthConfig>,
}

/// An image, by its reference.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ImageSpec {
    /// The reference, as in a pod.
    #[prost(string, tag = "1")]
    pub image: String,
}

/// Credentials for a registry. The messages of a log must not have them.
#[derive(Clone, PartialEq, Eq, prost::Message)]
#[prost(skip_debug)]
pub struct AuthConfig {
    /// The name of the user.
    #[prost(string, tag = "1")]
    pub username: String,
    /// The password.
    #[prost(string, tag = "2")]
    pub password: String,
    /// `USER:PASSWORD` in base64, instead of both.
    #[prost(string, tag = "3")]
    pub auth: String,
    /// The registry that they are for, if they are not for any.
    #[prost(string, tag = "4")]
    pub server_address: String,
}

impl std::fmt::Debug for AuthConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthConfig").field("server_address", &self.server_address).finish_non_exhaustive()
    }
}

/// Parses the message of a pull with its head, as kubelet sends it; `None`: it is compressed, or containerd will refuse it.
#[must_use]
pub fn parse_pull(frame: &[u8]) -> Option<PullImageRequest> {
    let head = frame.first_chunk::<FRAME_HEAD_BYTES>()?;
    let length = usize::try_from(u32::from_be_bytes([head[1], head[2], head[3], head[4]])).ok()?;
    let message = frame.get(FRAME_HEAD_BYTES..)?.get(..length)?;
    (head[0] == 0).then(|| PullImageRequest::decode(message).ok())?
}

#[cfg(test)]
mod tests {
    use hyper::body::Bytes;
    use proptest::prelude::*;

    use super::*;

    fn frame(message: &[u8]) -> Bytes {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0][..], &length, message].concat().into()
    }

    #[test]
    fn pulls_are_parsed() {
        let image = Some(ImageSpec { image: "h/a:1".into() });
        let auth = Some(AuthConfig { username: "me".into(), password: "secret".into(), ..AuthConfig::default() });
        let pull = PullImageRequest { image, auth };
        assert!(!format!("{pull:?}").contains("secret"));
        let message = pull.encode_to_vec();
        assert_eq!(parse_pull(&frame(&message)), Some(pull.clone()));
        let whole = frame(&message);
        assert_eq!(parse_pull(&whole.slice(..whole.len() - 1)), None, "cut off");
        let mut compressed = whole.to_vec();
        compressed[0] = 1;
        assert_eq!(parse_pull(&compressed), None);
    }

    proptest! {
        #[test]
        fn every_message_is_read_or_ignored(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_pull(&frame(&bytes));
            let _ = parse_pull(&bytes);
        }
    }
}
