//! Cross-origin access for web pages (`[cors]`). No page has access unless the config allows it.
//!
//! A browser sends a preflight request before a request with a key or a JSON body. It shows a
//! response to the page only if the response names the page's origin. CORS headers of an engine
//! concern only the engine, so they are replaced.

use bytes::Bytes;
use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
    ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};

const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE");
/// Time for which a browser may cache the permission, in seconds. Browsers cap it at two hours.
const MAX_AGE_S: HeaderValue = HeaderValue::from_static("7200");
const ANY: HeaderValue = HeaderValue::from_static("*");
/// Response headers that pages can read in addition to the few always readable ones.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-request-id, request-id, retry-after, x-should-retry, x-quorate-replica, \
     x-quorate-backend, x-quorate-policy, x-quorate-prefix, x-quorate-index, x-quorate-ignored, x-quorate-resumable",
);

/// CORS response headers, which are removed from an engine's response.
const OF_ENGINE: [HeaderName; 6] = [
    ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_ALLOW_CREDENTIALS,
    ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_HEADERS,
    ACCESS_CONTROL_EXPOSE_HEADERS,
    ACCESS_CONTROL_MAX_AGE,
];

/// Origins whose pages may use this replica.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AllowedOrigins {
    is_any: bool,
    origins: Vec<HeaderValue>,
}

/// Verdict on a request's origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proxy) enum OriginVerdict {
    /// The config has no origins, so the response gets no CORS headers.
    Unasked,
    /// The origin is missing or not allowed.
    Foreign,
    /// The response allows this origin.
    Allowed(HeaderValue),
}

impl AllowedOrigins {
    /// Parses origins such as `https://chat.example.org`, or `*` for all; `None` if one is invalid.
    #[must_use]
    pub fn new(origins: &[String]) -> Option<Self> {
        let mut allowed = Self::default();
        for origin in origins {
            if origin == "*" {
                allowed.is_any = true;
            } else {
                allowed.origins.push(of_text(origin)?);
            }
        }
        Some(allowed)
    }

    fn is_off(&self) -> bool {
        !self.is_any && self.origins.is_empty()
    }

    pub(in crate::proxy) fn verdict(&self, headers: &HeaderMap) -> OriginVerdict {
        if self.is_off() {
            return OriginVerdict::Unasked;
        }
        match headers.get(ORIGIN) {
            Some(_) if self.is_any => OriginVerdict::Allowed(ANY),
            Some(origin) if self.origins.contains(origin) => OriginVerdict::Allowed(origin.clone()),
            Some(_) | None => OriginVerdict::Foreign,
        }
    }
}

impl OriginVerdict {
    /// Returns the response to a preflight request; `None` if the request is not a preflight or the
    /// config has no origins.
    pub(in crate::proxy) fn preflight(
        &self,
        method: &Method,
        headers: &HeaderMap,
    ) -> Option<Response<Bytes>> {
        let is_question =
            *method == Method::OPTIONS && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
        if !is_question || *self == Self::Unasked {
            return None;
        }
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = StatusCode::NO_CONTENT;
        if let Self::Allowed(_) = self {
            let told = response.headers_mut();
            told.insert(ACCESS_CONTROL_ALLOW_METHODS, METHODS);
            told.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE_S);
            if let Some(asked) = headers.get(ACCESS_CONTROL_REQUEST_HEADERS) {
                // SDKs add headers of their own, and none of them is a secret of this replica.
                told.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
            }
        }
        Some(response)
    }

    /// Replaces the CORS headers of any response, unless the config has no origins.
    pub(in crate::proxy) fn add_headers(self, headers: &mut HeaderMap) {
        let origin = match self {
            Self::Unasked => return,
            Self::Foreign => None,
            Self::Allowed(origin) => Some(origin),
        };
        // In a preflight response, these headers are this replica's own.
        if headers.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN) {
            for name in &OF_ENGINE {
                headers.remove(name);
            }
        }
        headers.append(VARY, HeaderValue::from_static("origin"));
        if let Some(origin) = origin {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        }
    }
}

/// Parses an origin as browsers write it: scheme, host, and a port unless it is the default.
/// Returns `None` if it is invalid.
fn of_text(origin: &str) -> Option<HeaderValue> {
    let uri: http::Uri = origin.parse().ok()?;
    let is_origin = matches!(uri.scheme_str(), Some("http" | "https"))
        && uri.authority().is_some_and(|it| !it.as_str().contains('@'))
        && !origin.ends_with('/')
        && uri.path() == "/"
        && uri.query().is_none();
    let text = origin.to_ascii_lowercase();
    HeaderValue::from_maybe_shared(Bytes::from(text))
        .ok()
        .filter(|_| is_origin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cors_origins_are_a_scheme_and_a_host() {
        let allowed = |text: &str| AllowedOrigins::new(&[text.to_owned()]).is_some();
        for good in ["*", "https://a.example", "http://localhost:3000"] {
            assert!(allowed(good), "{good}");
        }
        for bad in [
            "",
            "a.example",
            "https://a.example/",
            "https://a.example/x",
            "ftp://a.example",
            "https://u@a.example",
            "https://",
        ] {
            assert!(!allowed(bad), "{bad}");
        }
    }
}
