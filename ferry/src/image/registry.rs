//! `ferry image push | pull`, and images that are fetched while they are mounted.

use std::path::{Path, PathBuf};

use anyhow::Result;
#[cfg(not(feature = "registry"))]
use anyhow::bail;
use ferry_image::{Digest, Source};

use super::args::{ImageArg, StoreArg};
use crate::flags::{ImageDigest, JOBS_MAX, Share};
use crate::size::Size;

/// The default number of parallel requests.
pub const JOBS: u16 = 4;
/// Additional requests, for readers that wait.
#[cfg(feature = "registry")]
const READERS: usize = 16;
/// The default size in bytes of the data fetched together with an object: a minimum, an amount per millisecond of the server's
/// response time, and a maximum. The longer a request waits, the more it should return.
const AHEAD_BYTES: u64 = 256 << 10;
#[cfg(feature = "registry")]
const AHEAD_BYTES_MAX: u64 = 2 << 20;

/// The flags of a registry.
#[derive(Debug, clap::Args)]
pub struct RemoteArg {
    /// The registry: oci:HOST/NAME:TAG, or s3:BUCKET/PREFIX:TAG with endpoint and credentials in the environment
    /// (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY).
    #[arg(value_name = "REF")]
    reference: String,
    /// The number of parallel requests.
    #[arg(long, value_name = "N", default_value_t = JOBS, value_parser = clap::value_parser!(u16).range(1..=i64::from(JOBS_MAX)))]
    jobs: u16,
    /// Allow unencrypted HTTP to other machines.
    #[arg(long)]
    plain_http: bool,
}

#[derive(Debug, clap::Args)]
pub struct PushArgs {
    #[command(flatten)]
    image: ImageArg,
    #[command(flatten)]
    remote: RemoteArg,
    #[command(flatten)]
    store: StoreArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub struct PullArgs {
    #[command(flatten)]
    remote: RemoteArg,
    /// The image to create. It appears when it is complete.
    #[arg(short, long, value_name = "IMAGE")]
    output: PathBuf,
    #[command(flatten)]
    store: StoreArg,
    /// Fail unless the image has this digest: of its tree (tree:, as ferry image build prints it), or of the image file.
    #[arg(long, value_name = "DIGEST")]
    digest: Option<ImageDigest>,
    /// Fetch only the metadata; ferry mount --from fetches the rest when it is read.
    #[arg(long)]
    metadata_only: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub struct ConvertArgs {
    #[command(flatten)]
    remote: RemoteArg,
    #[command(flatten)]
    store: StoreArg,
    /// Keep the image here, too.
    #[arg(short, long, value_name = "IMAGE")]
    output: Option<PathBuf>,
    /// Put the files in the list, which ferry image trace has written, in a pack of their own, in its order, which a lazy start fetches
    /// first. The image is then used instead of those that were converted before.
    #[arg(long, value_name = "TRACE")]
    order_from: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The source of an image's data, and how it is fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    pub reference: String,
    /// The number of parallel background requests.
    pub jobs: u16,
    /// The maximum size of the cache in bytes; `None`: everything is kept.
    pub cache_bytes: Option<u64>,
    /// The number of bytes fetched together with a read; `None`: depends on the server.
    pub ahead_bytes: Option<u64>,
    /// Before the background fetches more; `None`: no limit.
    pub bytes_per_second: Option<u64>,
    pub plain_http: bool,
}

impl Origin {
    /// Creates an origin with default options.
    pub fn new(reference: String, plain_http: bool) -> Self {
        Self { reference, jobs: JOBS, cache_bytes: None, ahead_bytes: None, bytes_per_second: None, plain_http }
    }

    /// Returns the origin of a share with `--from`.
    pub fn of(share: &Share) -> Option<Self> {
        let bytes = |size: Option<Size>| size.map(|Size(bytes)| bytes);
        Some(Self {
            jobs: share.jobs.unwrap_or(JOBS),
            cache_bytes: bytes(share.cache_size),
            ahead_bytes: bytes(share.fetch_ahead),
            bytes_per_second: bytes(share.fetch_rate),
            ..Self::new(share.from.clone()?, share.plain_http)
        })
    }
}

/// How layers of containers are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerOptions {
    ahead_bytes: u64,
    plain_http: bool,
}

impl LayerOptions {
    pub fn of(share: &Share) -> Self {
        let ahead_bytes = share.fetch_ahead.map_or(AHEAD_BYTES, |Size(bytes)| bytes);
        Self { ahead_bytes, plain_http: share.plain_http }
    }
}

#[cfg(not(feature = "registry"))]
macro_rules! unavailable {
    ($($name:ident($($argument:ty),+) -> $output:ty;)+) => {$(
        pub fn $name($(_: $argument),+) -> Result<$output> {
            bail!("this ferry was built without registries (cargo's feature registry)")
        }
    )+};
}

#[cfg(not(feature = "registry"))]
unavailable! {
    push(&PushArgs) -> ();
    pull(&PullArgs) -> ();
    convert(&ConvertArgs) -> ();
    push_trace(&str, Option<&str>, &Path) -> ();
    open(&Path, &Path, Option<Digest>, &Origin) -> Source;
    open_layers(&Path, LayerOptions) -> std::sync::Arc<dyn ferry_vfs::FileSystem>;
    objects(&Path, &Path, Option<Digest>, &Origin) -> ImageObjects;
    pull_and_report(&Path, &Path, &str, &Origin) -> Option<(ImageObjects, String)>;
    restore(&Path, &Path, Option<Digest>, &Origin) -> ferry_image::RepairCounts;
}

/// An image, its data, and the function that fetches the rest in the background.
pub type ImageObjects = (ferry_image::Image, ferry_image::Objects, Option<Background>);

/// Fetches all remaining data, without a time limit; returns whether it is complete and synced.
pub type Background = Box<dyn FnOnce(&ferry_image::Objects) -> bool + Send>;

#[cfg(feature = "registry")]
pub use with::{convert, objects, open, open_layers, pull, pull_and_report, push, push_trace, restore};

#[cfg(feature = "registry")]
mod with {
    use std::io::{BufRead as _, Read as _};
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::{Receiver, sync_channel};
    use std::sync::{Arc, Mutex};
    use std::thread;
    use std::time::{Duration, Instant};

    use anyhow::{Context, bail};
    use ferry_image::{
        FetchOptions, FirstFiles, Image, ObjectError, Objects, RepairCounts, Store, Trace, error_chain, repair_packs,
    };
    use ferry_registry::{
        Client, ConvertOptions, ConvertOutcome, Counts, LIST_BYTES_MAX, LazyImage, LazyOptions, Limits, Options, Packs,
        PullOptions, PullOutcome, PushOutcome, Remote, list_beside, pull_lazily,
    };
    use ferry_vfs::random_u64;
    use ferry_vfs::sync::lock;
    use serde_json::json;

    use super::super::report::bar;
    use super::*;
    use crate::output::print;

    /// The environment variable with a colon-separated list of directories with containerd's `hosts.toml` files.
    const HOSTS: &str = "FERRY_REGISTRY_HOSTS";
    /// The environment variable with the path of the reference's manifest, if the calling program has just fetched it.
    const MANIFEST: &str = "FERRY_REGISTRY_MANIFEST";
    /// The environment variable with the path of a file with credentials that come before all others. It may be missing.
    const PULL_CREDENTIALS: &str = "FERRY_REGISTRY_PULL_CREDENTIALS";
    /// The maximum size of a manifest in bytes, as in registries.
    const MANIFEST_BYTES_MAX: u64 = 4 << 20;
    /// If a server responds faster, nothing is fetched in the background while a container starts, because that takes CPU time.
    const IMMEDIATE: Duration = Duration::from_millis(2);
    /// The interval at which the background checks whether to begin.
    const TICK: Duration = Duration::from_millis(20);
    /// The maximum length of a line on standard input in bytes.
    const LINE_BYTES_MAX: u64 = 64;
    /// The maximum number of bytes of a file's name in the log.
    const NAME_BYTES_MAX: usize = 200;
    /// Limits while containerd waits for an image: the timeout of a request, the number of attempts, and the total time. After that the
    /// image is pulled as usual.
    const PATIENCE: Duration = Duration::from_secs(10);
    const ATTEMPTS: u32 = 2;
    const PULL_TIME: Duration = Duration::from_secs(300);
    /// The pause after a failed round of the background fetch. It doubles while nothing is fetched.
    const BACKGROUND_PAUSE_MIN: Duration = Duration::from_secs(30);
    const BACKGROUND_PAUSE_MAX: Duration = Duration::from_secs(3600);

    fn remote(reference: &str, plain_http: bool, jobs: u16) -> Result<Arc<Remote>> {
        remote_with(reference, plain_http, jobs, Limits::default())
    }

    fn remote_with(reference: &str, plain_http: bool, jobs: u16, limits: Limits) -> Result<Arc<Remote>> {
        // Some requests are reserved for readers, who never wait for the background.
        let requests_max = usize::from(jobs) + READERS;
        let hosts = std::env::var_os(HOSTS).unwrap_or_default();
        let hosts = std::env::split_paths(&hosts).filter(|directory| !directory.as_os_str().is_empty()).collect();
        // A file with another manifest is ignored; if it cannot be read, the manifest is fetched.
        let manifest =
            std::env::var_os(MANIFEST).and_then(|path| read_at_most(Path::new(&path), MANIFEST_BYTES_MAX).ok());
        let pull_credentials = std::env::var_os(PULL_CREDENTIALS).map(PathBuf::from);
        let options =
            Options { plain_http, requests_max, hosts, manifest, pull_credentials, limits, ..Options::default() };
        let client = Client::new(options);
        Ok(Arc::new(Remote::open(&reference.parse()?, client)?))
    }

    fn read_at_most(path: &Path, bytes_max: u64) -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(bytes_max).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn progress(bar: &indicatif::ProgressBar) -> impl Fn(u64, u64) + Sync + '_ {
        |done, all| {
            bar.set_length(all);
            bar.set_position(done);
        }
    }

    pub fn push(args: &PushArgs) -> Result<()> {
        let remote = remote(&args.remote.reference, args.remote.plain_http, args.remote.jobs)?;
        let directory = &args.store.store;
        let (store, bar) = (Store::open(directory)?, bar("bytes"));
        let (image, digest, jobs) = (&args.image.image, args.image.digest(), usize::from(args.remote.jobs));
        let pushed = ferry_registry::push(&remote, image, digest, &store, directory, jobs, &progress(&bar))?;
        bar.finish_and_clear();
        let PushOutcome { digest, manifest, sent_bytes } = pushed;
        let Counts { requests, .. } = remote.counts();
        if args.json {
            let answer = json!({"digest": digest.to_string(), "manifest": format!("sha256:{manifest}"),
                "new_bytes": sent_bytes, "requests": requests});
            return print(format!("{answer}\n"));
        }
        eprintln!("ferry: {sent_bytes} bytes were sent; the manifest is sha256:{manifest}");
        print(format!("{digest}\n"))
    }

    pub fn pull(args: &PullArgs) -> Result<()> {
        let remote = remote(&args.remote.reference, args.remote.plain_http, args.remote.jobs)?;
        // The store's lock is held until the end, so that gc removes nothing.
        let store = Store::create(&args.store.store)?;
        let options = PullOptions {
            digest: args.digest.map(|digest| digest.0),
            jobs: args.remote.jobs.into(),
            metadata_only: args.metadata_only,
        };
        let bar = bar("bytes");
        let pulled = ferry_registry::pull(&remote, &args.output, &args.store.store, &options, &progress(&bar))?;
        bar.finish_and_clear();
        drop(store);
        let PullOutcome { digest, manifest, fetched_bytes } = pulled;
        let Counts { requests, received_bytes, .. } = remote.counts();
        if args.json {
            let answer = json!({"digest": digest.to_string(), "manifest": format!("sha256:{manifest}"),
                "new_bytes": fetched_bytes, "requests": requests, "received_bytes": received_bytes});
            return print(format!("{answer}\n"));
        }
        eprintln!("ferry: {fetched_bytes} bytes of files were missing; {requests} requests, {received_bytes} bytes");
        print(format!("{digest}\n"))
    }

    pub fn convert(args: &ConvertArgs) -> Result<()> {
        let remote = remote(&args.remote.reference, args.remote.plain_http, args.remote.jobs)?;
        let directory = &args.store.store;
        let store = Store::create(directory)?;
        let new = store.temporary_directory()?;
        let unkept = new.path().join("image");
        let output = args.output.as_deref().unwrap_or(&unkept);
        let bar = bar("bytes");
        let order = args.order_from.as_deref().map(Trace::read).transpose()?;
        let options = ConvertOptions { order, jobs: args.remote.jobs.into() };
        let outcome = ferry_registry::convert(&remote, output, directory, &options, &progress(&bar))?;
        bar.finish_and_clear();
        drop((new, store));
        let ConvertOutcome { digest, manifest, subject, sent_bytes } = outcome;
        let Counts { requests, .. } = remote.counts();
        if args.json {
            let answer = json!({"digest": digest.to_string(), "manifest": format!("sha256:{manifest}"),
                "subject": format!("sha256:{subject}"), "new_bytes": sent_bytes, "requests": requests,
                "proved": sent_bytes.is_some()});
            return print(format!("{answer}\n"));
        }
        let Some(bytes) = sent_bytes else {
            eprintln!(
                "ferry: it was converted before; the manifest is sha256:{manifest}. The registry says that its digest is {digest}, which \
                 nothing proves: everybody who may push to the repository can say so"
            );
            return Ok(());
        };
        eprintln!("ferry: {bytes} bytes were sent; the manifest is sha256:{manifest}");
        print(format!("{digest}\n"))
    }

    /// Stores a list beside a container image, whose manifest must have the expected digits.
    pub fn push_trace(reference: &str, expected: Option<&str>, list: &Path) -> Result<()> {
        let text = std::fs::read(list).with_context(|| format!("cannot read {}", list.display()))?;
        let manifest = ferry_registry::push_trace(&*remote(reference, false, 1)?, expected, &text)?;
        eprintln!("ferry: the list is stored beside {reference}; its manifest is sha256:{manifest}");
        Ok(())
    }

    /// Opens an image whose data comes from a server, and fetches all of it in the background.
    pub fn open(path: &Path, store: &Path, digest: Option<Digest>, from: &Origin) -> Result<Source> {
        let Prepared { store, packs, missing, background } = prepare(path, store, digest, from)?;
        let source = Source::open_with(path, &store, digest, Some(missing))?;
        reach(&source.shared_objects(), &packs)?;
        put_first(path, source.image(), &source.shared_objects());
        if let Some(background) = background {
            let objects = source.shared_objects();
            let fetch = thread::Builder::new().name("ferry-fetch".into()).spawn(move || background(&objects));
            fetch.context("cannot start a thread")?;
        }
        Ok(source)
    }

    /// Opens the layers of containers that a directory has, and that are still in their registries.
    pub fn open_layers(directory: &Path, options: LayerOptions) -> Result<Arc<dyn ferry_vfs::FileSystem>> {
        let LayerOptions { ahead_bytes, plain_http } = options;
        let options = ferry_layers::Options { ahead_bytes, plain_http, ..ferry_layers::Options::default() };
        Ok(Arc::new(ferry_layers::LayerStore::open(directory, options)?))
    }

    /// The same, for direct access to the packs.
    pub fn objects(path: &Path, store: &Path, digest: Option<Digest>, from: &Origin) -> Result<ImageObjects> {
        open_objects(path, digest, prepare(path, store, digest, from)?)
    }

    /// The same for ferry-snapshotter, while containerd waits: pulls the metadata of a container image, and writes a description of the
    /// image, or an error, to standard output. Returns the image and the source of its data when a line on standard input requests the
    /// mount; connections and tokens for further requests exist then. `None`: the image is not to be mounted.
    pub fn pull_and_report(
        path: &Path,
        store: &Path,
        options: &str,
        from: &Origin,
    ) -> Result<Option<(ImageObjects, String)>> {
        let options: LazyOptions = serde_json::from_str(options).context("--pull: it is no option of a pull")?;
        let deadline = Some(Instant::now() + PULL_TIME);
        let limits = Limits { patience: PATIENCE, attempts_max: ATTEMPTS, deadline };
        let pull = || -> Result<(Arc<Remote>, LazyImage, Arc<Packs>)> {
            let remote = remote_with(&from.reference, from.plain_http, from.jobs, limits)?;
            let (image, packs) = pull_lazily(&remote, path, store, options)?;
            Ok((remote, image, packs))
        };
        let go = wait_for_line()?;
        let pulled = pull();
        let report = pulled.as_ref().map(|(_, image, _)| image).map_err(|error| format!("{error:#}"));
        print(format!("{}\n", serde_json::to_string(&report)?))?;
        let Ok((remote, image, packs)) = pulled else { return Ok(None) };
        if go.recv().is_err() {
            return Ok(None);
        }
        remote.set_limits(Limits::default());
        // Its directory has its final name now.
        let path = &path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?;
        let digest = Digest::parse(image.digest.as_bytes());
        let objects = open_objects(path, digest, prepare_with(&remote, packs, store, from)?)?;
        Ok(Some((objects, image.from)))
    }

    /// Waits for a line on standard input, in the background. At the end of the input this process ends, also during a pull.
    fn wait_for_line() -> Result<Receiver<()>> {
        let (sender, line) = sync_channel(1);
        let wait = move || match std::io::stdin().lock().take(LINE_BYTES_MAX).read_line(&mut String::new()) {
            Ok(1..) => drop(sender.send(())),
            Ok(0) | Err(_) => std::process::exit(0),
        };
        thread::Builder::new().name("image-stdin".into()).spawn(wait).context("cannot start a thread")?;
        Ok(line)
    }

    fn open_objects(path: &Path, digest: Option<Digest>, prepared: Prepared) -> Result<ImageObjects> {
        let Prepared { store, packs, missing, background } = prepared;
        let image = Image::open(path, digest)?;
        let objects = Objects::open_with(&image, &store, Some(missing))?;
        reach(&objects, &packs)?;
        put_first(path, &image, &objects);
        Ok((image, objects, background))
    }

    /// Schedules the files in the list beside an image to be fetched first. An invalid list is only logged.
    fn put_first(path: &Path, image: &Image, objects: &Objects) {
        let list = list_beside(path);
        let trace = match Trace::read_within(&list, LIST_BYTES_MAX) {
            Ok(trace) => trace,
            Err(_) if !list.exists() => return,
            Err(error) => return tracing::warn!("{}: nothing is fetched first", error_chain(&error)),
        };
        let FirstFiles { files, unknown, unknown_names } = objects.put_first(image, trace.paths());
        tracing::info!("{files} files of {} are fetched first", list.display());
        if unknown > 0 {
            let names: Vec<_> = unknown_names.iter().map(|name| excerpt(name)).collect();
            let more = if names.len() < unknown { ", ..." } else { "" };
            tracing::warn!(
                "{unknown} paths in {} are no files of the image: {}{more}",
                list.display(),
                names.join(", ")
            );
        }
    }

    fn excerpt(name: &[u8]) -> String {
        name[..name.len().min(NAME_BYTES_MAX)].escape_ascii().to_string()
    }

    /// Fetches missing data of the store and data recorded as damaged, if the server has it.
    pub fn restore(path: &Path, store: &Path, digest: Option<Digest>, from: &Origin) -> Result<RepairCounts> {
        let Prepared { store, packs, missing, .. } = prepare(path, store, digest, from)?;
        let image = Image::open(path, digest)?;
        let repaired = repair_packs(&image, &store, Some(&*packs));
        let bar = bar("bytes");
        let fetch = || -> Result<()> {
            let objects = Objects::open_repaired(&image, &store, Some(missing))?;
            objects.fetch_all(from.jobs.max(1).into(), &AtomicBool::new(false), &progress(&bar))?;
            Ok(objects.complete()?)
        };
        let fetched = fetch();
        bar.finish_and_clear();
        match (repaired, fetched) {
            (Err(one), Err(two)) => bail!("{}; {two:#}", error_chain(&one)),
            (repaired, fetched) => fetched.and(Ok(repaired?)),
        }
    }

    /// Returns an error if data is missing and the server is unreachable, so that the first reader does not find out. A complete image
    /// needs no server.
    fn reach(objects: &Objects, packs: &Packs) -> Result<()> {
        if objects.looks_complete() { Ok(()) } else { Ok(packs.fetch_manifest()?) }
    }

    /// An image whose metadata is present.
    struct Prepared {
        store: PathBuf,
        packs: Arc<Packs>,
        /// Fetches data when it is read.
        missing: FetchOptions,
        /// Fetches the rest in the background.
        background: Option<Background>,
    }
    fn prepare(path: &Path, store: &Path, digest: Option<Digest>, from: &Origin) -> Result<Prepared> {
        let remote = remote(&from.reference, from.plain_http, from.jobs)?;
        drop(Store::create(store)?);
        let packs = ferry_registry::pull_metadata(&remote, path, store, digest)?;
        prepare_with(&remote, packs, store, from)
    }

    fn prepare_with(remote: &Arc<Remote>, packs: Arc<Packs>, store: &Path, origin: &Origin) -> Result<Prepared> {
        // Each reader and each background request has a buffer for an object, of some MiB in a layer.
        ferry_engine::return_large_buffers();
        // Background servers change directory.
        let store = store.canonicalize().with_context(|| format!("cannot find {}", store.display()))?;
        let (ahead_bytes, cache_bytes) =
            (origin.ahead_bytes.unwrap_or_else(|| ahead_bytes(&packs)), origin.cache_bytes);
        let missing = FetchOptions { from: Arc::<Packs>::clone(&packs), ahead_bytes, cache_bytes };
        // With a rate limit, requests are sent one at a time.
        let jobs = usize::from(origin.bytes_per_second.map_or(origin.jobs, |_| origin.jobs.min(1)));
        let (remote, from) = (Arc::clone(remote), Arc::clone(&packs));
        let pace = Pace::new(origin.bytes_per_second);
        let background: Background = Box::new(move |objects| in_background(objects, jobs, &pace, &remote, &from));
        Ok(Prepared { store, packs, missing, background: Some(background).filter(|_| jobs > 0) })
    }

    /// Returns the server's response time, if fetching more per request is worth it: not for gzip layers, where unpacking unneeded data
    /// costs more.
    fn round_trip(packs: &Packs) -> Duration {
        packs.latency().filter(|_| !packs.are_layers()).unwrap_or_default()
    }

    /// Beside the first one, the background has a request in flight for each so many milliseconds of the server's response time.
    const RESPONSE_MS_PER_JOB: u128 = 4;

    /// Returns the maximum of background requests in flight to a near server while readers wait for it: so many that some data is always
    /// on its way. More would take CPUs, to unpack and verify, from the program that is being started.
    fn jobs_beside_readers(response: Option<Duration>) -> usize {
        let more = response.unwrap_or_default().as_millis() / RESPONSE_MS_PER_JOB;
        usize::try_from(more).unwrap_or(usize::MAX).saturating_add(1)
    }

    fn ahead_bytes(packs: &Packs) -> u64 {
        let bytes = u64::try_from(round_trip(packs).as_millis()).unwrap_or(u64::MAX).saturating_mul(AHEAD_BYTES);
        bytes.clamp(AHEAD_BYTES, AHEAD_BYTES_MAX)
    }

    /// The rate limit of the background. Unused bytes are saved for a second only, so that there is no burst after a pause.
    struct Pace {
        bytes_per_second: Option<u64>,
        /// The earliest time of the next request, and the number of received bytes when it was calculated.
        next: Mutex<(Instant, u64)>,
    }

    impl Pace {
        /// How long unused bytes are saved.
        const SAVED: Duration = Duration::from_secs(1);

        fn new(bytes_per_second: Option<u64>) -> Self {
            Self { bytes_per_second, next: Mutex::new((Instant::now(), 0)) }
        }

        /// Waits until the bytes received since the last call, including those of readers, fit the rate.
        fn wait(&self, remote: &Remote) {
            let now = Instant::now();
            if let Some(due) = self.due(remote.counts().received_bytes, now) {
                thread::sleep(due.saturating_duration_since(now));
            }
        }

        /// Returns when the next request may begin, after this many bytes in all; `None`: there is no limit.
        fn due(&self, received: u64, now: Instant) -> Option<Instant> {
            let rate = self.bytes_per_second?.max(1);
            let mut next = lock(&self.next);
            let milliseconds = u128::from(received.saturating_sub(next.1)) * 1000 / u128::from(rate);
            let took = Duration::from_millis(u64::try_from(milliseconds).unwrap_or(u64::MAX));
            let from = now.checked_sub(Self::SAVED).map_or(next.0, |saved| saved.max(next.0));
            *next = (from.checked_add(took).unwrap_or(now), received);
            Some(next.0)
        }
    }

    /// Ends with the process, or when all data is fetched; returns whether it is synced. A failed sync is not repeated: a second
    /// fsync(2) would report success.
    fn in_background(objects: &Objects, jobs: usize, pace: &Pace, remote: &Remote, packs: &Packs) -> bool {
        let wait = |_, _| pace.wait(remote);
        let is_far = !objects.looks_complete() && packs.is_far();
        let jobs_beside = if is_far { jobs } else { jobs.min(jobs_beside_readers(packs.latency())) };
        if let Err(bad) = objects.fetch_first(jobs_beside, &AtomicBool::new(false), &wait) {
            tracing::debug!("{bad}: it is tried again");
        }
        let waits = !is_far && !objects.looks_complete();
        if waits && round_trip(packs) > IMMEDIATE {
            objects.fetch_until_read(&wait);
        }
        while waits && !objects.should_fetch_all() {
            thread::sleep(TICK);
        }
        let jobs = if waits { jobs_beside } else { jobs };
        let (mut begin, mut pause, mut last) = (None, Duration::ZERO, String::new());
        let mut fetched = objects.fetched_bytes();
        while let Err(bad) = objects.fetch_round(&mut begin, jobs, &AtomicBool::new(false), &wait) {
            let now = objects.fetched_bytes();
            pause = next_pause(pause, now > fetched);
            fetched = now;
            let why = cause(&bad);
            if why == last {
                tracing::debug!("{bad}; retrying in about {} s", pause.as_secs());
            } else {
                tracing::warn!("{bad}; retrying in about {} s", pause.as_secs());
                last = why;
            }
            let end = Instant::now() + spread(pause, random_u64());
            // What a reader got shows that the registry is back.
            while Instant::now() < end && objects.fetched_bytes() == fetched {
                thread::sleep(BACKGROUND_PAUSE_MIN.min(end.saturating_duration_since(Instant::now())));
            }
        }
        match objects.complete() {
            Ok(()) => {
                let Counts { requests, received_bytes, .. } = remote.counts();
                tracing::info!(requests, received_bytes, "all data is fetched");
                true
            }
            Err(error) => {
                tracing::warn!("{:#}: the packs stay incomplete", anyhow::Error::from(error));
                false
            }
        }
    }

    /// Returns the pause after a failed round.
    fn next_pause(last: Duration, has_fetched: bool) -> Duration {
        if has_fetched { BACKGROUND_PAUSE_MIN } else { (last * 2).clamp(BACKGROUND_PAUSE_MIN, BACKGROUND_PAUSE_MAX) }
    }

    /// Returns three to five quarters of a pause: a registry that fails would get the requests of all its hosts at the same time.
    fn spread(pause: Duration, random: u64) -> Duration {
        let half_ms = u64::try_from(pause.as_millis() / 2).unwrap_or(u64::MAX);
        pause * 3 / 4 + Duration::from_millis(random % half_ms.max(1))
    }

    /// Returns why a round failed, without the object at which it did.
    fn cause(bad: &ObjectError) -> String {
        match bad {
            ObjectError::Fetch { reason, .. } => reason.to_string(),
            other => other.to_string(),
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn pauses_grow_while_nothing_is_fetched() {
            let pauses = std::iter::successors(Some(Duration::ZERO), |last| Some(next_pause(*last, false)));
            let seconds: Vec<_> = pauses.skip(1).take(9).map(|pause| pause.as_secs()).collect();
            assert_eq!(seconds, [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]);
            assert_eq!(next_pause(BACKGROUND_PAUSE_MAX, true), BACKGROUND_PAUSE_MIN);
            let spread = |random| spread(Duration::from_secs(40), random).as_millis();
            assert_eq!([0, 19_999, 20_000].map(spread), [30_000, 49_999, 30_000]);
        }

        #[test]
        fn slower_servers_have_more_requests_in_flight() {
            let jobs = |ms| jobs_beside_readers(Some(Duration::from_millis(ms)));
            assert_eq!([0, 3, 5, 20].map(jobs), [1, 1, 2, 6]);
            assert_eq!(jobs_beside_readers(None), 1);
        }

        #[test]
        fn no_burst_follows_a_pause() {
            let pace = Pace::new(Some(1000));
            let begun = pace.next.lock().expect("nobody panicked").0;
            let at = |seconds| begun + Duration::from_secs(seconds);
            for (received, now, expected) in
                [(4000, 0, 4), (5000, 4, 5), (5000, 3600, 3599), (15_000, 3600, 3609), (15_500, 3609, 3609)]
            {
                let due = pace.due(received, at(now)).expect("there is a limit");
                assert_eq!(due.duration_since(begun).as_secs(), expected, "{received} bytes after {now} s");
            }
            assert_eq!(Pace::new(None).due(1 << 40, begun), None);
        }
    }
}
