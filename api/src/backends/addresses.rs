//! Which addresses engines may have.
//!
//! Operators register engines at run time, and each replica then sends requests wherever the
//! registry says. Without a limit that reaches what the replica's host reaches and its operators
//! should not: the metadata service of a cloud, which hands out credentials, is at a link-local
//! address. A name is judged by the addresses that it leads to when it is connected to, since it may
//! lead elsewhere later.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use tokio::net::{TcpStream, lookup_host};

use crate::ip_prefix::IpPrefix;

/// Addresses that are refused unless a prefix has them: link-local ones, among which are those of
/// metadata services, their NAT64 form, and the one that AWS has besides.
const REFUSED: [IpPrefix; 4] = [
    IpPrefix::new(IpAddr::V4(Ipv4Addr::new(169, 254, 0, 0)), 16),
    IpPrefix::new(IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0)), 10),
    IpPrefix::new(
        IpAddr::V6(Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0xa9fe, 0)),
        112,
    ),
    IpPrefix::new(
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
        128,
    ),
];

/// Engines that are allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowedEngines {
    /// At these addresses.
    Network(IpPrefix),
    /// With this host name, in lower case.
    Name(String),
    /// With a host name that ends so, in lower case: `.engines.internal`.
    Below(String),
}

/// Text that allows no engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected an IP address, a prefix such as 10.0.0.0/8, or a host name such as gpu-1 or \
     *.engines.internal"
)]
pub struct AllowedEnginesError;

impl FromStr for AllowedEngines {
    type Err = AllowedEnginesError;

    fn from_str(text: &str) -> Result<Self, AllowedEnginesError> {
        if let Ok(prefix) = text.parse() {
            return Ok(Self::Network(prefix));
        }
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let (name, is_below) = match text.strip_prefix('*') {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        let starts_well = name.starts_with('.') == is_below && name.len() > 1;
        // What consists of digits and dots is an address that was mistyped.
        let is_name = name.bytes().any(|byte| byte.is_ascii_alphabetic());
        if !starts_well || !is_name || !name.bytes().all(is_plain) {
            return Err(AllowedEnginesError);
        }
        let name = name.to_ascii_lowercase();
        Ok(match is_below {
            true => Self::Below(name),
            false => Self::Name(name),
        })
    }
}

impl fmt::Display for AllowedEngines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(prefix) => prefix.fmt(f),
            Self::Name(name) => f.write_str(name),
            Self::Below(name) => write!(f, "*{name}"),
        }
    }
}

/// Which addresses the engines of a replica may have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineAddressRules {
    /// Empty: all but [`REFUSED`].
    allowed: Vec<AllowedEngines>,
}

/// An engine that may not be connected to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineAddressError {
    /// At an address that is refused unless it is listed.
    #[error("{0} is an address of the link or of a metadata service")]
    Refused(IpAddr),
    /// Neither its host nor its address is listed.
    #[error("{0} is not in admin.backends_allow")]
    NotListed(String),
}

impl EngineAddressRules {
    /// Allows these; none: all but what is refused by default.
    #[must_use]
    pub fn new(allowed: Vec<AllowedEngines>) -> Self {
        Self { allowed }
    }

    /// Judges the host of an engine, without asking where a name leads.
    ///
    /// # Errors
    /// [`EngineAddressError`].
    pub fn check_host(&self, host: &str) -> Result<(), EngineAddressError> {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = host.parse() {
            return self.check(host, address);
        }
        let has_networks = (self.allowed.iter()).any(|it| matches!(it, AllowedEngines::Network(_)));
        match self.allowed.is_empty() || has_networks || self.names(host) {
            true => Ok(()),
            false => Err(EngineAddressError::NotListed(host.to_owned())),
        }
    }

    /// Judges an address that `host` leads to.
    fn check(&self, host: &str, address: IpAddr) -> Result<(), EngineAddressError> {
        let is_in = |it: &AllowedEngines| match it {
            AllowedEngines::Network(prefix) => prefix.contains(address),
            AllowedEngines::Name(_) | AllowedEngines::Below(_) => false,
        };
        if self.allowed.iter().any(is_in) {
            return Ok(());
        }
        if REFUSED.iter().any(|prefix| prefix.contains(address)) {
            return Err(EngineAddressError::Refused(address));
        }
        match self.allowed.is_empty() || self.names(host) {
            true => Ok(()),
            false => Err(EngineAddressError::NotListed(address.to_string())),
        }
    }

    fn names(&self, host: &str) -> bool {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        self.allowed.iter().any(|it| match it {
            AllowedEngines::Network(_) => false,
            AllowedEngines::Name(name) => *name == host,
            AllowedEngines::Below(name) => host.ends_with(name),
        })
    }

    /// Connects to the first address of `host` that is allowed and answers.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) async fn connect(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let (mut refused, mut failed) = (None, None);
        for address in lookup_host((host, port)).await? {
            if let Err(error) = self.check(host, address.ip()) {
                refused = Some(error);
                continue;
            }
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => failed = Some(error),
            }
        }
        Err(match (failed, refused) {
            (Some(failed), _) => failed,
            (None, Some(refused)) => io::Error::new(io::ErrorKind::PermissionDenied, refused),
            (None, None) => io::Error::new(io::ErrorKind::NotFound, "the name has no address"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(allowed: &[&str]) -> EngineAddressRules {
        let allowed = allowed.iter().map(|text| text.parse().unwrap());
        EngineAddressRules::new(allowed.collect())
    }

    #[test]
    fn what_is_listed_is_allowed_and_by_default_all_but_link_local() {
        for (listed, host, is_allowed) in [
            (&[][..], "10.0.0.1", true),
            (&[], "gpu-1", true),
            (&[], "127.0.0.1", true),
            (&[], "169.254.169.254", false),
            (&[], "::ffff:169.254.169.254", false),
            (&[], "64:ff9b::a9fe:a9fe", false),
            (&[], "[fe80::1]", false),
            (&[], "febf::1", false),
            (&[], "fec0::1", true),
            (&[], "fd00:ec2::254", false),
            (&[], "fd00:ec2::255", true),
            (&["10.0.0.0/8"], "10.1.2.3", true),
            (&["10.0.0.0/8"], "11.0.0.1", false),
            (&["10.0.0.0/8"], "gpu-1", true),
            (&["GPU-1"], "gpu-1.", true),
            (&["gpu-1"], "gpu-2", false),
            (&["gpu-1"], "10.0.0.1", false),
            (&["*.engines.internal"], "a.Engines.Internal", true),
            (&["*.engines.internal"], "engines.internal", false),
            (&["*.engines.internal"], "evil-engines.internal", false),
            (&["0.0.0.0/0", "::/0"], "169.254.1.1", true),
            (&["169.254.7.0/24"], "169.254.7.9", true),
            (&["169.254.7.0/24"], "169.254.169.254", false),
        ] {
            let judged = rules(listed).check_host(host);
            assert_eq!(judged.is_ok(), is_allowed, "{listed:?} {host}: {judged:?}");
        }
    }

    #[test]
    fn a_name_is_judged_by_where_it_leads() {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let metadata = address("169.254.169.254");
        for listed in [&[][..], &["gpu-1"], &["10.0.0.0/8"]] {
            let judged = rules(listed).check("gpu-1", metadata);
            assert_eq!(judged, Err(EngineAddressError::Refused(metadata)));
        }
        let networks = rules(&["10.0.0.0/8"]);
        assert!(networks.check("gpu-1", address("10.0.0.1")).is_ok());
        assert!(networks.check("gpu-1", address("11.0.0.1")).is_err());
        let names = rules(&["gpu-1"]);
        assert!(names.check("gpu-1", address("11.0.0.1")).is_ok());
    }

    #[tokio::test]
    async fn nothing_is_connected_to_that_is_not_allowed() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(rules(&[]).connect("localhost", port).await.is_ok());
        let only = rules(&["10.0.0.0/8"]);
        for host in ["localhost", "127.0.0.1", "2130706433"] {
            let error = only.connect(host, port).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{host}");
            assert!(
                error.to_string().contains("admin.backends_allow"),
                "{error}"
            );
        }
        // A number that the system reads as an address.
        let error = rules(&[]).connect("2852039166", port).await.unwrap_err();
        assert!(error.to_string().contains("169.254.169.254"), "{error}");
    }

    #[test]
    fn what_allows_nothing_is_told() {
        for text in [
            "",
            "*",
            "*.",
            "*a",
            ".a",
            "10.0.0.0/40",
            "10.0.0.256",
            "a b",
            "a/8",
            "http://a",
        ] {
            assert_eq!(
                text.parse::<AllowedEngines>(),
                Err(AllowedEnginesError),
                "{text}"
            );
        }
        for text in ["10.0.0.0/8", "::1/128", "gpu-1", "*.a"] {
            assert_eq!(text.parse::<AllowedEngines>().unwrap().to_string(), text);
        }
    }
}
