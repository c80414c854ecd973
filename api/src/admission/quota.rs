//! Checks a user's rate limits before a request is routed or queued.
//!
//! The replicated state counts what was used, all replicas together; what this replica has let in
//! since is added. Nothing is reserved between the check and the charge that follows at once: what
//! requests on other threads slip in between is debt, as is what other replicas let in meanwhile.

use state::admission::PendingCharges;
use state::quotas::LimitRejection;

use super::Admission;
use crate::routing::UserName;

impl Admission {
    /// Looks at how far replicated time is: what passes from here on is added to it. To be called
    /// often.
    pub fn pass_time(&self) {
        self.log_time.present_ms(self.view.now_ms());
    }

    /// Whether `user` may have one more request.
    ///
    /// # Errors
    /// With the limit it would break.
    pub(super) fn check_quota(&self, user: &UserName) -> Result<(), LimitRejection> {
        let user = user.key(self.view.registry().hash_seed);
        if self.view.quota(user).limits.is_unbounded() {
            return Ok(());
        }
        // In this order: what is applied in between counts twice for a moment, never not at all. (Of
        // requests that ended this lets in as many too many; limits at once hold up to the lag.)
        let unapplied = self.dispatcher.unapplied(user);
        let quota = self.view.quota(user);
        let (_, pricing) = self.rules();
        let mut pending = PendingCharges::default();
        pending.add(&unapplied, &pricing);
        let now_ms = self.log_time.present_ms(self.view.now_ms());
        quota.check(now_ms, &pending.used(user))
    }
}
