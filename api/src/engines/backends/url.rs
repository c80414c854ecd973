//! Location of an engine: `http://host[:port][/prefix]`, or the same with `https`.
//!
//! The registry and the config hold a URL in normalised form, with its port, one spelling of its
//! host and without a trailing slash, so that equal locations have equal texts.

use std::net::IpAddr;

use http::uri::{Authority, PathAndQuery};
use http::{HeaderValue, Uri};
use url::Host;

const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;

/// The base URL of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineUrl {
    /// The whole URL in normalised form: `http://host:port` or `https://host:port`, and the prefix.
    text: String,
    is_tls: bool,
    /// Host and port, as `host:port`.
    address: String,
    /// Path prefix, as `/prefix`, or empty.
    prefix: String,
}

/// Error for text that is not an engine URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected http://host or https://host, optionally with a port and a path prefix")]
pub struct EngineUrlError;

impl EngineUrl {
    /// Parses a URL. The default port is that of the scheme.
    ///
    /// # Errors
    /// Returns an [`EngineUrlError`] if `text` is not an engine URL.
    pub fn parse(text: &str) -> Result<Self, EngineUrlError> {
        let begins = |scheme: &str| {
            let start = text.get(..scheme.len());
            start.is_some_and(|start| start.eq_ignore_ascii_case(scheme))
        };
        let schemes = [("http://", HTTP_PORT), ("https://", HTTPS_PORT)];
        let scheme = schemes.into_iter().find(|(scheme, _)| begins(scheme));
        let (scheme, port) = scheme.ok_or(EngineUrlError)?;
        let rest = &text[scheme.len()..];
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let address = address(authority, port).ok_or(EngineUrlError)?;
        let prefix = path.trim_end_matches('/');
        if !is_prefix(prefix) {
            return Err(EngineUrlError);
        }
        Ok(Self {
            text: format!("{scheme}{address}{prefix}"),
            is_tls: port == HTTPS_PORT,
            address,
            prefix: prefix.to_owned(),
        })
    }

    /// Returns the normalised form, as the registry holds it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether the engine uses TLS.
    pub(crate) fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// Returns the host, without brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        let host = self.address.rsplit_once(':').map_or("", |(host, _)| host);
        host.trim_start_matches('[').trim_end_matches(']')
    }

    /// Returns the port.
    pub(crate) fn port(&self) -> u16 {
        let port = self.address.rsplit_once(':').map(|(_, port)| port.parse());
        port.and_then(Result::ok)
            .expect("it was parsed with a port")
    }

    /// Whether the URL has no path prefix.
    pub(crate) fn has_no_prefix(&self) -> bool {
        self.prefix.is_empty()
    }

    /// Returns the value of the `host` header; `None` if a header cannot have it.
    pub(crate) fn host_header(&self) -> Option<HeaderValue> {
        let port = if self.is_tls { HTTPS_PORT } else { HTTP_PORT };
        let default = format!(":{port}");
        let bare = self.address.strip_suffix(&default);
        HeaderValue::from_str(bare.unwrap_or(&self.address)).ok()
    }

    /// Whether the host is a name, which may resolve elsewhere later.
    pub(crate) fn is_name(&self) -> bool {
        self.host().parse::<IpAddr>().is_err()
    }

    /// Returns the request target for `target` at this engine, which begins with the prefix.
    pub(crate) fn locate(&self, target: Uri) -> Uri {
        if self.prefix.is_empty() {
            return target;
        }
        let path = target.path_and_query().map_or("", PathAndQuery::as_str);
        let located = PathAndQuery::try_from(format!("{}{path}", self.prefix));
        located.map_or(target, Uri::from)
    }
}

/// Normalises an authority to `host:port`; `None` if it is invalid or contains a user.
fn address(authority: &str, default_port: u16) -> Option<String> {
    let parsed: Authority = authority.parse().ok()?;
    let is_plain = !authority.contains('@') && !parsed.host().is_empty();
    let port = match parsed.port() {
        Some(port) => port.as_str().parse().ok().filter(|port| *port > 0)?,
        None if authority == parsed.host() => default_port,
        // The text after the host is not a port.
        None => return None,
    };
    is_plain.then(|| format!("{}:{port}", host(parsed.host())))
}

/// Returns the one spelling of a host: names in lower case, addresses in their shortest form. An
/// IPv4 address may be written as resolvers read it (`127.1`), or mapped to IPv6.
fn host(text: &str) -> String {
    match Host::parse(text) {
        Ok(Host::Ipv4(ip)) => ip.to_string(),
        Ok(Host::Ipv6(ip)) => match ip.to_ipv4_mapped() {
            Some(ip) => ip.to_string(),
            None => format!("[{ip}]"),
        },
        Ok(Host::Domain(_)) | Err(_) => text.to_ascii_lowercase(),
    }
}

/// Whether the prefix is empty, or consists of segments that all servers interpret alike.
fn is_prefix(prefix: &str) -> bool {
    let is_plain = |segment: &str| {
        let mut bytes = segment.bytes();
        !segment.is_empty()
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte))
            && !segment.bytes().all(|byte| byte == b'.')
    };
    prefix.is_empty() || prefix.split('/').skip(1).all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_normalised_with_port_and_without_trailing_slash() {
        for (text, form) in [
            ("http://gpu1", "http://gpu1:80"),
            ("HTTP://gpu1/", "http://gpu1:80"),
            ("http://10.0.0.1:8000", "http://10.0.0.1:8000"),
            ("http://[::1]/v", "http://[::1]:80/v"),
            ("http://[0:0::0:1]", "http://[::1]:80"),
            ("http://[::ffff:10.0.0.1]", "http://10.0.0.1:80"),
            ("http://127.1", "http://127.0.0.1:80"),
            ("http://2130706433", "http://127.0.0.1:80"),
            ("http://0x7f.0.0.01:1", "http://127.0.0.1:1"),
            ("http://gpu_1.", "http://gpu_1.:80"),
            ("http://GPU1.Example:8000", "http://gpu1.example:8000"),
            ("http://a:1/team-a/m.1/", "http://a:1/team-a/m.1"),
            ("https://gpu1", "https://gpu1:443"),
            ("HTTPS://gpu1:80/x", "https://gpu1:80/x"),
        ] {
            let url = EngineUrl::parse(text).unwrap();
            assert_eq!(url.as_str(), form);
            assert_eq!(EngineUrl::parse(form), Ok(url));
        }
        for text in [
            "",
            "gpu1",
            "http://",
            "http://:1",
            "http://a:0",
            "http://a:",
            "http://a:65536",
            "http://u@a",
            "http://a/b?c",
            "http://a/../b",
            "http://a//b",
            "http://a/%2e",
            "ftp://a",
        ] {
            assert_eq!(EngineUrl::parse(text), Err(EngineUrlError), "{text}");
        }
        let host = |url: &str| EngineUrl::parse(url).unwrap().host_header().unwrap();
        assert_eq!(host("https://a"), "a");
        assert_eq!(host("https://a:80"), "a:80");
        assert_eq!(host("http://a:443"), "a:443");
    }

    #[test]
    fn request_paths_are_appended_to_the_url_prefix() {
        let target = |url: &str| {
            let url = EngineUrl::parse(url).unwrap();
            url.locate("/v1/models?a=1".parse().unwrap()).to_string()
        };
        assert_eq!(target("http://a"), "/v1/models?a=1");
        assert_eq!(target("http://a/x/y"), "/x/y/v1/models?a=1");
    }

    #[test]
    fn only_host_names_are_resolved_again() {
        let is_name = |url: &str| EngineUrl::parse(url).unwrap().is_name();
        assert!(is_name("http://gpu1") && is_name("http://localhost:9/x"));
        assert!(!is_name("http://10.0.0.1:8") && !is_name("http://[::1]:8"));
    }
}
