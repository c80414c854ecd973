//! API keys that engines require from this replica.
//!
//! A key belongs to an id *and* a URL, both as configured at this replica. Any client of an admin
//! listener can change a backend in the replicated registry. If a key were sent wherever the
//! registry points, it could be stolen by redirecting the backend (I62). Keys are never replicated.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue};

/// Maximum length of a file of headers, in bytes.
const FILE_BYTES_MAX: usize = 64 * 1024;
/// Headers that a file of headers must not contain, because they control the transmission or this
/// replica sets them.
const NOT_OF_ENGINES: [&str; 13] = [
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-request-id",
];

/// Headers that replace the client's credentials in requests to an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineHeaders(Arc<[(HeaderName, HeaderValue)]>);

impl From<HeaderValue> for EngineHeaders {
    /// Converts an `authorization` header, which it marks as sensitive.
    fn from(mut authorization: HeaderValue) -> Self {
        authorization.set_sensitive(true);
        Self([(AUTHORIZATION, authorization)].into())
    }
}

impl EngineHeaders {
    /// Parses a file of headers: `name: value` per line. Ignores empty lines and lines that begin
    /// with `#`.
    ///
    /// # Errors
    /// Describes the first fault with its line number, without quoting a value.
    pub fn read(text: &str) -> Result<Self, String> {
        if text.len() > FILE_BYTES_MAX {
            return Err("longer than 64 KiB".to_owned());
        }
        let lines = (1..).zip(text.lines().map(str::trim));
        let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let mut headers: Vec<(HeaderName, HeaderValue)> = Vec::new();
        for (number, line) in lines {
            let (name, value) = header(line).map_err(|why| format!("line {number}: {why}"))?;
            if headers.iter().any(|(other, _)| *other == name) {
                return Err(format!("line {number}: {name} again"));
            }
            headers.push((name, value));
        }
        match headers.is_empty() {
            true => Err("holds no header".to_owned()),
            false => Ok(Self(headers.into())),
        }
    }

    /// Inserts these headers, replacing those with the same names.
    pub(crate) fn put_into(&self, headers: &mut HeaderMap) {
        for (name, value) in &*self.0 {
            headers.insert(name, value.clone());
        }
    }
}

fn header(line: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = line.split_once(':').ok_or("expected name: value")?;
    let name: HeaderName = name
        .trim()
        .parse()
        .map_err(|_| "before the colon: expected the name of a header")?;
    if NOT_OF_ENGINES.contains(&name.as_str()) {
        return Err(format!(
            "{name}: expected a header that authenticates, not one of the protocol"
        ));
    }
    let value = HeaderValue::from_str(value.trim());
    let mut value = value.map_err(|_| format!("{name}: expected text in ASCII"))?;
    value.set_sensitive(true);
    Ok((name, value))
}

/// Headers for each engine that requires a key. Clones share one set, which can be replaced while
/// in use.
#[derive(Clone, Default)]
pub struct EngineKeys(Arc<ArcSwap<BTreeMap<String, EngineKey>>>);

#[derive(Clone, PartialEq, Eq)]
struct EngineKey {
    /// URL of the engine, without a trailing slash.
    url: String,
    headers: EngineHeaders,
    /// Whether client requests to the engine also carry the key, not only the replica's own.
    is_for_requests: bool,
}

impl EngineKeys {
    /// Adds a key for everything sent to the engine `id` at `url`, replacing the client's key.
    pub fn add(&mut self, id: &str, url: &str, headers: impl Into<EngineHeaders>) {
        self.insert(id, url, headers.into(), true);
    }

    /// Adds a key only for the replica's own requests to the engine.
    pub fn add_for_probes(&mut self, id: &str, url: &str, headers: impl Into<EngineHeaders>) {
        self.insert(id, url, headers.into(), false);
    }

    fn insert(&mut self, id: &str, url: &str, headers: EngineHeaders, requests: bool) {
        let key = EngineKey {
            url: bare(url).to_owned(),
            headers,
            is_for_requests: requests,
        };
        let mut keys = BTreeMap::clone(&self.0.load());
        keys.insert(id.to_owned(), key);
        self.0.store(Arc::new(keys));
    }

    /// Replaces the keys with those that `other` currently contains.
    pub fn replace(&self, other: &Self) {
        self.0.store(other.0.load_full());
    }

    /// Returns the key for the replica's own requests to the backend `id` at `url`, if there is
    /// one.
    pub(crate) fn of_probes(&self, id: &str, url: &str) -> Option<EngineHeaders> {
        self.of(id, url).map(|key| key.headers)
    }

    /// Returns the key that replaces the client's in requests to the backend `id` at `url`, if
    /// there is one.
    pub(crate) fn of_requests(&self, id: &str, url: &str) -> Option<EngineHeaders> {
        let key = self.of(id, url).filter(|key| key.is_for_requests);
        key.map(|key| key.headers)
    }

    fn of(&self, id: &str, url: &str) -> Option<EngineKey> {
        let keys = self.0.load();
        // The ranks of an engine share its key.
        keys.get(state::engine_of(id))
            .filter(|key| key.url == bare(url))
            .cloned()
    }
}

/// Compares by content: equal if both contain the same keys.
impl PartialEq for EngineKeys {
    fn eq(&self, other: &Self) -> bool {
        self.0.load().as_ref() == other.0.load().as_ref()
    }
}

impl Eq for EngineKeys {}

fn bare(url: &str) -> &str {
    url.trim_end_matches('/')
}

impl fmt::Debug for EngineKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineKeys({} keys)", self.0.load().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the `authorization` header sent to an engine.
    fn sent(headers: Option<EngineHeaders>) -> HeaderValue {
        let mut all = HeaderMap::new();
        headers.unwrap().put_into(&mut all);
        all.remove(AUTHORIZATION).unwrap()
    }

    #[test]
    fn header_files_have_one_header_per_line() {
        let read =
            EngineHeaders::read("# of the gateway\nX-Team: a: b\n\nauthorization:Basic YTpi\n");
        let mut headers = HeaderMap::new();
        headers.insert("x-team", HeaderValue::from_static("of the client"));
        read.unwrap().put_into(&mut headers);
        assert_eq!(headers["x-team"], "a: b");
        assert_eq!(headers["authorization"], "Basic YTpi");
        assert!(headers["x-team"].is_sensitive());
        for (text, fault) in [
            ("", "holds no header"),
            ("s3cret", "line 1: expected name: value"),
            ("a b: s3cret", "line 1: before the colon"),
            (
                "\nhost: s3cret",
                "line 2: host: expected a header that authenticates",
            ),
            ("x-a: s3cret\u{1}", "line 1: x-a: expected text"),
            ("x-a: 1\nX-A: s3cret", "line 2: x-a again"),
        ] {
            let told = EngineHeaders::read(text).err().unwrap();
            assert!(
                told.starts_with(fault) && !told.contains("s3cret"),
                "{told}"
            );
        }
    }

    #[test]
    fn an_engine_key_is_for_one_id_at_one_url() {
        let mut keys = EngineKeys::default();
        keys.add(
            "gpu-1",
            "http://10.0.0.1:8000/",
            HeaderValue::from_static("Bearer one"),
        );
        keys.add_for_probes(
            "gpu-2",
            "http://10.0.0.2",
            HeaderValue::from_static("Bearer two"),
        );
        let (one, two) = ("http://10.0.0.1:8000", "http://10.0.0.2");
        assert_eq!(sent(keys.of_requests("gpu-1", one)), "Bearer one");
        assert_eq!(sent(keys.of_probes("gpu-1", one)), "Bearer one");
        assert_eq!(sent(keys.of_probes("gpu-2", two)), "Bearer two");
        assert!(keys.of_requests("gpu-2", two).is_none());
        for (id, url) in [
            ("gpu-1", two),
            ("gpu-2", one),
            ("gpu-1", "http://10.0.0.1:80"),
            ("gpu-1", "http://evil.example"),
            ("evil", one),
        ] {
            assert!(keys.of_probes(id, url).is_none(), "{id} {url}");
        }
        assert_eq!(format!("{keys:?}"), "EngineKeys(2 keys)");
        let user = keys.clone();
        let mut later = EngineKeys::default();
        later.add("gpu-2", two, HeaderValue::from_static("Bearer three"));
        assert_ne!(user, later);
        keys.replace(&later);
        assert_eq!(sent(user.of_requests("gpu-2", two)), "Bearer three");
        assert!(user.of_probes("gpu-1", one).is_none());
        assert_eq!(user, later);
    }
}
