//! Discovery: engines listed by a DNS name, a file or Kubernetes become backends.
//!
//! Every replica queries the sources, so that each can report what it sees and a new leader has a
//! report at once. Only the leader acts: it compares its report with the cluster in a
//! [`SourcePlan`](state::discovery::SourcePlan), whose changes go through the log (ADR 0042).

mod dns;
mod file;
mod follow;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod kubernetes;
mod settings;
mod source_status;
#[cfg(test)]
mod tests;

pub use follow::{DiscoveryParts, run};
pub use kubernetes::StatefulSetScale;
pub use settings::{
    DnsSource, EngineScheme, EngineTemplate, KubernetesAccess, KubernetesSource, PodChoice,
    SourceKind, SourceSettings,
};
pub use source_status::{DiscoveryBoard, DiscoveryMetrics, SourceReport};
