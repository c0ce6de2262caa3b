//! HTTP requests: permitted servers, timeouts, retries, and counters.

use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Seek};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ureq::config::ConfigBuilder;
use ureq::http::{HeaderValue, Method, header};
use ureq::typestate::HttpCrateScope;
use ureq::{AsSendBody, Body, SendBody};
use url::Url;

use crate::error::{Error, Result};
use crate::hosts::Host;
use crate::resolver::{THIS_MACHINE, ThisMachine, is_loopback, names_this_machine, shown};

use agents::RenewedAgents;
pub(crate) use response::Response;

mod agents;
mod proxy;
mod response;

/// The maximum number of attempts.
const ATTEMPTS_MAX: u32 = 5;
/// The first pause between two attempts; each further one is twice as long.
const PAUSE: Duration = Duration::from_millis(250);
/// The maximum pause that a server may request.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// The maximum number of redirects.
const REDIRECTS_MAX: u32 = 5;
/// The minimum speed of a transfer, in bytes per second.
const SPEED_MIN: u64 = 64 << 10;

/// A request with settings of its own.
type Configured<B> = ConfigBuilder<HttpCrateScope<B>>;

/// Options of requests.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether other machines may be contacted without encryption.
    pub plain_http: bool,
    /// How long requests may take, at first.
    pub limits: Limits,
    /// The maximum number of concurrent requests; further ones wait. At least 1.
    pub requests_max: usize,
    /// Directories with containerd's `hosts.toml` files; the first one that describes a registry counts.
    pub hosts: Vec<PathBuf>,
    /// The file with credentials, or a directory of such files; otherwise those that podman and docker use. They are read when a server asks.
    pub credentials: Option<PathBuf>,
    /// A file with credentials that come before these. It may be missing.
    pub pull_credentials: Option<PathBuf>,
    /// A manifest that was fetched before, which is not asked for by its digest.
    pub manifest: Option<Vec<u8>>,
}

/// How long requests may take, and how often they are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long a server may be silent.
    pub patience: Duration,
    /// When requests end that are under way, and are not tried again; `None`: each has a time by its length.
    pub deadline: Option<Instant>,
    /// How often a request is tried. At least 1.
    pub attempts_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { patience: Duration::from_secs(30), deadline: None, attempts_max: ATTEMPTS_MAX }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            plain_http: false,
            limits: Limits::default(),
            requests_max: agents::IDLE_MAX,
            hosts: Vec::new(),
            credentials: None,
            pull_credentials: None,
            manifest: None,
        }
    }
}

/// Counters of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests, including retries, redirects and refused ones.
    pub requests: u64,
    /// Bytes of responses, without headers.
    pub received_bytes: u64,
    /// Bytes of requests, without headers.
    pub sent_bytes: u64,
}

/// An HTTP client for any number of threads.
#[derive(Debug)]
pub struct Client {
    agents: RenewedAgents,
    /// The origin may be on another machine.
    is_remote: Arc<AtomicBool>,
    options: Options,
    limits: Mutex<Limits>,
    /// The shortest time that a response took to begin, in microseconds.
    latency_us: AtomicU64,
    slots: Slots,
    requests: AtomicU64,
    received_bytes: AtomicU64,
    sent_bytes: AtomicU64,
}

/// Slots of threads that do something at once: have a request in flight, or much memory.
#[derive(Debug, Default)]
pub struct Slots {
    used: Mutex<usize>,
    freed: Condvar,
}

/// The slot of one thread, until dropped.
#[derive(Debug)]
pub struct Slot<'a>(&'a Slots);

impl Slots {
    /// Creates free slots.
    #[must_use]
    pub const fn new() -> Self {
        Self { used: Mutex::new(0), freed: Condvar::new() }
    }

    /// Waits for a free slot. A thread with a slot never waits for another one, so there is no deadlock.
    pub fn enter(&self, max: usize) -> Slot<'_> {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |used: &mut usize| *used >= max.max(1);
        *self.freed.wait_while(used, full).unwrap_or_else(PoisonError::into_inner) += 1;
        Slot(self)
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        *self.0.used.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_one();
    }
}

/// One request, without its body.
#[derive(Clone)]
pub(crate) struct Request {
    pub method: Method,
    pub url: Url,
    /// The server that the user named. `url` may be on another one: a redirect, a realm, an upload location.
    pub origin: Url,
    pub headers: Vec<(header::HeaderName, String)>,
    /// Credentials or a token for the server of `url`. A redirect to another server drops it.
    pub authorization: Option<String>,
    /// Headers that are set for the server of `url`, dropped likewise.
    pub own_headers: Vec<(header::HeaderName, HeaderValue)>,
    /// The expected length of the response, which determines its time limit.
    pub bytes: u64,
}

impl Request {
    pub(crate) fn new(method: Method, url: Url) -> Self {
        let (headers, own_headers) = Default::default();
        Self { method, origin: url.clone(), url, headers, authorization: None, own_headers, bytes: 0 }
    }

    pub(crate) fn with(mut self, name: header::HeaderName, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Requests only a range of the resource.
    pub(crate) fn with_range(self, range: &Range<u64>) -> Self {
        Self { bytes: range.end - range.start, ..self }
            .with(header::RANGE, format!("bytes={}-{}", range.start, range.end - 1))
    }
}

/// A reader that can start again.
pub(crate) trait ReadSeek: Read + Seek {}

impl<T: Read + Seek> ReadSeek for T {}

/// The body of a request, which may be sent more than once.
pub(crate) struct Upload<'a> {
    pub reader: &'a mut dyn ReadSeek,
    /// The length in bytes.
    pub bytes: u64,
}

impl Upload<'_> {
    pub(crate) fn rewind(&mut self) -> Result<()> {
        self.reader.rewind().map_err(Error::Sink)
    }
}

/// Checks whether a redirect is allowed, as far as the URL shows; `is_local`: also to this machine. [`crate::resolver::RemoteResolver`]
/// checks the resolved addresses.
fn check_redirect(from: &Url, to: &Url, is_local: bool) -> Result<()> {
    let refused = |reason| Err(Error::Redirect { from: shown(from), to: shown(to), reason });
    if from.scheme() == "https" && to.scheme() != "https" {
        return refused("that would be without encryption");
    }
    // A proxy resolves names itself.
    if names_this_machine(to) && !is_local {
        return refused(THIS_MACHINE);
    }
    Ok(())
}

impl Client {
    /// Creates a client that trusts the host's authorities (or those of `SSL_CERT_FILE`).
    pub fn new(options: Options) -> Self {
        let is_remote = Arc::<AtomicBool>::default();
        Self::with(options, RenewedAgents::new(Arc::clone(&is_remote)), is_remote)
    }

    /// Creates a client for a server of a `hosts.toml`, with these options.
    ///
    /// # Errors
    ///
    /// A file with a certificate cannot be read.
    pub(crate) fn for_host(host: &Host, options: Options) -> Result<Self> {
        // The file says so.
        let plain_http = options.plain_http || host.url.scheme() == "http";
        let is_remote = Arc::<AtomicBool>::default();
        let agents = RenewedAgents::of_host(host, Arc::clone(&is_remote))?;
        Ok(Self::with(Options { plain_http, ..options }, agents, is_remote))
    }

    fn with(options: Options, agents: RenewedAgents, is_remote: Arc<AtomicBool>) -> Self {
        Self {
            agents,
            is_remote,
            limits: Mutex::new(options.limits),
            latency_us: AtomicU64::new(u64::MAX),
            options,
            slots: Slots::default(),
            requests: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
            sent_bytes: AtomicU64::new(0),
        }
    }

    /// Returns the counters.
    pub fn counts(&self) -> Counts {
        Counts {
            requests: self.requests.load(Ordering::Relaxed),
            received_bytes: self.received_bytes.load(Ordering::Relaxed),
            sent_bytes: self.sent_bytes.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    fn limits(&self) -> Limits {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the limits of later requests.
    pub(crate) fn set_limits(&self, limits: Limits) {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner) = limits;
    }

    /// Returns the shortest time that a response took to begin, if there was one.
    pub(crate) fn latency(&self) -> Option<Duration> {
        Some(self.latency_us.load(Ordering::Relaxed)).filter(|us| *us < u64::MAX).map(Duration::from_micros)
    }

    /// Checks that a request without encryption stays on this machine, unless allowed.
    fn check_encryption(&self, url: &Url) -> Result<()> {
        match url.scheme() {
            "https" => Ok(()),
            "http" if is_loopback(url) || self.options.plain_http => Ok(()),
            _ => Err(Error::Plain(shown(url))),
        }
    }

    /// Returns whether the origin is on this machine, so that it may redirect to this machine.
    fn is_local(&self, origin: &Url) -> bool {
        is_loopback(origin) || !self.is_remote.load(Ordering::Acquire)
    }

    /// Checks whether the origin may refer to this URL.
    pub(crate) fn check_redirect(&self, origin: &Url, to: &Url) -> Result<()> {
        check_redirect(origin, to, self.is_local(origin))
    }

    /// Sends a request; returns a response of any status. Reads follow redirects, writes do not.
    pub(crate) fn send(&self, mut request: Request, mut upload: Option<&mut Upload<'_>>) -> Result<Response<'_>> {
        for _ in 0..=REDIRECTS_MAX {
            self.check_encryption(&request.url)?;
            let inner = self.send_once(&request, upload.as_deref_mut())?;
            let reads = matches!(request.method, Method::GET | Method::HEAD);
            if !reads || !inner.status().is_redirection() {
                return Ok(Response::new(self, request.url, inner));
            }
            let to = inner.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let to = to.and_then(|to| request.url.join(to).ok()).ok_or_else(|| Error::Response {
                url: shown(&request.url),
                reason: "the server sends on without saying where to".into(),
            })?;
            check_redirect(&request.url, &to, self.is_local(&request.origin))?;
            Response::new(self, request.url.clone(), inner).discard();
            if to.origin() != request.url.origin() {
                // A redirect back does not restore it.
                request.authorization = None;
                request.own_headers.clear();
            }
            request.url = to;
        }
        Err(Error::Response { url: shown(&request.url), reason: format!("more than {REDIRECTS_MAX} redirects") })
    }

    fn send_once(&self, request: &Request, upload: Option<&mut Upload<'_>>) -> Result<ureq::http::Response<Body>> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let url = shown(&request.url);
        let failed = |why: ureq::Error| match why {
            ureq::Error::Other(why) if why.is::<ThisMachine>() => {
                Error::Redirect { from: shown(&request.origin), to: url.clone(), reason: THIS_MACHINE }
            }
            why => Error::Transport { url: url.clone(), why: Box::new(why) },
        };
        let agents = self.agents.get();
        let agent = match request.url.origin() == request.origin.origin() {
            true => &agents.origin,
            false if self.is_local(&request.origin) => &agents.any,
            false => &agents.remote,
        };
        let sent = upload.as_ref().map_or(0, |upload| upload.bytes);
        let Limits { patience, deadline, .. } = self.limits();
        let time = patience + Duration::from_secs((request.bytes + sent) / SPEED_MIN);
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let time = left.map_or(time, |left| left.min(time));
        let mut builder = ureq::http::Request::builder().method(request.method.clone()).uri(request.url.as_str());
        for (name, value) in &request.headers {
            builder = builder.header(name, value);
        }
        if let Some(value) = &request.authorization {
            builder = builder.header(header::AUTHORIZATION, value);
        }
        let is_set = |name: &header::HeaderName| *name == header::AUTHORIZATION && request.authorization.is_some();
        for (name, value) in request.own_headers.iter().filter(|(name, _)| !is_set(name)) {
            builder = builder.header(name, value);
        }
        let invalid = |error| failed(ureq::Error::Http(error));
        let is_direct = proxy::is_direct(&request.url);
        let begun = Instant::now();
        let outcome = match upload {
            Some(Upload { reader, bytes }) => {
                let built = builder.header(header::CONTENT_LENGTH, *bytes).body(SendBody::from_reader(*reader));
                let request = limit(agent.configure_request(built.map_err(invalid)?), (patience, time), is_direct);
                // A registry is silent while it stores what it was sent.
                agent.run(request.timeout_per_read(Some(time)).build())
            }
            None => {
                let built = builder.body(()).map_err(invalid)?;
                agent.run(limit(agent.configure_request(built), (patience, time), is_direct).build())
            }
        };
        if outcome.is_ok() {
            let took = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.latency_us.fetch_min(took, Ordering::Relaxed);
        }
        let outcome = outcome.map_err(failed);
        self.sent_bytes.fetch_add(sent, Ordering::Relaxed);
        outcome
    }

    /// Retries until success, a permanent failure, or the maximum number of attempts. All requests are made in here,
    /// and none inside another attempt, so the maximum of concurrent requests holds. A pausing thread holds no slot.
    pub(crate) fn retry<T>(&self, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let mut attempts = 1;
        let Limits { deadline, attempts_max, .. } = self.limits();
        let is_over = || deadline.is_some_and(|deadline| deadline <= Instant::now());
        loop {
            let agents = self.agents.get();
            let slot = self.slots.enter(self.options.requests_max);
            let outcome = attempt();
            drop(slot);
            match outcome {
                // The files have other certificates by now.
                Err(error)
                    if is_of_tls(&error) && !is_over() && !Arc::ptr_eq(&agents, &self.agents.get_after_failure()) => {}
                Err(error) if error.is_transient() && attempts < attempts_max && !is_over() => {
                    tracing::debug!("{error}: the request is retried");
                    thread::sleep(pause(attempts, error.retry_after()));
                    attempts += 1;
                }
                outcome => return outcome,
            }
        }
    }
}

/// Limits a request: how long the server may be silent, and how long all of it may take.
fn limit<B: AsSendBody>(
    request: Configured<B>,
    (patience, time): (Duration, Duration),
    is_direct: bool,
) -> Configured<B> {
    let request = if is_direct { request.proxy(None) } else { request };
    let (patience, time) = (Some(patience), Some(time));
    let request = request.timeout_connect(patience).timeout_resolve(patience);
    // A long body has a long time as a whole.
    request.timeout_per_read(patience).timeout_per_write(patience).timeout_global(time)
}

/// Returns whether TLS is the cause: a certificate is not trusted, or the server does not take that of this machine.
fn is_of_tls(error: &Error) -> bool {
    let Error::Transport { why, .. } = error else { return false };
    match &**why {
        ureq::Error::Rustls(_) => true,
        ureq::Error::Io(error) => error.get_ref().is_some_and(|error| error.is::<rustls::Error>()),
        _ => false,
    }
}

/// Returns the pause after this many attempts, randomized so that clients do not retry together.
fn pause(attempts: u32, retry_after: Option<Duration>) -> Duration {
    let least = PAUSE * 2_u32.pow(attempts.min(8) - 1);
    let random = u32::try_from(RandomState::new().hash_one(attempts) % 1024).unwrap_or_default();
    let asked = retry_after.unwrap_or_default().min(PAUSE_MAX);
    (asked.max(least) + least * random / 1024).min(PAUSE_MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use super::*;

    #[test]
    fn other_machines_are_not_contacted_without_encryption() {
        let careful = Client::new(Options::default());
        let permissive = Client::new(Options { plain_http: true, ..Options::default() });
        let url = |text: &str| text.parse::<Url>().unwrap();
        for text in ["https://a.example/", "http://localhost:1/", "http://127.9.9.9/", "http://[::1]:8/"] {
            careful.check_encryption(&url(text)).unwrap();
        }
        for text in
            ["http://a.example/", "http://localhost.a.example/", "http://127.0.0.1.a.example/", "http://10.0.0.1/"]
        {
            let error = careful.check_encryption(&url(text)).unwrap_err().to_string();
            assert!(error.contains("--plain-http"), "{error}");
            permissive.check_encryption(&url(text)).unwrap();
        }
        permissive.check_encryption(&url("file:///etc/passwd")).unwrap_err();
    }

    #[test]
    fn redirects_to_this_machine_or_to_plain_http_are_refused() {
        let url = |text: &str| text.parse::<Url>().unwrap();
        for (from, to, allowed) in [
            ("https://a.example/", "https://b.example/", true),
            ("https://a.example/", "http://a.example/", false),
            ("http://a.example/", "https://a.example/", true),
            ("http://a.example/", "http://127.0.0.1/", false),
            ("http://a.example/", "http://0.0.0.0/", false),
            ("http://a.example/", "http://[::ffff:127.0.0.1]/", false),
            ("http://a.example/", "http://[::]/", false),
            ("http://a.example/", "http://LocalHost./", false),
            ("http://a.example/", "http://a.localhost/", false),
            ("http://a.example/", "http://2130706433/", false),
            ("https://a.example/", "https://[::1]/", false),
            ("http://localhost:1/", "http://127.0.0.1:2/", true),
        ] {
            let (from, to) = (url(from), url(to));
            assert_eq!(check_redirect(&from, &to, is_loopback(&from)).is_ok(), allowed, "{from} {to}");
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let url: Url = "https://user:word@h/a?X-Amz-Signature=00".parse().unwrap();
        assert_eq!(shown(&url), "https://h/a");
    }

    #[test]
    fn pauses_grow_and_end() {
        for tries in 1..40 {
            let pause = pause(tries, None);
            assert!(pause >= PAUSE && pause <= PAUSE_MAX, "{tries}: {pause:?}");
        }
        assert!(pause(1, Some(Duration::from_secs(3))) >= Duration::from_secs(3));
        assert_eq!(pause(1, Some(Duration::MAX / 2)), PAUSE_MAX);
    }
}
