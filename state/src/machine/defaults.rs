//! Application of commands that set the defaults of users.
//!
//! Two of these values also have commands of their own, from earlier format versions: the limits
//! (among the admission settings) and the cache scope.

use super::{AuditAction, RouterState};
use crate::command::{Origin, UserDefaults};
use crate::reject::Rejection;
use crate::users::DefaultPlan;

impl RouterState {
    pub(super) fn put_user_defaults(
        &mut self,
        origin: &Origin,
        defaults: UserDefaults,
    ) -> Result<(), Rejection> {
        defaults.validate()?;
        self.set_user_defaults(defaults);
        self.note(origin, AuditAction::PutUserDefaults, String::new());
        Ok(())
    }

    /// Replaces the defaults of users with validated ones.
    pub(super) fn set_user_defaults(&mut self, defaults: UserDefaults) {
        let UserDefaults {
            weight_milli,
            limits,
            budget,
            cache,
        } = defaults;
        let mut admission = self.admission_settings().into_owned();
        if admission.user_limits != limits {
            admission.user_limits = limits;
            self.set_admission(admission);
        }
        let plan = DefaultPlan {
            weight_milli,
            budget,
        };
        self.users.set_defaults(plan, self.caches.users());
        self.caches.set_default(cache);
    }

    /// Returns the defaults that apply to users without their own settings.
    pub(super) fn user_defaults(&self) -> UserDefaults {
        let DefaultPlan {
            weight_milli,
            budget,
        } = self.users.defaults().unwrap_or_default();
        UserDefaults {
            weight_milli,
            limits: self.terms().limits,
            budget,
            cache: self.caches.default_scope().clone(),
        }
    }
}
