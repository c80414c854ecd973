//! Cache sharing between users, as operators read and write it.

use super::*;

const CACHE: &str = "/admin/v1/cache";
const EVE: &str = "/admin/v1/users/eve";

#[tokio::test]
async fn settings_read_can_be_written_back() {
    let bench = Bench::new();
    let put = async |path: &str, body: &Value| {
        let put = bench.call("PUT", path, &body.to_string()).await;
        assert_eq!(put.status, StatusCode::OK, "{body}: {}", put.body);
    };
    let cache = bench.get(CACHE).await;
    assert_eq!(
        (&cache["cache"], &cache["users"]),
        (&json!("shared"), &json!(0))
    );
    put(CACHE, &cache).await;
    put(CACHE, &json!({"cache": "isolated"})).await;
    assert_eq!(bench.get(CACHE).await["cache"], "isolated");
    put(CACHE, &json!({"cache_group": "all"})).await;
    let cache = bench.get(CACHE).await;
    assert_eq!(
        (&cache["cache"], &cache["cache_group"]),
        (&json!("isolated"), &json!("all"))
    );
    put(CACHE, &cache).await;

    put(EVE, &json!({"cache": "shared", "weight_milli": 2000})).await;
    let shown = bench.get(EVE).await;
    assert_eq!(
        (&shown["cache"], &shown["weight_milli"]),
        (&json!("shared"), &json!(2000))
    );
    put(EVE, &json!({"cache_group": "team"})).await;
    let shown = bench.get(EVE).await;
    assert_eq!(
        (&shown["cache"], &shown["cache_group"]),
        (&json!("isolated"), &json!("team"))
    );
    assert_eq!(
        (&shown["weight_milli"], &shown["is_configured"]),
        (&json!(2000), &json!(true))
    );
    put(EVE, &shown).await;
    assert_eq!(bench.get(CACHE).await["users"], 1);
    put(EVE, &json!({"cache": "default"})).await;
    assert!(bench.get(EVE).await.get("cache").is_none());
    assert_eq!(bench.get(CACHE).await["users"], 0);
    // An unknown user is created.
    put("/admin/v1/users/new", &json!({"cache": "isolated"})).await;
    assert_eq!(bench.get("/admin/v1/users/new").await["cache"], "isolated");
}

#[tokio::test]
async fn unknown_settings_are_reported() {
    let bench = Bench::new();
    for (path, body, field) in [
        (
            EVE,
            r#"{"cache": "shared", "cache_group": "team"}"#,
            "cache_group",
        ),
        (EVE, r#"{"cache_group": ""}"#, "cache_group"),
        (EVE, r#"{"cache_group": "a\u0007"}"#, "cache_group"),
        (CACHE, "{}", "body"),
    ] {
        let problem = bench.problem(("PUT", path, body), 400, "invalid").await;
        assert_eq!(problem["field"], field, "{problem}");
    }
    let put = bench.call("PUT", EVE, r#"{"cache": "mine"}"#).await;
    assert_eq!(put.status, StatusCode::BAD_REQUEST, "{}", put.body);
}

#[tokio::test]
async fn scope_and_weight_of_a_user_are_set_by_one_command() {
    let bench = Bench::new();
    let index = bench.admin.view.applied().0;
    let body = r#"{"cache": "isolated", "weight_milli": 1500}"#;
    let put = bench.call("PUT", EVE, body).await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    let user = bench.get(EVE).await;
    assert_eq!(user["index"], index + 1);
    assert_eq!(
        (&user["cache"], &user["weight_milli"]),
        (&json!("isolated"), &json!(1500))
    );
    let body = r#"{"cache": "shared", "weight_milli": 0}"#;
    bench.problem(("PUT", EVE, body), 400, "invalid").await;
    assert_eq!(bench.get(EVE).await["cache"], "isolated");
}

const DEFAULTS: &str = "/admin/v1/user-defaults";

#[tokio::test]
async fn user_defaults_include_settings_of_other_routes() {
    let bench = Bench::new();
    let put = async |path: &str, body: Value| {
        let put = bench.call("PUT", path, &body.to_string()).await;
        assert_eq!(put.status, StatusCode::OK, "{path}: {}", put.body);
    };
    put(CACHE, json!({"cache_group": "all"})).await;
    let shown = bench.get(DEFAULTS).await;
    assert_eq!(shown["config"]["cache_group"], "all", "{shown}");
    let defaults = json!({
        "weight_milli": 500, "cache": "isolated", "limits": {"requests": 7}, "budget": {"day": 100}
    });
    put(DEFAULTS, defaults).await;
    let shown = bench.get(DEFAULTS).await;
    assert_eq!(shown["is_set"], true);
    assert!(bench.get(CACHE).await.get("cache_group").is_none());
    put(DEFAULTS, shown.clone()).await;
    assert_eq!(bench.get(DEFAULTS).await["config"], shown["config"]);

    // A user with some own settings has the defaults for the rest; writing it back adds none.
    put(EVE, json!({"models": ["m"]})).await;
    put("/admin/v1/users/ada", json!({"cache": "shared"})).await;
    for path in [EVE, "/admin/v1/users/ada"] {
        for _ in 0..2 {
            let user = bench.get(path).await;
            assert_eq!(
                (&user["weight_milli"], &user["is_configured"]),
                (&json!(500), &json!(false))
            );
            assert!(user["budget"].is_null(), "{user}");
            assert_eq!(user["budget_left"]["day"]["left"], 100);
            assert_eq!(user["left"]["requests"], 7);
            put(path, user).await;
        }
    }
    put(EVE, json!({"budget": {"month": 5}})).await;
    let user = bench.get(EVE).await;
    assert_eq!(user["budget_left"]["day"], Value::Null);
    assert_eq!(user["budget_left"]["month"]["left"], 5);
    put(EVE, json!({"budget": {}})).await;
    assert_eq!(bench.get(EVE).await["budget_left"]["day"]["left"], 100);

    for (body, field) in [
        (r#"{"weight_milli": 0}"#, "weight_milli"),
        (r#"{"cache_group": "team"}"#, "cache_group"),
        (
            r#"{"cache": "isolated", "cache_group": "a\u0007"}"#,
            "cache_group",
        ),
        (r#"{"limits": {"window": "2days"}}"#, "limits.window"),
        (r#"{"priority": 1}"#, "priority"),
    ] {
        let problem = bench.problem(("PUT", DEFAULTS, body), 400, "invalid").await;
        assert_eq!(problem["field"], field, "{problem}");
    }
}
