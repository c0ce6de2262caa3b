//! A location of images on any kind of server.

use std::io;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::http::{Answer, Client, Counts};
use crate::manifest::{Blob, Manifest, Sha256, is_container};
use crate::oci::{Content, Oci};
use crate::reference::{Place, Reference, Version};
use crate::s3::S3;

/// The number of bytes between two failures after which the second one counts as the first.
const PROGRESS_BYTES: u64 = 1 << 20;

/// One image's place.
#[derive(Debug)]
pub struct Remote {
    client: Client,
    reference: Reference,
    server: Server,
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
        let server = match &reference.place {
            Place::Oci { scheme, host, name } => Server::Oci(Oci::new(*scheme, host, name, client.allows_plain())?),
            Place::S3 { bucket, prefix } => Server::S3(S3::new(bucket, prefix)?),
        };
        Ok(Self { client, reference: reference.clone(), server })
    }

    /// Returns the counters of requests.
    pub fn counts(&self) -> Counts {
        self.client.counts()
    }

    /// Which one it is.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Returns the manifest, and its digest.
    pub(crate) fn manifest(&self) -> Result<(Manifest, Sha256)> {
        let version = &self.reference.version;
        let bytes = self.client.persist(|| match &self.server {
            Server::Oci(oci) => oci.manifest(&self.client, version),
            Server::S3(s3) => s3.manifest(&self.client, version),
        })?;
        let bytes = bytes.ok_or_else(|| Error::NoImage(self.reference.to_string()))?;
        let wrong = |reason| Error::Manifest { name: self.reference.to_string(), reason };
        let found = Sha256::of(&bytes);
        if let Version::Digest(wanted) = version
            && *wanted != found
        {
            return Err(wrong(format!("it has the digest sha256:{found}")));
        }
        if let Server::Oci(oci) = &self.server
            && is_container(&bytes)
        {
            return Err(self.container(oci));
        }
        Ok((Manifest::read(&bytes).map_err(wrong)?, found))
    }

    /// Returns the error for a container image, with a remedy.
    fn container(&self, registry: &Oci) -> Error {
        let name = self.reference.to_string();
        let options = if registry.is_plain() { "--src-tls-verify=false " } else { "" };
        let place = name.split_once("://").map_or_else(|| name.trim_start_matches("oci:"), |(_, place)| place).into();
        Error::Container { name, options, place }
    }

    pub(crate) fn put_manifest(&self, bytes: &[u8]) -> Result<()> {
        let version = &self.reference.version;
        self.client.persist(|| match &self.server {
            Server::Oci(oci) => oci.put_manifest(&self.client, version, bytes),
            Server::S3(s3) => s3.put_manifest(&self.client, version, bytes),
        })
    }

    /// Uploads a blob unless it exists. `content` is called for its bytes at each attempt. Returns whether it was
    /// uploaded.
    pub(crate) fn put(&self, blob: Blob, content: &mut Content<'_>) -> Result<bool> {
        let is_there = self.client.persist(|| match &self.server {
            Server::Oci(oci) => oci.has(&self.client, blob),
            Server::S3(s3) => s3.has(&self.client, blob),
        });
        let is_there = match is_there {
            // A server that was killed while it received the blob may fail on its partial state. A new upload is
            // complete.
            Err(Error::Status { status: 500, .. }) => false,
            is_there => is_there?,
        };
        if is_there {
            return Ok(false);
        }
        self.client.persist(|| {
            content.rewind()?;
            let mut content = Some(Content::of(&mut *content.reader, content.bytes));
            match &self.server {
                Server::Oci(oci) => oci.put(&self.client, blob, &mut content),
                Server::S3(s3) => s3.put(&self.client, blob, &mut content),
            }
        })?;
        Ok(true)
    }

    fn ask(&self, blob: Blob, range: &Range<u64>) -> Result<Answer<'_>> {
        match &self.server {
            Server::Oci(oci) => oci.read(&self.client, blob, range),
            Server::S3(s3) => s3.read(&self.client, blob, range),
        }
    }

    /// Passes on a range of a blob, each byte once; continues after a failure.
    pub(crate) fn read(
        &self,
        blob: Blob,
        range: &Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<()> {
        let mut at = range.start;
        loop {
            let begin = at;
            let outcome = self.client.persist(|| {
                if at == range.end {
                    return Ok(());
                }
                let left = at..range.end;
                let mut got = 0;
                let outcome = self.ask(blob, &left).and_then(|answer| answer.range(&left, &mut got, sink));
                at += got;
                outcome
            });
            match outcome {
                // Enough progress to restart the count of attempts.
                Err(error) if error.may_pass() && at - begin >= PROGRESS_BYTES => {}
                outcome => return outcome,
            }
        }
    }

    /// Returns a whole small blob, verified by its digest.
    pub(crate) fn all(&self, blob: Blob, bytes_max: u64) -> Result<Vec<u8>> {
        let wrong = |reason: String| Error::Manifest { name: self.reference.to_string(), reason };
        if blob.bytes > bytes_max {
            return Err(wrong(format!("a blob of {} bytes, which may have {bytes_max}", blob.bytes)));
        }
        // Not allocated at once, because the size is untrusted.
        let mut bytes = Vec::new();
        self.read(blob, &(0..blob.bytes), &mut |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        if Sha256::of(&bytes) != blob.sha256 {
            return Err(wrong(format!("the blob sha256:{} came damaged", blob.sha256)));
        }
        Ok(bytes)
    }
}
