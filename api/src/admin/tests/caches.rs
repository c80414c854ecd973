//! With whom users share cached blocks, as operators read and write it.

use super::*;

const CACHE: &str = "/admin/v1/cache";
const EVE: &str = "/admin/v1/users/eve";

#[tokio::test]
async fn what_was_read_can_be_written_back() {
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
    // A user whom nobody has heard of is known from then on.
    put("/admin/v1/users/new", &json!({"cache": "isolated"})).await;
    assert_eq!(bench.get("/admin/v1/users/new").await["cache"], "isolated");
}

#[tokio::test]
async fn what_is_no_setting_is_told() {
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
