//! Tests of the defaults of users.

use state::budgets::Budget;
use state::caches::CacheScope;
use state::command::UserDefaults;
use state::quotas::UserLimits;

use super::*;

#[test]
fn user_defaults_are_applied_at_founding() {
    let config = config(
        r#"
[node]
id = 1
[users.defaults]
weight_milli = 500
cache = "isolated"
cache_group = "all"
[users.defaults.limits]
requests = 20
window = "10s"
[users.defaults.budget]
day = 1000
"#,
    );
    let limits = UserLimits {
        requests: Some(20),
        window_ms: Some(10_000),
        ..UserLimits::default()
    };
    let expected = UserDefaults {
        weight_milli: 500,
        limits,
        budget: Budget {
            day: Some(1000),
            month: None,
        },
        cache: CacheScope::Group("all".to_owned()),
    };
    assert_eq!(config.user_defaults, expected);
    assert_eq!(config.admission.user_limits, limits);
    let stated: Vec<_> = config.file.stated.keys().map(ToString::to_string).collect();
    assert_eq!(
        stated,
        [
            "users.defaults.budget.day",
            "users.defaults.cache",
            "users.defaults.cache_group",
            "users.defaults.limits.requests",
            "users.defaults.limits.window",
            "users.defaults.weight_milli",
        ]
    );
    let is_local = |key: &String| key.starts_with("users.defaults");
    assert!(!config.file.local.keys().any(is_local));
}

#[test]
fn default_user_limits_are_equal_in_both_sections() {
    let config = config("node.id = 1\n[admission.user_limits]\nconcurrent = 3\n");
    assert_eq!(config.user_defaults.limits.concurrent, Some(3));
    assert!(config.user_defaults == UserDefaults::default());
    faults(
        "node.id = 1\n[admission.user_limits]\nrequests = 3\n[users.defaults.limits]\nrequests = 3\n",
        expect![[r#"
            5:12: users.defaults.limits.requests is set, and so is admission.user_limits.requests (expected limits of all users in one of [users.defaults.limits] and [admission.user_limits], which are the same)
        "#]],
    );
}

#[test]
fn invalid_user_defaults_are_refused() {
    faults(
        "node.id = 1\n[users.defaults]\ncache_group = \"a\"\n[users.defaults.budget]\nday = 0\n",
        expect![[r#"
            5:7: users.defaults.budget.day is 0 (expected an integer from 1 to 9007199254740992)
        "#]],
    );
    faults(
        "node.id = 1\n[users.defaults]\ncache_group = \"a\"\n",
        expect![[r#"
            3:15: users.defaults.cache_group is "a" (expected none where cache is not "isolated")
        "#]],
    );
    faults(
        "node.id = 1\n[users.defaults.limits]\nwindow = \"2days\"\n",
        expect![[r#"
            3:10: users.defaults.limits.window is "2days" (expected a duration from 1ms to 1day, such as "20ms" or "1m 30s")
        "#]],
    );
}
