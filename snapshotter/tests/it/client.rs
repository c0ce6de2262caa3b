//! A client of the Snapshots API.

use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::thread;
use std::time::{Duration, Instant};

use ferry_snapshotter::api::{
    CleanupRequest, CommitRequest, FieldMask, Info, InfoResponse, KeyRequest, Labels, ListRequest, ListResponse, Mount,
    MountsResponse, PrepareRequest, SERVICE, UpdateRequest, UsageResponse,
};
use hyper::body::Incoming;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper::http::uri::PathAndQuery;
use hyper::{Request, Response, Uri};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tonic::Status;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic_prost::ProstCodec;

/// The result of a call.
pub type Answer<T> = Result<T, Status>;

struct Connection(SendRequest<Body>);

impl GrpcService<Body> for Connection {
    type ResponseBody = Incoming;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// A connection on which one call runs at a time.
pub struct Client {
    runtime: Runtime,
    grpc: Grpc<Connection>,
}

/// The label that keeps snapshots from containerd's garbage collection, as in its own tests.
pub fn root_label() -> Labels {
    Labels::from([("containerd.io/gc.root".to_owned(), "2026-01-01T00:00:00Z".to_owned())])
}

impl Client {
    pub fn connect(socket: &Path) -> std::io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_io().build()?;
        let sender = runtime.block_on(async {
            let stream = UnixStream::connect(socket).await?;
            let shaken = handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
            let (sender, connection) = shaken.map_err(std::io::Error::other)?;
            tokio::spawn(connection);
            Ok::<_, std::io::Error>(sender)
        })?;
        let grpc = Grpc::with_origin(Connection(sender), Uri::from_static("http://localhost"));
        Ok(Self { runtime, grpc })
    }

    /// The path of a method of snapshots, or of another service, whose path begins with a slash.
    fn path(method: &str) -> PathAndQuery {
        let service = if method.starts_with('/') { "" } else { SERVICE };
        format!("{service}{method}").parse().expect("it is a path")
    }

    pub fn call<Q: Message + 'static, A: Message + Default + 'static>(
        &mut self,
        method: &str,
        request: Q,
    ) -> Answer<A> {
        self.runtime.block_on(async {
            self.grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            let codec = ProstCodec::<Q, A>::default();
            let answered = self.grpc.unary(tonic::Request::new(request), Self::path(method), codec).await;
            answered.map(tonic::Response::into_inner)
        })
    }

    pub fn prepare_with(&mut self, key: &str, parent: &str, labels: Labels) -> Answer<Vec<Mount>> {
        let request = PrepareRequest { key: key.into(), parent: parent.into(), labels, ..PrepareRequest::default() };
        Ok(self.call::<_, MountsResponse>("Prepare", request)?.mounts)
    }

    pub fn prepare(&mut self, key: &str, parent: &str) -> Answer<Vec<Mount>> {
        self.prepare_with(key, parent, root_label())
    }

    pub fn view(&mut self, key: &str, parent: &str) -> Answer<Vec<Mount>> {
        let (key, parent, labels) = (key.into(), parent.into(), root_label());
        let request = PrepareRequest { key, parent, labels, ..PrepareRequest::default() };
        Ok(self.call::<_, MountsResponse>("View", request)?.mounts)
    }

    pub fn mounts(&mut self, key: &str) -> Answer<Vec<Mount>> {
        Ok(self.call::<_, MountsResponse>("Mounts", by_key(key))?.mounts)
    }

    pub fn commit_with(&mut self, name: &str, key: &str, parent: &str, labels: Labels) -> Answer<()> {
        let (name, key, parent) = (name.into(), key.into(), parent.into());
        self.call("Commit", CommitRequest { name, key, parent, labels, ..CommitRequest::default() })
    }

    pub fn commit(&mut self, name: &str, key: &str) -> Answer<()> {
        self.commit_with(name, key, "", root_label())
    }

    /// Begins a commit, and gives it up after some time.
    pub fn commit_for(&mut self, name: &str, key: &str, time: Duration) {
        let request = CommitRequest { name: name.into(), key: key.into(), ..CommitRequest::default() };
        self.call_for("Commit", request, time);
    }

    /// Begins a call, and gives it up after some time.
    pub fn call_for<Q: Message + 'static>(&mut self, method: &str, request: Q, time: Duration) {
        let end = Instant::now() + time;
        self.runtime.block_on(async {
            if self.grpc.ready().await.is_err() {
                return;
            }
            let codec = ProstCodec::<Q, ()>::default();
            let mut call = pin!(self.grpc.unary(tonic::Request::new(request), Self::path(method), codec));
            let mut is_waiting = false;
            poll_fn(|context| {
                let is_over = call.as_mut().poll(context).is_ready() || Instant::now() >= end;
                if !is_over && !std::mem::replace(&mut is_waiting, true) {
                    let waker = context.waker().clone();
                    thread::spawn(move || {
                        thread::sleep(end.saturating_duration_since(Instant::now()));
                        waker.wake();
                    });
                }
                if is_over { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        });
    }

    pub fn remove(&mut self, key: &str) -> Answer<()> {
        self.call("Remove", by_key(key))
    }

    pub fn stat(&mut self, key: &str) -> Answer<Info> {
        let response: InfoResponse = self.call("Stat", by_key(key))?;
        Ok(response.info.expect("a response has it"))
    }

    pub fn update(&mut self, info: Info, paths: &[&str]) -> Answer<Info> {
        let paths = paths.iter().map(|path| (*path).to_owned()).collect();
        let request =
            UpdateRequest { info: Some(info), update_mask: Some(FieldMask { paths }), ..UpdateRequest::default() };
        let response: InfoResponse = self.call("Update", request)?;
        Ok(response.info.expect("a response has it"))
    }

    pub fn usage(&mut self, key: &str) -> Answer<UsageResponse> {
        self.call("Usage", by_key(key))
    }

    pub fn cleanup(&mut self) -> Answer<()> {
        self.call("Cleanup", CleanupRequest::default())
    }

    pub fn list(&mut self, filters: &[&str]) -> Answer<Vec<Info>> {
        let filters = filters.iter().map(|filter| (*filter).to_owned()).collect();
        let request = tonic::Request::new(ListRequest { filters, ..ListRequest::default() });
        self.runtime.block_on(async {
            self.grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            let codec = ProstCodec::<ListRequest, ListResponse>::default();
            let mut stream = self.grpc.server_streaming(request, Self::path("List"), codec).await?.into_inner();
            let mut found = Vec::new();
            while let Some(block) = stream.message().await? {
                found.extend(block.info);
            }
            Ok(found)
        })
    }
}

fn by_key(key: &str) -> KeyRequest {
    KeyRequest { key: key.into(), ..KeyRequest::default() }
}
