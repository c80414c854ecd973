//! Image of a replicated state: its contents as plain values.

use std::collections::{BTreeMap, BTreeSet};

use state::budgets::BudgetStatus;
use state::ids::{
    ApiKeyId, AttemptId, BackendRef, BlockHash, ModelKey, ReplicaId, SessionId, Slot, UserKey,
};
use state::keys::{ApiKeySpec, SecretHash};
use state::kv_events::{KvMode, KvPosition, LowerTier};
use state::usage::NOBODY;
use state::users::UserUsage;
use state::view::BlockView;
use state::{Backend, RouterState};

use super::model::usage::UsageKey;
use super::register::{RegisterKey, RegisterText};

/// Contents of a replicated state at one index. Digests are equal at equal indices, so the image of
/// one replica represents all. Taking an image copies every owned block, which is expensive: a run
/// takes about ten.
#[derive(Debug, Clone, PartialEq)]
pub struct StateImage {
    /// Applied index of the state.
    pub index: u64,
    /// Digest of the state.
    pub digest: u128,
    /// Replicated time, in milliseconds.
    pub now_ms: u64,
    /// Backends by name.
    pub backends: BTreeMap<String, BackendImage>,
    /// Known users by key.
    pub users: BTreeMap<UserKey, UserImage>,
    /// Usage by day, user and source.
    pub usage: BTreeMap<UsageKey, UserUsage>,
    /// Open leases by replica and attempt.
    pub leases: BTreeMap<(ReplicaId, AttemptId), LeaseImage>,
    /// Current session of every replica, with the last sequence numbers of its outbox and admin
    /// lanes.
    pub sessions: BTreeMap<ReplicaId, (SessionId, [u64; 2])>,
    /// Current secrets of API keys, each with the user of the key.
    pub secrets: BTreeMap<ApiKeyId, (SecretHash, String)>,
    /// Value of every register that the run has used.
    pub registers: BTreeMap<RegisterKey, RegisterText>,
    /// Virtual time of the fair order, to which arriving users are lifted.
    pub virtual_time: u64,
    /// Learned number of bytes per token by model, in thousandths.
    pub ratios: BTreeMap<ModelKey, u32>,
    /// Learned number of tokens per block by model.
    pub block_sizes: BTreeMap<String, u32>,
}

/// A registered backend with its owned blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct BackendImage {
    /// Slot and incarnation of the backend.
    pub handle: BackendRef,
    /// Whether the backend drains.
    pub draining: bool,
    /// Cache capacity in blocks, if an operator set it; `None` if it may be corrected by
    /// measurements.
    pub capacity_blocks: Option<u32>,
    /// Blocks that the backend owns, by hash.
    pub owned: BTreeMap<BlockHash, OwnedImage>,
    /// State of ownership by KV events; `None` if ownership follows from leases.
    pub kv: Option<KvImage>,
}

/// One owned block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnedImage {
    /// Block before this one; `None` for the first block of a prompt.
    pub parent: Option<BlockHash>,
    /// Number of open leases that end at this block.
    pub leases: u16,
    /// Number of ranks whose KV events report the block.
    pub reports: u8,
}

/// State of a backend whose ownership follows KV events.
#[derive(Debug, Clone, PartialEq)]
pub struct KvImage {
    /// Mode of ownership, such as exact.
    pub mode: KvMode,
    /// Position in each stream up to which events are applied.
    pub positions: Vec<KvPosition>,
    /// Blocks that are known to be on the GPU or in memory of the engine's host.
    pub with_cpu: BTreeSet<BlockHash>,
}

/// An open lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseImage {
    /// Backend of the lease.
    pub backend: BackendRef,
    /// Deepest block that the lease holds, if any.
    pub tip: Option<BlockHash>,
}

/// Usage, counter and budget of a user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UserImage {
    /// Virtual token counter, in thousandths of a token.
    pub counter_milli_tokens: u64,
    /// Weight of the user, in thousandths.
    pub weight_milli: u32,
    /// Total number of tokens and requests.
    pub total: UserUsage,
    /// Number of requests in flight.
    pub in_flight: u64,
    /// Number of waiting requests.
    pub waiting: u64,
    /// Effective budget, with the used part.
    pub budget: BudgetStatus,
}

impl StateImage {
    /// Takes an image of a state, with the registers in `keys`.
    #[must_use]
    pub fn of<'a>(state: &RouterState, keys: impl IntoIterator<Item = &'a RegisterKey>) -> Self {
        let backends = state.backends().map(|backend| {
            let image = BackendImage::of(state, backend);
            (backend.spec.id.clone(), image)
        });
        let users = state.users(None, usize::MAX).into_iter().map(|user| {
            let image = UserImage {
                counter_milli_tokens: user.counter_milli_tokens,
                weight_milli: user.weight_milli,
                total: user.total,
                in_flight: user.in_flight,
                waiting: user.waiting,
                budget: user.budget,
            };
            (user.key, image)
        });
        let leases = state.leases().map(|lease| {
            let image = LeaseImage {
                backend: lease.backend,
                tip: lease.tip,
            };
            ((lease.replica, lease.attempt), image)
        });
        let sessions = state.sessions().into_iter().map(|it| {
            let seqs = [it.outbox_seq, it.admin_seq];
            (it.replica, (it.session, seqs))
        });
        let view = state.view();
        let api_keys = view.keys();
        let secrets = api_keys.after(None).map(|key| {
            let ApiKeySpec {
                id, secret, user, ..
            } = &key.spec;
            (*id, (*secret, user.clone()))
        });
        let registers = keys.into_iter();
        Self {
            index: state.applied().0,
            digest: state.digest(),
            now_ms: state.now_ms(),
            backends: backends.collect(),
            users: users.collect(),
            usage: usage_of(state),
            leases: leases.collect(),
            sessions: sessions.collect(),
            secrets: secrets.collect(),
            registers: registers
                .map(|key| (key.clone(), key.value_in(state)))
                .collect(),
            virtual_time: state.virtual_time_milli_tokens(),
            block_sizes: state
                .view()
                .registry()
                .block_sizes
                .models()
                .map(|(model, size)| (model.to_owned(), size))
                .collect(),
            ratios: state
                .view()
                .ratios()
                .iter()
                .map(|(model, ratio)| (model, ratio.milli_bytes()))
                .collect(),
        }
    }
}

fn usage_of(state: &RouterState) -> BTreeMap<UsageKey, UserUsage> {
    let (view, mut usage) = (state.view(), BTreeMap::new());
    for row in view.usage().rows() {
        let user = row.user.unwrap_or(NOBODY);
        usage.insert((row.day, user, row.source_key), row.usage);
    }
    usage
}

/// Returns the blocks that the backend in `slot` has in the index of a level.
fn on_level(level: &BlockView, slot: Slot) -> BTreeSet<BlockHash> {
    let mut found = BTreeSet::new();
    if level.owned(slot) > 0 {
        level.for_each_run(|owner, _, blocks| {
            if owner == slot {
                found.extend(blocks);
            }
        });
    }
    found
}

impl BackendImage {
    fn of(state: &RouterState, backend: &Backend) -> Self {
        let slot = backend.handle.slot;
        let owned = state.owned(slot).map(|it| {
            let image = OwnedImage {
                parent: it.parent,
                leases: it.leases,
                reports: it.reports,
            };
            (it.block, image)
        });
        Self {
            handle: backend.handle,
            draining: backend.draining,
            capacity_blocks: backend.spec.capacity_blocks,
            owned: owned.collect(),
            kv: state.kv_status(slot).map(|status| KvImage {
                mode: status.condition.mode,
                positions: state.kv_positions(slot),
                with_cpu: on_level(&state.view().tiers[LowerTier::Cpu.at()], slot),
            }),
        }
    }
}
