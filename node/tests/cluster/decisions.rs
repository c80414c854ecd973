//! Explains past requests: decisions of three replicas, and states at past indexes.

use super::backups::{done, failed};
use super::*;

/// Sends a request with an id and a user header.
async fn ask(http: &Http, at: &Addresses, id: &str) -> HeaderMap {
    let body = json!({ "model": "emulated", "max_tokens": 3, "messages": [
        { "role": "user", "content": SYSTEM },
    ] });
    let request = Request::post(format!("http://{}/v1/chat/completions", at.data))
        .header("content-type", "application/json")
        .header("x-request-id", id)
        .header("x-quorate-user", "ada")
        .body(Full::new(Bytes::from(body.to_string())));
    let client = Client::builder(TokioExecutor::new()).build_http();
    let response = client.request(request.unwrap()).await.unwrap();
    assert_eq!(
        response.status(),
        StatusCode::OK,
        "{}",
        http.text(&format!("http://{}/readyz", at.admin)).await
    );
    let (head, body) = response.into_parts();
    body.collect().await.unwrap();
    head.headers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_past_decision_is_found_at_its_replica() {
    let (_dir, _engines, replicas, http, at) = started(3, 2).await;
    for (number, at) in at.iter().enumerate() {
        let id = format!("ask-{}", number + 1);
        let headers = ask(&http, at, &id).await;
        let backend = headers["x-quorate-backend"].to_str().unwrap().to_owned();
        let ended = async || {
            let url = format!("http://{}/admin/v1/decisions/{id}", at.admin);
            http.get(&url).await.1["end"]["outcome"] == "finished"
        };
        until("the request is over", ended).await;
        let record = done(at, &["explain", "--request-id", &id, "--json"]).await;
        let record: Value = serde_json::from_str(&record).unwrap();
        assert_eq!(record["replica"], number + 1);
        assert_eq!(
            (&record["user"], &record["user_source"]),
            (&json!("ada"), &json!("header:x-quorate-user"))
        );
        let decision = &record["decisions"][0];
        assert_eq!(decision["choice"], backend);
        let prefix = format!("{}/{}", decision["matched"], record["blocks_total"]);
        assert_eq!(prefix, headers["x-quorate-prefix"]);
        assert_eq!(decision["index"].to_string(), headers["x-quorate-index"]);
        assert_eq!(decision["outcome"]["usage"]["completion_tokens"], 3);
        let listed = done(at, &["decisions", "--user", "ada", "--backend", &backend]).await;
        assert!(
            listed.contains(&id) && listed.contains("finished"),
            "{listed}"
        );
    }
    let found = done(&at[0], &["explain", "--request-id", "ask-3"]).await;
    assert!(found.contains("decided by replica 3"), "{found}");
    let refused = failed(&at[0], &["explain", "--request-id", "ask-4"]).await;
    assert!(
        refused.contains("replica 1 has no request with this id, nor has any peer"),
        "{refused}"
    );
    leave(replicas).await;
}

/// Returns the ids of the requests that the replica at `at` lists, newest first.
async fn listed(http: &Http, at: &Addresses) -> Vec<String> {
    let (_, page) = http.admin(at.admin, "decisions?limit=1000").await;
    let ids = page["decisions"].as_array().unwrap().iter();
    ids.map(|it| it["request_id"].as_str().unwrap().to_owned())
        .collect()
}

/// Asserts that the replica at `at` shows each of these requests as ended.
async fn shows_all(http: &Http, at: &Addresses, ids: &[String]) {
    for id in ids {
        let url = format!("http://{}/admin/v1/decisions/{id}", at.admin);
        let (status, record) = http.get(&url).await;
        assert_eq!(
            (status, &record["end"]["outcome"]),
            (StatusCode::OK, &json!("finished"))
        );
        assert_eq!(
            record["decisions"][0]["backends"].as_array().unwrap().len(),
            2
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn past_decisions_outlive_their_replica() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 2).await;
    let mut ids = Vec::new();
    for (nth, at) in at.iter().cycle().take(18).enumerate() {
        ids.push(format!("ask-{nth}"));
        ask(&http, at, &ids[nth]).await;
    }
    for at in &at {
        let has_all = async || {
            let listed = listed(&http, at).await;
            ids.iter().all(|id| listed.contains(id))
        };
        until("every replica lists the decisions of all", has_all).await;
    }
    let left = replicas.remove(2).leave().await;
    for at in &at[..2] {
        shows_all(&http, at, &ids).await;
    }
    // What happens while a replica is away reaches it when it is back.
    ids.push("meanwhile".to_owned());
    ask(&http, &at[0], "meanwhile").await;
    replicas.push(Replica::again(left));
    http.ready(&at).await;
    for at in &at {
        let has_it = async || listed(&http, at).await.contains(&ids[18]);
        until("every replica lists what the returned one missed", has_it).await;
    }
    let mut all_left = Vec::new();
    for replica in replicas {
        all_left.push(replica.leave().await);
    }
    let replicas: Vec<_> = all_left.into_iter().map(Replica::again).collect();
    http.ready(&at).await;
    for at in &at {
        shows_all(&http, at, &ids).await;
        let again = listed(&http, at).await;
        assert!(again.len() == ids.len() && ids.iter().all(|id| again.contains(id)));
    }
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_replay_reproduces_a_replicas_state() {
    let (dir, _engines, replicas, http, at) = started(1, 2).await;
    let at = at[0];
    http.chat(&at, "ada", "Is the lamp lit?").await;
    http.quiet(&at).await;
    let past = http.digest(&at).await;
    let policy = format!("http://{}/admin/v1/policy", at.admin);
    let round = json!({ "policy": "round-robin" });
    let (status, ..) = http.send(Method::PUT, &policy, &round).await;
    assert_eq!(status, StatusCode::OK);
    http.chat(&at, "bo", "Is the lamp lit?").await;
    http.quiet(&at).await;
    let backup = dir.path().join("backup");
    let backup = backup.to_str().unwrap();
    done(&at, &["backup", backup]).await;
    let data = dir.path().join("n1");
    let data = data.to_str().unwrap();
    let in_use = failed(&at, &["inspect", "--data-dir", data]).await;
    assert!(in_use.contains("a replica runs on it"), "{in_use}");
    leave(replicas).await;
    let index = past["index"].to_string();
    let replay = ["inspect", "--data-dir", data, "--to", &index];
    let shown = done(&at, &[&replay[..], &["--json"]].concat()).await;
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(
        (&shown["index"], &shown["digest"]),
        (&past["index"], &past["digest"])
    );
    assert_eq!(shown["policy"]["policy"], "cost");
    assert_eq!(shown["backends"].as_array().unwrap().len(), 2);
    let names: Vec<_> = shown["users"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| &it["name"])
        .collect();
    assert_eq!(names, ["body:ada"]);

    let asked = dir.path().join("ask.json");
    let body = json!({ "model": "emulated", "messages": [{ "role": "user", "content": "hi" }] });
    let ask = json!({ "path": "/v1/chat/completions", "headers": { "x-quorate-user": "ada" }, "body": body });
    std::fs::write(&asked, ask.to_string()).unwrap();
    let explain = ["--explain", asked.to_str().unwrap()];
    let told = done(&at, &[&replay[..], &explain].concat()).await;
    assert!(
        told.contains("user     ada (named by header:x-quorate-user)"),
        "{told}"
    );
    assert!(
        told.contains("policy   cost, named by the cluster"),
        "{told}"
    );
    assert!(told.contains("load     unknown"), "{told}");

    let beyond = ["inspect", "--data-dir", data, "--to", "1000000"];
    let refused = failed(&at, &beyond).await;
    assert!(refused.contains("is not in this store"), "{refused}");
    let of_backup = done(&at, &["inspect", "--backup", backup, "--json"]).await;
    let of_backup: Value = serde_json::from_str(&of_backup).unwrap();
    assert_eq!(of_backup["policy"]["policy"], "round-robin");
    let refused = failed(&at, &["inspect", "--backup", backup, "--to", &index]).await;
    assert!(refused.contains("is not in this backup"), "{refused}");
}
