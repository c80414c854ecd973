//! Records and simulates the load of a real cluster (I126).

use api::files::recording::{Recording, read};

use super::backups::done;
use super::*;

/// Word that is in every prompt and must be in no recording.
const SECRET_WORD: &str = "xylophone";
const USERS: [&str; 3] = ["ada-lovelace", "grace-hopper", "barbara-liskov"];

/// Returns a prompt of `blocks` blocks of 128 bytes that its group shares, and 64 bytes of its own.
fn prompt(group: usize, blocks: usize, number: usize) -> String {
    let mut text = format!("{SECRET_WORD} {group} ").repeat(128 * blocks / 12 + 1);
    text.truncate(128 * blocks);
    text += &format!("{number:064}");
    text
}

/// Sends a prompt as a user; returns prompt tokens and cached tokens.
async fn ask(at: &Addresses, user: &str, prompt: &str) -> [u64; 2] {
    let body = json!({ "model": "emulated", "prompt": prompt, "max_tokens": 3 });
    let request = Request::post(format!("http://{}/v1/completions", at.data))
        .header("content-type", "application/json")
        .header("x-quorate-user", user)
        .header("x-request-id", format!("id-of-{user}"))
        .body(Full::new(Bytes::from(body.to_string())));
    let client = Client::builder(TokioExecutor::new()).build_http();
    let response = client.request(request.unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let answer = response.into_body().collect().await.unwrap().to_bytes();
    let answer: Value = serde_json::from_slice(&answer).unwrap();
    let usage = &answer["usage"];
    [
        usage["prompt_tokens"].as_u64().unwrap(),
        usage["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap(),
    ]
}

/// Waits until all replicas know what one has routed.
async fn known(http: &Http, here: &Addresses, at: &[Addresses]) {
    let body = json!({ "model": "emulated", "prompt": "who knows?" });
    let would_be = json!({ "path": "/v1/completions", "headers": {}, "body": body });
    let url = format!("http://{}/admin/v1/explain", here.admin);
    until("all that was routed is applied", async || {
        let (_, _, explained) = http.send(Method::POST, &url, &would_be).await;
        explained["overlay_runs"] == 0
    })
    .await;
    // The next replica must have heard that the request is over.
    for at in at {
        http.quiet(at).await;
    }
    http.agree(at).await;
}

/// Sends requests to all replicas in turn, each once all know where the previous one went; returns
/// the sums of what engines reported.
async fn ask_all(http: &Http, at: &[Addresses], requests: usize) -> [u64; 2] {
    let mut told = [0, 0];
    for number in 0..requests {
        let here = &at[number % at.len()];
        let (group, user) = (number % 4, USERS[number % USERS.len()]);
        let [tokens, cached] = ask(here, user, &prompt(group, 6 + group, number)).await;
        told = [told[0] + tokens, told[1] + cached];
        known(http, here, at).await;
    }
    told
}

fn hit_rate([tokens, cached]: [u64; 2]) -> f64 {
    cached as f64 / tokens as f64
}

/// Waits until all `requests` of a recording have ended. Returns its text and its content.
async fn whole(http: &Http, at: &Addresses, path: &str, requests: usize) -> (String, Recording) {
    let url = format!("http://{}{path}", at.admin);
    let recorded = async || {
        let text = http.text(&url).await;
        let recording = read(&text).unwrap();
        (text, recording)
    };
    until("all requests are over", async || {
        let (_, recording) = recorded().await;
        let ended = recording.requests.iter().filter(|it| it.end.is_some());
        ended.count() == requests
    })
    .await;
    recorded().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_simulated_recording_has_the_hits_its_engines_reported() {
    let (_dir, _engines, replicas, http, at) = started(3, 2).await;
    let told = ask_all(&http, &at, 24).await;
    assert!(told[1] > 0, "{told:?}");
    for at in &at {
        whole(&http, at, "/admin/v1/recordings/last", 8).await;
    }
    let urls: Vec<String> = at.iter().map(|at| format!("http://{}", at.admin)).collect();
    let urls = urls.join(",");
    // One at a time, as recorded.
    let args = [
        "simulate",
        "--from-decisions",
        &urls,
        "--rate",
        "0.5",
        "--json",
    ];
    let asked = [&args[..], &["--policy", "cost,prefix-cache"]].concat();
    let simulated = done(&at[0], &asked).await;
    let simulated: Value = serde_json::from_str(&simulated).unwrap();
    assert_eq!(simulated["recorded"]["requests"], 24);
    assert_eq!(simulated["recorded"]["hit_rate"], hit_rate(told));
    let runs = simulated["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 2);
    for run in runs {
        assert_eq!((&run["ok"], &run["faults"]), (&json!(24), &json!([])));
        assert_eq!(run["prompt_tokens"], told[0]);
        assert_eq!(run["hit_rate"], hit_rate(told), "{}", run["label"]);
        assert_eq!(run["by_backend"].as_array().unwrap().len(), 2);
    }
    let sizes = ["--backends", "1,3", "--concurrency", "1,adaptive"];
    let sizes = [&args[..], &sizes[..]].concat();
    let simulated: Value = serde_json::from_str(&done(&at[0], &sizes).await).unwrap();
    let labels = simulated["runs"].as_array().unwrap().iter();
    let labels: Vec<_> = labels.map(|run| run["label"].as_str().unwrap()).collect();
    assert_eq!(
        labels,
        [
            "N=1 limit=1",
            "N=1 limit=adaptive",
            "N=3 limit=1",
            "N=3 limit=adaptive"
        ]
    );

    let url = format!("http://{}/admin/v1/policy/what-if", at[0].admin);
    let (status, _, answer) = http.send(Method::POST, &url, &json!({})).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(
        (&answer["decisions"], &answer["left_out"]),
        (&json!(8), &json!(0))
    );
    let sum = |it: &Value| {
        let by_backend = it["by_backend"].as_object().unwrap().values();
        by_backend.filter_map(Value::as_u64).sum::<u64>()
    };
    assert_eq!(sum(&answer["decided"]), 8);
    let policies = answer["policies"].as_array().unwrap();
    assert!(policies.iter().all(|it| sum(it) == 8), "{answer}");
    assert_eq!(
        (&policies[0]["is_live"], &policies[0]["elsewhere"]),
        (&json!(true), &json!(0))
    );
    let cost = &policies[0]["predicted_hit_rate"];
    assert_eq!(*cost, answer["decided"]["predicted_hit_rate"]);
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recording_is_anonymous_and_ends_when_full() {
    let (_dir, _engines, replicas, http, at) = started(1, 1).await;
    let url = format!("http://{}/admin/v1/recordings", at[0].admin);
    let start = async |spec: Value| {
        let (status, _, begun) = http.send(Method::POST, &url, &spec).await;
        assert_eq!(status, StatusCode::OK, "{begun}");
        begun["path"].as_str().unwrap().to_owned()
    };
    let one = start(json!({ "requests": 3, "salt": "s" })).await;
    ask_all(&http, &at, 4).await;
    let (text, first) = whole(&http, &at[0], &one, 3).await;
    assert_eq!(
        (&*first.head.ended_by, first.head.replicas),
        ("requests", vec![1])
    );
    assert_eq!(first.head.backends[0].id, "engine-0");
    for hidden in USERS.into_iter().chain([SECRET_WORD, "id-of"]) {
        assert!(!text.contains(hidden), "{hidden} in {text}");
    }
    let (_, users) = http.admin(at[0].admin, "users").await;
    for user in users["users"].as_array().unwrap() {
        assert!(!text.contains(user["key"].as_str().unwrap()), "{user}");
    }
    let request = &first.requests[0];
    assert_eq!((request.blocks.len(), request.block_tokens), (6, 32));
    let report = request.report().unwrap();
    assert_eq!(
        (report.prompt_tokens, report.cached_tokens),
        (Some(208), Some(0))
    );

    // The same salt gives the same names, another salt gives others.
    let asked_again = async |spec: Value| {
        let path = start(spec).await;
        ask_all(&http, &at, 1).await;
        let (_, recording) = whole(&http, &at[0], &path, 1).await;
        recording
    };
    let again = asked_again(json!({ "requests": 1, "salt": "s" })).await;
    assert_eq!(again.requests[0].blocks, request.blocks);
    assert_eq!(again.requests[0].user, request.user);
    let other = asked_again(json!({ "requests": 1, "salt": "t" })).await;
    assert_ne!(other.requests[0].blocks[0], request.blocks[0]);
    assert_ne!(other.requests[0].user, request.user);
    start(json!({ "bytes": 4096 })).await;
    ask_all(&http, &at, 8).await;
    let (_, list) = http.get(&url).await;
    let full = &list["recordings"][0];
    assert_eq!(full["ended_by"], "bytes", "{full}");
    assert!(full["bytes"].as_u64() >= Some(4096), "{full}");
    leave(replicas).await;
}

/// Simulates a file, and checks that a damaged one is reported with its line.
async fn simulates(at: &Addresses, out: &str) {
    let simulated = done(at, &["simulate", "--from-decisions", out, "--rate", "0.5"]).await;
    assert!(
        simulated.contains("recorded: 8 requests for emulated by cost"),
        "{simulated}"
    );
    let damaged = std::fs::read_to_string(out)
        .unwrap()
        .replace("\"tokens\":", "\"tokns\":");
    std::fs::write(out, damaged).unwrap();
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_quorate"))
        .args(["simulate", "--from-decisions", out])
        .output();
    let output = output.await.unwrap();
    let why = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{why}");
    assert!(
        why.contains(&format!(
            "{out}:2: expected a request: missing field `tokens`"
        )),
        "{why}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_record_command_merges_all_replicas_into_one_file() {
    let (dir, _engines, replicas, http, at) = started(2, 2).await;
    let file = dir.path().join("asked.jsonl");
    let out = file.to_str().unwrap().to_owned();
    let urls = format!("http://{},http://{}", at[0].admin, at[1].admin);
    let args = [
        "record",
        "--seconds",
        "3600",
        "--requests",
        "4",
        "--out",
        &out,
    ];
    let args: Vec<&str> = args
        .into_iter()
        .chain(["--admin", &urls, "--only"])
        .collect();
    let recorded = async {
        let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_quorate"))
            .args(&args)
            .output();
        output.await.unwrap()
    };
    let asking = async {
        for at in &at {
            let url = format!("http://{}/admin/v1/recordings", at.admin);
            until("it records", async || {
                let (_, list) = http.get(&url).await;
                list["recordings"][0]["is_running"] == true
            })
            .await;
        }
        ask_all(&http, &at, 8).await
    };
    let (output, told) = tokio::join!(recorded, asking);
    let told_of = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{told_of}");
    let recording = read(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(recording.head.replicas, [1, 2]);
    assert_eq!(recording.requests.len(), 8);
    assert!(recording.requests.is_sorted_by_key(|it| it.at_ms));
    let list = http
        .text(&format!("http://{}/admin/v1/recordings", at[1].admin))
        .await;
    assert_eq!(list, r#"{"recordings":[]}"#);

    simulates(&at[0], &out).await;
    assert!(hit_rate(told) > 0.0);
    leave(replicas).await;
}
