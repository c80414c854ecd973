//! A user's limit on concurrent requests holds over all replicas (I163).

use futures_util::future::join_all;
use hyper::body::Incoming;

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

/// Sends four requests of `user` to each replica at once. Returns the streams that began.
async fn burst(at: &[Addresses], user: &str) -> Vec<Incoming> {
    let asked = (0..4).flat_map(|_| at.iter().map(|at| stream(at, user)));
    let mut began = Vec::new();
    for (status, body) in join_all(asked).await {
        match status {
            StatusCode::OK => began.push(body),
            status => assert_eq!(status, StatusCode::TOO_MANY_REQUESTS),
        }
    }
    began
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
    let first = burst(&at, "ada").await;
    assert_eq!(first.len(), 2);
    drop(first);
    let mut open = Vec::new();
    for user in ["bo", "cy", "di"] {
        let began = burst(&at[..2], user).await;
        assert_eq!(began.len(), 2, "{user}");
        open.push(began);
    }
    // The issuer of some of them goes; what runs at the others still counts.
    let left = replicas.remove(2).leave().await;
    for user in ["bo", "cy", "di"] {
        let more = burst(&at[..2], user).await;
        assert!(more.is_empty(), "{user}: {}", more.len());
    }
    replicas.push(Replica::again(left));
    http.ready(&at).await;
    drop(open);
    let is_free = async || burst(&at, "ada").await.len() == 2;
    until("a user whose streams have ended starts others", is_free).await;
    leave(replicas).await;
}
