//! What is known of a source from the config, and how its engines are described.

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
    /// Its id, and how fast what it does not tell of goes.
    pub rules: SourceRules,
    /// What its engines have in common.
    pub template: EngineTemplate,
    /// Where it is.
    pub kind: SourceKind,
}

/// Where a source is.
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
    /// The name.
    pub name: String,
    /// Port of the engines; `None`: the records tell.
    pub port: Option<u16>,
    /// What is asked for.
    pub records: DnsRecords,
    /// Longest time between two lookups; a shorter TTL counts.
    pub interval: Duration,
    /// Who is asked. `None`: as the system's resolver is set up.
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
    /// Where the pods are.
    pub access: KubernetesAccess,
    /// Which pods.
    pub pods: PodChoice,
    /// Port of the engines; `None`: as the pool says.
    pub port: Option<u16>,
}

/// A namespace, and how its API server is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesAccess {
    /// The namespace. `None`: that of this pod.
    pub namespace: Option<String>,
    /// The API server. `None`: that of the cluster that this pod runs in.
    pub api_server: Option<EngineUrl>,
    /// File with the token that is shown to it, read again as it changes.
    pub token_file: PathBuf,
    /// Authorities of its certificate.
    pub ca_file: PathBuf,
}

/// Which pods are engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodChoice {
    /// Those with these labels.
    Selector(String),
    /// Those of an `InferencePool`.
    Pool(String),
}

/// What the engines of a source have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineTemplate {
    /// First part of their ids.
    pub source: String,
    /// Models that they serve.
    pub models: Vec<String>,
    /// Labels, which win over what the source tells.
    pub labels: BTreeMap<String, String>,
    /// Stage of requests that they compute.
    pub role: BackendRole,
    /// Capacity of their caches.
    pub capacity_blocks: Option<u32>,
    /// How they are spoken to.
    pub scheme: EngineScheme,
    /// Port of their KV events.
    pub kv_events_port: Option<u16>,
    /// Port where missed KV events are asked for.
    pub kv_replay_port: Option<u16>,
}

/// How engines are spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineScheme {
    /// In the clear.
    #[default]
    Http,
    /// With TLS. The certificate has to be for the address.
    Https,
}

impl EngineTemplate {
    /// Returns the id of the engine that the source calls `name`.
    pub(super) fn id(&self, name: &str) -> String {
        let name = name.replace(|c| !is_id_char(c), "-");
        format!("{}-{name}", self.source)
    }

    /// Tells of an engine that has no address, or none that counts. It is not put.
    pub(super) fn nowhere(&self, name: &str, condition: EngineCondition) -> ListedEngine {
        let nowhere = (IpAddr::from([0, 0, 0, 0]), 1);
        ListedEngine {
            spec: self.at(Some(name), nowhere, &BTreeMap::new()),
            condition,
        }
    }

    /// Describes the engine at an address. Its name is its address if the source gives none.
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
