//! `ferry image push | pull`, and images that are mounted before they are all here.

use std::path::{Path, PathBuf};

use anyhow::Result;
#[cfg(not(feature = "registry"))]
use anyhow::bail;
use ferry_image::{Digest, Source};

use super::args::{ImageArg, StoreArg};
use crate::flags::{ImageDigest, JOBS_MAX, Share};
use crate::size::Size;

/// How many requests at a time, unless told otherwise.
const JOBS: u16 = 4;
/// How many requests more than those may be under way, all together, for readers wait for them.
#[cfg(feature = "registry")]
const READERS: usize = 16;
/// What is asked for together with an object that is read, unless told otherwise, in bytes.
const AHEAD_BYTES: u64 = 256 << 10;

/// Where images are pushed to and pulled from.
#[derive(Debug, clap::Args)]
pub struct RemoteArg {
    /// Where: oci:HOST/NAME:TAG, or s3:BUCKET/PREFIX:TAG with endpoint and credentials in the environment
    /// (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY).
    #[arg(value_name = "REF")]
    reference: String,
    /// How many requests at a time.
    #[arg(long, value_name = "N", default_value_t = JOBS, value_parser = clap::value_parser!(u16).range(1..=i64::from(JOBS_MAX)))]
    jobs: u16,
    /// Ask other machines than this one without encryption, too.
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
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub struct PullArgs {
    #[command(flatten)]
    remote: RemoteArg,
    /// The image to make. It is there when all of it is.
    #[arg(short, long, value_name = "IMAGE")]
    output: PathBuf,
    #[command(flatten)]
    store: StoreArg,
    /// Go on only if the image has this digest: of the tree (tree:, which ferry image build prints), or its own.
    #[arg(long, value_name = "DIGEST")]
    digest: Option<ImageDigest>,
    /// Get the metadata alone: ferry mount --from fetches the rest when it is read.
    #[arg(long)]
    metadata_only: bool,
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
}

/// What a share says of where its image's bytes come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    reference: String,
    jobs: u16,
    cache_bytes: Option<u64>,
    ahead_bytes: u64,
    plain_http: bool,
}

impl Origin {
    /// What is not said is as usual.
    pub fn new(
        reference: String,
        jobs: Option<u16>,
        cache_bytes: Option<u64>,
        ahead_bytes: Option<u64>,
        plain_http: bool,
    ) -> Self {
        let (jobs, ahead_bytes) = (jobs.unwrap_or(JOBS), ahead_bytes.unwrap_or(AHEAD_BYTES));
        Self { reference, jobs, cache_bytes, ahead_bytes, plain_http }
    }

    /// How many requests at a time fetch what nobody has read.
    pub fn jobs(&self) -> u16 {
        self.jobs
    }

    /// What a share says, if it says anything.
    pub fn of(share: &Share) -> Option<Self> {
        let bytes = |size: Option<Size>| size.map(|Size(bytes)| bytes);
        let (cache, ahead) = (bytes(share.cache_size), bytes(share.fetch_ahead));
        Some(Self::new(share.from.clone()?, share.jobs, cache, ahead, share.plain_http))
    }
}

#[cfg(not(feature = "registry"))]
const WITHOUT: &str = "this ferry was built without registries (cargo's feature registry)";

#[cfg(not(feature = "registry"))]
pub fn push(_: &PushArgs) -> Result<()> {
    bail!(WITHOUT)
}

#[cfg(not(feature = "registry"))]
pub fn pull(_: &PullArgs) -> Result<()> {
    bail!(WITHOUT)
}

#[cfg(not(feature = "registry"))]
pub fn open(_: &Path, _: &Path, _: Option<Digest>, _: &Origin) -> Result<Source> {
    bail!(WITHOUT)
}

#[cfg(not(feature = "registry"))]
pub fn objects(
    _: &Path,
    _: &Path,
    _: Option<Digest>,
    _: &Origin,
) -> Result<(ferry_image::Image, ferry_image::Objects, Option<Background>)> {
    bail!(WITHOUT)
}

#[cfg(not(feature = "registry"))]
pub fn restore(_: &Path, _: &Path, _: Option<Digest>, _: &Origin) -> Result<ferry_image::RepairCounts> {
    bail!(WITHOUT)
}

/// Fetches all that nobody has read yet, however long that takes; returns whether all of it has its lasting place then.
pub type Background = Box<dyn FnOnce(&ferry_image::Objects) -> bool + Send>;

#[cfg(feature = "registry")]
pub use with::{objects, open, pull, push, restore};

#[cfg(feature = "registry")]
mod with {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread;
    use std::time::Duration;

    use anyhow::{Context, bail};
    use ferry_image::{Image, Missing, Objects, RepairCounts, Store, repair_packs, told};
    use ferry_registry::{Client, Counts, Options, Packs, PullOptions, PullOutcome, PushOutcome, Remote};
    use serde_json::json;

    use super::super::report::bar;
    use super::*;
    use crate::output::print;

    /// How long the server is left alone when fetching beside the readers has failed.
    const BACKGROUND_PAUSE: Duration = Duration::from_secs(30);

    fn remote(reference: &str, plain_http: bool, jobs: u16) -> Result<Arc<Remote>> {
        // The rest never has all places: a reader waits for other readers only.
        let requests_max = usize::from(jobs) + READERS;
        let client = Client::new(Options { plain_http, requests_max, ..Options::default() });
        Ok(Arc::new(Remote::open(&reference.parse()?, client)?))
    }

    fn progress(bar: &indicatif::ProgressBar) -> impl Fn(u64, u64) + Sync + '_ {
        |done, all| {
            bar.set_length(all);
            bar.set_position(done);
        }
    }

    pub fn push(args: &PushArgs) -> Result<()> {
        let remote = remote(&args.remote.reference, args.remote.plain_http, args.remote.jobs)?;
        let folder = &args.store.store;
        let (store, bar) = (Store::open(folder)?, bar("bytes"));
        let (image, digest, jobs) = (&args.image.image, args.image.digest(), usize::from(args.remote.jobs));
        let pushed = ferry_registry::push(&remote, image, digest, &store, folder, jobs, &progress(&bar))?;
        bar.finish_and_clear();
        let PushOutcome { digest, manifest, sent_bytes } = pushed;
        let Counts { requests, .. } = remote.counts();
        if args.json {
            let answer = json!({"digest": digest.to_string(), "manifest": format!("sha256:{manifest}"),
                "new_bytes": sent_bytes, "requests": requests});
            return print(&format!("{answer}\n"));
        }
        eprintln!("ferry: {sent_bytes} bytes were new to the server; the manifest is sha256:{manifest}");
        print(&format!("{digest}\n"))
    }

    pub fn pull(args: &PullArgs) -> Result<()> {
        let remote = remote(&args.remote.reference, args.remote.plain_http, args.remote.jobs)?;
        // Held until the end, so that nothing is removed meanwhile.
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
            return print(&format!("{answer}\n"));
        }
        eprintln!(
            "ferry: {fetched_bytes} bytes of files were not here before; {requests} requests, {received_bytes} bytes"
        );
        print(&format!("{digest}\n"))
    }

    /// Opens an image whose bytes come from a server, and fetches what nobody has read yet beside the readers.
    pub fn open(path: &Path, store: &Path, digest: Option<Digest>, from: &Origin) -> Result<Source> {
        let Prepared { store, packs, missing, background } = prepare(path, store, digest, from)?;
        let source = Source::open_with(path, &store, digest, Some(missing))?;
        reach(&source.shared_objects(), &packs)?;
        if let Some(background) = background {
            let objects = source.shared_objects();
            let fetch = thread::Builder::new().name("ferry-fetch".into()).spawn(move || background(&objects));
            fetch.context("cannot start a thread")?;
        }
        Ok(source)
    }

    /// The same, for whoever reads the packs directly.
    pub fn objects(
        path: &Path,
        store: &Path,
        digest: Option<Digest>,
        from: &Origin,
    ) -> Result<(Image, Objects, Option<Background>)> {
        let Prepared { store, packs, missing, background } = prepare(path, store, digest, from)?;
        let image = Image::open(path, digest)?;
        let objects = Objects::open_with(&image, &store, Some(missing))?;
        reach(&objects, &packs)?;
        Ok((image, objects, background))
    }

    /// Fetches what is noted as damaged in the store, and what is missing there: of both all that can be had.
    pub fn restore(path: &Path, store: &Path, digest: Option<Digest>, from: &Origin) -> Result<RepairCounts> {
        let Prepared { store, packs, missing, .. } = prepare(path, store, digest, from)?;
        let image = Image::open(path, digest)?;
        let repaired = repair_packs(&image, &store, Some(&*packs));
        let bar = bar("bytes");
        let fetch = || -> Result<()> {
            let objects = Objects::open_repaired(&image, &store, Some(missing))?;
            objects.fetch_all(from.jobs().max(1).into(), &AtomicBool::new(false), &progress(&bar))?;
            Ok(objects.complete()?)
        };
        let fetched = fetch();
        bar.finish_and_clear();
        match (repaired, fetched) {
            (Err(one), Err(two)) => bail!("{}; {two:#}", told(&one)),
            (repaired, fetched) => fetched.and(Ok(repaired?)),
        }
    }

    /// Where something is missing, tells now that the server cannot be asked for it, and not who reads it; an image that is all here
    /// needs no server.
    fn reach(objects: &Objects, packs: &Packs) -> Result<()> {
        if objects.seems_whole() { Ok(()) } else { Ok(packs.fetch_manifest()?) }
    }

    /// An image whose metadata is here.
    struct Prepared {
        store: PathBuf,
        packs: Arc<Packs>,
        /// What fetches the rest when it is read.
        missing: Missing,
        /// And beside that.
        background: Option<Background>,
    }

    /// Gets the metadata.
    fn prepare(path: &Path, store: &Path, digest: Option<Digest>, from: &Origin) -> Result<Prepared> {
        let remote = remote(&from.reference, from.plain_http, from.jobs)?;
        drop(Store::create(store)?);
        // Servers in the background leave the folder that they were started in.
        let store = store.canonicalize().with_context(|| format!("cannot find {}", store.display()))?;
        let packs = ferry_registry::pull_metadata(&remote, path, &store, digest)?;
        let (ahead_bytes, cache_bytes) = (from.ahead_bytes, from.cache_bytes);
        let missing = Missing { from: Arc::<Packs>::clone(&packs), ahead_bytes, cache_bytes };
        let jobs = usize::from(from.jobs);
        let background: Background = Box::new(move |objects| in_background(objects, jobs, &remote));
        Ok(Prepared { store, packs, missing, background: Some(background).filter(|_| jobs > 0) })
    }

    /// Ends with the process, or when all is here; returns whether that lasts. What did not come to the disk is not
    /// tried again: a second fsync(2) would say that all is well.
    fn in_background(objects: &Objects, jobs: usize, remote: &Remote) -> bool {
        while let Err(bad) = objects.fetch_all(jobs, &AtomicBool::new(false), &|_, _| {}) {
            tracing::warn!("{bad}; tried again in {} s", BACKGROUND_PAUSE.as_secs());
            thread::sleep(BACKGROUND_PAUSE);
        }
        match objects.complete() {
            Ok(()) => {
                let Counts { requests, received_bytes, .. } = remote.counts();
                tracing::info!(requests, received_bytes, "nothing is left to fetch");
                true
            }
            Err(error) => {
                tracing::warn!("{:#}: what was fetched stays incomplete", anyhow::Error::from(error));
                false
            }
        }
    }
}
