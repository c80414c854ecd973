//! Features that clients written for engines and for model providers rely on.

use std::io::Write;

use api::engines::backends::ProbeSettings;
use api::proxy::{AllowedOrigins, ProxySettings};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use state::command::{BackendSpec, Command};

use super::client::{Answer, chat, post};
use super::engine::{Engine, Step, chunk, delta, json as answer_json, last_chunk, stream_head};
use super::fleet::{Fleet, PATIENT, eventually};

pub(crate) fn get(path: &str, headers: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: router\r\n{headers}\r\n")
}

pub(crate) fn body(answer: &Answer) -> Value {
    serde_json::from_str(&answer.body).expect(&answer.body)
}

pub(crate) fn spec(id: &str, engine: &Engine, models: &[&str]) -> Command {
    Command::PutBackend(BackendSpec {
        id: id.to_owned(),
        models: models.iter().map(ToString::to_string).collect(),
        capacity_blocks: Some(4),
        ..engine.spec(0)
    })
}

#[tokio::test]
async fn a_model_is_found_with_plain_or_encoded_slashes() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    fleet.apply(spec("e0", &engine, &["org/name"]));
    for path in ["org/name", "org%2Fname", "org%2fname", "org%2Fname/"] {
        let path = format!("/v1/models/{path}");
        let answer = fleet.client().await.ask(get(&path, "")).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        assert_eq!(body(&answer)["id"], "org/name");
    }
    let answer = fleet
        .client()
        .await
        .ask(get("/v1/models/org%2Fother", ""))
        .await;
    answer.refuses(404, "model_not_found");
    assert!(answer.body.contains("`org/other`"), "{}", answer.body);
}

/// Starts an engine that lists `m` like this.
async fn listing(model: Value) -> Engine {
    Engine::answering(move |request| {
        let list = json!({"object": "list", "data": [model]}).to_string();
        match request.starts_with("GET /v1/models") {
            true => vec![answer_json("200 OK", &list)],
            false => vec![answer_json("200 OK", "{}")],
        }
    })
    .await
}

#[tokio::test]
async fn models_are_described_with_the_least_context_length() {
    let permission = json!([{"id": "modelperm-1", "allow_sampling": true}]);
    let small = listing(json!({"id": "m", "root": "/weights/m", "parent": "base",
        "max_model_len": 4096, "permission": permission}))
    .await;
    let large = listing(json!({"id": "m", "root": "elsewhere", "max_model_len": 32768})).await;
    let fleet = Fleet::start_probed(&[&large, &small], ProbeSettings::default()).await;
    let listed = async || body(&fleet.client().await.ask(get("/v1/models", "")).await);
    let backends = &fleet.backends;
    eventually("both lists are read", || {
        (0..2).all(|nth| {
            let slot = fleet.backend(nth).slot;
            backends.record(slot).is_some_and(|it| it.listed.is_some())
        })
    })
    .await;
    let list = listed().await;
    let model = &list["data"][0];
    assert_eq!(model["id"], "m", "{list}");
    assert_eq!(model["max_model_len"], 4096, "{list}");
    assert_eq!(model["root"], "elsewhere", "{list}");
    assert_eq!(model["parent"], "base", "{list}");
    assert_eq!(model["permission"], permission, "{list}");
    let one = body(&fleet.client().await.ask(get("/v1/models/m", "")).await);
    assert_eq!(one, *model);
}

#[tokio::test]
async fn prompts_are_truncated_at_the_engines_length() {
    let engine = listing(json!({"id": "m", "max_model_len": 20})).await;
    let fleet = Fleet::start_probed(&[&engine], ProbeSettings::default()).await;
    let slot = fleet.backend(0).slot;
    eventually("its list is read", || {
        let record = fleet.backends.record(slot);
        record.is_some_and(|it| it.listed.is_some())
    })
    .await;
    let blocks = async |fields: &str| {
        let ids: Vec<u32> = (0..40).collect();
        let body = format!(r#"{{"model":"m","prompt":{ids:?}{fields}}}"#);
        let answer = fleet
            .client()
            .await
            .ask(post("/v1/completions", "", &body))
            .await;
        let told = answer.header("x-quorate-prefix").unwrap();
        told.split_once('/').unwrap().1.to_owned()
    };
    let cut_at = |tokens: u32| format!(r#","truncate_prompt_tokens":{tokens}"#);
    let (at_19, at_20) = (blocks(&cut_at(19)).await, blocks(&cut_at(20)).await);
    assert_ne!(at_19, at_20);
    let minus_one = r#","truncate_prompt_tokens":-1"#;
    assert_eq!(blocks(minus_one).await, at_20);
    // vLLM reserves one token for output.
    let with_output = format!(r#"{minus_one},"max_tokens":5"#);
    assert_eq!(blocks(&with_output).await, at_19);
}

#[tokio::test]
async fn messages_api_errors_have_its_format() {
    let fleet = Fleet::start(&[&Engine::dead().await]).await;
    for (model, status, kind) in [
        ("x", 404, "not_found_error"),
        ("m", 503, "overloaded_error"),
    ] {
        let request = format!(r#"{{"model":"{model}","max_tokens":1,"messages":[]}}"#);
        let request = post("/v1/messages", "x-request-id: r-7\r\n", &request);
        let answer = fleet.client().await.ask(request).await;
        assert_eq!(answer.status, status);
        let body = body(&answer);
        assert_eq!(body["type"], "error", "{body}");
        assert_eq!(body["error"]["type"], kind, "{body}");
        assert!(body["error"]["message"].is_string(), "{body}");
        assert_eq!(answer.header("request-id"), Some("r-7"));
        assert_eq!(answer.header("x-request-id"), Some("r-7"));
    }
    let answer = fleet.client().await.ask(chat("")).await;
    assert_eq!(answer.error_code(), "backend_unreachable");
    assert_eq!(answer.header("request-id"), None);
}

#[tokio::test]
async fn an_overlong_prompt_is_refused_in_the_words_clients_match() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    fleet.apply(spec("e0", &engine, &["m"]));
    let prompt = "word ".repeat(1000);
    let request = format!(r#"{{"model":"m","prompt":"{prompt}"}}"#);
    let answer = fleet
        .client()
        .await
        .ask(post("/v1/completions", "", &request))
        .await;
    answer.refuses(400, "context_length_exceeded");
    let told = body(&answer)["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    let rest = told
        .strip_prefix("This model's maximum context length is ")
        .expect(&told);
    let (tokens, rest) = rest
        .split_once(" tokens. However, your request has about ")
        .expect(&told);
    let (asked, _) = rest.split_once(" input tokens.").expect(&told);
    let (tokens, asked): (u64, u64) = (tokens.parse().unwrap(), asked.parse().unwrap());
    assert!(0 < tokens && tokens < asked, "{told}");
    let request = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{prompt}"}}]}}"#);
    let answer = fleet
        .client()
        .await
        .ask(post("/v1/messages", "", &request))
        .await;
    let told = body(&answer)["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(told.starts_with("prompt is too long: "), "{told}");
    assert_eq!(engine.requests().len(), 0);
}

#[tokio::test]
async fn stream_responses_disable_proxy_buffering() {
    let engine = Engine::answering(|request| {
        if request.contains("\"stream\":true") {
            vec![stream_head(), chunk(&delta("a", 1)), last_chunk()]
        } else {
            vec![answer_json("200 OK", "{}")]
        }
    })
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let stream = fleet.client().await.ask(chat(r#","stream":true"#)).await;
    assert_eq!(stream.header("x-accel-buffering"), Some("no"));
    assert_eq!(stream.header("cache-control"), Some("no-cache"));
    let whole = fleet.client().await.ask(chat("")).await;
    assert_eq!(whole.header("x-accel-buffering"), None);
    assert_eq!(whole.header("cache-control"), None);
}

#[tokio::test]
async fn an_engines_cache_control_is_kept() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\ntransfer-encoding: chunked\r\n\r\n";
    let stream = vec![
        Step::Send(head.as_bytes().to_vec()),
        chunk(&delta("a", 1)),
        last_chunk(),
    ];
    let engine = Engine::always(stream).await;
    let fleet = Fleet::start(&[&engine]).await;
    let answer = fleet.client().await.ask(chat(r#","stream":true"#)).await;
    assert_eq!(answer.header("cache-control"), Some("no-store"));
}

#[tokio::test]
async fn encodings_and_websockets_are_refused_with_a_reason() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    for encoding in ["deflate", "br", "br, gzip"] {
        let head = format!("content-encoding: {encoding}\r\n");
        let answer = fleet
            .client()
            .await
            .ask(post("/v1/completions", &head, "x"))
            .await;
        assert_eq!(answer.status, 415, "{encoding}");
        assert_eq!(answer.error_code(), "unsupported_content_encoding");
        assert_eq!(
            answer.header("accept-encoding"),
            Some("gzip, zstd, identity")
        );
        assert!(answer.body.contains(encoding), "{}", answer.body);
    }
    let upgrade = "connection: upgrade\r\nupgrade: WebSocket\r\nsec-websocket-version: 13\r\n";
    let answer = fleet
        .client()
        .await
        .ask(get("/v1/realtime?model=m", upgrade))
        .await;
    answer.refuses(501, "websockets_not_supported");
    // curl sends this by default.
    let upgrade = "connection: upgrade\r\nupgrade: h2c\r\n";
    let answer = fleet.client().await.ask(get("/v1/models", upgrade)).await;
    assert_eq!(answer.status, 200);
    assert_eq!(engine.requests().len(), 0);
}

/// Returns a POST of a chat compressed like `gzip -n`, with the body `packed`.
fn compressed(packed: &[u8]) -> Vec<u8> {
    let length = packed.len();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n\
         content-encoding: gzip\r\ncontent-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), packed].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[tokio::test]
async fn a_gzip_body_reaches_the_engine_decoded() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let fleet = Fleet::start_with(&[&engine], PATIENT, |settings| {
        settings.limits.body_bytes_max = 100_000;
    })
    .await;
    let body = r#"{"model":"m","messages":[{"role":"user","content":"packed"}]}"#;
    let answer = fleet
        .client()
        .await
        .ask(compressed(&gzip(body.as_bytes())))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let requests = engine.requests();
    let (head, seen) = requests[0].split_once("\r\n\r\n").unwrap();
    assert_eq!(seen, body);
    assert!(!head.contains("content-encoding"), "{head}");
    let length = format!("content-length: {}", body.len());
    assert!(head.contains(&length), "{head}");

    // 50 MB of spaces in 50 KB.
    let bomb = gzip(&vec![b' '; 50_000_000]);
    assert!(bomb.len() < 100_000);
    let answer = fleet.client().await.ask(compressed(&bomb)).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (413, "request_too_large")
    );
    let answer = fleet.client().await.ask(compressed(body.as_bytes())).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (400, "invalid_request")
    );
    assert!(answer.body.contains("not valid gzip"), "{}", answer.body);
    assert_eq!(engine.requests().len(), 1);
    fleet.is_idle().await;
}

#[tokio::test]
async fn browsers_are_served_from_allowed_origins() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\naccess-control-allow-origin: https://engine\r\naccess-control-allow-credentials: true\r\ncontent-length: 2\r\n\r\n{}";
    let engine = Engine::always(vec![Step::Send(head.as_bytes().to_vec())]).await;
    let start = async |origins: &[&str]| {
        let origins: Vec<_> = origins.iter().map(ToString::to_string).collect();
        let change = |settings: &mut ProxySettings| {
            settings.cors = AllowedOrigins::new(&origins).unwrap();
        };
        Fleet::start_with(&[&engine], PATIENT, change).await
    };
    let fleet = start(&["https://chat.example"]).await;
    let preflight = |origin: &str| {
        format!(
            "OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: router\r\norigin: {origin}\r\naccess-control-request-method: POST\r\naccess-control-request-headers: authorization,content-type,x-stainless-lang\r\n\r\n"
        )
    };
    let from = |origin: &str| {
        let head = format!("host: router\r\norigin: {origin}\r\n");
        chat("").replacen("host: router\r\n", &head, 1)
    };
    let answer = fleet
        .client()
        .await
        .ask(preflight("https://chat.example"))
        .await;
    assert_eq!(answer.status, 204);
    for (name, value) in [
        ("access-control-allow-origin", "https://chat.example"),
        ("access-control-allow-methods", "GET, POST, DELETE"),
        (
            "access-control-allow-headers",
            "authorization,content-type,x-stainless-lang",
        ),
        ("vary", "origin"),
    ] {
        assert_eq!(answer.header(name), Some(value));
    }
    let answer = fleet.client().await.ask(from("https://chat.example")).await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.header("access-control-allow-origin"),
        Some("https://chat.example")
    );
    assert_eq!(answer.header("access-control-allow-credentials"), None);
    let exposed = answer.header("access-control-expose-headers").unwrap();
    assert!(exposed.contains("x-request-id"), "{exposed}");
    for request in [
        preflight("https://evil.example"),
        from("https://evil.example"),
    ] {
        let answer = fleet.client().await.ask(request).await;
        assert_eq!(answer.header("access-control-allow-origin"), None);
        assert_eq!(answer.header("access-control-allow-methods"), None);
    }
    // Web pages can read errors too.
    let unknown = post("/v1/nothing", "origin: https://chat.example\r\n", "{}");
    let answer = fleet.client().await.ask(unknown).await;
    assert_eq!(answer.status, 404);
    assert_eq!(
        answer.header("access-control-allow-origin"),
        Some("https://chat.example")
    );
    let fleet = start(&["*"]).await;
    let answer = fleet.client().await.ask(from("https://any.example")).await;
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
    let fleet = start(&[]).await;
    let answer = fleet
        .client()
        .await
        .ask(preflight("https://chat.example"))
        .await;
    assert_eq!((answer.status, answer.header("vary")), (405, None));
}

#[tokio::test]
async fn an_ignored_header_is_named_in_the_answer() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let asking = |headers: &str| {
        let head = format!("host: router\r\n{headers}");
        chat("").replacen("host: router\r\n", &head, 1)
    };
    let both = "x-quorate-policy: random\r\nx-quorate-select: parity=0\r\n";
    let strict = Fleet::start_strict(&[&engine]).await;
    let answer = strict.client().await.ask(asking(both)).await;
    assert_eq!(answer.status, 200);
    let ignored = answer.header("x-quorate-ignored");
    assert_eq!(ignored, Some("x-quorate-policy, x-quorate-select"));
    let answer = strict.client().await.ask(chat("")).await;
    assert_eq!(answer.header("x-quorate-ignored"), None);
    let lenient = Fleet::start(&[&engine]).await;
    let answer = lenient.client().await.ask(asking(both)).await;
    assert_eq!(answer.header("x-quorate-ignored"), None);
}

#[tokio::test]
async fn a_trailing_slash_changes_nothing() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let request = chat("").replacen("/completions ", "/completions/?a=1 ", 1);
    assert_eq!(fleet.client().await.ask(request).await.status, 200);
    let seen = engine.requests().remove(0);
    assert!(
        seen.starts_with("POST /v1/chat/completions?a=1 HTTP/1.1"),
        "{seen}"
    );
    let list = fleet.client().await.ask(get("/v1/models/", "")).await;
    assert_eq!(body(&list)["object"], "list");
}

#[tokio::test]
async fn a_request_without_a_model_uses_the_only_one() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine, &engine]).await;
    let request = r#"{"messages":[{"role":"user","content":"hello"}]}"#;
    let request = post("/v1/chat/completions", "", request);
    let answer = fleet.client().await.ask(&request).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let seen = engine.requests().remove(0);
    assert!(!seen.contains("\"model\""), "{seen}");
    let null = post(
        "/v1/chat/completions",
        "",
        r#"{"model":null,"messages":[]}"#,
    );
    assert_eq!(fleet.client().await.ask(null).await.status, 200);
    fleet.apply(spec("e2", &engine, &["other"]));
    let answer = fleet.client().await.ask(&request).await;
    answer.refuses(400, "invalid_request");
    assert!(answer.body.contains("model is missing"), "{}", answer.body);
    let (status, explained) = fleet
        .call(
            "POST",
            "/admin/v1/explain",
            &json!({"path": "/v1/chat/completions/", "body": {"model": "m", "messages": []}}),
        )
        .await;
    assert_eq!(status, 200, "{explained}");
}

/// Returns a form like those with which clients upload audio.
fn upload(path: &str, fields: &[(&str, &str)]) -> String {
    let file = "--xyz\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\nRIFF\r\n--xy\r\n";
    let field = |(name, value): &(&str, &str)| {
        format!("--xyz\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
    };
    let fields: String = fields.iter().map(field).collect();
    let body = format!("{file}{fields}--xyz--\r\n");
    post(
        path,
        "content-type: multipart/form-data; boundary=xyz\r\n",
        &body,
    )
}

#[tokio::test]
async fn audio_uploads_are_forwarded_unchanged() {
    let engine = Engine::always(vec![answer_json("200 OK", "{\"text\":\"hi\"}")]).await;
    let other = Engine::always(vec![answer_json("200 OK", "{\"text\":\"no\"}")]).await;
    let fleet = Fleet::start(&[&engine, &other]).await;
    fleet.apply(spec("e1", &other, &["other"]));
    for path in ["/v1/audio/transcriptions", "/v1/audio/translations"] {
        let request = upload(path, &[("model", "m"), ("language", "en")]);
        let answer = fleet.client().await.ask(&request).await;
        assert_eq!((answer.status, &*answer.body), (200, "{\"text\":\"hi\"}"));
        let seen = engine.requests().pop().unwrap();
        let sent = request.split_once("\r\n\r\n").unwrap().1;
        assert_eq!(seen.split_once("\r\n\r\n").unwrap().1, sent);
        assert!(
            seen.contains("content-type: multipart/form-data; boundary=xyz\r\n"),
            "{seen}"
        );
    }
    for (request, status, code) in [
        (
            upload("/v1/audio/transcriptions", &[("model", "x")]),
            404,
            "model_not_found",
        ),
        (
            upload("/v1/audio/transcriptions", &[]),
            400,
            "invalid_request",
        ),
        (
            upload(
                "/v1/audio/transcriptions",
                &[("model", "m"), ("priority", "-1")],
            ),
            400,
            "invalid_request",
        ),
        (
            post("/v1/audio/transcriptions", "", "{\"model\":\"m\"}"),
            400,
            "invalid_request",
        ),
    ] {
        let answer = fleet.client().await.ask(&request).await;
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (status, code),
            "{request}"
        );
    }
    assert_eq!((engine.requests().len(), other.requests().len()), (2, 0));
    fleet.is_idle().await;
}
