//! Application of commands on users, and the terms of their charges.

use super::{AuditAction, RouterState};
use crate::command::{Origin, UserChanges, UserSpec};
use crate::prefix::user_key;
use crate::pricing::Pricing;
use crate::reject::Rejection;
use crate::settings::UserLimits;
use crate::users::ChargeTerms;
use crate::validate::{ensure, is_name};

impl RouterState {
    pub(super) fn put_user(&mut self, origin: &Origin, spec: UserSpec) -> Result<(), Rejection> {
        spec.validate()?;
        let key = user_key(self.config.hash_seed, &spec.name);
        if !self.users.configure(key, &spec.name, spec.weight_milli) {
            return Err(Rejection::TooManyUsers);
        }
        self.note(origin, AuditAction::PutUser, spec.name);
        Ok(())
    }

    pub(super) fn put_user_limits(
        &mut self,
        origin: &Origin,
        name: String,
        limits: UserLimits,
    ) -> Result<(), Rejection> {
        ensure(is_name(&name), "name", "1 to 256 bytes")?;
        limits.validate()?;
        let key = user_key(self.config.hash_seed, &name);
        let limits = Some(limits).filter(|limits| !limits.is_unbounded());
        if !self.users.limit(key, &name, limits) {
            return Err(Rejection::TooManyUsers);
        }
        self.note(origin, AuditAction::PutUserLimits, name);
        Ok(())
    }

    /// Sets weight and limits of a user, or neither if either is rejected.
    pub(super) fn set_user(
        &mut self,
        origin: &Origin,
        user: UserSpec,
        limits: UserLimits,
    ) -> Result<(), Rejection> {
        limits.validate()?;
        let name = user.name.clone();
        self.put_user(origin, user)?;
        // The user exists and both values are valid, so this call cannot be rejected.
        self.put_user_limits(origin, name, limits)
    }

    /// Applies all given changes to a user, or none if any is rejected.
    pub(super) fn configure_user(
        &mut self,
        origin: &Origin,
        changes: UserChanges,
    ) -> Result<(), Rejection> {
        changes.validate()?;
        let UserChanges {
            name,
            weight_milli,
            limits,
            budget,
            models,
            cache,
        } = changes;
        let key = user_key(self.config.hash_seed, &name);
        if !self.users.plan(key, &name, (budget, models)) {
            return Err(Rejection::TooManyUsers);
        }
        // A user with a plan is already in the table. Otherwise, the first of these calls adds the
        // user, or rejects the command before anything has changed.
        if let Some(weight_milli) = weight_milli
            && !self.users.configure(key, &name, weight_milli)
        {
            return Err(Rejection::TooManyUsers);
        }
        if let Some(limits) = limits {
            let limits = Some(limits).filter(|limits| !limits.is_unbounded());
            if !self.users.limit(key, &name, limits) {
                return Err(Rejection::TooManyUsers);
            }
        }
        if let Some(scope) = cache {
            if scope.is_some() && !self.users.keep(key, &name) {
                return Err(Rejection::TooManyUsers);
            }
            self.caches.set(key, scope);
        }
        self.note(origin, AuditAction::ConfigureUser, name);
        Ok(())
    }

    pub(super) fn forgive_user(&mut self, origin: &Origin, name: String) -> Result<(), Rejection> {
        let key = user_key(self.config.hash_seed, &name);
        let is_known = is_name(&name) && self.users.forgive(key);
        ensure(is_known, "name", "a user who is known")?;
        self.note(origin, AuditAction::ForgiveUser, name);
        Ok(())
    }

    pub(super) fn delete_user(&mut self, origin: &Origin, name: String) -> Result<(), Rejection> {
        ensure(is_name(&name), "name", "1 to 256 bytes")?;
        let key = user_key(self.config.hash_seed, &name);
        match self.users.remove(key) {
            None => Err(Rejection::UnknownUser { name }),
            Some(false) => Err(Rejection::UserBusy { name }),
            Some(true) => {
                if self.view.caches().own(key).is_some() {
                    self.caches.set(key, None);
                }
                self.note(origin, AuditAction::DeleteUser, name);
                Ok(())
            }
        }
    }

    /// Publishes the users if they changed, or unconditionally if `is_anew`, once a reader wants
    /// them.
    pub(super) fn publish_for_admission(&mut self, is_anew: bool) {
        if !self.view.wants_users() {
            return;
        }
        let is_anew = is_anew || !self.view.publishes_users();
        let limits = self.terms().limits;
        if let Some(users) = self.users.publish(self.time.now_ms, limits, is_anew) {
            self.view.publish_users(users);
        }
    }

    /// Returns the prices, limits and time that apply to charges.
    pub(super) fn terms(&self) -> ChargeTerms {
        let admission = self.settings.admission.as_ref();
        ChargeTerms {
            pricing: Pricing {
                prices: self.config.fairness,
                charge: admission.map(|it| it.charge).unwrap_or_default(),
            },
            limits: admission.map(|it| it.user_limits).unwrap_or_default(),
            calendar_ms: self.stamped_ms,
        }
    }
}
