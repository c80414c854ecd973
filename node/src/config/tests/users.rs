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
cache = "group:all"
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
    assert_eq!(config.users.defaults, expected);
    let stated: Vec<_> = config.file.stated.keys().map(ToString::to_string).collect();
    assert_eq!(
        stated,
        [
            "users.defaults.budget.day",
            "users.defaults.cache",
            "users.defaults.limits.requests",
            "users.defaults.limits.window",
            "users.defaults.weight_milli",
        ]
    );
    let is_local = |key: &String| key.starts_with("users.defaults");
    assert!(!config.file.local.keys().any(is_local));
}

#[test]
fn invalid_user_defaults_are_refused() {
    faults(
        "node.id = 1\n[users.defaults]\ncache = \"group:\"\n[users.defaults.budget]\nday = 0\n",
        expect![[r#"
            3:9: users.defaults.cache is "group:" (expected "shared", "isolated" or "group:NAME")
            5:7: users.defaults.budget.day is 0 (expected an integer from 1 to 9007199254740992)
        "#]],
    );
    faults(
        "node.id = 1\n[users.defaults.limits]\nwindow = \"2days\"\n",
        expect![[r#"
            3:10: users.defaults.limits.window is "2days" (expected a duration from 1ms to 1day, such as "20ms" or "1m 30s")
        "#]],
    );
}
