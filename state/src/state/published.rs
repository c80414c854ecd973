//! [`View`]: what the hot path reads of the state, from any thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::{ArcSwap, ArcSwapOption};

use super::Config;
use crate::backends::{Backend, Backends};
use crate::ids::{LogIndex, UserKey};
use crate::policy::{PolicyConfig, UserTokens};
use crate::users::{FairnessSettings, Lately};
use crate::view::BlockView;

/// What the hot path reads of the state, from any thread, without waiting for `apply`.
pub struct View {
    /// Which backend holds which blocks.
    pub blocks: BlockView,
    registry: ArcSwap<Registry>,
    applied: AtomicU64,
    /// What users used lately; `None` while no policy looks at it.
    lately: ArcSwapOption<Lately>,
    /// Whether any policy may be asked for, live or not.
    wants_all: AtomicBool,
}

impl View {
    pub(super) fn new(blocks: BlockView, registry: Registry) -> Self {
        Self {
            blocks,
            registry: ArcSwap::from_pointee(registry),
            applied: AtomicU64::new(0),
            lately: ArcSwapOption::empty(),
            wants_all: AtomicBool::new(false),
        }
    }

    /// Backends and replicated config, as of the last change to either.
    #[must_use]
    pub fn registry(&self) -> Arc<Registry> {
        self.registry.load_full()
    }

    /// Index up to which the state is applied. What that index brought can be read once this
    /// answers it.
    #[must_use]
    pub fn applied(&self) -> LogIndex {
        // Pairs with the Release in `publish_applied`.
        LogIndex(self.applied.load(Ordering::Acquire))
    }

    /// What a user used within the window; nothing while no policy looks at it.
    #[must_use]
    pub fn user_tokens(&self, user: UserKey) -> UserTokens {
        let lately = self.lately.load();
        lately
            .as_deref()
            .map(|lately| lately.tokens(user))
            .unwrap_or_default()
    }

    /// From the next command on, has everything published that any policy looks at, whichever is
    /// live: requests may ask for another one.
    pub fn want_all(&self) {
        self.wants_all.store(true, Ordering::Relaxed);
    }

    pub(super) fn wants_all(&self) -> bool {
        self.wants_all.load(Ordering::Relaxed)
    }

    pub(super) fn publishes_lately(&self) -> bool {
        self.lately.load().is_some()
    }

    pub(super) fn publish_lately(&self, lately: Option<Lately>) {
        self.lately.store(lately.map(Arc::new));
    }

    pub(super) fn publish_registry(&self, registry: Registry) {
        self.registry.store(Arc::new(registry));
    }

    pub(super) fn publish_applied(&self, index: LogIndex) {
        self.applied.store(index.0, Ordering::Release);
    }
}

/// An immutable image of the small part of the state.
#[derive(Debug, Clone, PartialEq)]
pub struct Registry {
    /// Whether `InitCluster` was applied.
    pub initialised: bool,
    /// Seed of block and user hashes.
    pub hash_seed: u64,
    /// The live policy.
    pub policy: PolicyConfig,
    /// What tokens cost.
    pub fairness: FairnessSettings,
    /// By slot, ascending; free slots are absent.
    pub backends: Vec<Backend>,
}

impl Registry {
    pub(super) fn of(config: &Config, backends: &Backends) -> Self {
        Self {
            initialised: config.initialised,
            hash_seed: config.hash_seed,
            policy: config.policy.clone(),
            fairness: config.fairness,
            backends: backends.iter().cloned().collect(),
        }
    }
}
