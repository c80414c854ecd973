//! Endpoints (address and port) to which a gateway can send a request.

use std::net::{IpAddr, SocketAddr, SocketAddrV4};

use crate::engines::backends::EngineUrl;

/// The endpoints that a gateway offers for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OfferedEndpoints {
    /// The gateway offers every backend that has an endpoint.
    All,
    /// The gateway offers these endpoints, in ascending order.
    Those(Vec<SocketAddr>),
}

impl OfferedEndpoints {
    /// Returns an offer of `endpoints`, which may be in any order.
    #[must_use]
    pub fn those(mut endpoints: Vec<SocketAddr>) -> Self {
        endpoints.sort_unstable();
        Self::Those(endpoints)
    }

    /// Whether a backend at `endpoint` is offered. A backend without an endpoint never is.
    pub(in crate::routing) fn has(&self, endpoint: Option<SocketAddr>) -> bool {
        match (self, endpoint) {
            (_, None) => false,
            (Self::All, Some(_)) => true,
            (Self::Those(those), Some(endpoint)) => those.binary_search(&endpoint).is_ok(),
        }
    }
}

/// Returns the endpoint of a backend at `url`. `None` if the URL is invalid or has a host name,
/// which a gateway does not look up, or a path prefix, which a gateway does not add.
#[must_use]
pub fn endpoint_of(url: &str) -> Option<SocketAddr> {
    // Most URLs are no more than that, and need no other parser.
    let plain = url.strip_prefix("http://").and_then(|it| it.parse().ok());
    if let Some(plain) = plain.filter(|it: &SocketAddrV4| it.port() != 0) {
        return Some(SocketAddr::V4(plain));
    }
    let url = EngineUrl::parse(url).ok()?;
    let host: IpAddr = url.host().parse().ok()?;
    url.has_no_prefix()
        .then(|| SocketAddr::new(host, url.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_url_of_address_and_port_is_an_endpoint() {
        for (url, endpoint) in [
            ("http://10.0.0.1:8000", Some("10.0.0.1:8000")),
            ("https://10.0.0.1", Some("10.0.0.1:443")),
            ("http://[fd00::1]:8000", Some("[fd00::1]:8000")),
            ("http://gpu-1:8000", None),
            ("http://10.0.0.1:8000/team-a", None),
        ] {
            let expected = endpoint.map(|it| it.parse().expect("it is an address"));
            assert_eq!(endpoint_of(url), expected, "{url}");
        }
    }

    #[test]
    fn backends_without_endpoints_are_never_offered() {
        let [one, two] = [1, 2].map(|port| SocketAddr::from(([10, 0, 0, 1], port)));
        let those = OfferedEndpoints::those(vec![two]);
        assert!(OfferedEndpoints::All.has(Some(one)) && !OfferedEndpoints::All.has(None));
        assert!(those.has(Some(two)) && !those.has(Some(one)) && !those.has(None));
    }
}
