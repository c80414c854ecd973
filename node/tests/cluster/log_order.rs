//! Requests that a client orders by the log: each names the index of the answer before it, and is
//! sent at once through another replica.

use std::time::Duration;

use super::*;

const MIN_INDEX: &str = "x-quorate-min-index";

async fn ask(at: &Addresses, prompt: &str, min_index: &str) -> (StatusCode, HeaderMap) {
    let body = json!({ "model": "emulated", "max_tokens": 1, "prompt": prompt });
    let request = Request::post(format!("http://{}/v1/completions", at.data))
        .header("content-type", "application/json")
        .header(MIN_INDEX, min_index)
        .body(Full::new(Bytes::from(body.to_string())));
    let client = Client::builder(TokioExecutor::new()).build_http();
    let response = client.request(request.unwrap()).await.unwrap();
    let (head, body) = response.into_parts();
    body.collect().await.unwrap();
    (head.status, head.headers)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_minimum_index_orders_a_request_at_any_replica() {
    let (_dir, _engines, replicas, _http, at) = started_with(3, 2, |config| {
        config.sections.routing.min_index_wait = Duration::from_secs(30);
        // The cost policy may leave a short prompt's holder for an engine that looks less busy.
        config.policy = PolicyConfig::PrefixCache(Default::default());
    })
    .await;
    for turn in 0..6 {
        let prompt = format!("{turn}: {SYSTEM}").repeat(4);
        let (status, first) = ask(&at[turn % 3], &prompt, "0").await;
        assert_eq!(status, StatusCode::OK);
        let index = first["x-quorate-index"].to_str().unwrap();
        let (_, next) = ask(&at[(turn + 1) % 3], &(prompt + " Go on."), index).await;
        let known = |headers: &HeaderMap| headers["x-quorate-prefix"].to_str().unwrap().to_owned();
        assert!(
            matched(&next) >= 2,
            "{} after {}",
            known(&next),
            known(&first)
        );
        assert_eq!(next["x-quorate-backend"], first["x-quorate-backend"]);
    }
    let (status, _) = ask(&at[0], SYSTEM, "soon").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    leave(replicas).await;
}
