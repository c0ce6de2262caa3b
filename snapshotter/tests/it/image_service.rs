//! CRI's image service, which goes on to containerd, and the credentials of its pulls.

use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ferry_snapshotter::cri_api::{AuthConfig, IMAGE_SERVICE, ImageSpec, PullImageRequest};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::HeaderMap;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustix::process::{Signal, kill_process};
use tokio::net::UnixListener;
use tonic::Code;
use tonic::body::Body;

use crate::client::{Answer, Client};
use crate::fake::Reply;
use crate::lazy_place::{LARGE, Place, WAYS, is_right, layers, noise, until};
use crate::server::{Mounted, Server, can_mount};

/// What containerd was asked, and what it replies: each message as it came, with this status.
#[derive(Default)]
struct Calls {
    asked: Vec<(String, Bytes)>,
    status: u32,
}

/// Starts containerd's image service on a socket.
fn containerd(socket: &Path) -> Arc<Mutex<Calls>> {
    let calls = Arc::new(Mutex::new(Calls::default()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    let listener = runtime.block_on(async { UnixListener::bind(socket) }).unwrap();
    let own = Arc::clone(&calls);
    // It ends with the test's process.
    thread::spawn(move || {
        runtime.block_on(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let calls = Arc::clone(&own);
                let service = service_fn(move |request| reply(Arc::clone(&calls), request));
                let builder = http2::Builder::new(TokioExecutor::new());
                tokio::spawn(builder.serve_connection(TokioIo::new(stream), service));
            }
        });
    });
    calls
}

async fn reply(calls: Arc<Mutex<Calls>>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    let message = request.into_body().collect().await.unwrap().to_bytes();
    let status = {
        let mut calls = calls.lock().unwrap();
        calls.asked.push((path, message.clone()));
        calls.status
    };
    let head = Response::builder().header("content-type", "application/grpc");
    if status != 0 {
        return Ok(head.header("grpc-status", status).header("grpc-message", "as asked").body(Body::empty()).unwrap());
    }
    let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), "0".parse().unwrap())]);
    let body = Full::new(message).with_trailers(async { Some(Ok::<_, Infallible>(trailers)) });
    Ok(head.body(Body::new(body)).unwrap())
}

fn pull(client: &mut Client, image: &str, password: &str) -> Answer<PullImageRequest> {
    let auth = AuthConfig { username: "me".into(), password: password.into(), ..AuthConfig::default() };
    let request = PullImageRequest { image: Some(ImageSpec { image: image.into() }), auth: Some(auth) };
    client.call(&format!("{IMAGE_SERVICE}PullImage"), request)
}

#[test]
fn calls_of_images_go_on_to_containerd() {
    let mut server = Server::start("never");
    let mut client = server.client();
    let refused = pull(&mut client, "h/a:1", "word").unwrap_err();
    assert!(refused.code() == Code::Unimplemented && refused.message().contains("image-service"), "{refused}");
    let mut server = Server::start_with("never", |root| {
        std::fs::write(root.with_file_name("more.toml"), "[lazy]\nimage-service = \"c.sock\"\n").unwrap();
    });
    let mut client = server.client();
    let socket = server.directory.path().join("c.sock");
    let refused = pull(&mut client, "h/a:1", "word").unwrap_err();
    assert!(refused.code() == Code::Unavailable && refused.message().contains("c.sock"), "{refused}");
    let calls = containerd(&socket);
    for method in ["PullImage", "ListImages", "ImageFsInfo", "AnythingElse"] {
        let request = ImageSpec { image: method.into() };
        let path = format!("{IMAGE_SERVICE}{method}");
        let replied: ImageSpec = client.call(&path, request.clone()).unwrap();
        assert_eq!(replied, request);
        let asked = calls.lock().unwrap().asked.pop().unwrap();
        assert_eq!((asked.0, asked.1.len()), (path.clone(), 5 + 2 + method.len()));
        calls.lock().unwrap().status = 5;
        let refused = client.call::<_, ImageSpec>(&path, request).unwrap_err();
        assert_eq!((refused.code(), refused.message()), (Code::NotFound, "as asked"));
        calls.lock().unwrap().status = 0;
    }
    // Neither too long, nor read to its end.
    let refused = pull(&mut client, &"x".repeat(2 << 20), "word").unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    client.list(&[]).unwrap();
}

/// containerd/stargz-snapshotter issues 1989, 2211: after a restart the credentials of pulls were gone. Those of a pull that fails are not used.
#[test]
fn images_use_the_credentials_of_the_last_pull_that_succeeded() {
    if !can_mount() {
        return;
    }
    for way in WAYS {
        let mut place = Place::in_directory(way.1, layers(way.0), 0, "image-service = \"c.sock\"\n");
        let calls = containerd(&place.server.directory.path().join("c.sock"));
        let image = format!("{}/os/app:1", place.fake.address);
        let password = Arc::new(Mutex::new("one"));
        let expected = Arc::clone(&password);
        place.fake.fault(move |request, reply| {
            let wanted = format!("Basic {}", STANDARD.encode(format!("me:{}", expected.lock().unwrap())));
            match request.headers.get("authorization") {
                Some(found) if *found == wanted => reply,
                _ => Reply::of(401, "").with("www-authenticate", "Basic realm=\"x\""),
            }
        });
        let mut client = place.server.client();
        pull(&mut client, &image, "one").unwrap();
        place.pull(&mut client);
        let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
        let read = |name: &str| std::fs::read(mounted.path().join(name));
        assert_eq!(read("small").unwrap(), noise(1, 20_000));
        *password.lock().unwrap() = "two";
        assert_eq!(read("above").unwrap_err().raw_os_error(), Some(libc::EIO), "{way:?}");
        // What the registry refused, and another repository's.
        calls.lock().unwrap().status = 7;
        pull(&mut client, &image, "two").unwrap_err();
        calls.lock().unwrap().status = 0;
        pull(&mut client, &image.replace("app", "other"), "two").unwrap();
        assert_eq!(read("large").unwrap_err().raw_os_error(), Some(libc::EIO), "{way:?}");
        pull(&mut client, &image, "two").unwrap();
        until("the file", || read("above").is_ok_and(|bytes| bytes == noise(5, 20_000)));
        drop(mounted);
        // The next process, of the next run of the program.
        place.server.kill();
        let process = place.process().unwrap();
        kill_process(process, Signal::KILL).unwrap();
        until("its end", || place.process() != Some(process));
        client = place.server.start_again();
        client.remove("container").unwrap();
        let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
        assert!(std::fs::read(mounted.path().join("large")).unwrap() == noise(4, LARGE), "{way:?}");
        is_right(mounted.path());
        // An image of its lower layer, which other images share, is pulled by a program that knows of no pull.
        let below = Mounted::of(&client.prepare("below", "sha256:chain-0").unwrap());
        assert!(std::fs::read(below.path().join("hidden")).unwrap() == noise(3, 20_000), "{way:?}");
    }
}
