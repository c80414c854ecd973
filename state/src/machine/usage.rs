//! Application of charges, to users and to the table of usage in one step.

use super::RouterState;
use crate::charge::Charge;
use crate::ids::ReplicaId;
use crate::usage::UsageSource;
use crate::users::UserUsage;
use crate::validate::is_name;

impl RouterState {
    /// Charges a user, and counts the usage. Returns `false` if the user has no room.
    pub(super) fn charge(&mut self, replica: ReplicaId, charge: &Charge) -> bool {
        let (terms, now_ms) = (self.terms(), self.time.now_ms);
        let is_charged = self.users.charge(replica, charge, &terms, now_ms);
        if is_charged {
            let usage = UserUsage::of(charge);
            self.usage
                .charge(charge.user, charge.source, &usage, terms.calendar_ms);
        }
        is_charged
    }

    /// Names a source of requests. Returns `false` if the name is invalid.
    pub(super) fn define_source(&mut self, source: UsageSource) -> bool {
        let is_valid = is_name(&source.model);
        if is_valid {
            self.usage.define(self.config.hash_seed, source);
        }
        is_valid
    }

    /// Drops usage that is older than the settings say, a bounded number of rows. Follows the
    /// calendar, which no single wrong clock moves.
    pub(super) fn forget_usage(&mut self) {
        let days = self.settings.admission.usage_days;
        self.usage.forget_some(self.time.calendar_ms(), days);
    }

    /// Publishes the usage if it changed.
    pub(super) fn publish_usage(&mut self) {
        if let Some(usage) = self.usage.publish() {
            self.view.publish_usage(usage);
        }
    }
}
