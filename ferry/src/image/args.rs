//! The flags that several commands of `ferry image` share.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use ferry_image::{Algorithm, Digest, Image};

use crate::flags::{ImageDigest, JOBS_MAX};
use crate::size::Size;

#[derive(Clone, Debug, clap::Args)]
pub struct StoreArg {
    /// The directory with the data of the files.
    #[arg(long, value_name = "DIR")]
    pub store: PathBuf,
}

#[derive(Clone, Debug, clap::Args)]
pub struct ImageArg {
    /// The image.
    #[arg(value_name = "IMAGE")]
    pub image: PathBuf,
    /// Fail unless the image has this digest: of its tree (tree:, as ferry image build prints it; equal in every store), or of
    /// the image file.
    #[arg(long, value_name = "DIGEST")]
    pub digest: Option<ImageDigest>,
}

impl ImageArg {
    pub fn digest(&self) -> Option<Digest> {
        self.digest.map(|digest| digest.0)
    }

    /// Opens the image. A digest of a tree is verified with the indexes in the store.
    pub fn open(&self, store: Option<&Path>) -> Result<Image> {
        let image = Image::open(&self.image, self.digest())?;
        match (self.digest().is_some_and(|digest| digest.algorithm() == Algorithm::Tree), store) {
            (true, Some(store)) => image.verify_tree(store)?,
            (true, None) => bail!(
                "verifying the digest of a tree needs the store: add --store DIR, or use the digest of the image \
                 (ferry image info shows it)"
            ),
            (false, _) => {}
        }
        Ok(image)
    }

    /// The same for checks: an invalid or different image is a finding.
    pub fn open_or_finding(&self, store: Option<&Path>) -> Result<std::result::Result<Image, String>> {
        use ferry_image::Error;

        match self.open(store) {
            Ok(image) => Ok(Ok(image)),
            Err(error) => match error.downcast_ref() {
                Some(Error::Invalid { .. } | Error::OtherDigest { .. } | Error::Unsound { .. }) => {
                    Ok(Err(format!("{error:#}")))
                }
                _ => Err(error),
            },
        }
    }
}

#[derive(Clone, Debug, clap::Args)]
pub struct LazyArgs {
    /// Mount at once, and fetch data that the store lacks from oci:HOST/NAME:TAG or s3:BUCKET/PREFIX:TAG when it is read, and the
    /// rest in the background (Linux 6.14 or later; the store on ext4, XFS or btrfs). An image of the composefs layout is mounted
    /// when it is complete.
    #[arg(long, value_name = "REF")]
    pub from: Option<String>,
    /// The maximum of parallel background requests; 0: fetch only what is read [default: 4].
    #[arg(long, value_name = "N", requires = "from")]
    #[arg(value_parser = clap::value_parser!(u16).range(..=i64::from(JOBS_MAX)))]
    pub jobs: Option<u16>,
    /// Fetch this much of the following data together with what is read [default: 256K, and up to 2M from a server that answers slowly].
    #[arg(long, value_name = "SIZE", requires = "from")]
    pub fetch_ahead: Option<Size>,
    /// Fetch the rest with at most so many bytes per second, together with what is read, which never waits.
    #[arg(long, value_name = "SIZE", requires = "from")]
    pub fetch_rate: Option<Size>,
    /// Allow unencrypted HTTP to other machines.
    #[arg(long, requires = "from")]
    pub plain_http: bool,
    /// Stay in the foreground until everything is fetched.
    #[arg(short, long, requires = "from")]
    pub foreground: bool,
    /// Run as the background process.
    #[arg(long, hide = true, requires = "from")]
    pub detached: bool,
    /// If this process is killed, readers of missing data wait this many seconds for the next one, which ferry-snapshotter starts.
    #[arg(long, hide = true, requires = "foreground", value_name = "SECONDS", default_value_t = 0)]
    pub restart_time: u32,
    /// Run for ferry-snapshotter: pull the image as these options say, in JSON, report it, and mount when a line says so.
    #[arg(long, hide = true, requires = "foreground", value_name = "OPTIONS")]
    pub pull: Option<String>,
}

impl LazyArgs {
    /// Adds the same flags of `ferry mount`, which goes to the background itself.
    pub fn add_to(&self, words: &mut Vec<OsString>) {
        let Some(from) = &self.from else { return };
        words.extend(["--from".into(), from.into()]);
        if let Some(jobs) = self.jobs {
            words.extend(["--jobs".into(), jobs.to_string().into()]);
        }
        if let Some(Size(bytes)) = self.fetch_ahead {
            words.extend(["--fetch-ahead".into(), bytes.to_string().into()]);
        }
        if let Some(Size(bytes)) = self.fetch_rate {
            words.extend(["--fetch-rate".into(), bytes.to_string().into()]);
        }
        let flags = [(self.plain_http, "--plain-http"), (self.foreground, "--foreground")];
        words.extend(flags.into_iter().filter(|(is_given, _)| *is_given).map(|(_, flag)| flag.into()));
    }
}
