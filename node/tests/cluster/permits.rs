//! A user's limit on concurrent requests holds over all replicas (I163).

use std::sync::Mutex;

use futures_util::future::join_all;
use hyper::body::Incoming;
use tokio_util::task::AbortOnDropHandle;

use super::*;

/// Asks `at` for a stream that does not end by itself. Returns the status and the open stream.
async fn stream(at: &Addresses, user: &str) -> (StatusCode, Incoming) {
    let body = json!({
        "model": "emulated", "prompt": "hello", "max_tokens": 100_000, "stream": true,
    });
    let request = Request::post(format!("http://{}/v1/completions", at.data))
        .header("content-type", "application/json")
        .header("x-quorate-user", user)
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap();
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let (head, body) = client.request(request).await.unwrap().into_parts();
    (head.status, body)
}

/// Number of requests that were judged without the user's issuer.
async fn unconfirmed(http: &Http, at: &[Addresses]) -> u64 {
    let mut sum = 0;
    for at in at {
        let page = http.metrics(at.admin).await;
        let of = |line: &str| {
            line.strip_prefix("quorate_admission_unconfirmed_permits_total ")?
                .parse()
                .ok()
        };
        sum += page.lines().find_map(of).unwrap_or(0_u64);
    }
    sum
}

/// Sends four requests of `user` to each replica at once. Returns the streams that began, which are
/// read until they are dropped.
async fn burst(http: &Http, at: &[Addresses], user: &str) -> Vec<AbortOnDropHandle<()>> {
    let before = unconfirmed(http, at).await;
    let asked = (0..4).flat_map(|_| at.iter().map(|at| stream(at, user)));
    let mut began = Vec::new();
    for (status, mut body) in join_all(asked).await {
        match status {
            StatusCode::OK => began.push(AbortOnDropHandle::new(tokio::spawn(async move {
                while let Some(Ok(_)) = body.frame().await {}
            }))),
            status => assert_eq!(status, StatusCode::TOO_MANY_REQUESTS),
        }
    }
    // A replica that is kept from running for a second decides by the replicated counts.
    let are_confirmed = unconfirmed(http, at).await == before;
    assert!(
        began.len() <= 2 || !are_confirmed,
        "{user}: {}",
        began.len()
    );
    began
}

/// Sends bursts of `user` until one of them gets the two permits.
async fn full_burst(http: &Http, at: &[Addresses], user: &str) -> Vec<AbortOnDropHandle<()>> {
    let full = Mutex::new(Vec::new());
    let is_full = async || {
        let began = burst(http, at, user).await;
        let is_full = began.len() == 2;
        if is_full {
            *full.lock().unwrap() = began;
        }
        is_full
    };
    until("a burst gets both permits", is_full).await;
    full.into_inner().unwrap()
}

async fn limit(http: &Http, at: &Addresses, user: &str, concurrent: u32) {
    let url = format!("http://{}/admin/v1/users/{user}", at.admin);
    let limits = json!({ "limits": { "concurrent": concurrent } });
    let is_set = async || http.send(Method::PUT, &url, &limits).await.0 == StatusCode::OK;
    until("the limit is set", is_set).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_on_all_replicas_runs_no_more_than_the_users_limit() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 2).await;
    for user in ["ada", "bo", "cy", "di"] {
        limit(&http, &at[0], user, 2).await;
    }
    http.agree(&at).await;
    drop(full_burst(&http, &at, "ada").await);
    let mut open = Vec::new();
    for user in ["bo", "cy", "di"] {
        open.extend(full_burst(&http, &at[..2], user).await);
    }
    // The issuer of some of them goes; what runs at the others still counts.
    let left = replicas.remove(2).leave().await;
    for user in ["bo", "cy", "di"] {
        let before = unconfirmed(&http, &at[..2]).await;
        let more = burst(&http, &at[..2], user).await;
        let are_confirmed = unconfirmed(&http, &at[..2]).await == before;
        let are_open = open.iter().all(|stream| !stream.is_finished());
        assert!(
            more.is_empty() || !are_confirmed || !are_open,
            "{user}: {}",
            more.len()
        );
    }
    replicas.push(Replica::again(left));
    http.ready(&at).await;
    drop(open);
    // A user whose streams have ended starts others.
    drop(full_burst(&http, &at, "bo").await);
    leave(replicas).await;
}
