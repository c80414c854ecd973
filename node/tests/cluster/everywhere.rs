//! What all replicas say of one request, and of their states: `explain --everywhere` and
//! `status --verify`.

use super::backups::{done, quorate};
use super::*;

const EXPLAIN: [&str; 7] = [
    "explain", "--prompt", SYSTEM, "--model", "emulated", "--user", "body:ada",
];

/// Runs a command that finds a difference and fails, and returns its output.
async fn differing(at: &Addresses, args: &[&str]) -> String {
    let output = quorate(at, args).await;
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_replicas_refuse_a_user_over_a_limit_as_the_data_plane_does() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 2).await;
    let everywhere = [&EXPLAIN[..], &["--everywhere"]].concat();
    http.agree(&at).await;
    let free = done(&at[1], &everywhere).await;
    assert!(free.contains("3 of 3 replicas at index"), "{free}");
    assert!(free.contains("alike") && !free.contains("429"), "{free}");

    let limit = [
        "user",
        "set",
        "body:ada",
        "--requests",
        "1",
        "--window",
        "1h",
    ];
    done(&at[0], &limit).await;
    http.chat(&at[0], "ada", "Is the lamp lit?").await;
    http.quiet(&at[0]).await;
    http.agree(&at).await;
    let body = json!({ "model": "emulated", "user": "ada", "prompt": SYSTEM });
    let url = format!("http://{}/v1/completions", at[2].data);
    let (status, _, answer) = http.send(Method::POST, &url, &body).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{answer}");

    http.agree(&at).await;
    let as_json = [&everywhere[..], &["--json"]].concat();
    let told: Value = serde_json::from_str(&done(&at[1], &as_json).await).unwrap();
    assert_eq!(told["is_alike"], true, "{told}");
    for id in ["1", "2", "3"] {
        let explained = &told["replicas"][id];
        assert_eq!(explained["refusal"]["status"], 429, "{explained}");
        assert_eq!(explained["refusal"]["code"], answer["error"]["code"]);
        assert_eq!(explained["refusal"]["message"], answer["error"]["message"]);
        assert_eq!(explained["choice"], Value::Null);
        assert_eq!(explained["admission"]["limits"][0]["left"], 0);
    }
    let alone = done(&at[0], &EXPLAIN).await;
    assert!(
        alone.contains("refused with 429 rate_limit_exceeded"),
        "{alone}"
    );
    assert!(alone.contains("0 of 1 requests left"), "{alone}");

    replicas.remove(2).leave().await;
    let partly = differing(&at[0], &everywhere).await;
    assert!(partly.contains("replica 3 did not answer"), "{partly}");
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn states_are_verified_at_one_index_on_all_replicas() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 1).await;
    http.chat(&at[0], "ada", "Is the lamp lit?").await;
    let verified = done(&at[0], &["status", "--verify"]).await;
    assert!(verified.contains("states are equal at index"), "{verified}");
    assert!(verified.contains("on replicas 1, 2, 3"), "{verified}");
    assert!(
        verified.contains("survives the failure of 1 more voter"),
        "{verified}"
    );

    replicas.remove(2).leave().await;
    let partly = differing(&at[0], &["status", "--verify"]).await;
    assert!(partly.contains("replica 3 did not answer"), "{partly}");
    leave(replicas).await;
}
