//! Discovery: engines that a DNS name, a file or Kubernetes tells of become backends.
//!
//! Every replica looks at the sources, so that each can tell what it sees and a new leader has an
//! answer at once. Only the leader acts: what it reads and what the cluster has make a
//! [`SourcePlan`](state::discovery::SourcePlan), whose changes go through the log (ADR 0087).

mod board;
mod dns;
mod file;
mod follow;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod kubernetes;
mod settings;
#[cfg(test)]
mod tests;

pub use board::{DiscoveryBoard, DiscoveryMetrics, SourceReport};
pub use follow::{DiscoveryParts, run};
pub use kubernetes::StatefulSetScale;
pub use settings::{
    DnsRecords, DnsSource, EngineScheme, EngineTemplate, KubernetesAccess, KubernetesSource,
    PodChoice, SourceKind, SourceSettings,
};
