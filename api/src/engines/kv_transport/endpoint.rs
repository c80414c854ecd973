//! KV event endpoints: the settings `kv_events` and `kv_replay` of a backend.
//!
//! | value | meaning |
//! | --- | --- |
//! | `tcp://10.0.0.1:5557` | the engine listens there; the host `*` stands for the host of the backend's URL |
//! | `ipc:///run/vllm.sock` | the engine listens on this machine |
//! | `bind:tcp://0.0.0.0:5557` | the engine connects; this replica listens there while it reads |
//! | `auto` | queried from the engine (`kv_events` only) |
//!
//! `?ranks=4` after a TCP address gives the number of data-parallel ranks, which use consecutive
//! ports.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::engines::backends::EnginePlace;

/// Maximum number of data-parallel ranks of one engine.
pub const RANKS_MAX: u16 = 64;

/// The setting `kv_events` of a backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEventsSource {
    /// The endpoint is queried from the engine.
    Auto,
    /// The endpoint is configured.
    At(KvEndpoint),
}

/// Endpoint of the first data-parallel rank, and the number of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEndpoint {
    /// Side that listens for connections.
    pub side: ListeningSide,
    /// Address that this side listens at.
    pub address: KvAddress,
    /// Number of data-parallel ranks.
    pub ranks: u16,
}

/// Side of a connection that listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListeningSide {
    /// The engine listens.
    Engine,
    /// The reading replica listens.
    Here,
}

/// Address of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvAddress {
    /// A TCP address.
    Tcp {
        /// Host name or address; `None` for the host of the backend's URL.
        host: Option<String>,
        /// Port of the first rank.
        port: u16,
    },
    /// Path of a Unix socket, which serves a single rank.
    Ipc(PathBuf),
}

/// Error for a malformed endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected {0}")]
pub struct EndpointError(&'static str);

const FORM: &str = "tcp://HOST:PORT, ipc://PATH, bind:tcp://ADDRESS:PORT, each with an optional \
                    ?ranks=N, or auto";

impl FromStr for KvEventsSource {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => text.parse().map(Self::At),
        }
    }
}

impl FromStr for KvEndpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let (text, ranks) = match text.split_once("?ranks=") {
            Some((text, ranks)) => (text, ranks.parse().unwrap_or(0)),
            None => (text, 1),
        };
        if ranks == 0 || ranks > RANKS_MAX {
            return Err(EndpointError("1 to 64 ranks"));
        }
        let (text, side) = match text.strip_prefix("bind:") {
            Some(text) => (text, ListeningSide::Here),
            None => (text, ListeningSide::Engine),
        };
        let address = text.parse()?;
        if matches!(address, KvAddress::Ipc(_)) && ranks > 1 {
            return Err(EndpointError("one rank per ipc:// endpoint"));
        }
        Ok(Self {
            side,
            address,
            ranks,
        })
    }
}

impl FromStr for KvAddress {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        if let Some(path) = text.strip_prefix("ipc://")
            && path.starts_with('/')
        {
            return Ok(Self::Ipc(PathBuf::from(path)));
        }
        let rest = text.strip_prefix("tcp://").ok_or(EndpointError(FORM))?;
        let (host, port) = rest.rsplit_once(':').ok_or(EndpointError(FORM))?;
        let port: u16 = port.parse().map_err(|_| EndpointError(FORM))?;
        if host.is_empty() || host.contains(['/', '?', '@', ' ']) || port == 0 {
            return Err(EndpointError(FORM));
        }
        let host = match host {
            "*" => None,
            _ => Some(host.to_owned()),
        };
        Ok(Self::Tcp { host, port })
    }
}

impl KvEndpoint {
    /// Returns the address of `rank` for an engine at `engine_host`; `None` if the rank's port
    /// would exceed 65535.
    #[must_use]
    pub fn of_rank(&self, rank: u16, engine_host: &str) -> Option<KvAddress> {
        match &self.address {
            KvAddress::Ipc(path) => Some(KvAddress::Ipc(path.clone())),
            KvAddress::Tcp { host, port } => Some(KvAddress::Tcp {
                host: Some(match (host, self.side) {
                    (Some(host), _) => host.clone(),
                    (None, ListeningSide::Engine) => engine_host.to_owned(),
                    (None, ListeningSide::Here) => "0.0.0.0".to_owned(),
                }),
                port: port.checked_add(rank)?,
            }),
        }
    }
}

impl fmt::Display for KvAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ipc(path) => write!(f, "ipc://{}", path.display()),
            Self::Tcp { host, port } => {
                write!(f, "tcp://{}:{port}", host.as_deref().unwrap_or("*"))
            }
        }
    }
}

/// Returns the hosts and Unix sockets that a replica connects to for these settings, if set, each
/// with the name of its setting. The host of the backend's URL is left out.
#[must_use]
pub fn places(
    kv_events: Option<&str>,
    kv_replay: Option<&str>,
) -> Vec<(&'static str, EnginePlace)> {
    let settings = [("kv_events", kv_events), ("kv_replay", kv_replay)];
    let places = settings.into_iter().filter_map(|(setting, endpoint)| {
        let KvEndpoint { side, address, .. } = endpoint?.parse().ok()?;
        match (side, address) {
            (ListeningSide::Engine, KvAddress::Tcp { host, .. }) => {
                Some((setting, EnginePlace::Host(host?)))
            }
            (ListeningSide::Engine, KvAddress::Ipc(path)) => {
                Some((setting, EnginePlace::Socket(path)))
            }
            (ListeningSide::Here, _) => None,
        }
    });
    places.collect()
}

/// Checks the settings `kv_events` and `kv_replay` of a backend; `None` if not set.
///
/// # Errors
/// Returns the field at fault and what is expected of it.
pub fn check(
    kv_events: Option<&str>,
    kv_replay: Option<&str>,
) -> Result<(), (&'static str, String)> {
    let source = kv_events.map(str::parse::<KvEventsSource>).transpose();
    let source = source.map_err(|bad| ("kv_events", bad.to_string()))?;
    let Some(replay) = kv_replay else {
        return Ok(());
    };
    let fault = |expected: &str| Err(("kv_replay", format!("expected {expected}")));
    match (source, replay.parse::<KvEndpoint>()) {
        (None, _) => fault("kv_events beside it"),
        (Some(KvEventsSource::Auto), _) => {
            fault("no endpoint: with kv_events = \"auto\" the engine names it")
        }
        (_, Err(bad)) => Err(("kv_replay", bad.to_string())),
        (_, Ok(replay)) if replay.side == ListeningSide::Here => {
            fault("an endpoint the engine listens at: replays are asked for by the reader")
        }
        (Some(KvEventsSource::At(events)), Ok(replay)) if replay.ranks != events.ranks => {
            fault("as many ranks as kv_events has")
        }
        (Some(KvEventsSource::At(_)), Ok(_)) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str, rank: u16) -> String {
        match text.parse::<KvEndpoint>() {
            Ok(endpoint) => match endpoint.of_rank(rank, "gpu") {
                Some(address) => format!("{:?} {address}", endpoint.side),
                None => "no such port".to_owned(),
            },
            Err(bad) => bad.to_string(),
        }
    }

    #[test]
    fn endpoints_resolve_per_rank() {
        assert_eq!(
            shown("tcp://10.0.0.1:5557", 0),
            "Engine tcp://10.0.0.1:5557"
        );
        assert_eq!(shown("tcp://*:5557?ranks=4", 3), "Engine tcp://gpu:5560");
        assert_eq!(shown("tcp://[::1]:5557", 0), "Engine tcp://[::1]:5557");
        assert_eq!(shown("bind:tcp://*:5557", 0), "Here tcp://0.0.0.0:5557");
        assert_eq!(shown("ipc:///run/kv", 0), "Engine ipc:///run/kv");
        assert_eq!(shown("tcp://a:65535?ranks=2", 1), "no such port");
    }

    #[test]
    fn invalid_endpoints_are_refused() {
        for text in [
            "",
            "10.0.0.1:5557",
            "tcp://a",
            "tcp://:1",
            "tcp://a:0",
            "tcp://a:1/x",
            "ipc://x",
        ] {
            assert!(text.parse::<KvEventsSource>().is_err(), "{text}");
        }
        for text in [
            "tcp://a:1?ranks=0",
            "tcp://a:1?ranks=65",
            "ipc:///x?ranks=2",
        ] {
            assert!(text.parse::<KvEventsSource>().is_err(), "{text}");
        }
    }

    #[test]
    fn event_and_replay_endpoints_must_be_consistent() {
        let fault = |events, replay| check(events, replay).map_err(|(field, _)| field);
        let (at, other) = (Some("tcp://a:1"), Some("tcp://a:2"));
        assert_eq!(fault(None, None), Ok(()));
        assert_eq!(fault(Some("auto"), None), Ok(()));
        assert_eq!(fault(at, other), Ok(()));
        assert_eq!(fault(Some("no"), None), Err("kv_events"));
        assert_eq!(fault(None, other), Err("kv_replay"));
        assert_eq!(fault(Some("auto"), other), Err("kv_replay"));
        assert_eq!(fault(at, Some("bind:tcp://a:2")), Err("kv_replay"));
        assert_eq!(fault(at, Some("tcp://a:2?ranks=2")), Err("kv_replay"));
    }
}
