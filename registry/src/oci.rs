//! A repository of an OCI registry.
//!
//! Specifications: OCI Distribution Specification 1.1 ("Pull", "Push"), and for tokens the distribution project's
//! "Token Authentication Specification".

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http_auth::ParamValue;
use http_auth::parser::ChallengeParser;
use ureq::http::{HeaderName, HeaderValue, Method, header};
use url::Url;

use crate::credentials::{Credentials, Found};
use crate::error::{Error, Result};
use crate::hosts::Host;
use crate::http::{Client, Options, Request, Response, Upload};
use crate::manifest::{Blob, MANIFEST_BYTES_MAX, Sha256, accepted};
use crate::reference::Version;
use crate::referrers;
use crate::resolver::is_loopback;
use crate::resolver::shown;

/// With it, a registry says that it knows the subject of a manifest.
const SUBJECT_HEADER: header::HeaderName = header::HeaderName::from_static("oci-subject");
/// A token is valid for so long at least ("Token Authentication Specification", `expires_in`).
const TOKEN_LIFE_MIN: Duration = Duration::from_secs(60);
/// The maximum response of a token server, in bytes.
const TOKEN_BYTES_MAX: u64 = 64 << 10;
/// The maximum length of a field of a challenge, in bytes; longer ones are left out.
const FIELD_BYTES_MAX: usize = 4096;
/// The maximum number of pages of a list of referrers: each is a round trip, while a container waits.
const REFERRER_PAGES_MAX: usize = 16;

/// The registry of images whose reference names `docker.io`.
const DOCKER_HUB: &str = "registry-1.docker.io";

pub(crate) struct Oci {
    /// The URL of the API, with a slash at its end.
    base: Url,
    name: String,
    /// The registry, for a server that is only a mirror of it.
    mirrored: Option<String>,
    headers: Vec<(HeaderName, HeaderValue)>,
    credentials: Credentials,
    /// The authorization of the last successful request.
    authorization: Mutex<Option<Authorization>>,
}

/// The authorization of a request, and the credentials that it was got with.
#[derive(Clone)]
struct Authorization {
    value: String,
    by: Option<Found>,
    /// When it was got, or found to be as good as a new one.
    since: Instant,
}

/// A response, and the credentials that the request had.
struct Exchange<'a> {
    response: Response<'a>,
    by: Option<Found>,
    /// Whether the registry refuses access.
    is_refused: bool,
}

impl fmt::Debug for Oci {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Oci").field("base", &shown(&self.base)).field("name", &self.name).finish_non_exhaustive()
    }
}

impl Oci {
    /// Returns the URL of a registry.
    pub(crate) fn base(scheme: Option<&str>, host: &str, name: &str, plain_http: bool) -> Result<Url> {
        let parse = |scheme: &str| {
            let host = if host == "docker.io" { DOCKER_HUB } else { host };
            let url = Url::parse(&format!("{scheme}://{host}/v2/"));
            url.map_err(|error| Error::Reference { text: format!("oci:{host}/{name}"), reason: error.to_string() })
        };
        match scheme {
            Some(scheme) => parse(scheme),
            None if plain_http => parse("http"),
            None => match parse("http")? {
                local if is_loopback(&local) => Ok(local),
                _ => parse("https"),
            },
        }
    }

    /// Creates a repository on a server, with the credentials that options name.
    pub(crate) fn new(host: Host, name: &str, mirrored: Option<String>, options: &Options) -> Result<Self> {
        let Host { url: base, headers, .. } = host;
        let named = base.host_str().unwrap_or_default();
        let named = base.port().map_or_else(|| named.to_owned(), |port| format!("{named}:{port}"));
        let named = if named == DOCKER_HUB { "docker.io" } else { &named };
        let credentials = Credentials::new(&base, named, name, options.credentials.as_deref())?;
        let credentials = credentials.after(options.pull_credentials.clone());
        Ok(Self { base, name: name.into(), mirrored, headers, credentials, authorization: Mutex::default() })
    }

    fn url(&self, rest: &str) -> Url {
        let mut url = self.base.clone();
        url.set_path(&format!("{}{}/{rest}", self.base.path(), self.name));
        if let Some(registry) = &self.mirrored {
            url.query_pairs_mut().append_pair("ns", registry);
        }
        url
    }

    fn blob_url(&self, blob: Blob) -> Url {
        self.url(&format!("blobs/sha256:{}", blob.sha256))
    }

    fn authorization(&self) -> MutexGuard<'_, Option<Authorization>> {
        self.authorization.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request, and again with authorization if the server requires it. Refused access is an error.
    fn send<'a>(&self, client: &'a Client, request: Request, upload: Option<&mut Upload<'_>>) -> Result<Response<'a>> {
        let Exchange { response, by, is_refused } = self.try_send(client, request, upload)?;
        if is_refused { Err(self.explained(response, by.as_ref())) } else { Ok(response) }
    }

    fn try_send<'a>(
        &self,
        client: &'a Client,
        request: Request,
        mut upload: Option<&mut Upload<'_>>,
    ) -> Result<Exchange<'a>> {
        // A registry may redirect uploads to another server, which gets no authorization.
        let is_registry = request.url.origin() == self.base.origin();
        let own_headers = if is_registry { self.headers.clone() } else { Vec::new() };
        let request = Request { origin: self.base.clone(), own_headers, ..request };
        let mut known = self.authorization().clone().filter(|_| is_registry);
        let with = |known: Option<&Authorization>| {
            let authorization = known.map(|known| known.value.clone());
            Request { authorization, ..request.clone() }
        };
        let mut response = client.send(with(known.as_ref()), upload.as_deref_mut())?;
        let is_own = |response: &Response<'_>| response.url.origin() == self.base.origin();
        if let Some(known) = &known
            && is_own(&response)
            && self.may_be_outdated(&response, known)?
        {
            rewind(&mut upload)?;
            response = client.send(with(None), upload.as_deref_mut())?;
            let mut current = self.authorization();
            if current.as_ref().is_some_and(|current| current.value == known.value) {
                let is_refused = matches!(response.status(), 400 | 403);
                *current = is_refused.then(|| Authorization { since: Instant::now(), ..known.clone() });
            }
        }
        // Only a challenge of the registry itself is answered, not one of a redirect or upload server.
        if response.status() == 401 && is_own(&response) {
            let by = self.credentials.find()?;
            let writes = !matches!(request.method, Method::GET | Method::HEAD);
            let value = match Challenge::of(&response) {
                Some(challenge) => self.answer_challenge(client, &challenge, (by.as_ref(), writes))?,
                None => None,
            };
            let Some(value) = value else { return Ok(Exchange { response, by, is_refused: true }) };
            response.discard();
            let fresh = Authorization { value, by, since: Instant::now() };
            *self.authorization() = Some(fresh.clone());
            rewind(&mut upload)?;
            response = client.send(with(Some(&fresh).filter(|_| is_registry)), upload)?;
            known = Some(fresh);
        }
        let is_refused = known.is_some() && matches!(response.status(), 401 | 403) && is_own(&response);
        Ok(Exchange { response, by: known.and_then(|known| known.by), is_refused })
    }

    /// Whether a refusal may mean that the authorization is too old. A registry should answer that with a challenge, and some do not.
    fn may_be_outdated(&self, response: &Response<'_>, known: &Authorization) -> Result<bool> {
        let challenge = Challenge::of(response);
        Ok(match (response.status(), challenge) {
            // Without any, it may ask for a token again.
            (401, Some(Challenge::Basic)) => known.value.starts_with("Bearer "),
            (400 | 403, _) | (401, None) => {
                known.since.elapsed() >= TOKEN_LIFE_MIN || self.credentials.find()? != known.by
            }
            _ => false,
        })
    }

    /// Returns the error for a response that refuses access, with the place of the credentials.
    fn explained(&self, response: Response<'_>, by: Option<&Found>) -> Error {
        let mut error = response.into_error();
        if let Error::Status { text, .. } = &mut error {
            let place = by
                .map_or_else(|| self.credentials.missing(), |found| format!("the credentials are from {}", found.from));
            *text = if text.is_empty() { place } else { format!("{text}; {place}") };
        }
        error
    }

    /// Returns the credentials for a realm; none if an attacker on the network could have changed its URL.
    fn basic_for(&self, realm: &Url, by: Option<&Found>) -> Result<Option<String>> {
        let is_named_by_tls = self.base.scheme() == "https" && realm.scheme() == "https";
        match by {
            Some(_) if !is_named_by_tls && realm.origin() != self.base.origin() => {
                Err(Error::Realm { registry: shown(&self.base), realm: shown(realm) })
            }
            by => Ok(by.map(|found| format!("Basic {}", found.basic))),
        }
    }

    /// Returns the authorization for a challenge, to a request that `writes` or not.
    fn answer_challenge(
        &self,
        client: &Client,
        challenge: &Challenge,
        (by, writes): (Option<&Found>, bool),
    ) -> Result<Option<String>> {
        let Challenge::Bearer(fields) = challenge else {
            return Ok(by.map(|found| format!("Basic {}", found.basic)));
        };
        let Some(mut realm) = fields.get("realm").and_then(|realm| Url::parse(realm).ok()) else { return Ok(None) };
        client.check_redirect(&self.base, &realm)?;
        let needed = || format!("repository:{}:{}", self.name, if writes { "pull,push" } else { "pull" });
        let scope = fields.get("scope").cloned().unwrap_or_else(needed);
        for (key, value) in [("service", fields.get("service")), ("scope", Some(&scope))] {
            if let Some(value) = value {
                realm.query_pairs_mut().append_pair(key, value);
            }
        }
        let authorization = self.basic_for(&realm, by)?;
        let request = Request { authorization, origin: self.base.clone(), ..Request::new(Method::GET, realm) };
        let response = client.send(request, None)?;
        if response.status() != 200 {
            return Err(self.explained(response, by));
        }
        let no_token = response.invalid("the response has no token");
        let json: serde_json::Value = serde_json::from_slice(&response.read_all(TOKEN_BYTES_MAX)?).unwrap_or_default();
        let token = json.get("token").or_else(|| json.get("access_token")).and_then(serde_json::Value::as_str);
        let is_valid = |token: &&str| !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
        token.filter(is_valid).map(|token| Some(format!("Bearer {token}"))).ok_or(no_token)
    }

    pub(crate) fn manifest(&self, client: &Client, version: &Version) -> Result<Option<Vec<u8>>> {
        let request = Request::new(Method::GET, self.url(&format!("manifests/{version}")));
        let response = self.send(client, request.with(header::ACCEPT, accepted()), None)?;
        match response.status() {
            200 => response.read_all(MANIFEST_BYTES_MAX).map(Some),
            404 => {
                response.discard();
                Ok(None)
            }
            _ => Err(response.into_error()),
        }
    }

    /// Stores a manifest; returns whether the registry will list it as a referrer of its subject.
    pub(crate) fn put_manifest(&self, client: &Client, version: &Version, kind: &str, bytes: &[u8]) -> Result<bool> {
        let request = Request::new(Method::PUT, self.url(&format!("manifests/{version}")));
        let mut upload = Upload { reader: &mut std::io::Cursor::new(bytes), bytes: bytes.len() as u64 };
        let response = self.send(client, request.with(header::CONTENT_TYPE, kind), Some(&mut upload))?;
        let is_listed = response.header(SUBJECT_HEADER).is_some();
        if matches!(response.status(), 200..=202) { Ok(is_listed) } else { Err(response.into_error()) }
    }

    /// Returns the list of a manifest's referrers of a type; `None` if the registry keeps none.
    pub(crate) fn referrers(&self, client: &Client, manifest: Sha256, kind: &str) -> Result<Option<Vec<u8>>> {
        let mut url = self.url(&format!("referrers/sha256:{manifest}"));
        url.query_pairs_mut().append_pair("artifactType", kind);
        let (mut pages, mut bytes_left, mut next) = (Vec::new(), MANIFEST_BYTES_MAX, Some(url));
        while let Some(url) = next.take() {
            if pages.len() == REFERRER_PAGES_MAX {
                tracing::warn!("{}: only {REFERRER_PAGES_MAX} pages of referrers are read", shown(&url));
                break;
            }
            let request = Request::new(Method::GET, url).with(header::ACCEPT, referrers::INDEX_TYPE);
            let Exchange { response, by, is_refused } = self.try_send(client, request, None)?;
            let is_own = response.url.origin() == self.base.origin();
            match response.status() {
                // oras-project/oras-go issue 633: a registry without lists shows its page for people, perhaps after a redirect.
                200 if pages.is_empty() && is_html(&response) => response.discard(),
                200 => {
                    let link = response.headers(header::LINK).find_map(next_page);
                    let link = link.and_then(|link| response.url.join(link).ok());
                    next = link.filter(|link| link.origin() == self.base.origin());
                    let page = response.read_all(bytes_left)?;
                    bytes_left -= page.len() as u64;
                    pages.push(page);
                }
                // Of registries from before version 1.1 of the specification: GHCR redirects, Artifactory refuses the media type, and Harbor
                // refuses without a challenge.
                400 | 404 | 405 | 406 if pages.is_empty() => response.discard(),
                401 if pages.is_empty() && Challenge::of(&response).is_none() => response.discard(),
                _ if pages.is_empty() && !is_own => response.discard(),
                _ if is_refused => return Err(self.explained(response, by.as_ref())),
                _ => return Err(response.into_error()),
            }
        }
        referrers::join(pages).map_err(|reason| Error::Response { url: shown(&self.base), reason })
    }

    pub(crate) fn has(&self, client: &Client, blob: Blob) -> Result<bool> {
        let response = self.send(client, Request::new(Method::HEAD, self.blob_url(blob)), None)?;
        match response.status() {
            200 => Ok(true),
            404 => Ok(false),
            _ => Err(response.into_error()),
        }
    }

    /// Uploads in one piece: parts are small, and a failed one is sent again.
    pub(crate) fn put(&self, client: &Client, blob: Blob, upload: &mut Upload<'_>) -> Result<()> {
        let begin = Request::new(Method::POST, self.url("blobs/uploads/")).with(header::CONTENT_LENGTH, "0");
        let response = self.send(client, begin, None)?;
        if response.status() != 202 {
            return Err(response.into_error());
        }
        let to = response.header(header::LOCATION).and_then(|to| response.url.join(to).ok());
        let mut to = to.ok_or_else(|| response.invalid("the server does not say where to upload to"))?;
        client.check_redirect(&self.base, &to)?;
        // The body must be read before the connection can be reused.
        response.read_all(MANIFEST_BYTES_MAX)?;
        to.query_pairs_mut().append_pair("digest", &format!("sha256:{}", blob.sha256));
        let request = Request::new(Method::PUT, to).with(header::CONTENT_TYPE, "application/octet-stream");
        let response = self.send(client, request, Some(upload))?;
        if response.status() == 201 { Ok(()) } else { Err(response.into_error()) }
    }

    pub(crate) fn read<'a>(&self, client: &'a Client, blob: Blob, range: &Range<u64>) -> Result<Response<'a>> {
        let request = Request::new(Method::GET, self.blob_url(blob));
        self.send(client, request.with_range(range), None)
    }
}

fn rewind(upload: &mut Option<&mut Upload<'_>>) -> Result<()> {
    upload.as_mut().map_or(Ok(()), |upload| upload.rewind())
}

/// Returns whether a response is a page for people.
fn is_html(response: &Response<'_>) -> bool {
    const HTML: &str = "text/html";
    let found = response.header(header::CONTENT_TYPE).and_then(|found| found.get(..HTML.len()));
    found.is_some_and(|found| found.eq_ignore_ascii_case(HTML))
}

/// Returns the URL of the next page in a `Link` header (RFC 8288, section 3).
fn next_page(header: &str) -> Option<&str> {
    let is_next = |parameter: &str| {
        let (key, value) = parameter.split_once('=').unwrap_or_default();
        let mut relations = value.trim().trim_matches('"').split(' ');
        key.trim().eq_ignore_ascii_case("rel") && relations.any(|relation| relation.eq_ignore_ascii_case("next"))
    };
    let mut links = header.split('<').skip(1).filter_map(|link| link.split_once('>'));
    links.find(|(_, parameters)| parameters.split([';', ',']).any(is_next)).map(|(link, _)| link)
}

/// What a server wants to see: credentials, or a token of the server that the fields name.
#[derive(Debug, PartialEq, Eq)]
enum Challenge {
    Basic,
    Bearer(HashMap<String, String>),
}

impl Challenge {
    /// Returns the challenge of a response that is answered here.
    fn of(response: &Response<'_>) -> Option<Self> {
        Self::pick(response.headers(header::WWW_AUTHENTICATE))
    }

    /// Picks one of several: a token rather than credentials. What comes after a syntax error does not count, except for `Basic`, whose
    /// realm some servers do not quote.
    fn pick<'a>(values: impl Iterator<Item = &'a str>) -> Option<Self> {
        let is_basic = |word: &str| word.eq_ignore_ascii_case("basic");
        let mut basic = None;
        for value in values {
            for found in ChallengeParser::new(value).flatten() {
                if found.scheme.eq_ignore_ascii_case("bearer") {
                    let field = |(key, value): &(&str, ParamValue<'_>)| {
                        let value = value.to_unescaped();
                        let is_good = value.len() <= FIELD_BYTES_MAX && !value.chars().any(char::is_control);
                        is_good.then(|| (key.to_ascii_lowercase(), value))
                    };
                    return Some(Self::Bearer(found.params.iter().filter_map(field).collect()));
                }
                if is_basic(found.scheme) {
                    basic = Some(Self::Basic);
                }
            }
            if value.split(' ').next().is_some_and(is_basic) {
                basic = Some(Self::Basic);
            }
        }
        basic
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_challenges_one_is_answered() {
        let token = r#"Bearer realm="https://a.example/t?x=1,Basic y",service="r, s",Scope="repository:a/b:pull""#;
        let pick = |values: &[&str]| Challenge::pick(values.iter().copied());
        for values in [
            &[token][..],
            &["Negotiate", token],
            &[r#"Basic realm="a""#, token],
            &[&format!(r#"Basic realm="a, b", charset="UTF-8", {token}"#)],
            &[&format!("Negotiate, {token}")],
        ] {
            let Some(Challenge::Bearer(fields)) = pick(values) else { panic!("{values:?}") };
            assert_eq!(fields["realm"], "https://a.example/t?x=1,Basic y", "{values:?}");
            assert_eq!(fields["service"], "r, s", "{values:?}");
            assert_eq!(fields["scope"], "repository:a/b:pull", "{values:?}");
        }
        let name = "a/".repeat(120);
        let long =
            format!(r#"Bearer realm="https://a.example/t",scope="repository:{name}:pull",x="{}""#, "x".repeat(5000));
        let Some(Challenge::Bearer(fields)) = pick(&[&long]) else { panic!("{long}") };
        assert_eq!(fields["scope"], format!("repository:{name}:pull"));
        assert_eq!(fields.len(), 2, "without the one that is too long");
        for values in
            [&[r#"Basic realm="a""#][..], &["Negotiate, basic"], &["Negotiate", "Basic realm = x"], &["basic realm=/"]]
        {
            assert_eq!(pick(values), Some(Challenge::Basic), "{values:?}");
        }
        let odd = ["", "=", "\"", "a=\"", "Bearer realm=\"", ",,,=,", ",,\",", "Bearer a=b=c", "Bearer \u{e9}=1"];
        for values in odd.each_ref().map(std::slice::from_ref).into_iter().chain([
            &[][..],
            &["Negotiate"],
            &["realm=\"Basic x\""],
        ]) {
            assert_eq!(pick(values), None, "{values:?}");
        }
    }

    #[test]
    fn the_next_page_is_found_in_links() {
        for (header, expected) in [
            (r#"</v2/a/referrers/x?n=1,2>; rel="next""#, Some("/v2/a/referrers/x?n=1,2")),
            (r#"</a>; rel=prev, </b>;title="x"; REL = "last NEXT""#, Some("/b")),
            (r#"</a>; rel="nexts""#, None),
            ("</a; rel=next", None),
            ("", None),
        ] {
            assert_eq!(next_page(header), expected, "{header}");
        }
    }

    #[test]
    fn only_this_machine_is_contacted_without_encryption() {
        let base = |scheme, host, plain| Oci::base(scheme, host, "a", plain).map(|base| base.to_string()).ok();
        assert_eq!(base(None, "localhost:5000", false).as_deref(), Some("http://localhost:5000/v2/"));
        assert_eq!(base(Some("https"), "localhost:5000", false).as_deref(), Some("https://localhost:5000/v2/"));
        assert_eq!(base(None, "a.example", false).as_deref(), Some("https://a.example/v2/"));
        assert_eq!(base(None, "a.example", true).as_deref(), Some("http://a.example/v2/"));
        assert_eq!(base(None, "docker.io", false).as_deref(), Some("https://registry-1.docker.io/v2/"));
        assert_eq!(base(None, "a:b:c", true), None);
    }
}
