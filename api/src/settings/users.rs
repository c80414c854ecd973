//! How defaults of users are written: `[users.defaults]` of a config file, and
//! `/admin/v1/user-defaults`.

use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use smart_default::SmartDefault;
use state::budgets::Budget;
use state::caches::CacheScope;
use state::command::UserDefaults;
use state::quotas::UserLimits;
use state::users::WEIGHT_MILLI_DEFAULT;

use super::admission::{misfit, read_settings};
use super::form;
use super::schema::{SettingError, schema_of};

/// Keys of `[users.defaults]`: what users without settings of their own get.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UserDefaultsForm {
    /// Share of service, relative to other users and in thousandths, of users without their own
    /// weight. Like all keys of `[users.defaults]`, it is read when a cluster is created; later use
    /// `quorate user defaults set` or `PUT /admin/v1/user-defaults`.
    #[schemars(range(min = 1))]
    #[default(WEIGHT_MILLI_DEFAULT)]
    pub weight_milli: u32,
    /// Whether users without their own setting share cached blocks: `shared` or `isolated`
    /// (docs/guide/security.md).
    pub cache: DefaultCache,
    /// With `isolated`: the group within which they share blocks. Default: none, each user is
    /// alone.
    #[schemars(length(min = 1))]
    pub cache_group: Option<String>,
    /// Limits of users without their own.
    pub limits: UserLimits,
    /// Budget of users without their own.
    pub budget: Budget,
}

/// Whether users share cached blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DefaultCache {
    /// Shared with all users who share.
    #[default]
    Shared,
    /// Not shared, or only within a cache group.
    Isolated,
}

static SCHEMA: LazyLock<Value> = LazyLock::new(|| schema_of::<UserDefaultsForm>(form::named));

impl UserDefaultsForm {
    /// Reads the settings in a document.
    ///
    /// # Errors
    /// Every fault, at least one.
    pub fn read(document: &Value) -> Result<Self, Vec<SettingError>> {
        let read: Self = read_settings(&SCHEMA, document)?;
        match read.misfit() {
            Some(fault) => Err(vec![fault]),
            None => Ok(read),
        }
    }

    /// Returns the first value that does not fit the others.
    #[must_use]
    pub fn misfit(&self) -> Option<SettingError> {
        if let (DefaultCache::Shared, Some(group)) = (self.cache, &self.cache_group) {
            return Some(SettingError {
                key: "cache_group".to_owned(),
                found: format!("{group:?}"),
                expected: "none where cache is not \"isolated\"".to_owned(),
            });
        }
        misfit(self, self.settings().validate())
    }

    /// Returns the settings as the log has them.
    #[must_use]
    pub fn settings(&self) -> UserDefaults {
        UserDefaults {
            weight_milli: self.weight_milli,
            limits: self.limits,
            budget: self.budget,
            cache: match (self.cache, &self.cache_group) {
                (DefaultCache::Shared, _) => CacheScope::Shared,
                (DefaultCache::Isolated, None) => CacheScope::Own,
                (DefaultCache::Isolated, Some(group)) => CacheScope::Group(group.clone()),
            },
        }
    }
}

impl From<&UserDefaults> for UserDefaultsForm {
    fn from(defaults: &UserDefaults) -> Self {
        let (cache, cache_group) = match &defaults.cache {
            CacheScope::Shared => (DefaultCache::Shared, None),
            CacheScope::Own => (DefaultCache::Isolated, None),
            CacheScope::Group(group) => (DefaultCache::Isolated, Some(group.clone())),
        };
        Self {
            weight_milli: defaults.weight_milli,
            cache,
            cache_group,
            limits: defaults.limits,
            budget: defaults.budget,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn written_settings_round_trip() {
        let limits = UserLimits {
            requests: Some(5),
            tokens: Some(1 << 40),
            concurrent: Some(2),
            window_ms: Some(60_000),
        };
        let budget = Budget {
            day: Some(1),
            month: None,
        };
        for cache in [CacheScope::Own, CacheScope::Group("a".to_owned())] {
            let defaults = UserDefaults {
                weight_milli: 250,
                limits,
                budget,
                cache,
            };
            let written = serde_json::to_value(UserDefaultsForm::from(&defaults)).unwrap();
            let read = UserDefaultsForm::read(&written).unwrap();
            assert_eq!(read.settings(), defaults, "{written}");
        }
        let nothing = UserDefaultsForm::read(&json!({})).unwrap();
        assert_eq!(nothing.settings(), UserDefaults::default());
    }

    #[test]
    fn all_errors_are_reported_with_expectations() {
        let told = |document: Value| {
            let faults = UserDefaultsForm::read(&document).unwrap_err();
            let told = faults
                .iter()
                .map(|it| format!("{} is {} (expected {})", it.key, it.found, it.expected));
            told.collect::<Vec<_>>().join("\n")
        };
        let several = told(json!({
            "weight_milli": 0,
            "cache": "default",
            "limits": { "requests": 0, "window": 5 },
            "budget": { "day": -1 },
            "priority": 3,
        }));
        expect_test::expect![[r#"
            weight_milli is 0 (expected an integer from 1 to 4294967295)
            cache is "default" (expected "shared" or "isolated")
            limits.requests is 0 (expected an integer from 1 to 4294967295)
            limits.window is 5 (expected a duration from 1ms to 1day, such as "20ms" or "1m 30s")
            budget.day is -1 (expected an integer from 1 to 9007199254740992)
            priority is an unknown key (expected one of budget, cache, cache_group, limits, weight_milli)"#]].assert_eq(&several);
        let window = told(json!({ "limits": { "window": "2days" } }));
        expect_test::expect![[r#"limits.window is "2days" (expected a duration from 1ms to 1day, such as "20ms" or "1m 30s")"#]].assert_eq(&window);
        let group = told(json!({ "cache_group": "a" }));
        expect_test::expect![[
            r#"cache_group is "a" (expected none where cache is not "isolated")"#
        ]]
        .assert_eq(&group);
    }
}
