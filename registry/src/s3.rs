//! A prefix of a bucket: `PREFIX/blobs/sha256/HEX` and `PREFIX/manifests/NAME`.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use rusty_s3::{Bucket, Credentials, S3Action, UrlStyle};
use ureq::http::{Method, header};
use url::Url;

use crate::error::{Error, Result};
use crate::http::{Client, Request, Response, Upload};
use crate::manifest::{Blob, MANIFEST_BYTES_MAX, Sha256};
use crate::reference::Version;

/// The validity of a signature. Each request has its own.
const SIGNATURE_VALIDITY: Duration = Duration::from_secs(3600);

pub(crate) struct S3 {
    bucket: Bucket,
    prefix: String,
    credentials: Option<Credentials>,
}

impl fmt::Debug for S3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3").field("bucket", &self.bucket.name()).field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

fn var(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl S3 {
    /// Creates it with endpoint, region and credentials from the environment, as AWS's tools do.
    pub(crate) fn new(bucket: &str, prefix: &str) -> Result<Self> {
        let region = var("AWS_REGION").or_else(|| var("AWS_DEFAULT_REGION")).unwrap_or_else(|| "us-east-1".into());
        let (what, endpoint, style) = match ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"].map(|name| (name, var(name))) {
            [(name, Some(endpoint)), _] | [_, (name, Some(endpoint))] => (name, endpoint, UrlStyle::Path),
            _ => ("AWS_REGION", format!("https://s3.{region}.amazonaws.com"), UrlStyle::VirtualHost),
        };
        let wrong = |reason: String| Error::Setting { what: what.into(), reason };
        let endpoint: Url = endpoint.parse().map_err(|error: url::ParseError| wrong(error.to_string()))?;
        if !matches!(endpoint.scheme(), "http" | "https") {
            return Err(wrong("it is not an http or https URL".into()));
        }
        let made = Bucket::new(endpoint, style, bucket.to_owned(), region);
        let bucket = made.map_err(|error| wrong(error.to_string()))?;
        let credentials = match (var("AWS_ACCESS_KEY_ID"), var("AWS_SECRET_ACCESS_KEY")) {
            (Some(key), Some(secret)) => Some(match var("AWS_SESSION_TOKEN") {
                Some(token) => Credentials::new_with_token(key, secret, token),
                None => Credentials::new(key, secret),
            }),
            (None, None) => None,
            _ => {
                let reason = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are a pair; give both or none".into();
                return Err(Error::Setting { what: "the credentials of S3".into(), reason });
            }
        };
        Ok(Self { bucket, prefix: prefix.into(), credentials })
    }

    fn blob_key(&self, sha256: Sha256) -> String {
        format!("{}/blobs/sha256/{sha256}", self.prefix)
    }

    fn manifest_key(&self, version: &Version) -> String {
        match version {
            Version::Tag(tag) => format!("{}/manifests/{tag}", self.prefix),
            // Manifests are kept as blobs, too.
            Version::Digest(digest) => self.blob_key(*digest),
        }
    }

    fn get(&self, key: &str) -> Request {
        Request::new(Method::GET, self.bucket.get_object(self.credentials.as_ref(), key).sign(SIGNATURE_VALIDITY))
    }

    pub(crate) fn manifest(&self, client: &Client, version: &Version) -> Result<Option<Vec<u8>>> {
        let response = client.send(self.get(&self.manifest_key(version)), None)?;
        match response.status() {
            200 => response.read_all(MANIFEST_BYTES_MAX).map(Some),
            404 => {
                response.discard();
                Ok(None)
            }
            _ => Err(response.into_error()),
        }
    }

    pub(crate) fn put_manifest(&self, client: &Client, version: &Version, bytes: &[u8]) -> Result<()> {
        for key in [self.blob_key(Sha256::of(bytes)), self.manifest_key(version)] {
            let mut upload = Upload { reader: &mut std::io::Cursor::new(bytes), bytes: bytes.len() as u64 };
            self.put_key(client, &key, &mut upload)?;
        }
        Ok(())
    }

    pub(crate) fn has(&self, client: &Client, blob: Blob) -> Result<bool> {
        let key = self.blob_key(blob.sha256);
        let url = self.bucket.head_object(self.credentials.as_ref(), &key).sign(SIGNATURE_VALIDITY);
        let response = client.send(Request::new(Method::HEAD, url), None)?;
        match response.status() {
            200 => {
                // A truncated blob is sent again.
                let length = response.header(header::CONTENT_LENGTH).and_then(|length| length.parse().ok());
                Ok(length.is_none_or(|length: u64| length == blob.bytes))
            }
            // S3 refuses requests for missing keys of those who may not list the bucket.
            403 | 404 => Ok(false),
            _ => Err(response.into_error()),
        }
    }

    pub(crate) fn put(&self, client: &Client, blob: Blob, upload: &mut Upload<'_>) -> Result<()> {
        self.put_key(client, &self.blob_key(blob.sha256), upload)
    }

    fn put_key(&self, client: &Client, key: &str, upload: &mut Upload<'_>) -> Result<()> {
        let url = self.bucket.put_object(self.credentials.as_ref(), key).sign(SIGNATURE_VALIDITY);
        let response = client.send(Request::new(Method::PUT, url), Some(upload))?;
        if response.status() == 200 {
            response.read_all(MANIFEST_BYTES_MAX).map(drop)
        } else {
            Err(response.into_error())
        }
    }

    pub(crate) fn read<'a>(&self, client: &'a Client, blob: Blob, range: &Range<u64>) -> Result<Response<'a>> {
        client.send(self.get(&self.blob_key(blob.sha256)).with_range(range), None)
    }
}
