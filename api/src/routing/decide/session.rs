//! Determines a request's session from its headers.

use http::HeaderMap;
use http::header::COOKIE;
use state::policy::SessionNames;
use xxhash_rust::xxh3::xxh3_64;

/// Returns a hash of the session's name; `None` if the headers name none.
pub(in crate::routing) fn hash(names: SessionNames<'_>, headers: &HeaderMap) -> Option<u64> {
    let name = header(names.header, headers).or_else(|| cookie(names.cookie?, headers))?;
    Some(xxh3_64(name))
}

/// Returns the source of the session's name, `header:NAME` or `cookie:NAME`; `None` if unnamed.
pub(super) fn source(names: SessionNames<'_>, headers: &HeaderMap) -> Option<String> {
    if header(names.header, headers).is_some() {
        return Some(format!("header:{}", names.header));
    }
    let name = names.cookie?;
    cookie(name, headers).map(|_| format!("cookie:{name}"))
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

    #[test]
    fn a_session_is_read_from_header_or_cookie() {
        let by_header = SessionNames {
            header: "x-quorate-session",
            cookie: None,
        };
        let by_cookie = SessionNames {
            cookie: Some("sid"),
            ..by_header
        };
        let mut headers = HeaderMap::new();
        assert_eq!(hash(by_cookie, &headers), None);
        headers.append(COOKIE, HeaderValue::from_static("a=1; xsid=no; sid=abc"));
        headers.append(COOKIE, HeaderValue::from_static("sid=later"));
        assert_eq!(hash(by_cookie, &headers), Some(xxh3_64(b"abc")));
        assert_eq!(source(by_cookie, &headers).as_deref(), Some("cookie:sid"));
        assert_eq!(hash(by_header, &headers), None);
        headers.insert("x-quorate-session", HeaderValue::from_static(" s1 "));
        assert_eq!(hash(by_cookie, &headers), Some(xxh3_64(b"s1")));
        let by_header_too = source(by_cookie, &headers);
        assert_eq!(by_header_too.as_deref(), Some("header:x-quorate-session"));
        let renamed = SessionNames {
            header: "X-Chat-Id",
            cookie: None,
        };
        assert_eq!(hash(renamed, &headers), None);
        headers.insert("x-chat-id", HeaderValue::from_static("s1"));
        assert_eq!(hash(renamed, &headers), Some(xxh3_64(b"s1")));
    }
}
