//! Users with isolated caches, with emulated engines: a user's requests reveal nothing to others,
//! by any header, count or choice (I111).

use super::blocks::exact_replica;
use super::*;

/// Number of prompts that one user has sent, and of prompts that no user has.
const PROMPTS: usize = 24;

/// What a probe reveals to its sender, apart from times.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    backend: String,
    matched: u32,
    cached_tokens: u64,
}

/// Returns a prompt that differs from the others from its first block on.
fn prompt(number: usize) -> String {
    format!("Case {number} of the harbour court. {SYSTEM}")
}

async fn ask(http: &Http, at: &Addresses, user: &str, number: usize) -> Seen {
    let body = json!({
        "model": "emulated", "prompt": prompt(number), "max_tokens": 1, "user": user,
    });
    let url = format!("http://{}/v1/completions", at.data);
    let (status, headers, answer) = http.send(Method::POST, &url, &body).await;
    assert_eq!(status, StatusCode::OK, "{user}: {answer}");
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    Seen {
        backend: headers["x-quorate-backend"].to_str().unwrap().to_owned(),
        matched: matched(&headers),
        cached_tokens: cached.as_u64().unwrap(),
    }
}

/// Sets the users' cache scopes, and waits until all replicas know them and their engines.
async fn set_scopes(http: &Http, at: &[Addresses], scopes: &[(&str, Value)]) {
    for (user, scope) in scopes {
        let url = format!("http://{}/admin/v1/users/body:{user}", at[0].admin);
        let is_set = async || http.send(Method::PUT, &url, scope).await.0 == StatusCode::OK;
        until("a cache scope is set", is_set).await;
    }
    http.agree(at).await;
    for at in at {
        let url = format!("http://{}/admin/v1/users/defaults", at.admin);
        let is_known = async || http.get(&url).await.1["unsalted_backends"] == json!([]);
        until("the engines are known to keep users apart", is_known).await;
    }
}

fn isolated() -> Value {
    json!({ "cache": "isolated" })
}

fn team() -> Value {
    json!({ "cache": "group:team" })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cache_probes_hit_only_their_own_groups_prompts() {
    let (_dir, _engines, replicas, http, at) = started(3, 1).await;
    let scopes = [("ada", team()), ("bo", team()), ("mallory", isolated())];
    set_scopes(&http, &at, &scopes).await;

    for number in 0..4 {
        let first = ask(&http, &at[number % 3], "ada", number).await;
        assert_eq!((first.matched, first.cached_tokens), (0, 0), "{first:?}");
    }
    http.quiet(&at[0]).await;
    http.agree(&at).await;
    // Each on a replica that did not serve ada's request.
    for number in 0..4 {
        let held = ask(&http, &at[(number + 1) % 3], "mallory", number).await;
        let unheld = ask(&http, &at[(number + 1) % 3], "mallory", 100 + number).await;
        assert_eq!(held, unheld);
        assert_eq!((held.matched, held.cached_tokens), (0, 0), "{held:?}");
        let shared = ask(&http, &at[(number + 1) % 3], "eve", number).await;
        assert_eq!((shared.matched, shared.cached_tokens), (0, 0), "{shared:?}");
        // Router and engine find the group's own blocks.
        let group = ask(&http, &at[(number + 2) % 3], "bo", number).await;
        assert!(group.matched >= 2 && group.cached_tokens > 0, "{group:?}");
    }
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routing_does_not_reveal_other_groups_prompts() {
    let (_dir, _engines, replicas, http, at) = started(1, 4).await;
    let scopes = [("ada", isolated()), ("mallory", isolated())];
    set_scopes(&http, &at, &scopes).await;

    let (mut adas, mut eves) = (Vec::new(), Vec::new());
    for number in 0..PROMPTS {
        adas.push(ask(&http, &at[0], "ada", number).await.backend);
        eves.push(ask(&http, &at[0], "eve", 1000 + number).await.backend);
    }
    http.quiet(&at[0]).await;
    let (mut held, mut unheld, mut shared) = (0, 0, 0);
    for number in 0..PROMPTS {
        let probe = ask(&http, &at[0], "mallory", number).await;
        held += usize::from(probe.backend == adas[number]);
        let other = ask(&http, &at[0], "mallory", 500 + number).await;
        unheld += usize::from(other.backend == adas[number]);
        let none = (0, 0);
        assert_eq!((probe.matched, probe.cached_tokens), none, "{probe:?}");
        assert_eq!((other.matched, other.cached_tokens), none, "{other:?}");
        // A user who shares is routed to the prompt's holder, which the probe would reveal.
        let sam = ask(&http, &at[0], "sam", 1000 + number).await;
        shared += usize::from(sam.backend == eves[number] && sam.cached_tokens > 0);
    }
    assert_eq!(shared, PROMPTS, "all who share find each other's");
    // A quarter each, by chance.
    let near = |hits: usize| hits <= PROMPTS * 3 / 4;
    assert!(
        near(held) && near(unheld),
        "{held} and {unheld} of {PROMPTS}"
    );
    assert!(held.abs_diff(unheld) <= PROMPTS / 2, "{held} and {unheld}");
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn predictions_are_exact_under_salts_with_kv_events() {
    const BLOCK_TOKENS: u32 = 16;
    let (dir, http) = (TempDir::new().unwrap(), Http::new());
    let (replica, _engine) = exact_replica(&http, BLOCK_TOKENS, &dir).await;
    let at = [replica.addresses];
    let scopes = [("ada", team()), ("bo", team()), ("mallory", isolated())];
    set_scopes(&http, &at, &scopes).await;
    let is_exact = async || {
        let url = format!("http://{}/admin/v1/backends", at[0].admin);
        let (_, answer) = http.get(&url).await;
        answer["backends"][0]["ownership"]["mode"] == "exact"
    };
    let mut found = Vec::new();
    for user in ["ada", "bo", "mallory", "eve", "mallory", "bo", "eve"] {
        until("the engine's own blocks are exact", is_exact).await;
        let seen = ask(&http, &at[0], user, 1).await;
        let blocks = seen.cached_tokens / u64::from(BLOCK_TOKENS);
        assert_eq!(u64::from(seen.matched), blocks, "{user}: {seen:?}");
        found.push(seen.matched > 0);
    }
    assert_eq!(found, [false, true, false, false, true, true, true]);
    replica.leave().await;
}
