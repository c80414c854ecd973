//! Settings of a source from the config, including those of its engines.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use state::command::{BackendRole, BackendSpec};
use state::discovery::{EngineCondition, ListedEngine, SourceRules, is_id_char};

use crate::engines::backends::EngineUrl;

/// A source of engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceSettings {
    /// Id of the source, and rules for the removal of engines that it no longer lists.
    pub rules: SourceRules,
    /// Settings shared by the source's engines.
    pub template: EngineTemplate,
    /// Kind and location of the source.
    pub kind: SourceKind,
}

/// Kind and location of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceKind {
    /// Engines at the addresses of a DNS name.
    Dns(DnsSource),
    /// Engines listed in a file.
    File(PathBuf),
    /// Engines in pods of a Kubernetes cluster.
    Kubernetes(KubernetesSource),
}

impl SourceKind {
    /// Returns the kind's name in the config.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Dns(_) => "dns",
            Self::File(_) => "file",
            Self::Kubernetes(_) => "kubernetes",
        }
    }
}

/// A DNS name that lists engines, and how to resolve it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsSource {
    /// The host name to resolve.
    pub name: String,
    /// Port of the engines at the name's addresses; `None`: the name has service records, which
    /// contain hosts with ports.
    pub port: Option<u16>,
    /// Maximum interval between lookups; a shorter TTL takes precedence.
    pub interval: Duration,
    /// Name server. `None` uses the system's resolver configuration.
    pub resolver: Option<SocketAddr>,
}

/// Pods of a Kubernetes namespace that are engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesSource {
    /// Namespace and API server.
    pub access: KubernetesAccess,
    /// Selection of the pods that are engines.
    pub pods: PodChoice,
    /// Port of the engines; `None` uses the pool's ports.
    pub port: Option<u16>,
}

/// Folder in which a pod finds what it shows to the API server.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// A namespace, and how to reach its API server.
#[derive(Debug, Clone, PartialEq, Eq, SmartDefault)]
pub struct KubernetesAccess {
    /// The namespace. `None` means that of the pod in which this replica runs.
    pub namespace: Option<String>,
    /// The API server. `None` means that of the cluster in which this pod runs.
    pub api_server: Option<EngineUrl>,
    /// File with the bearer token, reloaded when it changes.
    #[default(format!("{SERVICE_ACCOUNT}/token").into())]
    pub token_file: PathBuf,
    /// File with the authorities of the API server's certificate.
    #[default(format!("{SERVICE_ACCOUNT}/ca.crt").into())]
    pub ca_file: PathBuf,
}

/// Selects the pods that are engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodChoice {
    /// Pods that match a label selector.
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
    /// Role of the engines, unless the source states another.
    pub role: BackendRole,
    /// Protocol of the engines.
    pub scheme: EngineScheme,
    /// Port of the engines' KV events; `None` not to read them.
    pub kv_events_port: Option<u16>,
    /// Port for requesting missed KV events; `None` not to request them.
    pub kv_replay_port: Option<u16>,
}

/// Protocol of engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EngineScheme {
    /// HTTP without TLS.
    #[default]
    Http,
    /// HTTP with TLS. The certificate must be valid for the engine's address.
    Https,
}

impl EngineTemplate {
    /// Returns the id of the engine that the source calls `name`.
    pub(super) fn id(&self, name: &str) -> String {
        let name = name.replace(|c| !is_id_char(c), "-");
        format!("{}-{name}", self.source)
    }

    /// Describes an engine without a usable address, which is not registered.
    pub(super) fn nowhere(&self, name: &str, condition: EngineCondition) -> ListedEngine {
        let nowhere = (IpAddr::from([0, 0, 0, 0]), 1);
        ListedEngine {
            spec: self.at(Some(name), nowhere, &BTreeMap::new()),
            condition,
        }
    }

    /// Describes the engine at an address. The engine's name defaults to its address.
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
            capacity_blocks: None,
            kv_events: endpoint(self.kv_events_port),
            kv_replay: endpoint(self.kv_replay_port),
            role: self.role,
        };
        spec.labels.extend(self.labels.clone());
        spec
    }
}
