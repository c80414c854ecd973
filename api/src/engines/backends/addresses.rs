//! Rules for the addresses of engines.
//!
//! Operators register engines at run time, and each replica then sends requests wherever the
//! registry points. Without a limit, that includes anything the replica's host can reach and its
//! operators should not. For example, a cloud's metadata service, which hands out credentials, has
//! a link-local address. A name is checked by the addresses it resolves to at connection time,
//! since it may resolve elsewhere later.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use tokio::net::{TcpStream, lookup_host};

use crate::net::ip_prefix::IpPrefix;

/// Addresses that are refused unless an allowed prefix contains them: link-local ones, which
/// include most metadata services, and other special addresses of clouds. IPv6 addresses that embed
/// one of these IPv4 addresses are refused too ([`embedded`]).
const REFUSED: [IpPrefix; 7] = [
    IpPrefix::new(IpAddr::V4(Ipv4Addr::new(169, 254, 0, 0)), 16),
    // Alibaba Cloud.
    IpPrefix::new(IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)), 32),
    // Azure.
    IpPrefix::new(IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)), 32),
    // Oracle Cloud.
    IpPrefix::new(IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)), 32),
    IpPrefix::new(IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0)), 10),
    // AWS.
    IpPrefix::new(
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
        128,
    ),
    // Google Cloud.
    IpPrefix::new(
        IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)),
        128,
    ),
];

/// Returns the IPv4 address that a gateway would use for this IPv6 address: NAT64 (`64:ff9b::/96`,
/// `64:ff9b:1::/48`), 6to4 (`2002::/16`), and the forms `::a.b.c.d`, `::ffff:a.b.c.d` and
/// `::ffff:0:a.b.c.d`. Returns `None` for all others.
fn embedded(address: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(address) = address else {
        return None;
    };
    let octets = address.octets();
    let at = match address.segments() {
        [0x2002, ..] => 2,
        [0x64, 0xff9b, 0, 0, 0, 0, ..]
        | [0x64, 0xff9b, 1, ..]
        | [0, 0, 0, 0, 0, 0 | 0xffff, ..]
        | [0, 0, 0, 0, 0xffff, 0, ..] => 12,
        _ => return None,
    };
    let octets: [u8; 4] = octets[at..at + 4].try_into().expect("four of sixteen");
    Some(octets.into())
}

/// A rule that allows some engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowedEngines {
    /// Engines at these addresses.
    Network(IpPrefix),
    /// Engines with this host name, in lower case.
    Name(String),
    /// Engines whose host name ends in this text, in lower case, such as `.engines.internal`.
    Below(String),
    /// Engines with KV events at this Unix socket of the replica's host.
    Socket(String),
    /// Engines with KV events at a Unix socket whose path begins with this directory, ending in a
    /// slash.
    SocketBelow(String),
}

/// Location of an engine or of its KV events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnginePlace {
    /// A host name or an address.
    Host(String),
    /// The path of a Unix socket.
    Socket(PathBuf),
}

/// Error for text that is not a rule for engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected an IP address, a prefix such as 10.0.0.0/8, a host name such as gpu-1 or \
     *.engines.internal, or a Unix socket such as ipc:///run/vllm/kv.sock or ipc:///run/vllm/*"
)]
pub struct AllowedEnginesError;

impl FromStr for AllowedEngines {
    type Err = AllowedEnginesError;

    fn from_str(text: &str) -> Result<Self, AllowedEnginesError> {
        if let Ok(prefix) = text.parse() {
            return Ok(Self::Network(prefix));
        }
        if let Some(path) = text.strip_prefix("ipc://") {
            return socket(path).ok_or(AllowedEnginesError);
        }
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let (name, is_below) = match text.strip_prefix('*') {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        let starts_well = name.starts_with('.') == is_below && name.len() > usize::from(is_below);
        // Host names are compared in this form: `gpu-1.` is `gpu-1`.
        let name = name.strip_suffix('.').unwrap_or(name);
        // Digits and dots alone are a mistyped address.
        let is_name = name.bytes().any(|byte| byte.is_ascii_alphabetic());
        if !starts_well || !is_name || name.ends_with('.') || !name.bytes().all(is_plain) {
            return Err(AllowedEnginesError);
        }
        let name = name.to_ascii_lowercase();
        Ok(match is_below {
            true => Self::Below(name),
            false => Self::Name(name),
        })
    }
}

/// Parses the path of a Unix socket, or of a folder of Unix sockets followed by `*`; `None` if it
/// is neither.
fn socket(path: &str) -> Option<AllowedEngines> {
    if !is_plain_path(Path::new(path)) || path.trim_end_matches('*').contains('*') {
        return None;
    }
    match path.strip_suffix('*') {
        Some(directory) if directory.ends_with('/') => {
            Some(AllowedEngines::SocketBelow(directory.to_owned()))
        }
        Some(_) => None,
        None => Some(AllowedEngines::Socket(path.to_owned())),
    }
}

/// Whether a path is absolute and has no `.` or `..` components.
fn is_plain_path(path: &Path) -> bool {
    let is_down = |it: Component<'_>| matches!(it, Component::RootDir | Component::Normal(_));
    path.is_absolute() && path.components().all(is_down)
}

impl fmt::Display for AllowedEngines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(prefix) => prefix.fmt(f),
            Self::Name(name) => f.write_str(name),
            Self::Below(name) => write!(f, "*{name}"),
            Self::Socket(path) => write!(f, "ipc://{path}"),
            Self::SocketBelow(directory) => write!(f, "ipc://{directory}*"),
        }
    }
}

/// Rules for the addresses of a replica's engines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineAddressRules {
    /// Rules of which one must allow an engine. If empty, all addresses except [`REFUSED`] are
    /// allowed.
    allowed: Vec<AllowedEngines>,
}

/// Error for an engine that may not be connected to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineAddressError {
    /// The address is refused by default, and no rule allows it.
    #[error("{0} is a link-local address or that of a metadata service")]
    Refused(IpAddr),
    /// The address was announced by a source of engines, and is not that of a single other host.
    #[error(
        "{0} is not the address of a single other host; to allow it, list it in admin.backends_allow"
    )]
    OwnHost(IpAddr),
    /// No rule allows the host, the address or the socket.
    #[error("{0} is not in admin.backends_allow")]
    NotListed(String),
}

impl EngineAddressRules {
    /// Creates rules that allow `allowed`; if empty, all addresses that are not refused by default.
    #[must_use]
    pub fn new(allowed: Vec<AllowedEngines>) -> Self {
        Self { allowed }
    }

    /// Checks the location of an engine, without resolving names.
    ///
    /// # Errors
    /// Returns an [`EngineAddressError`] if no rule allows the location.
    pub fn check_place(&self, place: &EnginePlace) -> Result<(), EngineAddressError> {
        match place {
            EnginePlace::Host(host) => self.check_host(host),
            EnginePlace::Socket(path) => self.check_socket(path),
        }
    }

    /// Checks the path of a Unix socket. If any rules exist, one must allow it.
    ///
    /// # Errors
    /// Returns [`EngineAddressError::NotListed`] if none does.
    pub fn check_socket(&self, path: &Path) -> Result<(), EngineAddressError> {
        let is_listed = self.allowed.iter().any(|it| match it {
            AllowedEngines::Socket(listed) => path == Path::new(listed),
            AllowedEngines::SocketBelow(directory) => path.starts_with(directory),
            AllowedEngines::Network(_) | AllowedEngines::Name(_) | AllowedEngines::Below(_) => {
                false
            }
        });
        match self.allowed.is_empty() || (is_listed && is_plain_path(path)) {
            true => Ok(()),
            false => Err(EngineAddressError::NotListed(format!(
                "ipc://{}",
                path.display()
            ))),
        }
    }

    /// Checks the host of an engine, without resolving names.
    ///
    /// # Errors
    /// Returns an [`EngineAddressError`] if no resolved address could be allowed.
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

    /// Checks an address that `host` resolves to.
    fn check(&self, host: &str, address: IpAddr) -> Result<(), EngineAddressError> {
        let is_in = |it: &AllowedEngines| match it {
            AllowedEngines::Network(prefix) => prefix.contains(address),
            AllowedEngines::Name(_)
            | AllowedEngines::Below(_)
            | AllowedEngines::Socket(_)
            | AllowedEngines::SocketBelow(_) => false,
        };
        if self.allowed.iter().any(is_in) {
            return Ok(());
        }
        let is_refused = |address: IpAddr| REFUSED.iter().any(|it| it.contains(address));
        if is_refused(address) || embedded(address).is_some_and(|it| is_refused(it.into())) {
            return Err(EngineAddressError::Refused(address));
        }
        match self.allowed.is_empty() || self.names(host) {
            true => Ok(()),
            false => Err(EngineAddressError::NotListed(address.to_string())),
        }
    }

    /// Checks an address announced by a source of engines. The owner of a name could make every
    /// replica send requests to itself, so addresses of this host must be allowed by a rule.
    pub(crate) fn check_told(&self, address: IpAddr) -> Result<(), EngineAddressError> {
        let canonical = address.to_canonical();
        let is_broadcast = canonical == IpAddr::V4(Ipv4Addr::BROADCAST);
        let is_own = canonical.is_loopback() || canonical.is_unspecified();
        let is_listed = self
            .allowed
            .iter()
            .any(|it| matches!(it, AllowedEngines::Network(prefix) if prefix.contains(address)));
        if !is_listed && (is_own || canonical.is_multicast() || is_broadcast) {
            return Err(EngineAddressError::OwnHost(address));
        }
        self.check(&address.to_string(), address)
    }

    fn names(&self, host: &str) -> bool {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        self.allowed.iter().any(|it| match it {
            AllowedEngines::Network(_)
            | AllowedEngines::Socket(_)
            | AllowedEngines::SocketBelow(_) => false,
            AllowedEngines::Name(name) => *name == host,
            AllowedEngines::Below(name) => host.ends_with(name),
        })
    }

    /// Connects to the first allowed address of `host` that responds.
    ///
    /// # Errors
    /// Returns why no address could be used.
    pub(crate) async fn connect(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        self.connect_to(host, lookup_host((host, port)).await?)
            .await
    }

    /// Connects to the first of `addresses`, those of `host`, that is allowed and responds.
    async fn connect_to(
        &self,
        host: &str,
        addresses: impl Iterator<Item = SocketAddr>,
    ) -> io::Result<TcpStream> {
        let (mut refused, mut failed) = (None, None);
        for address in addresses {
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
    fn listed_addresses_are_allowed_and_link_local_is_not_by_default() {
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
            (&[], "100.100.100.200", false),
            (&[], "100.100.100.201", true),
            (&[], "168.63.129.16", false),
            (&[], "192.0.0.192", false),
            (&[], "fd20:ce::254", false),
            (&[], "64:ff9b::100.100.100.200", false),
            (&[], "64:ff9b:1::a9fe:a9fe", false),
            (&[], "64:ff9b::10.0.0.1", true),
            (&[], "2002:a9fe:a9fe::1", false),
            (&[], "2002:0a00:0001::1", true),
            (&[], "::169.254.169.254", false),
            (&[], "::ffff:0:169.254.169.254", false),
            (&[], "::1", true),
            (&[], "fd00:ec2::254", false),
            (&[], "fd00:ec2::255", true),
            (&["10.0.0.0/8"], "10.1.2.3", true),
            (&["10.0.0.0/8"], "11.0.0.1", false),
            (&["10.0.0.0/8"], "gpu-1", true),
            (&["GPU-1"], "gpu-1.", true),
            (&["gpu-1."], "gpu-1", true),
            (&["gpu-1."], "gpu-1.", true),
            (&["*.engines.internal."], "a.engines.internal", true),
            (&["a"], "a", true),
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
    fn sources_may_name_this_host_only_if_listed() {
        for (listed, address, is_allowed) in [
            (&[][..], "10.0.0.1", true),
            (&[], "127.0.0.1", false),
            (&[], "::1", false),
            (&[], "::ffff:127.0.0.1", false),
            (&[], "0.0.0.0", false),
            (&[], "224.0.0.1", false),
            (&[], "255.255.255.255", false),
            (&[], "169.254.169.254", false),
            (&["127.0.0.0/8"], "127.0.0.2", true),
            (&["gpu-1"], "10.0.0.1", false),
            (&["10.0.0.0/8"], "127.0.0.1", false),
        ] {
            let judged = rules(listed).check_told(address.parse().unwrap());
            assert_eq!(
                judged.is_ok(),
                is_allowed,
                "{listed:?} {address}: {judged:?}"
            );
        }
    }

    #[test]
    fn a_host_name_is_judged_by_its_addresses() {
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
    async fn a_host_name_is_judged_again_when_its_address_changes() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let here = listener.local_addr().unwrap();
        let metadata: SocketAddr = "169.254.169.254:80".parse().unwrap();
        let rules = rules(&["gpu-1"]);
        let before = rules.connect_to("gpu-1", [here].into_iter()).await;
        assert_eq!(before.unwrap().peer_addr().unwrap(), here);
        let after = rules.connect_to("gpu-1", [metadata].into_iter()).await;
        let error = after.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
        // Of several addresses, only the allowed ones are tried.
        let both = rules
            .connect_to("gpu-1", [metadata, here].into_iter())
            .await;
        assert_eq!(both.unwrap().peer_addr().unwrap(), here);
    }

    #[test]
    fn unix_sockets_must_be_listed_if_anything_is() {
        for (listed, path, is_allowed) in [
            (&[][..], "/run/vllm/kv.sock", true),
            (&["10.0.0.0/8"], "/run/vllm/kv.sock", false),
            (&["ipc:///run/vllm/kv.sock"], "/run/vllm/kv.sock", true),
            (&["ipc:///run/vllm/kv.sock"], "/run/vllm/kv.sock2", false),
            (&["ipc:///run/vllm/*"], "/run/vllm/a/kv.sock", true),
            (&["ipc:///run/vllm/*"], "/run/vllm-2/kv.sock", false),
            (&["ipc:///run/vllm/*"], "/run/vllm/../docker.sock", false),
        ] {
            let judged = rules(listed).check_socket(Path::new(path));
            assert_eq!(judged.is_ok(), is_allowed, "{listed:?} {path}: {judged:?}");
        }
    }

    #[tokio::test]
    async fn disallowed_addresses_are_never_connected() {
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
        // A number that the system interprets as an address.
        let error = rules(&[]).connect("2852039166", port).await.unwrap_err();
        assert!(error.to_string().contains("169.254.169.254"), "{error}");
    }

    #[test]
    fn rules_that_allow_nothing_are_reported() {
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
            "a..",
            "*..",
            "ipc://",
            "ipc://run/x",
            "ipc:///run/x*",
            "ipc:///run/*/x",
            "ipc:///run/../x",
        ] {
            assert_eq!(
                text.parse::<AllowedEngines>(),
                Err(AllowedEnginesError),
                "{text}"
            );
        }
        for text in [
            "10.0.0.0/8",
            "::1/128",
            "gpu-1",
            "*.a",
            "ipc:///run/a",
            "ipc:///run/*",
        ] {
            assert_eq!(text.parse::<AllowedEngines>().unwrap().to_string(), text);
        }
    }
}
