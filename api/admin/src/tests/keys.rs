//! API keys: what is revealed once, what is listed, and what is kept.

use state::keys::FoundKey;

use super::*;
use api::users::api_keys::{is_of_cluster, secret_hash};

const KEYS: &str = "/admin/v1/keys";

async fn told(bench: &Bench, path: &str, body: &str) -> (String, String) {
    let answer = bench.call("POST", path, body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let answer = answer.json();
    assert_eq!(answer["outcome"], "committed", "{answer}");
    let text = |name: &str| answer[name].as_str().unwrap().to_owned();
    assert!(is_of_cluster(text("secret").as_bytes()), "{answer}");
    (text("id"), text("secret"))
}

impl Bench {
    fn looked_up(&self, secret: &str) -> FoundKey {
        let view = &self.admin.view;
        let hash = secret_hash(view.registry().hash_seed, secret.as_bytes());
        view.keys().find(&hash, self.admin.clock.unix_ms())
    }
}

#[tokio::test]
async fn a_secret_is_returned_once_and_not_stored() {
    let bench = Bench::new();
    let body = r#"{"user":"ada","name":"ci","expires_at":"2100-01-31T12:00:00Z","models":["m"],"scopes":["/v1/*"]}"#;
    let (id, secret) = told(&bench, KEYS, body).await;
    assert!(matches!(bench.looked_up(&secret), FoundKey::Live(key) if key.spec.user == "ada"));
    let shown = bench.get(&format!("{KEYS}/{id}")).await;
    assert_eq!(shown["name"], "ci");
    assert_eq!(shown["expires_at"], "2100-01-31T12:00:00Z");
    assert_eq!(shown["scopes"], serde_json::json!(["/v1/*"]));
    let list = bench.get(KEYS).await;
    let mut snapshot = Vec::new();
    let frozen = bench.cluster.state.lock().unwrap().freeze();
    frozen.write_to(&mut snapshot).unwrap();
    let audit = bench.get("/admin/v1/audit").await;
    assert_eq!(audit["writes"][0]["action"], "create-key", "{audit}");
    let random = secret.strip_prefix("qk-").unwrap();
    for text in [shown, list, audit] {
        assert!(!text.to_string().contains(random), "{text}");
    }
    let is_in_snapshot = |bytes: &[u8]| snapshot.windows(bytes.len()).any(|it| it == bytes);
    assert!(is_in_snapshot(b"ada") && !is_in_snapshot(random.as_bytes()));
}

#[tokio::test]
async fn a_key_can_be_rotated_with_grace_and_revoked() {
    let bench = Bench::new();
    let (id, first) = told(&bench, KEYS, r#"{"user":"ada"}"#).await;
    let (same, second) = told(&bench, &format!("{KEYS}/{id}/rotate?grace=1h"), "").await;
    assert_eq!(same, id);
    for secret in [&first, &second] {
        assert!(matches!(bench.looked_up(secret), FoundKey::Live(_)));
    }
    assert!(bench.get(&format!("{KEYS}/{id}")).await["former_until"].is_string());
    let (_, third) = told(&bench, &format!("{KEYS}/{id}/rotate"), "").await;
    assert_eq!(bench.looked_up(&second), FoundKey::Unknown);
    let gone = bench.call("DELETE", &format!("{KEYS}/{id}"), "").await;
    assert_eq!(gone.status, StatusCode::OK);
    assert_eq!(bench.looked_up(&third), FoundKey::Unknown);
    let again = ("DELETE", &*format!("{KEYS}/{id}"), "");
    bench.problem(again, 404, "not-found").await;
    // All writes to the removed key keep its name and user.
    let (live, _) = told(&bench, KEYS, r#"{"user":"bob","name":"ci"}"#).await;
    let audit = bench.get("/admin/v1/audit").await;
    let subject = |at: usize| audit["writes"][at]["subject"].as_str().unwrap().to_owned();
    assert_eq!(subject(0), format!("{live}: \"ci\" of \"bob\""));
    for at in 1..=4 {
        assert_eq!(subject(at), format!("{id}: \"ada\" of \"ada\""), "{audit}");
    }
}

#[tokio::test]
async fn key_lists_have_pages_and_a_user_filter() {
    let bench = Bench::new();
    for user in ["ada", "bob", "ada"] {
        told(&bench, KEYS, &format!(r#"{{"user":"{user}"}}"#)).await;
    }
    let mut path = format!("{KEYS}?limit=1");
    let mut ids = Vec::new();
    loop {
        let page = bench.get(&path).await;
        ids.push(page["keys"][0]["id"].as_str().unwrap().to_owned());
        match page["next_cursor"].as_str() {
            Some(cursor) => path = format!("{KEYS}?limit=1&cursor={cursor}"),
            None => break,
        }
    }
    assert!(ids.len() == 3 && ids.is_sorted(), "{ids:?}");
    let of_ada = bench.get(&format!("{KEYS}?user=ada")).await;
    assert_eq!(of_ada["keys"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn an_invalid_key_is_refused_with_the_field() {
    let bench = Bench::new();
    for (body, field) in [
        ("{}", "body"),
        (r#"{"user":""}"#, "user"),
        (r#"{"user":"ada","expires_at":"soon"}"#, "expires_at"),
        (r#"{"user":"ada","expires_at":1}"#, "expires_at"),
        (r#"{"user":"ada","scopes":["chat"]}"#, "scopes"),
        (r#"{"user":"ada","scopes":["/v1/*x*"]}"#, "scopes"),
        (r#"{"user":"ada","models":["*-chat"]}"#, "models"),
        (r#"{"user":"ada","expires_at":true}"#, "expires_at"),
    ] {
        let problem = bench.problem(("POST", KEYS, body), 400, "invalid").await;
        assert_eq!(problem["field"], field, "{problem}");
        if body.ends_with("true}") {
            let expected = "a date such as \"2027-01-31T12:00:00Z\", or Unix seconds";
            assert!(
                problem["detail"].as_str().unwrap().contains(expected),
                "{problem}"
            );
        }
    }
    let odd = ("GET", "/admin/v1/keys/1", "");
    bench.problem(odd, 400, "invalid").await;
    *bench.cluster.fate.lock().unwrap() = Fate::Unknown;
    let lost = ("POST", KEYS, r#"{"user":"ada"}"#);
    let problem = bench.problem(lost, 504, "outcome-unknown").await;
    assert!(problem["id"].is_string() && problem["secret"].is_null());
}
