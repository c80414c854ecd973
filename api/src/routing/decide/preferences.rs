//! Routing preferences in a request's headers: the policy to use, and labels that the backend must
//! have. They are read once per request.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue};
use state::ids::LogIndex;
use state::policy::PolicyConfig;

use super::Decider;
use super::select::{Labels, SELECT, SelectRejection};

/// Header that names the policy to use, if the config allows it; in responses, the policy used.
pub const POLICY: HeaderName = HeaderName::from_static("x-quorate-policy");

/// Header with the log index that the replica should have applied before it decides.
const MIN_INDEX: HeaderName = HeaderName::from_static("x-quorate-min-index");

/// Routing preferences of one request. The default has none.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RoutingPreferences {
    /// Policy to use in place of the live one; `None` for no preference. If the live policy has the
    /// same name, the live one decides, with its own settings.
    pub policy: Option<Arc<PolicyConfig>>,
    /// Labels that the backend must have in addition to those of its model.
    pub labels: Labels,
    /// Log index that the replica should have applied before it decides; `None` for any.
    pub min_index: Option<LogIndex>,
}

/// Why a request's preferences are rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PreferenceRejection {
    /// The request names an unknown policy.
    #[error("x-quorate-policy: unknown policy, expected one of {}", state::policy::POLICY_NAMES.join(", "))]
    Policy,
    /// The labels cannot be parsed.
    #[error(transparent)]
    Select(#[from] SelectRejection),
    /// The minimum index is not a number.
    #[error("x-quorate-min-index: expected a log index, as in x-quorate-index")]
    MinIndex,
}

impl PreferenceRejection {
    /// Returns the name of the invalid header.
    #[must_use]
    pub fn header(&self) -> HeaderName {
        match self {
            Self::Policy => POLICY,
            Self::Select(_) => SELECT,
            Self::MinIndex => MIN_INDEX,
        }
    }
}

impl Decider {
    /// Returns the preferences in `headers` that the config allows.
    ///
    /// # Errors
    /// Returns a [`PreferenceRejection`] if a header cannot be parsed or names an unknown policy.
    pub fn preferences(
        &self,
        headers: &HeaderMap,
    ) -> Result<RoutingPreferences, PreferenceRejection> {
        Ok(RoutingPreferences {
            policy: self.asked_policy(headers)?,
            labels: self.select.asked(headers)?,
            min_index: min_index(headers)?,
        })
    }

    /// Returns a comma-separated list of the preference headers in `headers` that the config does
    /// not allow; `None` if there are none.
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

fn min_index(headers: &HeaderMap) -> Result<Option<LogIndex>, PreferenceRejection> {
    let Some(index) = headers.get(MIN_INDEX) else {
        return Ok(None);
    };
    let index = index.to_str().ok().and_then(|index| index.parse().ok());
    index
        .map(|index| Some(LogIndex(index)))
        .ok_or(PreferenceRejection::MinIndex)
}
