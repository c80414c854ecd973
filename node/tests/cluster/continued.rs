//! Streams whose engine stops in the middle: the client receives what one engine would have sent.

use hyper::body::Incoming;

use super::*;

/// Output tokens of a stream: more than a second of the engine's time.
const TOKENS: u64 = 60;

/// Starts engines of one seed, whose output depends on the request only.
async fn equal_engines(count: usize) -> Vec<EngineHandle> {
    let mut engines = Vec::new();
    for _ in 0..count {
        engines.push(
            EmulatedEngine::start(EngineOptions::default())
                .await
                .unwrap(),
        );
    }
    engines
}

async fn send(url: String, body: &Value) -> http::Response<Incoming> {
    let request = Request::post(url)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap();
    let client = Client::builder(TokioExecutor::new()).build_http();
    client.request(request).await.unwrap()
}

/// Reads a stream up to its end, or until it has `events` events.
async fn read(response: &mut http::Response<Incoming>, stream: &mut String, events: usize) {
    while stream.matches("\n\n").count() < events {
        let Some(frame) = response.body_mut().frame().await else {
            return;
        };
        let data = frame.unwrap().into_data().unwrap();
        stream.push_str(std::str::from_utf8(&data).unwrap());
    }
}

/// Returns text, ids, number of roles, finish reasons and last usage of a stream that ends with
/// `[DONE]`.
fn content(stream: &str) -> (String, BTreeSet<String>, usize, Vec<String>, Value) {
    let chunks = stream.strip_suffix("data: [DONE]\n\n").unwrap();
    let (mut text, mut ids, mut roles) = (String::new(), BTreeSet::new(), 0);
    let (mut finishes, mut usage) = (Vec::new(), Value::Null);
    for chunk in chunks.split_terminator("\n\n") {
        let chunk: Value = serde_json::from_str(chunk.strip_prefix("data: ").unwrap()).unwrap();
        assert!(chunk["error"].is_null(), "{chunk}");
        ids.insert(chunk["id"].as_str().unwrap().to_owned());
        let choice = &chunk["choices"][0];
        for part in [&choice["delta"]["content"], &choice["text"]] {
            text.push_str(part.as_str().unwrap_or_default());
        }
        roles += usize::from(choice["delta"]["role"].is_string());
        finishes.extend(choice["finish_reason"].as_str().map(str::to_owned));
        if chunk["choices"] == json!([]) {
            usage = chunk["usage"].clone();
            usage
                .as_object_mut()
                .unwrap()
                .remove("prompt_tokens_details");
        }
    }
    (text, ids, roles, finishes, usage)
}

/// Sends a stream, stops its engine, and compares the rest with another engine's answer.
async fn stopped_engine_is_not_noticed(path: &str, mut body: Value) {
    let (dir, mut engines) = (TempDir::new().unwrap(), equal_engines(2).await);
    let replica = lone_replica(&engines, &dir, |_| {});
    let (http, at) = (Http::new(), replica.addresses);
    http.ready(&[at]).await;
    body["model"] = json!("emulated");
    body["max_tokens"] = json!(TOKENS);
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_usage": true });

    let mut response = send(format!("http://{}{path}", at.data), &body).await;
    assert_eq!(response.status(), StatusCode::OK);
    let mut stream = String::new();
    read(&mut response, &mut stream, 5).await;
    let backend = response.headers()["x-quorate-backend"].to_str().unwrap();
    let engine: usize = backend.strip_prefix("engine-").unwrap().parse().unwrap();
    engines.remove(engine).stop().await;
    read(&mut response, &mut stream, usize::MAX).await;
    let (text, ids, roles, finishes, usage) = content(&stream);

    let mut whole = String::new();
    let mut direct = send(format!("{}{path}", engines[0].url()), &body).await;
    read(&mut direct, &mut whole, usize::MAX).await;
    let (expected, _, expected_roles, expected_finishes, expected_usage) = content(&whole);
    assert_eq!(text, expected, "{path}");
    assert_eq!(ids.len(), 1, "{ids:?}");
    assert_eq!(
        (roles, finishes, &usage),
        (expected_roles, expected_finishes, &expected_usage)
    );
    assert_eq!(usage["completion_tokens"], TOKENS);
    http.quiet(&at).await;
    let (_, users) = http.admin(at.admin, "users").await;
    let total = &users["users"][0]["total"];
    let input = ["input_cached", "input_uncached"].map(|of| total[of].as_u64().unwrap());
    assert_eq!(usage["prompt_tokens"], input.iter().sum::<u64>(), "{users}");
    assert_eq!(total["output"], TOKENS, "{users}");
    // Each start counts, so the stream did go on at the other engine.
    assert_eq!(total["requests"], 2, "{users}");
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_goes_on_when_its_engine_stops() {
    let messages = json!([
        { "role": "system", "content": SYSTEM },
        { "role": "user", "content": "What is \"the\" time?\n" },
    ]);
    stopped_engine_is_not_noticed("/v1/chat/completions", json!({ "messages": messages })).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_text_completion_goes_on_when_its_engine_stops() {
    stopped_engine_is_not_noticed("/v1/completions", json!({ "prompt": SYSTEM })).await;
}
