//! Settings of a source from the config, including those of its engines.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use state::command::{BackendRole, BackendSpec};
use state::discovery::{EngineCondition, ListedEngine, SourceRules, is_id_char};

use crate::backends::EngineUrl;

/// A source of engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceSettings {
    /// Its id, and how fast engines it no longer lists are removed.
    pub rules: SourceRules,
    /// Settings shared by its engines.
    pub template: EngineTemplate,
    /// Kind and location.
    pub kind: SourceKind,
}

/// Kind and location of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceKind {
    /// A DNS name.
    Dns(DnsSource),
    /// A file with a list.
    File(PathBuf),
    /// Pods.
    Kubernetes(KubernetesSource),
}

impl SourceKind {
    /// Returns its name in the config.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Dns(_) => "dns",
            Self::File(_) => "file",
            Self::Kubernetes(_) => "kubernetes",
        }
    }
}

/// A DNS name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsSource {
    /// The host name.
    pub name: String,
    /// Port of the engines; `None` uses the ports in the records.
    pub port: Option<u16>,
    /// Record types to query.
    pub records: DnsRecords,
    /// Maximum interval between lookups; a shorter TTL takes precedence.
    pub interval: Duration,
    /// Name server. `None` uses the system's resolver configuration.
    pub resolver: Option<SocketAddr>,
}

/// Records of a DNS name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DnsRecords {
    /// IPv4 addresses, or IPv6 addresses where there are none.
    Addresses,
    /// IPv4 addresses.
    A,
    /// IPv6 addresses.
    Aaaa,
    /// Hosts with ports.
    Srv,
}

/// Pods of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesSource {
    /// Namespace and API server.
    pub access: KubernetesAccess,
    /// The pods to select.
    pub pods: PodChoice,
    /// Port of the engines; `None` uses the pool's ports.
    pub port: Option<u16>,
}

/// A namespace, and how to reach its API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesAccess {
    /// The namespace. `None` means that of this pod.
    pub namespace: Option<String>,
    /// The API server. `None` means that of the cluster in which this pod runs.
    pub api_server: Option<EngineUrl>,
    /// File with the bearer token, reloaded when it changes.
    pub token_file: PathBuf,
    /// File with the authorities of the API server's certificate.
    pub ca_file: PathBuf,
}

/// Selects the pods that are engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodChoice {
    /// Pods with these labels.
    Selector(String),
    /// Pods of an `InferencePool`.
    Pool(String),
}

/// Settings shared by the engines of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineTemplate {
    /// Prefix of the engines' ids.
    pub source: String,
    /// Models that the engines serve.
    pub models: Vec<String>,
    /// Labels, which take precedence over those from the source.
    pub labels: BTreeMap<String, String>,
    /// Role of the engines.
    pub role: BackendRole,
    /// Capacity of the engines' caches, in blocks.
    pub capacity_blocks: Option<u32>,
    /// Protocol of the engines.
    pub scheme: EngineScheme,
    /// Port of the engines' KV events.
    pub kv_events_port: Option<u16>,
    /// Port for requesting missed KV events.
    pub kv_replay_port: Option<u16>,
}

/// Protocol of engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineScheme {
    /// Without TLS.
    #[default]
    Http,
    /// With TLS. The certificate must be for the address.
    Https,
}

impl EngineTemplate {
    /// Returns the id of an engine with this name at the source.
    pub(super) fn id(&self, name: &str) -> String {
        let name = name.replace(|c| !is_id_char(c), "-");
        format!("{}-{name}", self.source)
    }

    /// Describes an engine without a usable address. It is not registered.
    pub(super) fn nowhere(&self, name: &str, condition: EngineCondition) -> ListedEngine {
        let nowhere = (IpAddr::from([0, 0, 0, 0]), 1);
        ListedEngine {
            spec: self.at(Some(name), nowhere, &BTreeMap::new()),
            condition,
        }
    }

    /// Describes the engine at an address. Its name defaults to its address.
    pub(super) fn at(
        &self,
        name: Option<&str>,
        (ip, port): (IpAddr, u16),
        labels: &BTreeMap<String, String>,
    ) -> BackendSpec {
        let place = SocketAddr::new(ip, port);
        let endpoint = |port: Option<u16>| {
            let place = SocketAddr::new(ip, port?);
            Some(format!("tcp://{place}"))
        };
        let scheme = match self.scheme {
            EngineScheme::Http => "http",
            EngineScheme::Https => "https",
        };
        let address = || {
            let ip = ip.to_string().replace(['.', ':'], "-");
            format!("{ip}-{port}")
        };
        let mut spec = BackendSpec {
            id: self.id(&name.map_or_else(address, str::to_owned)),
            url: format!("{scheme}://{place}"),
            models: self.models.clone(),
            labels: labels.clone(),
            capacity_blocks: self.capacity_blocks,
            kv_events: endpoint(self.kv_events_port),
            kv_replay: endpoint(self.kv_replay_port),
            role: self.role,
        };
        spec.labels.extend(self.labels.clone());
        spec
    }
}
