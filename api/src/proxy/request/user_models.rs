//! Restriction of users to models, regardless of their keys.

use state::StateView;
use state::prefix::user_key;

use super::cluster_keys::listed;
use super::models::shown_model;
use crate::error::ProxyError;
use crate::proxy::settings::keys::Holder;

/// Returns an error if `user` is not allowed to use `model`.
pub(super) fn check_user_model(
    view: &StateView,
    user: &str,
    model: &str,
) -> Result<(), ProxyError> {
    let (users, user) = (view.users(), user_key(view.registry().hash_seed, user));
    if users.allows_model(user, model) {
        return Ok(());
    }
    Err(ProxyError::ModelNotAllowed {
        model: shown_model(model),
        allowed: listed(&users.models(user)),
    })
}

impl Holder {
    /// Returns the user that the key alone determines, if any.
    fn user(&self) -> Option<&str> {
        match self {
            Self::Cluster(key) => Some(&key.spec.user),
            Self::Named(name) => Some(name),
            Self::Unchecked | Self::Unnamed => None,
        }
    }

    /// Returns an error if the key or its user is not allowed to use `model`.
    pub(in crate::proxy) fn check_either_model(
        &self,
        view: &StateView,
        model: &str,
    ) -> Result<(), ProxyError> {
        self.check_model(model)?;
        match self.user() {
            Some(user) => check_user_model(view, user, model),
            None => Ok(()),
        }
    }

    /// Whether the key or its user is restricted to some models.
    pub(in crate::proxy) fn has_some_models(&self, view: &StateView) -> bool {
        let of_user = |user: &str| {
            let user = user_key(view.registry().hash_seed, user);
            !view.users().models(user).is_empty()
        };
        self.has_models() || self.user().is_some_and(of_user)
    }
}
