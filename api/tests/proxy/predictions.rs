//! What is predicted of engines' caches, and what becomes of it.

use api::prompt::{ModelSettings, Tokenizer};

use super::client::post;
use super::engine::{DONE, Engine, chunk, delta, json as answer_json, last_chunk, stream_head};
use super::fleet::Fleet;

const REPLY: &str = "I am well, thank you; and how are you yourself on this fine day?";

/// The blocks that a request was believed to find, and all of its prompt's.
fn prefix(answer: &super::client::Answer) -> (u32, u32) {
    let told = answer.header("x-quorate-prefix").unwrap();
    let (matched, total) = told.split_once('/').unwrap();
    (matched.parse().unwrap(), total.parse().unwrap())
}

/// Answers [`REPLY`], as a stream to who asks for one.
async fn talkative() -> Engine {
    Engine::answering(|request| {
        if request.contains(r#""stream":true"#) {
            let words = REPLY.split_inclusive(' ');
            let words = words.map(|word| chunk(&delta(word, 1)));
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
async fn an_answers_tokens_are_found_in_the_next_turn() {
    for stream in ["", r#","stream":true"#] {
        let engine = talkative().await;
        let models = ModelSettings {
            name: "*".to_owned(),
            tokenizer: Tokenizer::load("tiktoken:o200k_base".parse().unwrap(), None).unwrap(),
            block_size: Some(4),
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
