//! Responses to requests: their status, their headers, and their bodies, as a whole or a range.

use std::fmt;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ureq::Body;
use ureq::http::header;
use url::Url;

use super::{Client, shown};
use crate::error::{Error, Result};
use crate::manifest::excerpt;

/// The maximum length of an error text, and of a body that is not needed, in bytes.
const TEXT_BYTES_MAX: u64 = 4096;

/// The response to a request.
pub(crate) struct Response<'a> {
    client: &'a Client,
    /// The URL that responded.
    pub url: Url,
    inner: ureq::http::Response<Body>,
}

impl fmt::Debug for Response<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Response")
            .field("url", &shown(&self.url))
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

impl<'a> Response<'a> {
    pub(super) fn new(client: &'a Client, url: Url, inner: ureq::http::Response<Body>) -> Self {
        Self { client, url, inner }
    }

    pub(crate) fn status(&self) -> u16 {
        self.inner.status().as_u16()
    }

    pub(crate) fn header(&self, name: header::HeaderName) -> Option<&str> {
        self.inner.headers().get(name).and_then(|value| value.to_str().ok())
    }

    /// Returns all values of a header.
    pub(crate) fn headers(&self, name: header::HeaderName) -> impl Iterator<Item = &str> {
        self.inner.headers().get_all(name).into_iter().filter_map(|value| value.to_str().ok())
    }

    /// Returns the error for an unexpected response.
    pub(crate) fn into_error(self) -> Error {
        let status = self.status();
        let retry_after =
            self.header(header::RETRY_AFTER).and_then(|value| value.parse().ok()).map(Duration::from_secs);
        let url = shown(&self.url);
        let mut text = Vec::new();
        // An incomplete text is better than none.
        let _ = self.inner.into_body().into_reader().take(TEXT_BYTES_MAX).read_to_end(&mut text);
        Error::Status { url, status, text: excerpt(String::from_utf8_lossy(&text).trim()), retry_after }
    }

    /// Reads a short body that is not needed, because the connection can be reused only after that.
    pub(crate) fn discard(self) {
        let _ = io::copy(&mut self.inner.into_body().into_reader().take(TEXT_BYTES_MAX), &mut io::sink());
    }

    pub(crate) fn invalid(&self, reason: impl Into<String>) -> Error {
        Error::Response { url: shown(&self.url), reason: reason.into() }
    }

    /// Returns the whole body, if it is not longer than this.
    pub(crate) fn read_all(self, bytes_max: u64) -> Result<Vec<u8>> {
        let too_long = self.invalid(format!("the response has more than {bytes_max} bytes"));
        let url = shown(&self.url);
        let mut bytes = Vec::new();
        let read = self.inner.into_body().into_reader().take(bytes_max + 1).read_to_end(&mut bytes);
        self.client.received_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        read.map_err(|error| transport_error(url, error))?;
        if bytes.len() as u64 > bytes_max { Err(too_long) } else { Ok(bytes) }
    }

    /// Passes the requested range to `sink`, whether the server sent that range or everything, unless only the range is
    /// of use (`is_part`). Adds the number of bytes to `received`. Bytes beyond the range are not read.
    pub(crate) fn read_range(
        self,
        range: &Range<u64>,
        is_part: bool,
        received: &mut u64,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<()> {
        let content_range = self.header(header::CONTENT_RANGE).unwrap_or_default();
        let is_range = content_range.starts_with(&format!("bytes {}-{}/", range.start, range.end - 1));
        let mut skip = match self.status() {
            // Some proxies forget the status.
            200 | 206 if is_range => 0,
            206 => return Err(self.invalid(format!("{:?} is not the requested range", excerpt(content_range)))),
            // The server does not support ranges.
            200 if is_part => return Err(Error::NoRanges { url: shown(&self.url) }),
            200 => range.start,
            _ => return Err(self.into_error()),
        };
        let url = shown(&self.url);
        let wanted = range.end - range.start;
        let mut reader = self.inner.into_body().into_reader();
        let mut buffer = vec![0; 64 << 10];
        let mut left = wanted;
        while left > 0 {
            let count = usize::try_from((skip + left).min(buffer.len() as u64)).unwrap_or(buffer.len());
            let count = match reader.read(&mut buffer[..count]) {
                Ok(0) => return Err(Error::Short { url, received: wanted - left, wanted }),
                Ok(count) => count as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(transport_error(url, error)),
            };
            self.client.received_bytes.fetch_add(count, Ordering::Relaxed);
            let (from, to) = (skip.min(count), count);
            skip -= from;
            let span = usize::try_from(from).unwrap_or_default()..usize::try_from(to).unwrap_or_default();
            let piece = &buffer[span];
            if !piece.is_empty() {
                sink(piece).map_err(Error::Sink)?;
                left -= piece.len() as u64;
                *received += piece.len() as u64;
            }
        }
        // A connection can be reused after its response was read to the end.
        let _ = reader.read(&mut buffer[..1]);
        Ok(())
    }
}

fn transport_error(url: String, error: io::Error) -> Error {
    Error::Transport { url, why: Box::new(ureq::Error::from(error)) }
}
