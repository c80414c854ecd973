//! Scores depend on the log: at one index every replica explains a request with the same numbers,
//! whichever replicas served earlier requests, and also after a restart.

use super::*;

/// Fields of an explanation that are a replica's own: updates not in the log yet, results of its
/// own probes and connections, and turns (`docs/reference/policies.md`).
const OWN: [&str; 7] = [
    "circuit",
    "engine_running",
    "engine_waiting",
    "kv_usage_percent",
    "outbox",
    "overlay_runs",
    "turn",
];

fn without_own(explained: &mut Value) {
    match explained {
        Value::Object(members) => {
            members.retain(|name, _| !OWN.contains(&name.as_str()));
            members.values_mut().for_each(without_own);
        }
        Value::Array(values) => values.iter_mut().for_each(without_own),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Lengths of the prompts sent to each replica. The emulated engine counts four bytes per token and
/// rounds up, so the first replica sees fewer bytes per token than the others.
const SENT_BYTES: [usize; 3] = [513, 1024, 2048];
/// Length of the explained prompt, which is long enough to expose a different estimate, and its
/// number of tokens at four bytes each.
const EXPLAINED_BYTES: usize = 9000;
const TOKENS_UNLEARNT: usize = EXPLAINED_BYTES / 4;

/// Returns a prompt of `bytes` bytes. Prompts with the same number share their beginning.
fn text(number: usize, bytes: usize) -> String {
    let mut text = format!("{number} ").repeat(bytes);
    text.truncate(bytes);
    text
}

async fn explain(http: &Http, at: &Addresses, prompt: &str) -> Value {
    let body = json!({ "model": "emulated", "prompt": prompt });
    let would_be = json!({ "path": "/v1/completions", "headers": {}, "body": body });
    let url = format!("http://{}/admin/v1/explain", at.admin);
    let (status, _, explained) = http.send(Method::POST, &url, &would_be).await;
    assert_eq!(status, StatusCode::OK, "{explained}");
    explained
}

/// Explains `prompt` on all replicas at one index until they agree. Scores include an engine's last
/// figures, which replicas probe at different times: they differ after load until all probes see
/// its end.
async fn alike(http: &Http, replicas: &[Addresses], prompt: &str) -> Value {
    let seen = tokio::sync::Mutex::new(Value::Null);
    let at_one_index = async || {
        let mut all = Vec::new();
        for at in replicas {
            all.push(explain(http, at, prompt).await);
        }
        let is_told = all.iter().all(|it| it["overlay_runs"] == 0);
        all.iter_mut().for_each(without_own);
        let is_alike = all.iter().all(|it| *it == all[0]);
        *seen.lock().await = all.swap_remove(0);
        is_told && is_alike
    };
    until("all replicas explain alike at one index", at_one_index).await;
    seen.into_inner()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_explain_equally_before_and_after_a_restart() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 2).await;

    let is_learnt = async |rounds: usize| {
        for number in 0..rounds {
            let sent = at.iter().zip(SENT_BYTES).map(async |(at, bytes)| {
                let prompt = text(number % 40, bytes);
                let body = json!({ "model": "emulated", "prompt": prompt, "max_tokens": 2 });
                let url = format!("http://{}/v1/completions", at.data);
                let (status, _, answer) = http.send(Method::POST, &url, &body).await;
                assert_eq!(status, StatusCode::OK, "{answer}");
            });
            futures_util::future::join_all(sent).await;
        }
        let explained = explain(&http, &at[1], &text(1, EXPLAINED_BYTES)).await;
        explained["tokens"] != TOKENS_UNLEARNT
    };
    is_learnt(500).await;
    until("bytes per token are learnt", async || is_learnt(10).await).await;
    http.quiet(&at[0]).await;

    let prompts: Vec<String> = (0..6).map(|n| text(n, EXPLAINED_BYTES)).collect();
    let mut before = Vec::new();
    for prompt in &prompts {
        before.push(alike(&http, &at, prompt).await);
    }
    let scores = before
        .iter()
        .flat_map(|it| it["backends"].as_array().unwrap());
    assert!(scores.clone().any(|it| it["score"] != 0), "{before:?}");

    let gone = replicas.remove(1).leave().await;
    replicas.insert(1, Replica::again(gone));
    http.ready(&at).await;
    for (prompt, before) in prompts.iter().zip(&before) {
        let after = alike(&http, &at, prompt).await;
        // A replica that leaves reports everything it has learnt.
        let [now, then] = [&after, before].map(|it| it["tokens"].as_u64().unwrap());
        assert!(now.abs_diff(then) <= then / 100, "{then} before: {after}");
        assert_ne!(after["tokens"], TOKENS_UNLEARNT, "{after}");
    }
    leave(replicas).await;
}
