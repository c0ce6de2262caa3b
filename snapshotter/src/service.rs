//! The calls of gRPC as calls of [`Snapshotter`], each on a thread that may block.

use std::convert::Infallible;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use ferry_image::error_chain;
use hyper::body::Incoming;
use hyper::{Request, Response};
use prost::Message;
use tonic::body::Body;
use tonic::server::{Grpc, ServerStreamingService, UnaryService};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

use crate::api::{
    CleanupRequest, CommitRequest, InfoResponse, KeyRequest, ListRequest, ListResponse, Mount, MountsResponse,
    PrepareRequest, SERVICE, UpdateRequest, UsageResponse,
};
use crate::calls::CallCounter;
use crate::cri_api::IMAGE_SERVICE;
use crate::diff::{ApplyRequest, ApplyResponse, DIFF_SERVICE, Stop};
use crate::error::{Error, Result};
use crate::filter::Filter;
use crate::image_service::forward;
use crate::snapshotter::{NewSnapshot, Snapshotter};

/// The number of snapshots in one message of List, as in containerd.
const LIST_BLOCK: usize = 100;

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::NotFound(_) => Code::NotFound,
            Error::AlreadyExists(_) => Code::AlreadyExists,
            Error::FailedPrecondition(_) => Code::FailedPrecondition,
            Error::InvalidArgument(_) => Code::InvalidArgument,
            Error::Unimplemented(_) => Code::Unimplemented,
            Error::Io { .. }
            | Error::Metadata(_)
            | Error::Record(..)
            | Error::Image(_)
            | Error::Merge(_)
            | Error::Lazy { .. }
            | Error::Mount { .. } => {
                tracing::error!("{}", error_chain(&error));
                Code::Internal
            }
        };
        Self::new(code, error_chain(&error))
    }
}

/// Replies to a request of HTTP/2.
///
/// # Errors
///
/// None: failures are statuses of gRPC.
pub async fn answer(
    snapshotter: Arc<Snapshotter>,
    mut request: Request<Incoming>,
) -> std::result::Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    let all = snapshotter;
    if path.starts_with(IMAGE_SERVICE) {
        let Some(containerd) = all.lazy.image_service().map(Path::to_owned) else {
            let why = "name containerd's socket in the configuration: image-service, below [lazy]";
            return Ok(Status::unimplemented(why).into_http());
        };
        return Ok(forward(all, &containerd, request).await);
    }
    let method = path.strip_prefix(SERVICE).or_else(|| path.strip_prefix(DIFF_SERVICE)).unwrap_or_default();
    if let Some(counter) = CallCounter::of(all.metrics(), method) {
        request.extensions_mut().insert(counter);
    }
    if path.strip_prefix(DIFF_SERVICE) == Some("Apply") {
        let stop = Stop::default();
        // Dropped with this call when the client is gone.
        let _stop = stop.when_dropped();
        let apply = move |call: ApplyRequest| Ok(ApplyResponse { applied: Some(all.apply(&call, &stop)?) });
        return Ok(unary(request, apply).await);
    }
    Ok(match path.strip_prefix(SERVICE).unwrap_or_default() {
        "Prepare" => unary(request, move |call| mounts(all.prepare(new(call)))).await,
        "View" => unary(request, move |call| mounts(all.view(new(call)))).await,
        "Mounts" => unary(request, move |call: KeyRequest| mounts(all.mounts(&call.key))).await,
        "Commit" => {
            unary(request, move |call: CommitRequest| all.commit(&call.name, &call.key, &call.parent, call.labels))
                .await
        }
        "Remove" => unary(request, move |call: KeyRequest| all.remove(&call.key)).await,
        "Stat" => unary(request, move |call: KeyRequest| Ok(InfoResponse { info: Some(all.stat(&call.key)?) })).await,
        "Update" => unary(request, move |call| update(&all, call)).await,
        "Usage" => {
            let usage = move |call: KeyRequest| {
                let usage = all.usage(&call.key)?;
                Ok(UsageResponse { size: usage.bytes, inodes: usage.inodes })
            };
            unary(request, usage).await
        }
        "Cleanup" => {
            let cleanup = move |_: CleanupRequest| {
                let cleaned = all.cleanup();
                all.collect_in_background();
                all.convert_in_background();
                cleaned
            };
            unary(request, cleanup).await
        }
        "List" => {
            let list = Stream(Some(move |call| list(&all, &call)));
            Grpc::new(ProstCodec::<ListResponse, ListRequest>::default()).server_streaming(list, request).await
        }
        _ => Status::unimplemented(format!("there is no call {path}")).into_http(),
    })
}

fn new(PrepareRequest { key, parent, labels, .. }: PrepareRequest) -> NewSnapshot {
    NewSnapshot { key, parent, labels }
}

fn mounts(mounts: Result<Vec<Mount>>) -> Result<MountsResponse> {
    Ok(MountsResponse { mounts: mounts? })
}

fn update(snapshotter: &Snapshotter, UpdateRequest { info, update_mask, .. }: UpdateRequest) -> Result<InfoResponse> {
    let info = info.ok_or_else(|| Error::InvalidArgument("the call names no snapshot".into()))?;
    let paths = update_mask.unwrap_or_default().paths;
    Ok(InfoResponse { info: Some(snapshotter.update(&info, &paths)?) })
}

fn list(snapshotter: &Snapshotter, call: &ListRequest) -> Result<Vec<ListResponse>> {
    let filter = Filter::parse(&call.filters)?;
    let mut blocks: Vec<ListResponse> = Vec::new();
    snapshotter.walk(&filter, |info| match blocks.last_mut() {
        Some(block) if block.info.len() < LIST_BLOCK => block.info.push(info),
        _ => blocks.push(ListResponse { info: vec![info] }),
    })?;
    Ok(blocks)
}

/// Replies to a call with one message.
async fn unary<Q, A>(request: Request<Incoming>, call: impl FnOnce(Q) -> Result<A> + Send + 'static) -> Response<Body>
where
    Q: Message + Default + 'static,
    A: Message + 'static,
{
    Grpc::new(ProstCodec::<A, Q>::default()).unary(Unary(Some(call)), request).await
}

type ResponseFuture<T> = Pin<Box<dyn Future<Output = std::result::Result<tonic::Response<T>, Status>> + Send>>;

/// Runs a call on a thread that may block. The call is finished even if the client disconnects.
fn on_thread<Q, A, F>(
    call: &mut Option<F>,
    mut request: tonic::Request<Q>,
) -> impl Future<Output = std::result::Result<A, Status>> + use<Q, A, F>
where
    F: FnOnce(Q) -> Result<A> + Send + 'static,
    Q: Send + 'static,
    A: Send + 'static,
{
    let call = call.take();
    let counter = request.extensions_mut().remove::<CallCounter>();
    async move {
        let call = call.ok_or_else(|| Status::internal("a call is answered once"))?;
        let call = move || call(request.into_inner());
        let call = move || if let Some(counter) = counter { counter.count(call) } else { call() };
        let answered = tokio::task::spawn_blocking(call).await;
        answered.map_err(|error| Status::internal(format!("the call failed: {error}")))?.map_err(Status::from)
    }
}

struct Unary<F>(Option<F>);

impl<Q, A, F> UnaryService<Q> for Unary<F>
where
    F: FnOnce(Q) -> Result<A> + Send + 'static,
    Q: Send + 'static,
    A: Send + 'static,
{
    type Response = A;
    type Future = ResponseFuture<A>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        let answer = on_thread(&mut self.0, request);
        Box::pin(async move { answer.await.map(tonic::Response::new) })
    }
}

struct Stream<F>(Option<F>);

/// The messages of a stream, which are all available at once.
type Messages<T> = tokio_stream::Iter<std::vec::IntoIter<std::result::Result<T, Status>>>;

impl<Q, A, F> ServerStreamingService<Q> for Stream<F>
where
    F: FnOnce(Q) -> Result<Vec<A>> + Send + 'static,
    Q: Send + 'static,
    A: Send + 'static,
{
    type Response = A;
    type ResponseStream = Messages<A>;
    type Future = ResponseFuture<Messages<A>>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        let answer = on_thread(&mut self.0, request);
        Box::pin(async move {
            let messages: Vec<_> = answer.await?.into_iter().map(Ok).collect();
            Ok(tonic::Response::new(tokio_stream::iter(messages)))
        })
    }
}
