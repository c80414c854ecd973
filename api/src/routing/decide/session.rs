//! Determines a request's session from its headers, or from its client's address.

use http::HeaderMap;
use http::header::COOKIE;
use state::policy::SessionNames;
use xxhash_rust::xxh3::xxh3_64;

/// Parts of a request that may name its session.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::routing) struct SessionParts<'a> {
    /// The request's headers; `None` if there are none.
    pub(in crate::routing) headers: Option<&'a HeaderMap>,
    /// The client's address; `None` if it is not known.
    pub(in crate::routing) client: Option<&'a str>,
}

/// Returns a hash of the session's name; `None` if nothing names it.
pub(in crate::routing) fn hash(names: SessionNames<'_>, parts: SessionParts<'_>) -> Option<u64> {
    let by_headers = parts.headers.and_then(|headers| {
        header(names.header, headers).or_else(|| cookie(names.cookie?, headers))
    });
    let name = by_headers.or_else(|| address(names, parts).map(str::as_bytes))?;
    Some(xxh3_64(name))
}

/// Returns the source of the session's name, `header:NAME`, `cookie:NAME` or `client-address`;
/// `None` if unnamed.
pub(super) fn source(names: SessionNames<'_>, parts: SessionParts<'_>) -> Option<String> {
    let by_headers = parts.headers.and_then(|headers| {
        if header(names.header, headers).is_some() {
            return Some(format!("header:{}", names.header));
        }
        let name = names.cookie?;
        cookie(name, headers).map(|_| format!("cookie:{name}"))
    });
    by_headers.or_else(|| address(names, parts).map(|_| "client-address".to_owned()))
}

fn address<'a>(names: SessionNames<'_>, parts: SessionParts<'a>) -> Option<&'a str> {
    parts.client.filter(|_| names.client_address)
}

fn header<'a>(name: &str, headers: &'a HeaderMap) -> Option<&'a [u8]> {
    let value = headers.get(name)?.as_bytes().trim_ascii();
    (!value.is_empty()).then_some(value)
}

/// Returns the first nonempty value of the cookie `name`, if any (for the order see RFC 6265,
/// section 5.4).
fn cookie<'a>(name: &str, headers: &'a HeaderMap) -> Option<&'a [u8]> {
    let fields = headers.get_all(COOKIE).iter();
    fields
        .flat_map(|field| field.as_bytes().split(|byte| *byte == b';'))
        .find_map(|pair| {
            let value = pair
                .trim_ascii()
                .strip_prefix(name.as_bytes())?
                .strip_prefix(b"=")?;
            (!value.is_empty()).then_some(value)
        })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const BY_HEADER: SessionNames<'_> = SessionNames {
        header: "x-quorate-session",
        cookie: None,
        client_address: false,
    };

    fn of(headers: &HeaderMap) -> SessionParts<'_> {
        SessionParts {
            headers: Some(headers),
            client: Some("192.0.2.7"),
        }
    }

    #[test]
    fn a_session_is_read_from_header_or_cookie() {
        let by_cookie = SessionNames {
            cookie: Some("sid"),
            ..BY_HEADER
        };
        let mut headers = HeaderMap::new();
        assert_eq!(hash(by_cookie, of(&headers)), None);
        headers.append(COOKIE, HeaderValue::from_static("a=1; xsid=no; sid=abc"));
        headers.append(COOKIE, HeaderValue::from_static("sid=later"));
        assert_eq!(hash(by_cookie, of(&headers)), Some(xxh3_64(b"abc")));
        let source_of = |names| source(names, of(&headers));
        assert_eq!(source_of(by_cookie).as_deref(), Some("cookie:sid"));
        assert_eq!(hash(BY_HEADER, of(&headers)), None);
        headers.insert("x-quorate-session", HeaderValue::from_static(" s1 "));
        assert_eq!(hash(by_cookie, of(&headers)), Some(xxh3_64(b"s1")));
        let by_header_too = source(by_cookie, of(&headers));
        assert_eq!(by_header_too.as_deref(), Some("header:x-quorate-session"));
        let renamed = SessionNames {
            header: "X-Chat-Id",
            ..BY_HEADER
        };
        assert_eq!(hash(renamed, of(&headers)), None);
        headers.insert("x-chat-id", HeaderValue::from_static("s1"));
        assert_eq!(hash(renamed, of(&headers)), Some(xxh3_64(b"s1")));
    }

    #[test]
    fn a_clients_address_names_a_session_that_nothing_else_names() {
        let names = SessionNames {
            client_address: true,
            ..BY_HEADER
        };
        let mut headers = HeaderMap::new();
        assert_eq!(hash(names, of(&headers)), Some(xxh3_64(b"192.0.2.7")));
        let by_address = source(names, of(&headers));
        assert_eq!(by_address.as_deref(), Some("client-address"));
        assert_eq!(hash(names, SessionParts::default()), None);
        headers.insert("x-quorate-session", HeaderValue::from_static("s1"));
        assert_eq!(hash(names, of(&headers)), Some(xxh3_64(b"s1")));
    }
}
