//! What a request asks of routing by its headers: the policy that decides it, and labels that its
//! backend must have. Read once per request.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue};
use state::policy::PolicyConfig;

use super::decide::Decider;
use super::select::{Labels, SELECT, SelectRejection};

/// Names the policy that decides the request, where the config allows it; in answers the policy
/// that did.
pub const POLICY: HeaderName = HeaderName::from_static("x-quorate-policy");

/// What one request asks of routing. The default asks nothing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RoutingPreferences {
    /// The policy in place of the live one. Where the live one has the same name it decides, with
    /// its own settings.
    pub policy: Option<Arc<PolicyConfig>>,
    /// Labels its backend must have, beside those of its model.
    pub labels: Labels,
}

/// Why a request's preferences are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PreferenceRejection {
    /// It asks for a policy that does not exist.
    #[error("x-quorate-policy names no policy, expected one of {}", state::policy::POLICY_NAMES.join(", "))]
    Policy,
    /// It asks for labels in a form that cannot be read.
    #[error(transparent)]
    Select(#[from] SelectRejection),
}

impl PreferenceRejection {
    /// The header at fault.
    #[must_use]
    pub fn header(&self) -> HeaderName {
        match self {
            Self::Policy => POLICY,
            Self::Select(_) => SELECT,
        }
    }
}

impl Decider {
    /// What a request with these headers asks for, as far as the config lets requests ask.
    ///
    /// # Errors
    /// [`PreferenceRejection`].
    pub fn preferences(
        &self,
        headers: &HeaderMap,
    ) -> Result<RoutingPreferences, PreferenceRejection> {
        Ok(RoutingPreferences {
            policy: self.asked_policy(headers)?,
            labels: self.select.asked(headers)?,
        })
    }

    /// Headers by which a request asks for something that the config does not let requests ask
    /// for, as a list; `None`: there are none.
    #[must_use]
    pub fn ignored(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let is_policy = self.overrides.is_empty() && headers.contains_key(POLICY);
        let is_select = !self.select.allow && headers.contains_key(SELECT);
        let ignored = match (is_policy, is_select) {
            (false, false) => return None,
            (true, false) => "x-quorate-policy",
            (false, true) => "x-quorate-select",
            (true, true) => "x-quorate-policy, x-quorate-select",
        };
        Some(HeaderValue::from_static(ignored))
    }

    fn asked_policy(
        &self,
        headers: &HeaderMap,
    ) -> Result<Option<Arc<PolicyConfig>>, PreferenceRejection> {
        let Some(asked) = headers.get(POLICY) else {
            return Ok(None);
        };
        if self.overrides.is_empty() {
            return Ok(None);
        }
        let mut known = self.overrides.iter();
        let named = known.find(|policy| asked == policy.name());
        named
            .map(|policy| Some(Arc::clone(policy)))
            .ok_or(PreferenceRejection::Policy)
    }
}
