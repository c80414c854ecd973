//! Settings of users and their defaults, as operators read and write them.

use super::*;

const DEFAULTS: &str = "/admin/v1/users/defaults";
const ADA: &str = "/admin/v1/users/ada";
const EVE: &str = "/admin/v1/users/eve";

async fn put(bench: &Bench, path: &str, body: &Value) {
    let put = bench.call("PUT", path, &body.to_string()).await;
    assert_eq!(put.status, StatusCode::OK, "{path}: {}", put.body);
}

#[tokio::test]
async fn a_user_is_replaced_as_a_whole_by_one_command() {
    let bench = Bench::new();
    let index = bench.admin.view.applied().0;
    let all = json!({
        "weight_milli": 1500,
        "limits": {
            "requests": 5, "tokens": null, "concurrent": null, "concurrent_per_tree": null,
            "tokens_per_tree": null, "window": "1m",
        },
        "budget": { "day": 1000, "month": null },
        "models": ["m*"],
        "cache": "group:team",
    });
    put(&bench, ADA, &all).await;
    let user = bench.get(ADA).await;
    assert_eq!((&user["index"], &user["config"]), (&json!(index + 1), &all));
    assert_eq!(user["left"]["requests"], 5);
    assert_eq!(user["budget_left"]["day"]["left"], 1000);
    // The fields around `config` are ignored.
    put(&bench, ADA, &user).await;
    assert_eq!(bench.get(ADA).await["config"], all);
    // Absent fields take the defaults.
    let unlimited = json!({ "weight_milli": 2000, "limits": {}, "cache": null });
    put(&bench, ADA, &unlimited).await;
    let user = bench.get(ADA).await;
    assert_eq!(user["config"], json!({ "weight_milli": 2000 }));
    assert!(user["budget_left"].is_null() && user["left"]["requests"].is_null());
    put(&bench, ADA, &json!({})).await;
    let user = bench.get(ADA).await;
    assert_eq!(
        (&user["config"], &user["weight_milli"]),
        (&json!({}), &json!(1000))
    );
    // A write with a fault changes nothing.
    let wrong = r#"{"cache": "shared", "weight_milli": 0}"#;
    bench.problem(("PUT", EVE, wrong), 400, "invalid").await;
    bench.problem(("GET", EVE, ""), 404, "not-found").await;
}

#[tokio::test]
async fn defaults_apply_to_users_without_their_own_settings() {
    let bench = Bench::new();
    let shown = bench.get(DEFAULTS).await;
    assert_eq!(shown["config"]["cache"], "shared", "{shown}");
    assert_eq!(shown["users_with_own_cache"], 0, "{shown}");
    let defaults = json!({
        "weight_milli": 500, "cache": "isolated", "limits": {"requests": 7}, "budget": {"day": 100}
    });
    put(&bench, DEFAULTS, &defaults).await;
    let shown = bench.get(DEFAULTS).await;
    put(&bench, DEFAULTS, &shown).await;
    assert_eq!(bench.get(DEFAULTS).await["config"], shown["config"]);

    put(&bench, EVE, &json!({"models": ["m"]})).await;
    put(&bench, ADA, &json!({"cache": "group:team"})).await;
    assert_eq!(bench.get(DEFAULTS).await["users_with_own_cache"], 1);
    for path in [EVE, ADA] {
        for _ in 0..2 {
            let user = bench.get(path).await;
            assert_eq!(user["weight_milli"], 500);
            assert_eq!(user["budget_left"]["day"]["left"], 100);
            assert_eq!(user["left"]["requests"], 7);
            // Writing it back adds no setting.
            assert_eq!(user["config"].as_object().unwrap().len(), 1, "{user}");
            put(&bench, path, &user).await;
        }
    }
    put(&bench, EVE, &json!({"budget": {"month": 5}})).await;
    let user = bench.get(EVE).await;
    assert_eq!(user["budget_left"]["day"], Value::Null);
    assert_eq!(user["budget_left"]["month"]["left"], 5);
}

#[tokio::test]
async fn a_user_called_defaults_has_a_path() {
    let bench = Bench::new();
    let user = "/admin/v1/users/%64efaults";
    put(&bench, user, &json!({"weight_milli": 3000})).await;
    assert_eq!(bench.get(user).await["name"], "defaults");
    assert_eq!(bench.get(DEFAULTS).await["config"]["weight_milli"], 1000);
}

#[tokio::test]
async fn wrong_settings_of_users_are_named() {
    let bench = Bench::new();
    for path in [EVE, DEFAULTS] {
        for (body, field) in [
            (r#"{"weight_milli": 0}"#, "weight_milli"),
            (r#"{"cache": "mine"}"#, "cache"),
            (r#"{"cache": "group:"}"#, "cache"),
            (r#"{"cache": "group:a\u0007"}"#, "cache"),
            (r#"{"limits": {"window": "2days"}}"#, "limits.window"),
            (r#"{"budget": {"day": 0}}"#, "budget.day"),
            (r#"{"budget": {"week": 7}}"#, "budget.week"),
            (r#"{"budget": 7}"#, "budget"),
            (r#"{"priority": 1}"#, "priority"),
        ] {
            let problem = bench.problem(("PUT", path, body), 400, "invalid").await;
            assert_eq!(problem["field"], field, "{problem}");
        }
    }
    let patterns = r#"{"models": ["*m"]}"#;
    let problem = bench.problem(("PUT", EVE, patterns), 400, "invalid").await;
    assert_eq!(problem["field"], "models", "{problem}");
}
