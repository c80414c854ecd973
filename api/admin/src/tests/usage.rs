//! Usage and what it costs, as JSON and CSV.

use state::command::{Charge, Item};
use state::ids::{ApiKeyId, UserKey};
use state::prefix::user_key;
use state::usage::{UsageSource, source_key};

use super::reads::batch;
use super::*;

/// Hash seed of the cluster.
const SEED: u64 = 1;

fn charged(user: &str, (key, model): (Option<u64>, &str), tokens: [u64; 3]) -> [Item; 3] {
    let user_name = user.to_owned();
    let user: UserKey = user_key(SEED, user);
    let key = key.map(ApiKeyId);
    let [input_uncached, input_cached, output] = tokens;
    [
        Item::DefineUser {
            key: user,
            name: user_name,
        },
        Item::DefineSource(UsageSource {
            key,
            model: model.to_owned(),
        }),
        Item::Charge(Charge {
            user,
            source: source_key(SEED, key, model),
            input_uncached,
            input_cached,
            output,
            started: 1,
            ended: 1,
            ..Charge::default()
        }),
    ]
}

fn used() -> Bench {
    let bench = Bench::new();
    let items = [
        charged("ada", (Some(7), "llama"), [1_000, 2_000, 300]),
        charged("ada", (None, "llama"), [10, 0, 1]),
        charged("bob", (None, "tiny"), [5, 0, 5]),
    ];
    batch(&bench, items.into_iter().flatten().collect());
    bench
}

#[tokio::test]
async fn usage_adds_up_by_any_columns_with_exact_money() {
    let bench = used();
    let by_user = bench.get("/admin/v1/usage").await;
    let rows = by_user["usage"].as_array().unwrap();
    let ada = rows.iter().find(|row| row["user"] == "ada").unwrap();
    // 1010 * 0.15 + 2000 * 0.075 + 301 * 0.6, per million.
    assert_eq!(ada["money"], "0.0004821");
    assert_eq!((&ada["requests"], &ada["output"]), (&json!(2), &json!(301)));
    assert_eq!(ada.get("model"), None);
    let bob = rows.iter().find(|row| row["user"] == "bob").unwrap();
    assert_eq!(
        (&bob["money"], &bob["unpriced_tokens"]),
        (&json!("0"), &json!(10))
    );
    assert_eq!(by_user["total"]["input_uncached"], 1015);
    for by in ["user", "key", "model", "day", "user,key,model,day"] {
        let list = bench.get(&format!("/admin/v1/usage?by={by}")).await;
        assert_eq!(list["total"], by_user["total"], "{by}");
        let rows = list["usage"].as_array().unwrap();
        let output: u64 = rows.iter().map(|row| row["output"].as_u64().unwrap()).sum();
        assert_eq!(output, 306, "{by}");
    }
    let keys = bench.get("/admin/v1/usage?by=key").await;
    assert_eq!(keys["usage"][0]["key"], Value::Null);
    assert_eq!(keys["usage"][1]["key"], "0000000000000007");
    let ada = bench.get("/admin/v1/usage?by=model&user=ada").await;
    assert_eq!(ada["usage"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn usage_comes_in_pages_that_follow_each_other() {
    let bench = used();
    let whole = bench.get("/admin/v1/usage?by=user,key").await;
    let mut path = "/admin/v1/usage?by=user,key&limit=1".to_owned();
    let mut rows = Vec::new();
    loop {
        let page = bench.get(&path).await;
        rows.push(page["usage"][0].clone());
        assert_eq!(page["total"], whole["total"]);
        let Some(cursor) = page["next_cursor"].as_str() else {
            break;
        };
        path = format!("/admin/v1/usage?by=user,key&limit=1&cursor={cursor}");
    }
    assert_eq!(json!(rows), whole["usage"]);
    assert_eq!(rows.len(), 3);
    let cut = bench.call("GET", &format!("{path}0"), "").await;
    assert_eq!(cut.status, StatusCode::BAD_REQUEST, "{path}0");
}

#[tokio::test]
async fn usage_is_a_table_in_csv() {
    let bench = used();
    let answer = bench
        .call("GET", "/admin/v1/usage?by=model&format=csv", "")
        .await;
    assert_eq!(answer.headers["content-type"], "text/csv; charset=utf-8");
    let rows = [
        "model,requests,input_uncached,input_cached,output,money,unpriced_tokens",
        "llama,2,1010,2000,301,0.0004821,0",
        "tiny,1,5,0,5,0,10",
    ];
    assert_eq!(answer.body, rows.map(|row| format!("{row}\r\n")).concat());
    // The columns follow from the query alone.
    let none = "/admin/v1/usage?by=user,key&format=csv&to=1971-01-01";
    let header = "user,user_key,key,key_name,requests,input_uncached,input_cached,output,money,\
                  unpriced_tokens\r\n";
    let rows = bench.call("GET", none, "").await.body;
    assert!(rows.starts_with(header), "{rows}");
}

#[tokio::test]
async fn settings_of_admission_without_usage_days_drop_no_usage() {
    let bench = Bench::new();
    let put = async |settings: &str| bench.call("PUT", "/admin/v1/admission", settings).await;
    assert_eq!(put(r#"{"usage_days": 400}"#).await.status, StatusCode::OK);
    assert_eq!(put(r#"{"order": "vtc"}"#).await.status, StatusCode::OK);
    let config = &bench.get("/admin/v1/admission").await["config"];
    assert_eq!(
        (&config["usage_days"], &config["order"]),
        (&json!(400), &json!("vtc"))
    );
}

#[tokio::test]
async fn a_query_for_usage_that_makes_no_sense_names_the_parameter() {
    let bench = used();
    let queries = [
        ("by=color", "by"),
        ("by=tree,user", "by"),
        ("by=tree&from=2026-11-01", "by"),
        ("from=yesterday", "from"),
        ("to=2026-02-30", "to"),
        ("from=2026-11-02&to=2026-11-01", "to"),
        ("limit=0", "limit"),
        ("cursor=ada", "cursor"),
        ("format=xml", "format"),
    ];
    for (query, field) in queries {
        let answer = bench
            .call("GET", &format!("/admin/v1/usage?{query}"), "")
            .await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{query}");
        assert_eq!(answer.json()["field"], field, "{query}");
    }
}
