//! A repository of an OCI registry.
//!
//! Specifications: OCI Distribution Specification 1.1 ("Pull", "Push"), and for tokens the distribution project's
//! "Token Authentication Specification".

use std::collections::HashMap;
use std::fmt;
use std::io::Read;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ureq::http::{Method, header};
use url::Url;

use crate::credentials;
use crate::error::{Error, Result};
use crate::http::{Answer, Client, Request, shown};
use crate::manifest::{Blob, MANIFEST_BYTES_MAX, MANIFEST_TYPE, accepted, cut};
use crate::reference::Version;
use crate::resolver::is_loopback;

/// The maximum response of a token server, in bytes.
const TOKEN_BYTES_MAX: u64 = 64 << 10;

pub(crate) struct Oci {
    base: Url,
    name: String,
    /// `USER:PASSWORD` in base64.
    basic: Option<String>,
    /// The authorization of the last successful request.
    authorization: Mutex<Option<String>>,
}

impl fmt::Debug for Oci {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Oci").field("base", &shown(&self.base)).field("name", &self.name).finish_non_exhaustive()
    }
}

impl Oci {
    pub(crate) fn new(scheme: Option<&str>, host: &str, name: &str, plain: bool) -> Result<Self> {
        let parse = |scheme: &str| {
            let url = Url::parse(&format!("{scheme}://{host}/v2/"));
            url.map_err(|error| Error::Reference { text: format!("oci:{host}/{name}"), reason: error.to_string() })
        };
        let base = match scheme {
            Some(scheme) => parse(scheme)?,
            None if plain => parse("http")?,
            None => match parse("http")? {
                here if is_loopback(&here) => here,
                _ => parse("https")?,
            },
        };
        let basic = credentials::basic(&base, host)?;
        Ok(Self { base, name: name.into(), basic, authorization: Mutex::default() })
    }

    /// Returns whether the registry is contacted without encryption.
    pub(crate) fn is_plain(&self) -> bool {
        self.base.scheme() == "http"
    }

    fn url(&self, rest: &str) -> Url {
        let mut url = self.base.clone();
        url.set_path(&format!("/v2/{}/{rest}", self.name));
        url
    }

    fn blob(&self, blob: Blob) -> Url {
        self.url(&format!("blobs/sha256:{}", blob.sha256))
    }

    fn authorization(&self) -> MutexGuard<'_, Option<String>> {
        self.authorization.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request, and again with authorization if the server requires it.
    fn send<'a>(
        &self,
        client: &'a Client,
        make: &mut dyn FnMut() -> Result<RequestParts>,
        body: &mut Option<Content<'_>>,
    ) -> Result<Answer<'a>> {
        let known = self.authorization().clone();
        let answer = self.attempt(client, make()?, known.as_deref(), body)?;
        // Only a challenge of the registry itself is answered, not one of a redirect or upload server.
        if answer.status() != 401 || answer.url.origin() != self.base.origin() {
            return Ok(answer);
        }
        let challenge = answer.header(header::WWW_AUTHENTICATE).unwrap_or_default().to_owned();
        let fresh = self.answer_to(client, &challenge)?;
        let Some(fresh) = fresh else { return Err(answer.refused()) };
        *self.authorization() = Some(fresh.clone());
        if let Some(content) = body {
            content.rewind()?;
        }
        self.attempt(client, make()?, Some(&fresh), body)
    }

    fn attempt<'a>(
        &self,
        client: &'a Client,
        parts: RequestParts,
        known: Option<&str>,
        body: &mut Option<Content<'_>>,
    ) -> Result<Answer<'a>> {
        let mut request = self.request(parts.method, parts.url);
        request.headers = parts.headers;
        request.bytes = parts.bytes;
        // A registry may redirect uploads to another server.
        request.authorization = known.filter(|_| request.url.origin() == self.base.origin()).map(str::to_owned);
        if let Some(content) = body {
            let bytes = content.bytes;
            request.body = Some((&mut *content.reader, bytes));
        }
        client.send(request)
    }

    /// Returns a request whose origin is the registry.
    fn request<'a>(&self, method: Method, url: Url) -> Request<'a> {
        Request { origin: self.base.clone(), ..Request::new(method, url) }
    }

    /// Returns the credentials for a realm; none if an attacker on the network could have changed its URL.
    fn basic_for(&self, realm: &Url) -> Result<Option<String>> {
        let is_named_by_tls = self.base.scheme() == "https" && realm.scheme() == "https";
        match &self.basic {
            Some(_) if !is_named_by_tls && realm.origin() != self.base.origin() => {
                Err(Error::Realm { registry: shown(&self.base), realm: shown(realm) })
            }
            basic => Ok(basic.as_ref().map(|basic| format!("Basic {basic}"))),
        }
    }

    /// Returns the authorization for a challenge.
    fn answer_to(&self, client: &Client, challenge: &str) -> Result<Option<String>> {
        let (scheme, rest) = challenge.split_once(' ').unwrap_or((challenge, ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Ok(self.basic.as_ref().map(|basic| format!("Basic {basic}")));
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Ok(None);
        }
        let fields = fields(rest);
        let Some(mut realm) = fields.get("realm").and_then(|realm| Url::parse(realm).ok()) else { return Ok(None) };
        client.follow(&self.base, &realm)?;
        for key in ["service", "scope"] {
            if let Some(value) = fields.get(key) {
                realm.query_pairs_mut().append_pair(key, value);
            }
        }
        let authorization = self.basic_for(&realm)?;
        let request = Request { authorization, ..self.request(Method::GET, realm) };
        let answer = client.send(request)?;
        if answer.status() != 200 {
            return Err(answer.refused());
        }
        let nonsense = answer.nonsense("the response has no token");
        let answer: serde_json::Value = serde_json::from_slice(&answer.all(TOKEN_BYTES_MAX)?).unwrap_or_default();
        let token = answer.get("token").or_else(|| answer.get("access_token")).and_then(serde_json::Value::as_str);
        let is_sound = |token: &&str| !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
        token.filter(is_sound).map(|token| Some(format!("Bearer {token}"))).ok_or(nonsense)
    }

    pub(crate) fn manifest(&self, client: &Client, version: &Version) -> Result<Option<Vec<u8>>> {
        let url = self.url(&format!("manifests/{version}"));
        let mut make = || Ok(RequestParts::new(Method::GET, url.clone()).with(header::ACCEPT, accepted()));
        let answer = self.send(client, &mut make, &mut None)?;
        match answer.status() {
            200 => answer.all(MANIFEST_BYTES_MAX).map(Some),
            404 => Ok(None),
            _ => Err(answer.refused()),
        }
    }

    pub(crate) fn put_manifest(&self, client: &Client, version: &Version, bytes: &[u8]) -> Result<()> {
        let url = self.url(&format!("manifests/{version}"));
        let mut make = || Ok(RequestParts::new(Method::PUT, url.clone()).with(header::CONTENT_TYPE, MANIFEST_TYPE));
        let mut reader = std::io::Cursor::new(bytes);
        let answer = self.send(client, &mut make, &mut Some(Content::of(&mut reader, bytes.len() as u64)))?;
        if matches!(answer.status(), 200..=202) { Ok(()) } else { Err(answer.refused()) }
    }

    pub(crate) fn has(&self, client: &Client, blob: Blob) -> Result<bool> {
        let url = self.blob(blob);
        let answer = self.send(client, &mut || Ok(RequestParts::new(Method::HEAD, url.clone())), &mut None)?;
        match answer.status() {
            200 => Ok(true),
            404 => Ok(false),
            _ => Err(answer.refused()),
        }
    }

    /// Uploads in one piece: parts are small, and a failed one is sent again.
    pub(crate) fn put(&self, client: &Client, blob: Blob, content: &mut Option<Content<'_>>) -> Result<()> {
        let begin = self.url("blobs/uploads/");
        let mut make = || {
            let mut parts = RequestParts::new(Method::POST, begin.clone());
            parts.headers.push((header::CONTENT_LENGTH, "0".into()));
            Ok(parts)
        };
        let answer = self.send(client, &mut make, &mut None)?;
        if answer.status() != 202 {
            return Err(answer.refused());
        }
        let to = answer.header(header::LOCATION).and_then(|to| answer.url.join(to).ok());
        let mut to = to.ok_or_else(|| answer.nonsense("the server does not say where to upload to"))?;
        client.follow(&self.base, &to)?;
        // The body must be read before the connection can be reused.
        answer.all(MANIFEST_BYTES_MAX)?;
        to.query_pairs_mut().append_pair("digest", &format!("sha256:{}", blob.sha256));
        let mut make =
            || Ok(RequestParts::new(Method::PUT, to.clone()).with(header::CONTENT_TYPE, "application/octet-stream"));
        let answer = self.send(client, &mut make, content)?;
        if answer.status() == 201 { Ok(()) } else { Err(answer.refused()) }
    }

    pub(crate) fn read<'a>(&self, client: &'a Client, blob: Blob, range: &Range<u64>) -> Result<Answer<'a>> {
        let url = self.blob(blob);
        let bytes = format!("bytes={}-{}", range.start, range.end - 1);
        let mut make = || {
            let mut parts = RequestParts::new(Method::GET, url.clone()).with(header::RANGE, bytes.clone());
            parts.bytes = range.end - range.start;
            Ok(parts)
        };
        self.send(client, &mut make, &mut None)
    }
}

/// The parts of a request, which may be sent twice.
pub(crate) struct RequestParts {
    method: Method,
    url: Url,
    headers: Vec<(header::HeaderName, String)>,
    bytes: u64,
}

impl RequestParts {
    fn new(method: Method, url: Url) -> Self {
        Self { method, url, headers: Vec::new(), bytes: 0 }
    }

    fn with(mut self, name: header::HeaderName, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

/// A body that can be read again from the start.
pub(crate) trait RewindableRead: Read {
    /// Back to the beginning.
    fn again(&mut self) -> std::io::Result<()>;
}

impl<T: Read + std::io::Seek> RewindableRead for T {
    fn again(&mut self) -> std::io::Result<()> {
        self.rewind()
    }
}

/// What is uploaded.
pub(crate) struct Content<'a> {
    pub reader: &'a mut dyn RewindableRead,
    pub bytes: u64,
}

impl<'a> Content<'a> {
    pub(crate) fn of(reader: &'a mut dyn RewindableRead, bytes: u64) -> Self {
        Self { reader, bytes }
    }

    pub(crate) fn rewind(&mut self) -> Result<()> {
        self.reader.again().map_err(Error::Sink)
    }
}

/// Returns the fields of a challenge: `key="value"` or `key=value`, separated by commas.
fn fields(mut text: &str) -> HashMap<String, String> {
    let mut found = HashMap::new();
    while let Some((key, rest)) = text.split_once('=') {
        let key = key.trim_matches([',', ' ']).to_ascii_lowercase();
        let (value, rest) = match rest.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => rest.split_once(',').unwrap_or((rest, "")),
        };
        found.insert(key, cut(value));
        text = rest;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_parsed() {
        let found = fields(r#"realm="https://a.example/token",service="r, s",scope="repository:a/b:pull", x=1"#);
        let get = |key: &str| found.get(key).map(String::as_str);
        assert_eq!(get("realm"), Some("https://a.example/token"));
        assert_eq!(get("service"), Some("r, s"));
        assert_eq!(get("scope"), Some("repository:a/b:pull"));
        assert_eq!(get("x"), Some("1"));
        for odd in ["", "=", "\"", "a=\"", "a", ",,,=,", "a=b=c"] {
            fields(odd);
        }
    }

    #[test]
    fn only_this_machine_is_contacted_without_encryption() {
        let base = |scheme, host, plain| Oci::new(scheme, host, "a", plain).map(|oci| oci.base.to_string()).ok();
        assert_eq!(base(None, "localhost:5000", false).as_deref(), Some("http://localhost:5000/v2/"));
        assert_eq!(base(Some("https"), "localhost:5000", false).as_deref(), Some("https://localhost:5000/v2/"));
        assert_eq!(base(None, "a.example", false).as_deref(), Some("https://a.example/v2/"));
        assert_eq!(base(None, "a.example", true).as_deref(), Some("http://a.example/v2/"));
        assert_eq!(base(None, "a:b:c", true), None);
    }
}
