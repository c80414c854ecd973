//! API keys of the cluster: created on one replica, used on another, revoked on the third (I102);
//! stale key lists (I103), and budgets of users (I106).

use super::*;

/// Sends a request to `at` with this key; returns the status and the error code.
async fn ask(at: &Addresses, secret: &str) -> (u16, Value) {
    let body = json!({ "model": "emulated", "prompt": "hello", "max_tokens": 1 });
    let request = Request::post(format!("http://{}/v1/completions", at.data))
        .header("content-type", "application/json")
        .header("authorization", format!("Bearer {secret}"))
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap();
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let response = client.request(request).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let answer: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    (status, answer["error"]["code"].clone())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_key_works_and_ends_on_all_replicas() {
    let (dir, _engines, mut replicas, http, at) = started(3, 1).await;

    let made = tokio::sync::Mutex::new(Vec::new());
    let is_made = async || {
        let url = format!("http://{}/admin/v1/keys", at[0].admin);
        let (status, _, answer) = http
            .send(Method::POST, &url, &json!({ "user": "ada", "name": "ci" }))
            .await;
        let is_made = status == StatusCode::OK;
        if is_made {
            made.lock().await.push(answer);
        }
        is_made && made.lock().await.len() == 2
    };
    until("two keys are made", is_made).await;
    let made = made.into_inner();
    let text = |at: usize, name: &str| made[at][name].as_str().unwrap().to_owned();
    let (kept, revoked) = (text(0, "secret"), text(1, "secret"));
    http.agree(&at).await;
    for at in &at {
        assert_eq!(ask(at, &kept).await, (200, Value::Null));
        assert_eq!(ask(at, &revoked).await, (200, Value::Null));
    }

    let url = format!("http://{}/admin/v1/keys/{}", at[2].admin, text(1, "id"));
    let (status, _, answer) = http.send(Method::DELETE, &url, &json!({})).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    http.agree(&at).await;
    let refused = (401, json!("invalid_api_key"));
    for at in &at {
        assert_eq!(ask(at, &revoked).await, refused);
        assert_eq!(ask(at, &kept).await, (200, Value::Null));
    }

    let left = replicas.remove(1).leave().await;
    replicas.insert(1, Replica::again(left));
    http.ready(&at).await;
    http.agree(&at).await;
    assert_eq!(ask(&at[1], &revoked).await, refused);
    assert_eq!(ask(&at[1], &kept).await, (200, Value::Null));
    let (_, users) = http.admin(at[1].admin, "users/ada").await;
    assert_eq!(users["name"], "ada", "{users}");

    // No file contains a secret.
    let random = kept.strip_prefix("qk-").unwrap();
    let mut folders = vec![dir.path().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(bytes) = std::fs::read(&path) {
                let is_there = bytes
                    .windows(random.len())
                    .any(|it| it == random.as_bytes());
                assert!(!is_there, "{}", path.display());
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_spent_on_one_replica_is_spent_on_all() {
    let (_dir, _engines, replicas, http, at) = started(3, 1).await;

    let user = format!("http://{}/admin/v1/users/ada", at[1].admin);
    let budget = json!({ "budget": { "day": 1 } });
    let is_set = async || http.send(Method::PUT, &user, &budget).await.0 == StatusCode::OK;
    until("ada has a budget", is_set).await;
    let keys = format!("http://{}/admin/v1/keys", at[0].admin);
    let (_, _, made) = http
        .send(Method::POST, &keys, &json!({ "user": "ada" }))
        .await;
    let secret = made["secret"].as_str().unwrap();
    http.agree(&at).await;

    // The admitted request costs more than the budget has left.
    assert_eq!(ask(&at[0], secret).await, (200, Value::Null));
    let used_up = (429, json!("insufficient_quota"));
    for replica in &at {
        let is_refused = async || ask(replica, secret).await == used_up;
        until("the budget is used up", is_refused).await;
    }
    // Refused even before the charge is committed.
    let is_charged = async || http.get(&user).await.1["budget_left"]["day"]["left"] == 0;
    until("the budget is charged", is_charged).await;
    // Charges after the first forgiving count, even for requests from before it.
    let forgive = format!("{user}/forgive");
    let is_forgiven = async || {
        let (status, _, answer) = http.send(Method::POST, &forgive, &json!({})).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        http.agree(&at).await;
        ask(&at[2], secret).await == (200, Value::Null)
    };
    until("the budget is there again", is_forgiven).await;
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_isolated_replica_refuses_keys_until_it_reconnects() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 1).await;
    let (mut config, addresses) = replicas.remove(0).leave().await;
    config.users.refuse_stale_keys_after = Duration::from_millis(1);
    let strict = Replica::again((config, addresses));
    http.ready(&at).await;

    let keys = format!("http://{}/admin/v1/keys", at[0].admin);
    let made = tokio::sync::Mutex::new(Value::Null);
    let is_made = async || {
        let (status, _, answer) = http
            .send(Method::POST, &keys, &json!({ "user": "ada" }))
            .await;
        *made.lock().await = answer;
        status == StatusCode::OK
    };
    until("a key is made", is_made).await;
    let made = made.into_inner();
    let secret = made["secret"].as_str().unwrap();
    let is_served = async || ask(&at[0], secret).await == (200, Value::Null);
    until("it is served", is_served).await;

    let mut left = Vec::new();
    for replica in replicas {
        left.push(replica.leave().await);
    }
    let refused = (503, json!("api_keys_stale"));
    let is_refused = async || ask(&at[0], secret).await == refused;
    until("it is refused by who is cut off", is_refused).await;
    let back: Vec<_> = left.into_iter().map(Replica::again).collect();
    until("it is served again", is_served).await;
    for replica in back.into_iter().chain([strict]) {
        replica.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_defaults_apply_on_all_replicas_and_after_a_restart() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 1).await;

    let defaults = format!("http://{}/admin/v1/users/defaults", at[1].admin);
    let one_token = json!({ "weight_milli": 500, "budget": { "day": 1 } });
    let is_set = async || http.send(Method::PUT, &defaults, &one_token).await.0 == StatusCode::OK;
    until("the defaults are set", is_set).await;
    let keys = format!("http://{}/admin/v1/keys", at[0].admin);
    let mut secrets = Vec::new();
    for user in ["ada", "bob"] {
        let body = json!({ "user": user });
        let (_, _, made) = http.send(Method::POST, &keys, &body).await;
        secrets.push(made["secret"].as_str().unwrap().to_owned());
    }
    let user = |name: &str| format!("http://{}/admin/v1/users/{name}", at[2].admin);
    let own = json!({ "budget": { "day": 1_000_000 } });
    let (status, _, answer) = http.send(Method::PUT, &user("bob"), &own).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    http.agree(&at).await;

    // ada has no settings of her own: the first request exceeds the default budget.
    let used_up = (429, json!("insufficient_quota"));
    assert_eq!(ask(&at[0], &secrets[0]).await, (200, Value::Null));
    for replica in &at {
        let is_refused = async || ask(replica, &secrets[0]).await == used_up;
        until("the budget is used up", is_refused).await;
        assert_eq!(ask(replica, &secrets[1]).await, (200, Value::Null));
    }
    let left = replicas.remove(1).leave().await;
    replicas.insert(1, Replica::again(left));
    http.ready(&at).await;
    http.agree(&at).await;
    assert_eq!(ask(&at[1], &secrets[0]).await, used_up);
    let (_, shown) = http.get(&user("ada")).await;
    assert_eq!(
        (&shown["weight_milli"], &shown["config"]["budget"]),
        (&json!(500), &Value::Null),
        "{shown}"
    );

    let more = json!({ "budget": { "day": 1_000_000 } });
    let (status, _, answer) = http.send(Method::PUT, &defaults, &more).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    http.agree(&at).await;
    for replica in &at {
        assert_eq!(ask(replica, &secrets[0]).await, (200, Value::Null));
    }
    let (_, shown) = http.get(&user("ada")).await;
    assert_eq!(shown["weight_milli"], 1000, "{shown}");
    leave(replicas).await;
}
