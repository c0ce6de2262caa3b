//! CRI's image service: kubelet calls it on this socket, and each call goes on to containerd's.
//!
//! That is for the credentials: containerd gives those of a pull (`imagePullSecrets`) to no snapshotter. They are kept for the lazy images
//! of the same repository (`lazy/pull_credentials.rs`). Calls and their replies are not changed.

use std::path::Path;
use std::sync::Arc;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http2::handshake;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixStream;
use tonic::body::Body;
use tonic::{Code, Status};

use crate::cri_api::{IMAGE_SERVICE, parse_pull};
use crate::lazy::pull_credentials::Credentials;
use crate::snapshotter::Snapshotter;

/// The maximum length of a pull's messages in bytes. They have names, labels and credentials.
const PULL_BYTES_MAX: usize = 1 << 20;

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
