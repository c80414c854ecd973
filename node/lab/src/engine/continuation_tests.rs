//! Tests of outputs that were cut off: an engine goes on where another one stopped.

use http::StatusCode;
use http_body_util::BodyExt;
use serde_json::{Value, json};

use super::fleet::{Engines, EnginesPlan};
use super::offload::OffloadOptions;
use super::tests::{ask, connect, events, send};
use super::{EmulatedEngine, EngineHandle, EngineOptions};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

async fn engine(options: EngineOptions) -> EngineHandle {
    EmulatedEngine::start(EngineOptions { seed: 3, ..options })
        .await
        .unwrap()
}

async fn fast() -> EngineHandle {
    engine(EngineOptions {
        speed: 1000.0,
        ..EngineOptions::default()
    })
    .await
}

/// Returns text, finish reason, prompt tokens and output tokens of an answer.
async fn answer(engine: &EngineHandle, path: &str, body: Value) -> (String, Value, u64, u64) {
    let (status, answer) = ask(engine, "POST", path, body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let choice = &answer["choices"][0];
    let text = choice["text"].as_str();
    let text = text.or(choice["message"]["content"].as_str()).unwrap();
    let count = |name: &str| answer["usage"][name].as_u64().unwrap();
    (
        text.to_owned(),
        choice["finish_reason"].clone(),
        count("prompt_tokens"),
        count("completion_tokens"),
    )
}

/// Returns `body` with what its answer began with, and with a limit that leaves out these words.
fn continued(path: &str, body: &Value, begun: &str, words: u64) -> Value {
    let mut body = body.clone();
    if let Some(most) = body["max_tokens"].as_u64() {
        body["max_tokens"] = (most - words).into();
    }
    if path == TEXT {
        body["prompt"] = format!("{}{begun}", body["prompt"].as_str().unwrap()).into();
        return body;
    }
    let reply = json!({ "role": "assistant", "content": begun });
    body["messages"].as_array_mut().unwrap().push(reply);
    body["add_generation_prompt"] = false.into();
    body["continue_final_message"] = true.into();
    body
}

#[tokio::test]
async fn a_prompt_with_its_first_words_is_followed_by_the_rest_of_the_output() {
    let (one, other) = (fast().await, fast().await);
    for length in 1..=9 {
        let content = "tell me more".split_at(length).0;
        let messages = json!([
            { "role": "system", "content": "be brief" }, { "role": "user", "content": content },
        ]);
        for (path, mut body) in [
            (CHAT, json!({ "model": "emulated", "messages": messages })),
            (TEXT, json!({ "model": "emulated", "prompt": content })),
        ] {
            for (most, words) in [(Some(40), 1), (Some(40), 23), (None, 15)] {
                body["max_tokens"] = most.into();
                let (text, finish, prompt, output) = answer(&one, path, body.clone()).await;
                for trimmed in [0, 1] {
                    let begun = &text[..words * 4 - trimmed];
                    let asked = continued(path, &body, begun, words as u64);
                    let rest = answer(&other, path, asked).await;
                    let words = words as u64;
                    let expected = (
                        text[begun.len()..].to_owned(),
                        finish.clone(),
                        prompt + words,
                        output - words,
                    );
                    assert_eq!(rest, expected, "{path} {body} after {begun:?}");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_continued_answer_finds_the_first_one_cached() {
    let engine = fast().await;
    let content = "x".repeat(600);
    let body = json!({
        "model": "emulated", "max_tokens": 100,
        "messages": [{ "role": "user", "content": content }],
    });
    let (text, _, prompt, _) = answer(&engine, CHAT, body.clone()).await;
    let asked = continued(CHAT, &body, text[..320].trim_end(), 80);
    let (_, rest) = ask(&engine, "POST", CHAT, asked.clone()).await;
    let cached = &rest["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert_eq!(*cached, (prompt + 79) / 32 * 32);
    let (_, prefix) = ask(&engine, "POST", "/debug/prefix", asked.clone()).await;
    assert_eq!(prefix["blocks"], (prompt + 79) / 32);
    let (_, tokens) = ask(&engine, "POST", "/tokenize", asked).await;
    assert_eq!(tokens["count"], prompt + 80);
    engine.stop().await;
}

#[tokio::test]
async fn only_an_assistants_final_message_is_continued() {
    let engine = fast().await;
    let role = |role| json!([{ "role": role, "content": "hello" }]);
    for (messages, begins, expected) in [
        (role("assistant"), json!(false), 200),
        (role("assistant"), json!(true), 400),
        (role("assistant"), Value::Null, 400),
        (role("user"), json!(false), 400),
        (json!([]), json!(false), 400),
    ] {
        let body = json!({
            "model": "emulated", "messages": messages, "add_generation_prompt": begins,
            "continue_final_message": true,
        });
        for path in [CHAT, "/tokenize"] {
            let (status, answer) = ask(&engine, "POST", path, body.clone()).await;
            assert_eq!(status.as_u16(), expected, "{path} {body} {answer}");
        }
    }
}

#[tokio::test]
async fn another_engine_goes_on_with_the_stream_of_a_stopped_one() {
    let dying = engine(EngineOptions::default()).await;
    let addr = dying.addr();
    let mut body = json!({
        "model": "emulated", "prompt": "hello", "max_tokens": 200, "stream": true,
    });
    let mut sender = connect(&dying).await;
    let mut response = send(&mut sender, "POST", TEXT, &body).await;
    let mut received = Vec::new();
    while received.iter().filter(|byte| **byte == b'\n').count() < 6 {
        let frame = response.body_mut().frame().await.unwrap().unwrap();
        received.extend(frame.into_data().unwrap());
    }
    dying.stop().await;
    let next = loop {
        match response.body_mut().frame().await {
            Some(Ok(frame)) => received.extend(frame.into_data().unwrap()),
            end => break end,
        }
    };
    assert!(
        next.is_some_and(|end| end.is_err()),
        "the stream is cut off"
    );
    let received = String::from_utf8(received).unwrap();
    let begun: String = received.split_terminator("\n\n").map(word_of).collect();

    let restarted = engine(EngineOptions {
        listen: addr,
        speed: 1000.0,
        ..EngineOptions::default()
    })
    .await;
    let words = begun.len() as u64 / 4;
    let asked = continued(TEXT, &body, &begun, words);
    let mut sender = connect(&restarted).await;
    let rest = events(send(&mut sender, "POST", TEXT, &asked).await).await;
    let rest: String = rest.iter().map(text_of).collect();
    body["stream"] = false.into();
    let (text, _, _, _) = answer(&restarted, TEXT, body).await;
    assert_eq!(format!("{begun}{rest}"), text);
}

fn word_of(event: &str) -> String {
    text_of(&serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
}

fn text_of(event: &Value) -> String {
    event["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn engines_of_a_demo_cluster_continue_each_others_answers() {
    let plan = EnginesPlan {
        urls: &[],
        count: 2,
        speed: 1000.0,
        blocks: None,
        offload: OffloadOptions::default(),
        has_events: false,
        faults: None,
    };
    let engines = Engines::start(plan).await.unwrap();
    let [one, other] = &engines.emulated[..] else {
        unreachable!("two were asked for")
    };
    let messages = json!([{ "role": "user", "content": "tell me more" }]);
    let body = json!({ "model": "emulated", "messages": messages, "max_tokens": 40 });
    let (text, ..) = answer(one, CHAT, body.clone()).await;
    let (begun, rest) = text.split_at(4 * 7);
    let (found, ..) = answer(other, CHAT, continued(CHAT, &body, begun, 7)).await;
    assert_eq!(found, rest);
    engines.stop().await;
}
