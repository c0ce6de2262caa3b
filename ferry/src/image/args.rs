//! The flags that several commands of `ferry image` have.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use ferry_image::{Algorithm, Digest, Image};

use crate::flags::ImageDigest;

#[derive(Debug, clap::Args)]
pub struct StoreArg {
    /// The folder with the bytes of the files.
    #[arg(long, value_name = "DIR")]
    pub store: PathBuf,
}

#[derive(Debug, clap::Args)]
pub struct ImageArg {
    /// The image.
    #[arg(value_name = "IMAGE")]
    pub image: PathBuf,
    /// Go on only if the image has this digest: of the tree (tree:, which ferry image build prints; the same in every store), or its own.
    #[arg(long, value_name = "DIGEST")]
    pub digest: Option<ImageDigest>,
}

impl ImageArg {
    pub fn digest(&self) -> Option<Digest> {
        self.digest.map(|digest| digest.0)
    }

    /// Opens the image; the digest of a tree is proved with the indexes in the store.
    pub fn open(&self, store: Option<&Path>) -> Result<Image> {
        let image = Image::open(&self.image, self.digest())?;
        match (self.digest().is_some_and(|digest| digest.algorithm() == Algorithm::Tree), store) {
            (true, Some(store)) => image.prove_tree(store)?,
            (true, None) => bail!(
                "what proves the digest of a tree is in the store, too: add --store DIR, or take the digest of the image \
                 (ferry image info shows it)"
            ),
            (false, _) => {}
        }
        Ok(image)
    }

    /// The same for whoever checks it: that a file is no image, or another one, is what was found.
    pub fn open_if_one(&self, store: Option<&Path>) -> Result<std::result::Result<Image, String>> {
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
