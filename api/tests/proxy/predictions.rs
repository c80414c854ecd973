//! Predictions about engines' caches, and their consequences.

use api::prompt::{ModelSettings, Tokenizer};

use super::client::{chat, post};
use super::engine::{
    DONE, Engine, Step, chunk, delta, json as answer_json, last_chunk, stream_head,
};
use super::fleet::Fleet;

const REPLY: &str = "I am well, thank you; and how are you yourself on this fine day?";

/// Returns how many blocks the request was predicted to find, and how many its prompt has.
fn prefix(answer: &super::client::Answer) -> (u32, u32) {
    let told = answer.header("x-quorate-prefix").unwrap();
    let (matched, total) = told.split_once('/').unwrap();
    (matched.parse().unwrap(), total.parse().unwrap())
}

/// Starts an engine that answers [`REPLY`], as a stream if requested.
async fn talkative() -> Engine {
    Engine::answering(|request| {
        if request.contains(r#""stream":true"#) {
            let words = REPLY.split_inclusive(' ');
            // One token per word and one per punctuation mark, counted by continuous usage.
            let mut made = 0;
            let words = words.map(|word| {
                made += 1 + u32::from(word.contains([',', ';', '?']));
                chunk(&delta(word, made))
            });
            let role = delta("", 0).replace(r#""content":"""#, r#""role":"assistant","content":"""#);
            let mut steps = vec![stream_head(), chunk(&role)];
            steps.extend(words);
            steps.extend([chunk(DONE), last_chunk()]);
            steps
        } else {
            let body = format!(
                r#"{{"choices":[{{"index":0,"message":{{"role":"assistant","content":"{REPLY}"}}}}]}}"#
            );
            vec![answer_json("200 OK", &body)]
        }
    })
    .await
}

#[tokio::test]
async fn an_answers_tokens_match_in_the_next_turn() {
    for stream in ["", r#","stream":true"#] {
        let engine = talkative().await;
        let models = ModelSettings {
            name: "*".to_owned(),
            tokenizer: Tokenizer::load("tiktoken:o200k_base".parse().unwrap(), None).unwrap(),
            block_size: Some(4),
            pairs: Default::default(),
        };
        let fleet = Fleet::start_cutting(&[&engine], models).await;
        let ask = async |turns: &str| {
            let body = format!(r#"{{"model":"m","messages":[{turns}]{stream}}}"#);
            let request = post("/v1/chat/completions", "", &body);
            let answer = fleet.client().await.ask(request).await;
            assert!(answer.is_complete, "{answer:?}");
            fleet.is_idle().await;
            prefix(&answer)
        };
        let first = r#"{"role":"user","content":"How are you?"}"#;
        let (_, asked) = ask(first).await;
        let reply = format!(r#"{{"role":"assistant","content":"{REPLY}"}}"#);
        let last = r#"{"role":"user","content":"Well."}"#;
        let (found, _) = ask(&format!("{first},{reply},{last}")).await;
        assert!(found > asked + 2, "{found} blocks after {asked}");
    }
}

#[tokio::test]
async fn an_answers_token_ids_match_in_the_next_prompt() {
    for is_stream in [false, true] {
        let usage = r#""usage":{"prompt_tokens":9,"completion_tokens":12}"#;
        let part = |ids: &str| {
            let choice = format!(r#"{{"index":0,"text":"","token_ids":{ids}}}"#);
            format!("data: {{\"choices\":[{choice}]}}\n\n")
        };
        let engine = Engine::start(move |_| {
            if !is_stream {
                let choice =
                    r#"{"index":0,"text":"x","token_ids":[20,21,22,23,24,25,26,27,28,29,30,31]}"#;
                return vec![answer_json(
                    "200 OK",
                    &format!(r#"{{"choices":[{choice}],{usage}}}"#),
                )];
            }
            let last = format!("data: {{\"choices\":[],{usage}}}\n\n");
            let parts = ["[20]", "[21,22,23,24,25]", "[26,27,28,29,30,31]"].map(part);
            let events = parts.iter().map(|it| chunk(it));
            let end = [chunk(&last), chunk(DONE), last_chunk()];
            std::iter::once(stream_head())
                .chain(events)
                .chain(end)
                .collect()
        })
        .await;
        let models = ModelSettings {
            name: "*".to_owned(),
            tokenizer: Tokenizer::load("tiktoken:o200k_base".parse().unwrap(), None).unwrap(),
            block_size: Some(4),
            pairs: Default::default(),
        };
        let fleet = Fleet::start_cutting(&[&engine], models).await;
        let ask = async |ids: std::ops::Range<u32>| {
            let ids: Vec<u32> = ids.collect();
            let body = format!(r#"{{"model":"m","stream":{is_stream},"prompt":{ids:?}}}"#);
            let answer = fleet
                .client()
                .await
                .ask(post("/v1/completions", "", &body))
                .await;
            assert!(answer.is_complete, "{answer:?}");
            fleet.is_idle().await;
            prefix(&answer)
        };
        assert_eq!(ask(11..20).await, (0, 2));
        // The last token of the response has not been computed: 9 + 11 tokens are cached.
        assert_eq!(ask(11..40).await, (5, 7), "{is_stream}");
    }
}

/// Returns a chat of many blocks.
fn long_chat() -> String {
    let content = "all work and no play ".repeat(20);
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{content}"}}]}}"#);
    post("/v1/chat/completions", "", &body)
}

fn counted(details: &str) -> Vec<Step> {
    let body = format!(
        r#"{{"choices":[{{"index":0,"message":{{"role":"assistant","content":"yes"}}}}],"usage":{{"prompt_tokens":100,"completion_tokens":3{details}}}}}"#
    );
    vec![answer_json("200 OK", &body)]
}

#[tokio::test]
async fn a_missing_cached_count_means_zero_if_others_reported() {
    const TOLD: &str = r#","prompt_tokens_details":{"cached_tokens":96}"#;
    const NULL: &str = r#","prompt_tokens_details":null"#;
    for (details, expected) in [
        // Without any report from the engine, the prediction is believed.
        ([NULL, NULL], (false, 200)),
        ([TOLD, NULL], (true, 104)),
        ([TOLD, ""], (true, 104)),
    ] {
        let engine = Engine::start(move |nth| counted(details[nth])).await;
        let fleet = Fleet::start(&[&engine]).await;
        for _ in details {
            let answer = fleet.client().await.ask(long_chat()).await;
            assert_eq!(answer.status, 200);
            fleet.is_idle().await;
        }
        let (told, all) = expected;
        let charge = fleet.charged().await;
        assert_eq!(charge.input_uncached + charge.input_cached, 200);
        if told {
            assert_eq!(charge.input_uncached, all, "{details:?}");
        } else {
            assert!(charge.input_cached > 50, "{charge:?}");
        }
    }
}

#[tokio::test]
async fn cache_skipping_requests_predict_and_teach_nothing() {
    let engine =
        Engine::start(|_| counted(r#","prompt_tokens_details":{"cached_tokens":0}"#)).await;
    let fleet = Fleet::start(&[&engine]).await;
    let plain = long_chat();
    let ask = async |request: &str| {
        let answer = fleet.client().await.ask(request).await;
        fleet.is_idle().await;
        prefix(&answer)
    };
    assert_eq!(ask(&plain).await.0, 0);
    let body = plain.split_once("\r\n\r\n").unwrap().1;
    let body = body.replace(r#"{"model""#, r#"{"prompt_logprobs":1,"model""#);
    let (found, all) = ask(&post("/v1/chat/completions", "", &body)).await;
    assert!(found == 0 && all > 10, "{found} of {all}");
    assert!(ask(&plain).await.0 > 10, "the lease counts all the same");
    let mut registry = prometheus_client::registry::Registry::default();
    fleet.router.metrics().register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let two_requests = "quorate_prefix_prompt_tokens_total{backend=\"e0\"} 200";
    assert!(text.contains(two_requests), "{text}");
}

#[tokio::test]
async fn a_client_gets_its_requested_usage() {
    let end = "data: {\"choices\":[{\"index\":0,\"text\":\"b\",\"finish_reason\":\"stop\"}],\
               \"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\n\n";
    let steps = vec![stream_head(), chunk(end), chunk(DONE), last_chunk()];
    let engine = Engine::always(steps).await;
    let fleet = Fleet::start(&[&engine]).await;
    let asked = r#","stream":true,"stream_options":{"include_usage":true}"#;
    let answer = fleet.client().await.ask(chat(asked)).await;
    assert_eq!(answer.body, format!("{end}{DONE}"));
    let answer = fleet.client().await.ask(chat(r#","stream":true"#)).await;
    assert!(!answer.body.contains("usage"), "{}", answer.body);
}
