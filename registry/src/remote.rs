//! An image on any kind of server.

use std::io;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::http::{Client, Counts, Response, Upload};
use crate::manifest::{Blob, Manifest, Sha256, is_container};
use crate::oci::Oci;
use crate::reference::{Location, Reference, Version};
use crate::s3::S3;

/// The number of bytes between two failures after which the second one counts as the first.
const PROGRESS_BYTES: u64 = 1 << 20;

/// An image on a server.
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
        let server = match &reference.location {
            Location::Oci { scheme, host, name } => Server::Oci(Oci::new(*scheme, host, name, client.allows_plain())?),
            Location::S3 { bucket, prefix } => Server::S3(S3::new(bucket, prefix)?),
        };
        Ok(Self { client, reference: reference.clone(), server })
    }

    /// Returns the counters of requests.
    pub fn counts(&self) -> Counts {
        self.client.counts()
    }

    /// Returns its location.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Returns the manifest, and its digest.
    pub(crate) fn manifest(&self) -> Result<(Manifest, Sha256)> {
        let version = &self.reference.version;
        let bytes = self.client.retry(|| match &self.server {
            Server::Oci(oci) => oci.manifest(&self.client, version),
            Server::S3(s3) => s3.manifest(&self.client, version),
        })?;
        let bytes = bytes.ok_or_else(|| Error::NoImage(self.reference.to_string()))?;
        let invalid = |reason| Error::Manifest { name: self.reference.to_string(), reason };
        let found = Sha256::of(&bytes);
        if let Version::Digest(wanted) = version
            && *wanted != found
        {
            return Err(invalid(format!("it has the digest sha256:{found}")));
        }
        if let Server::Oci(oci) = &self.server
            && is_container(&bytes)
        {
            return Err(self.container_error(oci));
        }
        Ok((Manifest::read(&bytes).map_err(invalid)?, found))
    }

    /// Returns the error for a container image, with a remedy.
    fn container_error(&self, registry: &Oci) -> Error {
        let name = self.reference.to_string();
        let options = if registry.is_plain() { "--src-tls-verify=false " } else { "" };
        let place = name.split_once("://").map_or_else(|| name.trim_start_matches("oci:"), |(_, place)| place).into();
        Error::Container { name, options, place }
    }

    pub(crate) fn put_manifest(&self, bytes: &[u8]) -> Result<()> {
        let version = &self.reference.version;
        self.client.retry(|| match &self.server {
            Server::Oci(oci) => oci.put_manifest(&self.client, version, bytes),
            Server::S3(s3) => s3.put_manifest(&self.client, version, bytes),
        })
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
    pub(crate) fn read(
        &self,
        blob: Blob,
        range: &Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<()> {
        let mut at = range.start;
        loop {
            let begin = at;
            let outcome = self.client.retry(|| {
                if at == range.end {
                    return Ok(());
                }
                let left = at..range.end;
                let mut received = 0;
                let response = self.request_range(blob, &left);
                let outcome = response.and_then(|response| response.read_range(&left, &mut received, sink));
                at += received;
                outcome
            });
            match outcome {
                // Enough progress to restart the count of attempts.
                Err(error) if error.is_transient() && at - begin >= PROGRESS_BYTES => {}
                outcome => return outcome,
            }
        }
    }

    /// Returns a whole small blob, verified by its digest.
    pub(crate) fn read_all(&self, blob: Blob, bytes_max: u64) -> Result<Vec<u8>> {
        let invalid = |reason: String| Error::Manifest { name: self.reference.to_string(), reason };
        if blob.bytes > bytes_max {
            return Err(invalid(format!("a blob of {} bytes, which may have {bytes_max}", blob.bytes)));
        }
        // Not allocated at once, because the size is untrusted.
        let mut bytes = Vec::new();
        self.read(blob, &(0..blob.bytes), &mut |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        if Sha256::of(&bytes) != blob.sha256 {
            return Err(invalid(format!("the blob sha256:{} came damaged", blob.sha256)));
        }
        Ok(bytes)
    }
}
