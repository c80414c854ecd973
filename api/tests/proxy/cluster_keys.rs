//! API keys on the data plane: which client is served, as which user, and how (I101).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::base::clock::Clock;
use api::proxy::{ApiKeys, ProxySettings};
use api::users::api_keys::{ListAge, NewSecret, draw_id};
use serde_json::json;
use state::command::Command;
use state::ids::{ApiKeyId, ReplicaId};
use state::keys::ApiKeySpec;
use tokio::time::Instant;

use super::client::{Answer, post};
use super::engine::{Engine, json as answer_json};
use super::fleet::Fleet;

/// Returns the time on the fleet's clock.
fn now_ms() -> u64 {
    Clock::default().unix_ms()
}

struct Key {
    id: ApiKeyId,
    secret: NewSecret,
}

/// Creates a key of the user ada.
fn created(fleet: &Fleet, change: impl FnOnce(&mut ApiKeySpec)) -> Key {
    let (id, secret) = (draw_id(), NewSecret::draw());
    let mut spec = ApiKeySpec {
        id,
        secret: secret.hash(fleet.hash_seed()),
        name: "test".to_owned(),
        user: "ada".to_owned(),
        ..ApiKeySpec::default()
    };
    change(&mut spec);
    fleet.apply_at(now_ms(), Command::CreateKey(Box::new(spec)));
    Key { id, secret }
}

/// Requests a completion with these header lines.
async fn ask(fleet: &Fleet, path: &str, model: &str, headers: &str) -> Answer {
    let body = json!({"model": model, "prompt": "hello", "input": "hello", "user": "body"});
    let headers = format!("content-type: application/json\r\n{headers}");
    let request = post(path, &headers, &body.to_string());
    fleet.client().await.ask(request).await
}

async fn with(fleet: &Fleet, key: &NewSecret) -> Answer {
    let bearer = format!("authorization: Bearer {}\r\n", key.text());
    ask(fleet, "/v1/completions", "m", &bearer).await
}

#[tokio::test]
async fn a_revoked_key_is_refused_by_every_replica_and_ends_with_its_grace() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let settings = [1, 2].map(|id| ProxySettings::new(ReplicaId(id)));
    let fleets = Fleet::replicas(&[&engine], settings.into()).await;
    let key = created(&fleets[0], |_| {});
    for fleet in &fleets {
        assert_eq!(with(fleet, &key.secret).await.status, 200);
    }
    let second = NewSecret::draw();
    let rotate = |secret: &NewSecret, grace_ms| Command::RotateKey {
        id: key.id,
        secret: secret.hash(fleets[0].hash_seed()),
        grace_ms,
    };
    fleets[0].apply_at(now_ms(), rotate(&second, 3_600_000));
    for secret in [&key.secret, &second] {
        assert_eq!(with(&fleets[1], secret).await.status, 200);
    }
    let third = NewSecret::draw();
    fleets[1].apply(rotate(&third, 0));
    with(&fleets[0], &second)
        .await
        .refuses(401, "invalid_api_key");
    assert_eq!(with(&fleets[0], &third).await.status, 200);
    fleets[1].apply(Command::RevokeKey { id: key.id });
    for fleet in &fleets {
        // Even though keys are not required here.
        with(fleet, &third).await.refuses(401, "invalid_api_key");
    }
}

#[tokio::test]
async fn a_keys_user_takes_precedence_and_no_key_is_forwarded() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let key = created(&fleet, |_| {});
    let secret = key.secret.text();
    for line in [
        format!("authorization: Bearer {secret}\r\n"),
        format!("x-api-key: {secret}\r\n"),
        format!("api-key: {secret}\r\n"),
    ] {
        // Loopback is trusted to name users, but keys take precedence.
        let headers = format!("{line}x-quorate-user: head\r\n");
        let answer = ask(&fleet, "/v1/completions", "m", &headers).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        fleet.is_idle().await;
        let request = engine.requests().pop().unwrap();
        assert!(!request.contains(secret), "{request}");
    }
    let (_, decisions) = fleet
        .call("GET", "/admin/v1/decisions?user=ada", &json!({}))
        .await;
    let found = decisions["decisions"].as_array().expect("a list");
    assert_eq!(found.len(), 3, "{decisions}");
}

#[tokio::test]
async fn a_key_admits_its_models_and_paths_until_it_expires() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let key = created(&fleet, |spec| {
        spec.models = vec!["other*".to_owned()];
        spec.scopes = vec!["/v1/completions".to_owned(), "/v1/models".to_owned()];
    });
    let bearer = format!("authorization: Bearer {}\r\n", key.secret.text());
    let answer = ask(&fleet, "/v1/completions", "m", &bearer).await;
    answer.refuses(403, "model_not_allowed");
    assert!(answer.body.contains("`other*`"), "{}", answer.body);
    let answer = ask(&fleet, "/v1/embeddings", "m", &bearer).await;
    answer.refuses(403, "path_not_allowed");
    assert!(answer.body.contains("`/v1/completions`"), "{}", answer.body);
    let models = format!("GET /v1/models HTTP/1.1\r\nhost: router\r\n{bearer}\r\n");
    let listed = fleet.client().await.ask(models).await;
    let listed: serde_json::Value = serde_json::from_str(&listed.body).unwrap();
    assert_eq!(listed["data"], json!([]));
    // No command carries the current time.
    let brief = created(&fleet, |spec| spec.expires_at_ms = Some(now_ms() + 2000));
    assert_eq!(with(&fleet, &brief.secret).await.status, 200);
    tokio::time::timeout(Duration::from_secs(10), async {
        while with(&fleet, &brief.secret).await.status == 200 {}
    })
    .await
    .unwrap();
    with(&fleet, &brief.secret)
        .await
        .refuses(401, "expired_api_key");
}

#[tokio::test]
async fn a_stored_response_requires_a_key_for_its_model() {
    let engine = Engine::answering(|request| {
        let line = request.lines().next().unwrap_or_default();
        let body = match line.contains("resp_other") {
            true => r#"{"id":"resp_other","output":[{"model":"m"}],"model":"other"}"#,
            false => r#"{"id":"resp_m","model":"m"}"#,
        };
        vec![answer_json("200 OK", body)]
    })
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let key = created(&fleet, |spec| spec.models = vec!["m".to_owned()]);
    let all = created(&fleet, |_| {});
    let mut client = fleet.client().await;
    for (method, tail) in [
        ("GET", ""),
        ("GET", "?stream=true"),
        ("DELETE", ""),
        ("POST", "/cancel"),
    ] {
        for (key, id, status) in [(&key, "m", 200), (&key, "other", 403), (&all, "other", 200)] {
            let secret = key.secret.text();
            let before = engine.requests().len();
            let answer = client
                .ask(format!(
                    "{method} /v1/responses/resp_{id}{tail} HTTP/1.1\r\nhost: router\r\n\
                     content-length: 0\r\nauthorization: Bearer {secret}\r\n\r\n"
                ))
                .await;
            assert_eq!(answer.status, status, "{method} {id}{tail}");
            if status == 403 {
                answer.refuses(403, "model_not_allowed");
                // The response was looked up, and nothing was done to it.
                let asked = engine.requests().split_off(before);
                let is_read = |it: &String| it.starts_with("GET /v1/responses/resp_other HTTP/1.1");
                assert!(asked.iter().all(is_read), "{asked:?}");
            }
        }
    }
}

#[tokio::test]
async fn required_keys_may_come_from_cluster_or_file() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        settings.keys.is_required = true;
    })
    .await;
    let key = created(&fleet, |_| {});
    assert_eq!(with(&fleet, &key.secret).await.status, 200);
    for headers in [
        "",
        "authorization: Bearer sk-file\r\n",
        "x-quorate-user: ada\r\n",
    ] {
        let answer = ask(&fleet, "/v1/completions", "m", headers).await;
        answer.refuses(401, "invalid_api_key");
    }
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        let mut keys = ApiKeys::default();
        keys.add("sk-file", Some("bob".to_owned()));
        settings.api_keys = Some(keys);
    })
    .await;
    let key = created(&fleet, |_| {});
    assert_eq!(with(&fleet, &key.secret).await.status, 200);
    let filed = "authorization: Bearer sk-file\r\n";
    assert_eq!(ask(&fleet, "/v1/completions", "m", filed).await.status, 200);
}

#[tokio::test]
async fn a_stale_key_list_is_used_as_configured() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    for (refuse_stale_after, status) in [(None, 200), (Some(Duration::from_secs(10)), 503)] {
        let is_heard = Arc::new(AtomicBool::new(false));
        let heard = Arc::clone(&is_heard);
        let confirmed = move || heard.load(Ordering::Relaxed).then(Instant::now);
        let list = Arc::new(ListAge::of(Duration::from_secs(1), confirmed));
        let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
            settings.keys.refuse_stale_after = refuse_stale_after;
            settings.keys.list = Arc::clone(&list);
        })
        .await;
        let key = created(&fleet, |_| {});
        let answer = with(&fleet, &key.secret).await;
        assert_eq!(answer.status, status, "{}", answer.body);
        if status == 503 {
            answer.refuses(503, "api_keys_stale");
            assert_eq!(answer.header("retry-after"), Some("1"));
        }
        is_heard.store(true, Ordering::Relaxed);
        assert_eq!(with(&fleet, &key.secret).await.status, 200);
    }
}
