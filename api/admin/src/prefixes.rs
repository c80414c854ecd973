//! Prefixes that this replica's last requests share, and the backends that own them.
//!
//! A hash names a block together with everything before it, so requests with the same hash at some
//! depth share a prefix up to there. Each kept request has the hashes at depths that are powers of
//! two. A prefix is listed once, at the greatest such depth that the same requests share.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use axum::extract::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::Registry;
use state::ids::{BlockHash, LogIndex, ReplicaId, Slot};

use super::AdminState;
use super::answer::{Answer, ListQuery, QueryParams};
use super::ownership::{HexBlockHash, block_owners};
use api::error::Problem;
use api::proxy::RequestRecord;

/// Maximum number of recorded requests to examine.
const REQUESTS_MAX: usize = 2000;

/// Query parameters of the list.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct PrefixesQuery {
    /// Maximum number of entries; 100 if absent.
    #[schemars(range(min = 1, max = super::PAGE_ENTRIES_MAX))]
    limit: Option<usize>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct PrefixesResponse {
    index: LogIndex,
    /// Replica whose last requests were examined.
    replica: ReplicaId,
    /// Number of requests examined, at most 2000.
    requests: usize,
    /// Prefixes, those shared by the most requests first.
    prefixes: Vec<PrefixDetail>,
}

/// A prefix that several requests share.
#[derive(Serialize, JsonSchema)]
struct PrefixDetail {
    /// Hash of the prefix's last block.
    #[schemars(with = "String")]
    hash: HexBlockHash,
    /// Length of the prefix, in blocks.
    blocks: u32,
    model: String,
    /// Number of requests that begin with the prefix.
    requests: u32,
    /// Number of users who sent requests that begin with the prefix.
    users: usize,
    /// When the last request that begins with the prefix arrived, in Unix milliseconds.
    last_ms: u64,
    /// Ids of the backends that own the prefix, by slot.
    owners: Vec<String>,
    /// Hash of the listed prefix that this one extends; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    after: Option<HexBlockHash>,
}

/// Counts of the requests that share one prefix.
struct SharedPrefix<'a> {
    blocks: u32,
    parent: Option<BlockHash>,
    /// Number of requests with the prefix's most frequent extension.
    deeper: u32,
    requests: u32,
    users: BTreeSet<&'a str>,
    newest: &'a RequestRecord,
}

/// Handles `GET /admin/v1/ownership/prefixes`.
pub(super) async fn list(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<PrefixesQuery>,
) -> Result<Answer<PrefixesResponse>, Problem> {
    let page = ListQuery {
        limit: query.limit,
        ..ListQuery::default()
    };
    let limit = page.limit()?;
    let index = admin.view.applied();
    let requests = admin.decisions.newest(u64::MAX, REQUESTS_MAX, |_| true);
    let shared = shared(&requests);
    let mut listed: Vec<(&BlockHash, &SharedPrefix<'_>)> = shared
        .iter()
        .filter(|(_, it)| it.requests > 1 && it.deeper < it.requests)
        .collect();
    listed.sort_unstable_by_key(|(hash, it)| (std::cmp::Reverse((it.requests, it.blocks)), hash.0));
    listed.truncate(limit);
    let names: BTreeSet<BlockHash> = listed.iter().map(|(hash, _)| **hash).collect();
    let mut owners = block_owners(&admin, names.iter().copied().collect()).await?;
    let registry = admin.view.registry();
    let prefixes = listed.into_iter().map(|(hash, prefix)| {
        let after = std::iter::successors(prefix.parent, |hash| shared.get(hash)?.parent);
        PrefixDetail {
            hash: HexBlockHash(*hash),
            blocks: prefix.blocks,
            model: prefix.newest.model.to_string(),
            requests: prefix.requests,
            users: prefix.users.len(),
            last_ms: prefix.newest.at_ms,
            owners: names_of(&registry, &owners.remove(hash).unwrap_or_default()),
            after: after
                .into_iter()
                .find(|it| names.contains(it))
                .map(HexBlockHash),
        }
    });
    Ok(Answer(PrefixesResponse {
        index,
        replica: admin.decisions.replica(),
        requests: requests.len(),
        prefixes: prefixes.collect(),
    }))
}

/// Counts the prefixes of `requests`, which are sorted newest first.
fn shared(requests: &[Arc<RequestRecord>]) -> HashMap<BlockHash, SharedPrefix<'_>> {
    let mut shared: HashMap<BlockHash, SharedPrefix<'_>> = HashMap::new();
    for record in requests {
        let mut parent = None;
        for (depth, &hash) in record.marks.iter().enumerate() {
            let prefix = shared.entry(hash).or_insert_with(|| SharedPrefix {
                blocks: 1 << depth,
                parent,
                deeper: 0,
                requests: 0,
                users: BTreeSet::new(),
                newest: record,
            });
            prefix.requests += 1;
            prefix.users.insert(record.user.as_str());
            parent = Some(hash);
        }
    }
    let mut deepest: BTreeMap<BlockHash, u32> = BTreeMap::new();
    for prefix in shared.values() {
        if let Some(parent) = prefix.parent {
            let most = deepest.entry(parent).or_default();
            *most = prefix.requests.max(*most);
        }
    }
    for (hash, most) in deepest {
        if let Some(prefix) = shared.get_mut(&hash) {
            prefix.deeper = most;
        }
    }
    shared
}

fn names_of(registry: &Registry, slots: &[Slot]) -> Vec<String> {
    let backends = slots.iter().filter_map(|slot| registry.backend(*slot));
    backends.map(|it| it.spec.id.clone()).collect()
}
