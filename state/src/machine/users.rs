//! Application of commands on users, and the terms of their charges.

use super::{AuditAction, RouterState};
use crate::command::{Origin, UserDefaults, UserSettings};
use crate::prefix::user_key;
use crate::pricing::Pricing;
use crate::reject::Rejection;
use crate::users::ChargeTerms;
use crate::validate::{ensure, is_name};

impl RouterState {
    /// Replaces the settings of a user.
    pub(super) fn configure_user(
        &mut self,
        origin: &Origin,
        name: String,
        settings: UserSettings,
    ) -> Result<(), Rejection> {
        ensure(is_name(&name), "name", "1 to 256 bytes")?;
        settings.validate()?;
        let key = user_key(self.config.hash_seed, &name);
        if !self.users.configure(key, &name, settings) {
            return Err(Rejection::TooManyUsers);
        }
        self.note(origin, AuditAction::ConfigureUser, name);
        Ok(())
    }

    /// Replaces the defaults of users.
    pub(super) fn put_user_defaults(
        &mut self,
        origin: &Origin,
        defaults: UserDefaults,
    ) -> Result<(), Rejection> {
        defaults.validate()?;
        self.users.set_defaults(defaults);
        self.note(origin, AuditAction::PutUserDefaults, String::new());
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
                self.trees.forget_user(key);
                self.streams.forget_user(key);
                self.usage.forget_user(self.config.hash_seed, key);
                self.note(origin, AuditAction::DeleteUser, name);
                Ok(())
            }
        }
    }

    /// Publishes the users if they changed.
    pub(super) fn publish_users(&mut self) {
        if let Some(users) = self.users.publish(self.time.now_ms) {
            self.view.publish_users(users);
        }
    }

    /// Returns the prices and time that apply to charges.
    pub(super) fn terms(&self) -> ChargeTerms {
        ChargeTerms {
            pricing: Pricing {
                prices: self.config.fairness,
                charge: self.settings.admission.charge,
            },
            calendar_ms: self.stamped_ms,
        }
    }
}
