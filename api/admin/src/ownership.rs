//! Block ownership as the admin API shows it.

use std::collections::{BTreeMap, BTreeSet};

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use state::Registry;
use state::ids::{BlockHash, LogIndex, Slot};

use super::answer::{Answer, PathParam, QueryParams, ReadQuery, at_level};
use super::problem::{invalid, stopping};
use super::{Admin, AdminState};
use api::error::Problem;

#[derive(Serialize, JsonSchema)]
pub(super) struct OwnershipCounts {
    index: LogIndex,
    /// Owned blocks; each counts once for every backend that holds it.
    owned_blocks: u64,
    leases: u64,
    backends: Vec<OwnerDetail>,
    /// Models, by name.
    models: Vec<ModelOwnership>,
}

/// Owned blocks by model. A block's hash does not reveal its model, so blocks of backends that
/// serve several models cannot be told apart.
#[derive(Default, Serialize, JsonSchema)]
struct ModelOwnership {
    model: String,
    /// Blocks on backends that serve only this model.
    owned_blocks: u64,
    /// Blocks on backends that also serve other models; they may belong to any of these.
    shared_blocks: u64,
}

#[derive(Serialize, JsonSchema)]
struct OwnerDetail {
    backend: String,
    slot: Slot,
    owned_blocks: u64,
    capacity_blocks: Option<u32>,
}

pub(super) async fn counts(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Answer<OwnershipCounts>, Problem> {
    at_level(&admin, query.read).await?;
    let mut counts = OwnershipCounts {
        index: LogIndex(0),
        owned_blocks: 0,
        leases: 0,
        backends: Vec::new(),
        models: Vec::new(),
    };
    admin.cluster.with_state(&mut |state| {
        counts.index = admin.view.applied();
        counts.leases = state.open_leases() as u64;
        let registry = admin.view.registry();
        let service = admin.view.service();
        counts.backends = registry
            .backends
            .iter()
            .map(|backend| OwnerDetail {
                backend: backend.spec.id.clone(),
                slot: backend.handle.slot,
                owned_blocks: state.owned_blocks(backend.handle.slot),
                capacity_blocks: service
                    .get(backend.handle.slot)
                    .and_then(|served| served.capacity_blocks),
            })
            .collect();
        counts.models = by_model(&registry, |slot| state.owned_blocks(slot));
    });
    counts.owned_blocks = counts.backends.iter().map(|owner| owner.owned_blocks).sum();
    Ok(Answer(counts))
}

fn by_model(registry: &Registry, owned: impl Fn(Slot) -> u64) -> Vec<ModelOwnership> {
    let mut models: BTreeMap<&str, ModelOwnership> = BTreeMap::new();
    for backend in &registry.backends {
        let served: BTreeSet<&str> = backend.named_models().collect();
        let (blocks, is_shared) = (owned(backend.handle.slot), served.len() > 1);
        for model in served {
            let counts = models.entry(model).or_default();
            let count = match is_shared {
                true => &mut counts.shared_blocks,
                false => &mut counts.owned_blocks,
            };
            *count += blocks;
        }
    }
    let named = models.into_iter().map(|(model, counts)| ModelOwnership {
        model: model.to_owned(),
        ..counts
    });
    named.collect()
}

#[derive(Serialize, JsonSchema)]
pub(super) struct BlockDetail {
    index: LogIndex,
    #[schemars(with = "String")]
    hash: HexBlockHash,
    owners: Vec<BlockOwner>,
}

/// A hash as 16 hex digits.
pub(super) struct HexBlockHash(pub(super) BlockHash);

impl Serialize for HexBlockHash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

#[derive(Serialize, JsonSchema)]
struct BlockOwner {
    /// Id of the backend; `null` if it has just been removed.
    backend: Option<String>,
    slot: Slot,
}

pub(super) async fn owners(
    State(admin): State<AdminState>,
    PathParam(hash): PathParam<String>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Answer<BlockDetail>, Problem> {
    let hash = u64::from_str_radix(&hash, 16)
        .ok()
        .filter(|_| hash.len() == 16)
        .map(BlockHash)
        .ok_or_else(|| invalid("hash", format!("{hash:?}, expected 16 hex digits")))?;
    at_level(&admin, query.read).await?;
    let index = admin.view.applied();
    let registry = admin.view.registry();
    let owners = block_owners(&admin, vec![hash]).await?.remove(&hash);
    let owners = owners.unwrap_or_default().into_iter();
    let owners = owners.map(|slot| BlockOwner {
        backend: registry.backend(slot).map(|it| it.spec.id.clone()),
        slot,
    });
    let owners = owners.collect();
    Ok(Answer(BlockDetail {
        index,
        hash: HexBlockHash(hash),
        owners,
    }))
}

/// Looks up the owners of `blocks` on another thread, because it reads the whole index.
pub(super) async fn block_owners(
    admin: &Admin,
    blocks: Vec<BlockHash>,
) -> Result<BTreeMap<BlockHash, Vec<Slot>>, Problem> {
    if blocks.is_empty() {
        return Ok(BTreeMap::new());
    }
    let view = admin.view.blocks.clone();
    let searched = tokio::task::spawn_blocking(move || view.owners(&blocks)).await;
    searched.map_err(|_| stopping())
}
