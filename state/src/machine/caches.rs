//! Application of commands on cache scopes.

use super::{AuditAction, RouterState};
use crate::caches::CacheScope;
use crate::command::Origin;
use crate::error::InvariantError;
use crate::prefix::user_key;
use crate::reject::Rejection;
use crate::validate::{ensure, is_name};

impl RouterState {
    /// Sets the cache scope of `user`, or the default one. A user with its own scope counts as
    /// configured, so that it is not forgotten.
    pub(super) fn set_cache_scope(
        &mut self,
        origin: &Origin,
        user: Option<String>,
        scope: Option<CacheScope>,
    ) -> Result<(), Rejection> {
        scope.as_ref().map_or(Ok(()), CacheScope::validate)?;
        let Some(name) = user else {
            self.caches.set_default(scope.unwrap_or_default());
            self.note(origin, AuditAction::SetCacheScope, String::new());
            return Ok(());
        };
        ensure(is_name(&name), "name", "1 to 256 bytes")?;
        let key = user_key(self.config.hash_seed, &name);
        if scope.is_some() && !self.users.keep(key, &name) {
            return Err(Rejection::TooManyUsers);
        }
        self.caches.set(key, scope);
        self.note(origin, AuditAction::SetCacheScope, name);
        Ok(())
    }

    /// Publishes the cache scopes if they changed.
    pub(super) fn publish_caches(&mut self) {
        if let Some(caches) = self.caches.publish() {
            self.view.publish_caches(caches);
        }
    }

    /// Checks I110: the table of cache scopes, and that each user with a scope is configured.
    pub(super) fn check_caches(&self) -> Result<(), InvariantError> {
        let broken = |detail| InvariantError {
            number: "I110",
            detail,
        };
        let checked = self.caches.check(&self.view.caches());
        checked.map_err(broken)?;
        match self.caches.users().find(|user| !self.users.keeps(*user)) {
            None => Ok(()),
            Some(user) => Err(broken(format!(
                "user {user} has a scope and may be forgotten"
            ))),
        }
    }
}
