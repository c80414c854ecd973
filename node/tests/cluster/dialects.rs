//! Every dialect of the emulated engine, through a replica: the same text unary and streamed, and
//! usage under each dialect's names, as the router reads it.

use super::*;

/// An endpoint, with JSON pointers into its responses.
struct Dialect {
    path: &'static str,
    body: Value,
    /// Pointers in the usage to prompt tokens, cached tokens and output tokens.
    usage: [&'static str; 3],
    /// Pointer to the text of a unary response.
    text: &'static str,
    /// Pointer to the text of an event.
    delta: &'static str,
    /// Pointer to the usage in the last event that has one.
    last_usage: &'static str,
}

fn dialects() -> Vec<Dialect> {
    let messages = json!([{ "role": "user", "content": SYSTEM }]);
    let (cached, completion) = ("/prompt_tokens_details/cached_tokens", "/completion_tokens");
    vec![
        Dialect {
            path: "/v1/chat/completions",
            body: json!({ "messages": messages, "max_tokens": 3 }),
            usage: ["/prompt_tokens", cached, completion],
            text: "/choices/0/message/content",
            delta: "/choices/0/delta/content",
            last_usage: "/usage",
        },
        Dialect {
            path: "/v1/completions",
            body: json!({ "prompt": format!("Complete this. {SYSTEM}"), "max_tokens": 3 }),
            usage: ["/prompt_tokens", cached, completion],
            text: "/choices/0/text",
            delta: "/choices/0/text",
            last_usage: "/usage",
        },
        Dialect {
            path: "/v1/responses",
            body: json!({ "input": SYSTEM, "instructions": "Sing.", "max_output_tokens": 3 }),
            usage: [
                "/input_tokens",
                "/input_tokens_details/cached_tokens",
                "/output_tokens",
            ],
            text: "/output/0/content/0/text",
            delta: "/delta",
            last_usage: "/response/usage",
        },
        Dialect {
            path: "/v1/messages",
            body: json!({ "messages": messages, "system": "Whisper.", "max_tokens": 3 }),
            usage: [
                "/input_tokens",
                "/cache_read_input_tokens",
                "/output_tokens",
            ],
            text: "/content/0/text",
            delta: "/delta/text",
            last_usage: "/usage",
        },
    ]
}

impl Dialect {
    fn body(&self, is_stream: bool) -> Value {
        let mut body = self.body.clone();
        body["model"] = json!("emulated");
        if is_stream {
            body["stream"] = json!(true);
        }
        if is_stream && self.path.ends_with("completions") {
            body["stream_options"] = json!({ "include_usage": true });
        }
        body
    }

    /// Returns prompt, cached and output tokens.
    fn usage(&self, usage: &Value) -> [u64; 3] {
        let [input, cached, output] = self.usage.map(|name| {
            let number = usage.pointer(name).and_then(Value::as_u64);
            number.unwrap_or_else(|| panic!("{name} in {usage}"))
        });
        // In messages, cached tokens are not part of the input.
        let is_beside = self.path == "/v1/messages";
        [input + if is_beside { cached } else { 0 }, cached, output]
    }
}

/// Returns the JSON of a stream's events.
fn events(stream: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(stream).unwrap();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let json = data.filter(|data| *data != "[DONE]");
    json.map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_dialect_reports_usage_whole_and_streamed() {
    let (dir, engines) = (TempDir::new().unwrap(), engines(1).await);
    let replicas = cluster(1, &engines, &dir);
    let (http, at) = (Http::new(), addresses(&replicas)[0]);
    http.ready(&[at]).await;
    for dialect in dialects() {
        let path = dialect.path;
        let url = format!("http://{}{path}", at.data);
        let mut answers = Vec::new();
        for is_stream in [false, true] {
            let body = dialect.body(is_stream);
            let answer = http.0.send(Method::POST, &url, Some(&body)).await.unwrap();
            assert_eq!(answer.status, StatusCode::OK, "{:?}", answer.body);
            let (text, usage) = if is_stream {
                let events = events(&answer.body);
                let delta =
                    |event: &Value| Some(event.pointer(dialect.delta)?.as_str()?.to_owned());
                let usage = |event: &Value| event.pointer(dialect.last_usage).cloned();
                let usage = events.iter().rev().find_map(usage);
                (events.iter().filter_map(delta).collect(), usage)
            } else {
                let answer: Value = serde_json::from_slice(&answer.body).unwrap();
                let text = answer.pointer(dialect.text).and_then(Value::as_str);
                (text.unwrap().to_owned(), answer.get("usage").cloned())
            };
            let told = dialect.usage(&usage.unwrap());
            assert_eq!(told[2], 3, "{path}");
            // The router read the usage that the engine reported.
            let id = answer.headers["x-request-id"].to_str().unwrap();
            let url = format!("http://{}/admin/v1/decisions/{id}", at.admin);
            let is_read = async || {
                let (_, record) = http.get(&url).await;
                let usage = &record["decisions"][0]["outcome"]["usage"];
                let names = ["prompt_tokens", "cached_tokens", "completion_tokens"];
                names.map(|name| usage[name].as_u64()) == told.map(Some)
            };
            until(&format!("{path} is charged as {told:?}"), is_read).await;
            answers.push((text, told));
        }
        let [(whole, first), (streamed, second)] = &answers[..] else {
            panic!("two answers");
        };
        assert_eq!(whole, streamed, "{path}");
        assert_eq!(whole.len(), 12, "{path}: three words");
        assert_eq!((first[0], first[1]), (second[0], 0), "{path}");
        assert!(second[1] >= 64, "{path}: the prompt is cached: {second:?}");
    }
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embeddings_are_computed_cached_and_equal() {
    let (dir, engines) = (TempDir::new().unwrap(), engines(1).await);
    let replicas = cluster(1, &engines, &dir);
    let (http, at) = (Http::new(), addresses(&replicas)[0]);
    http.ready(&[at]).await;
    let url = format!("http://{}/v1/embeddings", at.data);
    let ask = async |fields: Value| {
        let mut body = json!({ "model": "emulated" });
        let fields = fields.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(fields);
        http.send(Method::POST, &url, &body).await
    };
    let (status, headers, one) = ask(json!({ "input": SYSTEM })).await;
    assert_eq!(status, StatusCode::OK, "{one}");
    let vector = &one["data"][0]["embedding"];
    let numbers = vector.as_array().unwrap().iter();
    let length: f64 = numbers.map(|it| it.as_f64().unwrap().powi(2)).sum();
    assert!((length - 1.0).abs() < 1e-3, "{length}");
    assert_eq!(one["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let id = headers["x-request-id"].to_str().unwrap();
    let url = format!("http://{}/admin/v1/decisions/{id}", at.admin);
    let is_read = async || {
        let (_, record) = http.get(&url).await;
        let usage = &record["decisions"][0]["outcome"]["usage"];
        usage["prompt_tokens"] == one["usage"]["prompt_tokens"] && usage["completion_tokens"] == 0
    };
    until("the prompt is charged", is_read).await;

    let (_, _, both) = ask(json!({ "input": [SYSTEM, "another"], "dimensions": 2 })).await;
    assert_eq!(both["data"][1]["index"], 1);
    assert_eq!(both["data"][1]["embedding"].as_array().unwrap().len(), 2);
    let cached = &both["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert!(cached.as_u64().unwrap() >= 64, "{both}");
    let encoded = ask(json!({ "input": SYSTEM, "encoding_format": "base64" })).await;
    let text = encoded.2["data"][0]["embedding"].as_str().unwrap().len();
    assert_eq!(text, (64 * 4_usize).div_ceil(3) * 4);
    for (fields, part) in [
        (json!({ "input": [] }), "cannot be empty"),
        (json!({ "input": "x", "dimensions": 0 }), "at least 1"),
    ] {
        let (status, _, refused) = ask(fields).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        let message = refused["error"]["message"].as_str().unwrap();
        assert!(message.contains(part), "{message}");
    }
    let (status, _, unknown) = http
        .send(
            Method::POST,
            &format!("http://{}/v1/rerank", at.data),
            &json!({ "model": "emulated", "query": "a", "documents": ["b"] }),
        )
        .await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    let message = unknown["error"]["message"].as_str().unwrap();
    assert!(message.contains("this is an emulated engine"), "{message}");
    leave(replicas).await;
}
