//! The image of a state: its contents as plain values.

use std::collections::BTreeMap;

use state::budgets::BudgetStatus;
use state::exact::{KvMode, KvPosition};
use state::ids::{
    ApiKeyId, AttemptId, BackendRef, BlockHash, ModelKey, ReplicaId, SessionId, UserKey,
};
use state::keys::{ApiKeySpec, SecretHash};
use state::users::UserUsage;
use state::{Backend, RouterState};

use super::register::{RegisterKey, RegisterText};

/// What a state holds at one index. Digests are equal at equal index, so one replica's image stands
/// for all of them; taking one copies every owned block, which is dear: some ten per run.
#[derive(Debug, Clone, PartialEq)]
pub struct StateImage {
    /// Up to where it is applied.
    pub index: u64,
    /// Its digest.
    pub digest: u128,
    /// Replicated time, milliseconds.
    pub now_ms: u64,
    /// Whether it is paced.
    pub is_time_paced: bool,
    /// By name.
    pub backends: BTreeMap<String, BackendImage>,
    /// By key.
    pub users: BTreeMap<UserKey, UserImage>,
    /// Leases that are open.
    pub leases: BTreeMap<(ReplicaId, AttemptId), LeaseImage>,
    /// The present run of every replica, with the last sequence numbers of its outbox and of its
    /// admin lane.
    pub sessions: BTreeMap<ReplicaId, (SessionId, [u64; 2])>,
    /// Secrets that API keys have at present, and whose requests come with them.
    pub secrets: BTreeMap<ApiKeyId, (SecretHash, String)>,
    /// Every key that was asked for, with what it holds.
    pub registers: BTreeMap<RegisterKey, RegisterText>,
    /// Virtual time of the fair order.
    pub virtual_time: u64,
    /// Bytes per token by model, in thousandths.
    pub ratios: BTreeMap<ModelKey, u32>,
    /// Tokens per block by model.
    pub block_sizes: BTreeMap<String, u32>,
}

/// A backend.
#[derive(Debug, Clone, PartialEq)]
pub struct BackendImage {
    /// How commands name it.
    pub handle: BackendRef,
    /// Whether it drains.
    pub draining: bool,
    /// Blocks its cache holds, as an operator says; `None`: what is known otherwise may be
    /// corrected.
    pub capacity_blocks: Option<u32>,
    /// What it owns.
    pub owned: BTreeMap<BlockHash, OwnedImage>,
    /// How its ownership is known from KV events; `None`: by leases.
    pub kv: Option<KvImage>,
}

/// One owned block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnedImage {
    /// The block before it; `None`: it is a first one.
    pub parent: Option<BlockHash>,
    /// Open leases that end here.
    pub leases: u16,
    /// Ranks that report it.
    pub reports: u8,
}

/// What is known of a backend from KV events.
#[derive(Debug, Clone, PartialEq)]
pub struct KvImage {
    /// How its ownership is known.
    pub mode: KvMode,
    /// How far its streams are applied.
    pub positions: Vec<KvPosition>,
}

/// An open lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseImage {
    /// On which backend.
    pub backend: BackendRef,
    /// Deepest block it holds.
    pub tip: Option<BlockHash>,
}

/// A user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UserImage {
    /// Virtual token counter.
    pub counter_milli_tokens: u64,
    /// In thousandths.
    pub weight_milli: u32,
    /// Tokens and requests since the user is known.
    pub total: UserUsage,
    /// Requests begun and not ended.
    pub in_flight: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// The budget that counts, and what is used of it.
    pub budget: BudgetStatus,
}

impl StateImage {
    /// Takes it; of the registers those in `keys`.
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
            is_time_paced: state.is_time_paced(),
            backends: backends.collect(),
            users: users.collect(),
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
            }),
        }
    }
}
