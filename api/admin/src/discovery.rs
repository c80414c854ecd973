//! Status of the sources of engines at this replica, and the backends that they registered.

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use state::ids::{LogIndex, ReplicaId};

use super::AdminState;
use super::answer::{Answer, QueryParams, ReadQuery, registry_at};
use api::engines::discovery::SourceReport;
use api::error::Problem;

#[derive(Serialize, JsonSchema)]
pub(super) struct DiscoveryResponse {
    index: LogIndex,
    /// The leader, which registers and removes backends according to its sources; `null`: none is
    /// known. Each replica reads its own sources.
    leader: Option<ReplicaId>,
    sources: Vec<SourceReport>,
    /// Backends of sources that this replica is not configured with.
    orphans: Vec<OrphanBackend>,
}

/// A backend whose source is not configured here. Discovery neither changes nor removes it.
#[derive(Serialize, JsonSchema)]
struct OrphanBackend {
    backend: String,
    source: String,
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Answer<DiscoveryResponse>, Problem> {
    let (index, registry) = registry_at(&admin, query.read).await?;
    let sources = admin.discovery.report();
    let is_known = |source: &str| sources.iter().any(|known| known.id() == source);
    let orphans = registry.discovered.iter().filter_map(|(slot, known)| {
        let backend = registry.backend(*slot)?;
        (!is_known(&known.source)).then(|| OrphanBackend {
            backend: backend.spec.id.clone(),
            source: known.source.clone(),
        })
    });
    let orphans = orphans.collect();
    Ok(Answer(DiscoveryResponse {
        index,
        leader: admin.cluster.status().leader,
        sources,
        orphans,
    }))
}
