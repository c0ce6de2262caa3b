//! An image on any kind of server.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use sha2::Digest as _;

use crate::container::{self, Container};
use crate::error::{Error, Result};
use crate::hosts::{self, Host};
use crate::http::{Client, Counts, Limits, Options, Response, Upload};
use crate::manifest::{ARTIFACT_TYPE, Blob, FIRST_BYTES_MAX, MANIFEST_TYPE, Manifest, Sha256, is_container};
use crate::oci::Oci;
use crate::reference::{Location, Reference, Version};
use crate::referrers::{self, Converted};
use crate::s3::S3;

/// The maximum nesting of indexes of container images.
const INDEX_DEPTH_MAX: usize = 4;
/// How often a list of referrers is written, if others write it, too.
const LIST_TRIES_MAX: usize = 4;
/// The number of bytes between two failures after which the second one counts as the first.
const PROGRESS_BYTES: u64 = 1 << 20;
/// How many manifests are remembered.
const KNOWN_MAX: usize = 4;

/// How often a mirror is tried before the next server is.
const MIRROR_ATTEMPTS: u32 = 2;
/// How long a mirror that failed is left out.
const MIRROR_PAUSE: Duration = Duration::from_secs(60);

/// Receives bytes in order.
type Sink<'a> = dyn FnMut(&[u8]) -> io::Result<()> + 'a;

/// What a reference names.
pub(crate) enum Document {
    Image(Box<Manifest>),
    Container(Box<Container>),
}

/// An image on a server.
#[derive(Debug)]
pub struct Remote {
    client: Client,
    reference: Reference,
    server: Server,
    /// Servers that are asked before it.
    mirrors: Vec<Mirror>,
    /// Manifests by their digests.
    known: Mutex<HashMap<Sha256, Vec<u8>>>,
    /// Prefetched blobs, until they are used.
    ahead: Mutex<HashMap<Sha256, Vec<u8>>>,
}

fn of_mirror(limits: Limits) -> Limits {
    Limits { attempts_max: limits.attempts_max.min(MIRROR_ATTEMPTS), ..limits }
}

/// A server that has images of a registry, by a `hosts.toml`.
#[derive(Debug)]
struct Mirror {
    client: Client,
    oci: Oci,
    pulls: bool,
    resolves: bool,
    /// When it failed last.
    failed: Mutex<Option<Instant>>,
}

impl Mirror {
    /// `registry`: the one of which it is a mirror, if it is not that itself.
    fn new(host: Host, registry: Option<String>, name: &str, options: &Options) -> Result<Self> {
        let client = Client::for_host(&host, Options { limits: of_mirror(options.limits), ..options.clone() })?;
        let (pulls, resolves) = (host.pulls, host.resolves);
        let oci = Oci::new(host, name, registry, options)?;
        Ok(Self { client, oci, pulls, resolves, failed: Mutex::default() })
    }

    fn is_usable(&self) -> bool {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.is_none_or(|when| when.elapsed() >= MIRROR_PAUSE)
    }

    fn note(&self, error: &Error) {
        tracing::debug!("{error}: the next server is asked");
        if error.is_transient() {
            self.leave_out();
        }
    }

    fn leave_out(&self) {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

#[derive(Debug)]
enum Server {
    Oci(Oci),
    S3(S3),
}

impl Remote {
    /// Creates it without a request.
    ///
    /// # Errors
    ///
    /// The environment has an invalid endpoint or invalid credentials.
    pub fn open(reference: &Reference, client: Client) -> Result<Self> {
        let (mut client, mut mirrors) = (client, Vec::new());
        let options = client.options().clone();
        let known = options.manifest.iter().map(|bytes| (Sha256::of(bytes), bytes.clone())).collect();
        let server = match &reference.location {
            Location::Oci { scheme, host, name } => {
                let base = Oci::base(*scheme, host, name, options.plain_http)?;
                // Who names a scheme means that server.
                let directories = if scheme.is_none() { &*options.hosts } else { &[] };
                let server = base[..url::Position::BeforePath].to_owned();
                let found = hosts::find(directories, host, &server)?;
                // Another server is told of which registry an image is.
                let origin = base.origin();
                let registry = |found: &Host| (found.url.origin() != origin).then(|| host.clone());
                let mut own = Host::of(base.clone());
                if let Some(mut all) = found
                    && let Some(last) = all.pop()
                {
                    client = Client::for_host(&last, options.clone())?;
                    own = last;
                    let mirror = |found: Host| {
                        let registry = registry(&found);
                        Mirror::new(found, registry, name, &options)
                    };
                    mirrors = all.into_iter().map(mirror).collect::<Result<_>>()?;
                }
                let registry = registry(&own);
                Server::Oci(Oci::new(own, name, registry, &options)?)
            }
            Location::S3 { bucket, prefix } => Server::S3(S3::new(bucket, prefix)?),
        };
        let (known, ahead) = (Mutex::new(known), Mutex::default());
        Ok(Self { client, reference: reference.clone(), server, mirrors, known, ahead })
    }

    /// Returns the counters of requests.
    pub fn counts(&self) -> Counts {
        self.mirrors.iter().fold(self.client.counts(), |sum, mirror| {
            let Counts { requests, received_bytes, sent_bytes } = mirror.client.counts();
            Counts {
                requests: sum.requests + requests,
                received_bytes: sum.received_bytes + received_bytes,
                sent_bytes: sum.sent_bytes + sent_bytes,
            }
        })
    }

    /// Changes the limits of later requests.
    pub fn set_limits(&self, limits: Limits) {
        self.client.set_limits(limits);
        self.mirrors.iter().for_each(|mirror| mirror.client.set_limits(of_mirror(limits)));
    }

    /// Returns the shortest time that a response took to begin, of the server that is asked for data first; `None`: it was not yet asked.
    pub(crate) fn latency(&self) -> Option<Duration> {
        let mirror = self.mirrors.iter().find(|mirror| mirror.pulls && mirror.is_usable());
        mirror.map_or(&self.client, |mirror| &mirror.client).latency()
    }

    /// Asks the mirrors one after another.
    fn by_mirror<T>(&self, can: impl Fn(&Mirror) -> bool, ask: impl Fn(&Mirror) -> Result<T>) -> Option<T> {
        let mut usable = self.mirrors.iter().filter(|mirror| can(mirror) && mirror.is_usable());
        usable.find_map(|mirror| ask(mirror).inspect_err(|error| mirror.note(error)).ok())
    }

    /// Returns its location.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Returns what the reference names, and the digest of its manifest.
    pub(crate) fn find(&self) -> Result<(Document, Sha256)> {
        let (bytes, found) = self.fetch_manifest(&self.reference.version)?;
        if matches!(self.server, Server::Oci(_)) && is_container(&bytes) {
            return Ok((Document::Container(self.container(bytes)?), found));
        }
        let invalid = |reason| Error::Manifest { name: self.reference.to_string(), reason };
        Ok((Document::Image(Box::new(Manifest::read(&bytes).map_err(invalid)?)), found))
    }

    /// Returns a manifest, verified by the digest if it is named by one; of a mirror, if one has it.
    fn fetch_manifest(&self, version: &Version) -> Result<(Vec<u8>, Sha256)> {
        if let Version::Digest(wanted) = version
            && let Some(known) = self.known_manifest(*wanted)
        {
            return Ok((known, *wanted));
        }
        let can = |mirror: &Mirror| if matches!(version, Version::Tag(_)) { mirror.resolves } else { mirror.pulls };
        let found = self.by_mirror(can, |mirror| {
            let Mirror { client, oci, .. } = mirror;
            self.checked_manifest(client.retry(|| oci.manifest(client, version))?, version)
        });
        match found {
            Some(found) => Ok(found),
            None => self.fetch_own_manifest(version),
        }
    }

    /// Returns a manifest of the server itself, verified by the digest if it is named by one.
    fn fetch_own_manifest(&self, version: &Version) -> Result<(Vec<u8>, Sha256)> {
        let bytes = self.client.retry(|| match &self.server {
            Server::Oci(oci) => oci.manifest(&self.client, version),
            Server::S3(s3) => s3.manifest(&self.client, version),
        })?;
        self.checked_manifest(bytes, version)
    }

    fn checked_manifest(&self, bytes: Option<Vec<u8>>, version: &Version) -> Result<(Vec<u8>, Sha256)> {
        let bytes = bytes.ok_or_else(|| Error::NoImage(self.reference.to_string()))?;
        let found = Sha256::of(&bytes);
        if let Version::Digest(wanted) = version {
            if *wanted != found {
                let reason = format!("it has the digest sha256:{found}");
                return Err(Error::Manifest { name: self.reference.to_string(), reason });
            }
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if known.len() < KNOWN_MAX {
                known.insert(found, bytes.clone());
            }
        }
        Ok((bytes, found))
    }

    /// Returns a manifest that was fetched by its digest before.
    pub(crate) fn known_manifest(&self, digest: Sha256) -> Option<Vec<u8>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(&digest).cloned()
    }

    /// Follows indexes to the container image for this machine.
    fn container(&self, mut bytes: Vec<u8>) -> Result<Box<Container>> {
        let invalid = |reason| Error::Container { name: self.reference.to_string(), reason };
        for _ in 0..INDEX_DEPTH_MAX {
            match container::parse(bytes).map_err(invalid)? {
                container::Found::Container(found) => return Ok(found),
                container::Found::Index(digest) => bytes = self.fetch_manifest(&Version::Digest(digest))?.0,
            }
        }
        Err(invalid("indexes name indexes, deeper than programs do".into()))
    }

    pub(crate) fn put_manifest(&self, bytes: &[u8]) -> Result<()> {
        self.put_manifest_as(&self.reference.version, MANIFEST_TYPE, bytes).map(drop)
    }

    /// Stores a manifest or an index; returns whether the registry will list it as a referrer of its subject.
    fn put_manifest_as(&self, version: &Version, kind: &str, bytes: &[u8]) -> Result<bool> {
        self.client.retry(|| match &self.server {
            Server::Oci(oci) => oci.put_manifest(&self.client, version, kind, bytes),
            Server::S3(s3) => s3.put_manifest(&self.client, version, bytes).map(|()| false),
        })
    }

    /// Stores a manifest that refers to another one, and the list of its referrers if the registry keeps none.
    pub(crate) fn put_referrer(&self, subject: Sha256, bytes: &[u8], entry: &serde_json::Value) -> Result<()> {
        let own = Sha256::of(bytes);
        if self.put_manifest_as(&Version::Digest(own), MANIFEST_TYPE, bytes)? {
            return Ok(());
        }
        // Others may write the list at the same time, and the registry keeps one of both.
        for _ in 0..LIST_TRIES_MAX {
            let known = self.referrers_list(subject, false)?;
            let Some(list) = referrers::add(known.as_deref(), entry).map_err(|reason| self.invalid_list(reason))?
            else {
                return Ok(());
            };
            self.put_manifest_as(&Version::Tag(referrers::tag(subject)), referrers::INDEX_TYPE, &list)?;
        }
        Err(self.invalid_list("others change it at the same time".into()))
    }

    /// Returns the list of referrers that clients keep, if there is one. A mirror's may be old or forged: `by_mirrors` says whether that
    /// is no harm.
    fn referrers_list(&self, subject: Sha256, by_mirrors: bool) -> Result<Option<Vec<u8>>> {
        let tag = Version::Tag(referrers::tag(subject));
        match if by_mirrors { self.fetch_manifest(&tag) } else { self.fetch_own_manifest(&tag) } {
            Err(Error::NoImage(_)) => Ok(None),
            // Some registries take the tag for the digest.
            Ok((_, found)) if found == subject => Ok(None),
            found => Ok(Some(found?.0)),
        }
    }

    fn invalid_list(&self, reason: String) -> Error {
        Error::Container { name: self.reference.to_string(), reason: format!("its list of referrers: {reason}") }
    }

    /// Returns the images that were made of a container image and stored beside it.
    pub(crate) fn converted(&self, subject: Sha256) -> Result<Vec<Converted>> {
        let list = self.referrers(subject, ARTIFACT_TYPE)?;
        list.map_or(Ok(Vec::new()), |list| referrers::parse(&list).map_err(|reason| self.invalid_list(reason)))
    }

    /// Returns the list of the manifests of a type that refer to another one; it may have others, too. Nothing proves a list, and whose
    /// list of images is believed decides what is in a container: that is the registry's own.
    pub(crate) fn referrers(&self, subject: Sha256, kind: &str) -> Result<Option<Vec<u8>>> {
        let Server::Oci(oci) = &self.server else { return Ok(None) };
        let by_mirrors = kind != ARTIFACT_TYPE;
        let by_registry = || {
            let by_mirror = self.by_mirror(
                |mirror| by_mirrors && mirror.resolves,
                |mirror| {
                    let Mirror { client, oci, .. } = mirror;
                    let listed = client.retry(|| oci.referrers(client, subject, kind))?;
                    listed.ok_or_else(|| Error::NoImage(self.reference.to_string()))
                },
            );
            match by_mirror {
                Some(list) => Ok(Some(list)),
                None => self.client.retry(|| oci.referrers(&self.client, subject, kind)),
            }
        };
        // At the same time: a container waits for the answer.
        let (listed, by_clients) = thread::scope(|scope| {
            let by_clients = scope.spawn(|| self.referrers_list(subject, by_mirrors));
            (by_registry(), by_clients.join().unwrap_or(Ok(None)))
        });
        match (listed, by_clients) {
            (Ok(None), by_clients) | (Err(_), by_clients @ Ok(Some(_))) => by_clients,
            (listed, _) => listed,
        }
    }

    /// Returns a manifest, verified by its digest.
    pub(crate) fn manifest_of(&self, digest: Sha256) -> Result<Vec<u8>> {
        Ok(self.fetch_manifest(&Version::Digest(digest))?.0)
    }

    /// Returns a converted image as an image of its own. What its mount needs first is fetched at the same time.
    pub(crate) fn converted_image(&self, found: &Converted) -> Result<(Manifest, Sha256)> {
        let (bytes, name) = thread::scope(|scope| {
            for blob in &found.first {
                scope.spawn(|| self.fetch_ahead(*blob));
            }
            self.fetch_manifest(&Version::Digest(found.manifest))
        })?;
        let invalid = |reason| Error::Manifest { name: self.reference.to_string(), reason };
        Ok((Manifest::read(&bytes).map_err(invalid)?, name))
    }

    /// Uploads a blob unless it exists. Each attempt reads `upload` from its start. Returns whether it was uploaded.
    pub(crate) fn put(&self, blob: Blob, upload: &mut Upload<'_>) -> Result<bool> {
        let exists = self.client.retry(|| match &self.server {
            Server::Oci(oci) => oci.has(&self.client, blob),
            Server::S3(s3) => s3.has(&self.client, blob),
        });
        let exists = match exists {
            // A server that was killed while it received the blob may fail on its partial state. A new upload is
            // complete.
            Err(Error::Status { status: 500, .. }) => false,
            exists => exists?,
        };
        if exists {
            return Ok(false);
        }
        self.client.retry(|| {
            upload.rewind()?;
            match &self.server {
                Server::Oci(oci) => oci.put(&self.client, blob, upload),
                Server::S3(s3) => s3.put(&self.client, blob, upload),
            }
        })?;
        Ok(true)
    }

    fn request_range(&self, blob: Blob, range: &Range<u64>) -> Result<Response<'_>> {
        match &self.server {
            Server::Oci(oci) => oci.read(&self.client, blob, range),
            Server::S3(s3) => s3.read(&self.client, blob, range),
        }
    }

    /// Passes a range of a blob to `sink`, each byte once; continues after a failure.
    pub(crate) fn read(&self, blob: Blob, range: &Range<u64>, sink: &mut Sink<'_>) -> Result<()> {
        self.read_as(blob, range, false, sink)
    }

    /// As [`Self::read`], for a small part of a large blob: a server that would send all of it is refused.
    pub(crate) fn read_part(&self, blob: Blob, range: &Range<u64>, sink: &mut Sink<'_>) -> Result<()> {
        let is_part = *range != (0..blob.bytes);
        self.read_as(blob, range, is_part, sink)
    }

    fn read_as(&self, blob: Blob, range: &Range<u64>, is_part: bool, sink: &mut Sink<'_>) -> Result<()> {
        let mut left = range.clone();
        // The last mirror of which there are some bytes.
        let mut sender = None;
        for mirror in self.mirrors.iter().filter(|mirror| mirror.pulls && mirror.is_usable()) {
            let (Mirror { client, oci, .. }, begin) = (mirror, left.start);
            let outcome = read_from(client, &mut left, is_part, sink, &|left| oci.read(client, blob, left));
            match outcome {
                Err(Error::Sink(error)) => return Err(refused(error, Some(mirror))),
                // What has come is proved later, from whichever server it is.
                Err(error) => mirror.note(&error),
                Ok(()) => return Ok(()),
            }
            if left.start > begin {
                sender = Some(mirror);
            }
        }
        read_from(&self.client, &mut left, is_part, sink, &|left| self.request_range(blob, left)).map_err(|error| {
            match error {
                Error::Sink(error) => refused(error, sender),
                error => error,
            }
        })
    }

    /// Returns a whole small blob, verified by its digest.
    pub(crate) fn read_all(&self, blob: Blob, bytes_max: u64) -> Result<Vec<u8>> {
        let invalid = |reason: String| Error::Manifest { name: self.reference.to_string(), reason };
        if blob.bytes > bytes_max {
            return Err(invalid(format!("a blob of {} bytes; the maximum is {bytes_max}", blob.bytes)));
        }
        // Not allocated at once, because the size is untrusted.
        let mut bytes = Vec::new();
        self.read_verified(blob, &mut |at, piece| {
            bytes.truncate(usize::try_from(at).unwrap_or(usize::MAX));
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(bytes)
    }

    /// Prefetches a blob. A failure is ignored, and retried on demand.
    fn fetch_ahead(&self, blob: Blob) {
        match self.read_all(blob, FIRST_BYTES_MAX) {
            Ok(bytes) => drop(self.ahead.lock().unwrap_or_else(PoisonError::into_inner).insert(blob.sha256, bytes)),
            Err(error) => tracing::debug!("{error}: a blob is not fetched ahead"),
        }
    }

    /// Passes a whole blob to `sink`, each piece with its offset, and verifies it by its digest. What a mirror sent damaged comes again.
    pub(crate) fn read_verified(&self, blob: Blob, sink: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>) -> Result<()> {
        let ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner).remove(&blob.sha256);
        if let Some(bytes) = ahead.filter(|bytes| bytes.len() as u64 == blob.bytes) {
            return sink(0, &bytes).map_err(Error::Sink);
        }
        for _ in 0..=self.mirrors.len() {
            let (mut hasher, mut at) = (sha2::Sha256::new(), 0);
            let is_right = |hasher: &sha2::Sha256| Sha256(hasher.clone().finalize().into()) == blob.sha256;
            let outcome = self.read(blob, &(0..blob.bytes), &mut |piece| {
                sink(at, piece)?;
                hasher.update(piece);
                at += piece.len() as u64;
                if at < blob.bytes || is_right(&hasher) { Ok(()) } else { Err(ErrorKind::InvalidData.into()) }
            });
            match outcome {
                // Another server is asked.
                Err(Error::Sink(error)) if error.kind() == ErrorKind::Interrupted => {}
                Err(Error::Sink(error)) if error.kind() == ErrorKind::InvalidData => break,
                // Nothing is passed of an empty blob.
                Ok(()) if !is_right(&hasher) => break,
                outcome => return outcome,
            }
        }
        Err(Error::Damaged { name: self.reference.to_string(), blob: blob.sha256 })
    }
}

/// Returns the error for a refusal of the sink. The mirror that sent something damaged is left out, and the kind of the error says that another
/// server can be asked.
fn refused(error: io::Error, sender: Option<&Mirror>) -> Error {
    match sender {
        Some(mirror) if error.kind() == ErrorKind::InvalidData => {
            tracing::warn!("{:?} sent damaged data: it is left out for {} s", mirror.oci, MIRROR_PAUSE.as_secs());
            mirror.leave_out();
            Error::Sink(io::Error::new(ErrorKind::Interrupted, error))
        }
        _ => Error::Sink(error),
    }
}

/// Passes what is left of a range to `sink`, and takes it from `left`; continues after a failure.
fn read_from<'a>(
    client: &Client,
    left: &mut Range<u64>,
    is_part: bool,
    sink: &mut Sink<'_>,
    request: &dyn Fn(&Range<u64>) -> Result<Response<'a>>,
) -> Result<()> {
    loop {
        let begin = left.start;
        let outcome = client.retry(|| {
            if left.is_empty() {
                return Ok(());
            }
            let mut received = 0;
            let response = request(left);
            let outcome = response.and_then(|response| response.read_range(left, is_part, &mut received, sink));
            left.start += received;
            outcome
        });
        match outcome {
            // Enough progress to restart the count of attempts.
            Err(error) if error.is_transient() && left.start - begin >= PROGRESS_BYTES => {}
            outcome => return outcome,
        }
    }
}
