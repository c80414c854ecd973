//! The cluster's API keys on the data plane: their users, and the paths and models they allow.
//!
//! Whatever the number of keys, a request costs one hash and two lookups in the published list. It
//! takes no lock (ADR 0014).

use std::sync::Arc;

use state::StateView;
use state::keys::{ApiKey, FoundKey};

use super::models::shown_model;
use crate::base::clock::Clock;
use crate::error::ProxyError;
use crate::proxy::settings::keys::Holder;
use crate::users::api_keys::{KeyRules, secret_hash};

/// Maximum length of a list of models or paths in a refusal, in bytes.
const LISTED_BYTES_MAX: usize = 512;

/// Lookup of the cluster's keys for the data plane.
pub(super) struct ClusterKeys {
    view: Arc<StateView>,
    /// The replica's wall clock, so that keys expire even while no commands are applied.
    clock: Clock,
}

impl ClusterKeys {
    pub(in crate::proxy) fn new(view: &Arc<StateView>, clock: &Clock) -> Self {
        Self {
            view: Arc::clone(view),
            clock: clock.clone(),
        }
    }

    /// Returns the holder of a key that has the form of the cluster's keys. Fails if the key is
    /// unknown or expired, or if this replica's keys may be out of date.
    pub(in crate::proxy) fn holder(
        &self,
        rules: &KeyRules,
        key: &[u8],
    ) -> Result<Holder, ProxyError> {
        if rules.refuses() {
            return Err(ProxyError::StaleKeys);
        }
        let secret = secret_hash(self.view.registry().hash_seed, key);
        match self.view.keys().find(&secret, self.clock.unix_ms()) {
            FoundKey::Live(key) => Ok(Holder::Cluster(key)),
            FoundKey::Expired => Err(ProxyError::ExpiredKey),
            FoundKey::Unknown => Err(ProxyError::BadKey),
        }
    }
}

impl Holder {
    fn key(&self) -> Option<&ApiKey> {
        match self {
            Self::Cluster(key) => Some(key),
            Self::Unchecked | Self::Unnamed | Self::Named(_) => None,
        }
    }

    /// Whether this is a key of the cluster that is restricted to some models.
    pub(super) fn has_models(&self) -> bool {
        self.key().is_some_and(|key| !key.spec.models.is_empty())
    }

    /// Returns an error if the key does not allow `path`.
    pub(super) fn check_path(&self, path: &str) -> Result<(), ProxyError> {
        match self.key() {
            Some(key) if !key.allows_path(path) => Err(ProxyError::PathNotAllowed {
                allowed: listed(&key.spec.scopes),
            }),
            _ => Ok(()),
        }
    }

    /// Returns an error if the key does not allow `model`.
    pub(super) fn check_model(&self, model: &str) -> Result<(), ProxyError> {
        match self.key() {
            Some(key) if !key.allows_model(model) => Err(ProxyError::ModelNotAllowed {
                model: shown_model(model),
                allowed: listed(&key.spec.models),
            }),
            _ => Ok(()),
        }
    }
}

/// Formats names as a list for people, of at most about [`LISTED_BYTES_MAX`] bytes.
pub(in crate::proxy) fn listed(names: &[String]) -> String {
    let mut text = String::new();
    for name in names {
        if text.len() + name.len() > LISTED_BYTES_MAX {
            text.push_str(", ...");
            break;
        }
        if !text.is_empty() {
            text.push_str(", ");
        }
        text.push('`');
        text.push_str(name);
        text.push('`');
    }
    text
}
