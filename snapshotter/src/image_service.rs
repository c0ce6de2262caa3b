//! CRI's image service: kubelet calls it on this socket, and each call goes on to containerd's.
//!
//! That is for the credentials: containerd gives those of a pull (`imagePullSecrets`) to no snapshotter. They are kept for the lazy images
//! of the same repository (`lazy/pull_credentials.rs`). Calls and their replies are not changed.
//!
//! Source: `pkg/apis/runtime/v1/api.proto` of k8s.io/cri-api, service `ImageService`.

use std::path::Path;
use std::sync::Arc;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http2::handshake;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::net::UnixStream;
use tonic::body::Body;
use tonic::{Code, Status};

use crate::lazy::pull_credentials::Credentials;
use crate::snapshotter::Snapshotter;

/// The service, as in the path of a call.
pub const IMAGE_SERVICE: &str = "/runtime.v1.ImageService/";
/// The maximum length of a pull's messages in bytes. They have names, labels and credentials.
const PULL_BYTES_MAX: usize = 1 << 20;
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

/// Sends a call on to containerd, and returns its reply.
pub(crate) async fn forward(
    snapshotter: Arc<Snapshotter>,
    containerd: &Path,
    request: Request<Incoming>,
) -> Response<Body> {
    let is_pull = request.uri().path().strip_prefix(IMAGE_SERVICE) == Some("PullImage");
    let replied = if is_pull {
        pull(snapshotter, containerd, request).await
    } else {
        send(containerd, request.map(Body::new)).await.map(|response| response.map(Body::new))
    };
    replied.unwrap_or_else(Status::into_http)
}

async fn send(containerd: &Path, request: Request<Body>) -> Result<Response<Incoming>, Status> {
    let failed = |error: &dyn std::fmt::Display| {
        Status::unavailable(format!("cannot send a call of images on to {}: {error}", containerd.display()))
    };
    let stream = UnixStream::connect(containerd).await.map_err(|error| failed(&error))?;
    let shaken = handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (mut sender, connection) = shaken.map_err(|error| failed(&error))?;
    // It ends with the sender and the reply.
    tokio::spawn(connection);
    sender.send_request(request).await.map_err(|error| failed(&error))
}

/// Sends a pull on, and remembers its credentials: for what this pull prepares at once, and for all images of the repository when it has succeeded.
async fn pull(
    snapshotter: Arc<Snapshotter>,
    containerd: &Path,
    request: Request<Incoming>,
) -> Result<Response<Body>, Status> {
    let too_long = |error| Status::new(Code::ResourceExhausted, format!("a pull cannot be read: {error}"));
    let (head, body) = request.into_parts();
    let message = Limited::new(body, PULL_BYTES_MAX).collect().await.map_err(too_long)?.to_bytes();
    let credentials = parse_pull(&message).and_then(|pull| Credentials::of(&pull));
    if let Some(credentials) = &credentials {
        snapshotter.lazy.begin_pull(credentials);
    }
    let response = send(containerd, Request::from_parts(head, Body::new(Full::new(message)))).await?;
    let (head, body) = response.into_parts();
    // An error without a message has its status in the head.
    let is_over = body.is_end_stream();
    let body = Limited::new(body, PULL_BYTES_MAX).collect().await.map_err(too_long)?;
    let status =
        if is_over { head.headers.get("grpc-status") } else { body.trailers().and_then(|all| all.get("grpc-status")) };
    if let Some(credentials) = credentials.filter(|_| status.is_some_and(|status| status == "0")) {
        let learn = move || snapshotter.lazy.finish_pull(&credentials);
        // Its caller is told when they are in use.
        let _ = tokio::task::spawn_blocking(learn).await;
    }
    let trailers = body.trailers().cloned();
    let body = Full::new(body.to_bytes()).with_trailers(async move { trailers.map(Ok) });
    Ok(Response::from_parts(head, Body::new(body)))
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
            let _ = parse_pull(&frame(&bytes)).and_then(|pull| Credentials::of(&pull));
            let _ = parse_pull(&bytes);
        }
    }
}
