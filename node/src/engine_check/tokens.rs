//! Checks whether the engine tokenizes, and whether the given tokenizer returns the same ids.

use std::sync::Arc;

use api::engines::backends::EngineKind;
use api::prompt::{Tokenizer, tokenize_question};
use serde_json::{Value, json};

use super::client::{EngineClient, refusal};
use super::{CheckOutcome, CheckResult};

const NAME: &str = "tokenizer";
const CHAT: &str = "/v1/chat/completions";

/// Returns the requests whose tokens are compared, each with a name, a path and a body.
fn shapes(model: &str) -> Vec<(&'static str, &'static str, Value)> {
    let chat = |name, messages: Value| (name, CHAT, json!({"model": model, "messages": messages}));
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    let tool = json!({"type": "function", "function": {"name": "look", "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}});
    let call = json!({"id": "c1", "type": "function",
        "function": {"name": "look", "arguments": "{\"at\": \"home\"}"}});
    let with_tools =
        |messages: Value| json!({"model": model, "messages": messages, "tools": [tool]});
    vec![
        (
            "text",
            "/v1/completions",
            json!({"model": model, "prompt": "Hello, world. 你好\r\n"}),
        ),
        chat("chat", user(json!("How are you, and who?"))),
        chat(
            "system",
            json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]),
        ),
        chat(
            "turns",
            json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."},
                {"role": "user", "content": "And?"}]),
        ),
        chat(
            "developer",
            json!([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]),
        ),
        chat(
            "parts",
            user(json!([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])),
        ),
        chat(
            "special tokens",
            user(json!("<|im_start|><s></s><|endoftext|>")),
        ),
        ("tools", CHAT, with_tools(user(json!("Look at home")))),
        (
            "tool calls",
            CHAT,
            with_tools(json!([{"role": "user", "content": "Look"},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"}])),
        ),
        (
            "continued",
            CHAT,
            json!({"model": model, "add_generation_prompt": false, "continue_final_message": true,
                "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good"}]}),
        ),
    ]
}

/// Returns the engine's token ids for the prompt of a request, or why they are unknown.
async fn of_engine(client: &EngineClient, question: &[u8]) -> Result<Vec<u32>, String> {
    let question: Value = serde_json::from_slice(question).map_err(|it| it.to_string())?;
    let answer = client.post("/tokenize", &question).await;
    let answer = answer.map_err(|error| error.to_string())?;
    if !answer.status.is_success() {
        return Err(refusal(&answer));
    }
    let answer = answer.json().map_err(|error| error.to_string())?;
    let ids: Option<Vec<u32>> = serde_json::from_value(answer["tokens"].clone()).ok();
    match ids {
        Some(ids) if ids.is_empty() => Err("no tokens for a text".to_owned()),
        Some(ids) => Ok(ids),
        None => Err("no list of token ids".to_owned()),
    }
}

pub(super) async fn check(
    client: &EngineClient,
    model: &str,
    kind: Option<EngineKind>,
    tokenizer: Option<&Arc<Tokenizer>>,
) -> CheckResult {
    let (mut answered, mut equal) = (0, 0);
    let (mut refused, mut differing) = (Vec::new(), Vec::new());
    for (name, path, body) in shapes(model) {
        let body = body.to_string();
        let Some(question) = tokenize_question(path, model, body.as_bytes(), kind) else {
            continue;
        };
        match of_engine(client, &question).await {
            Ok(ids) => {
                answered += 1;
                let ours = tokenizer.map(|it| it.encode_request_for(path, body.as_bytes(), kind));
                match ours {
                    None => {}
                    Some(Some(ours)) if ours == ids => equal += 1,
                    Some(_) => differing.push(name),
                }
            }
            Err(why) => refused.push((name, why)),
        }
    }
    if answered == 0 {
        let why = refused
            .first()
            .map_or_else(String::new, |(_, why)| why.clone());
        let therefore = "tokenizer = \"engine\" falls back to characters: use huggingface:FILE";
        return CheckResult::new(NAME, CheckOutcome::No, why, therefore);
    }
    let mut found = format!("{answered} of {} shapes", answered + refused.len());
    if !refused.is_empty() {
        let names: Vec<_> = refused.iter().map(|(name, _)| *name).collect();
        found += &format!(", not: {}", names.join(", "));
    }
    let Some(tokenizer) = tokenizer else {
        let therefore = "tokenizer = \"engine\" works; with --tokenizer ids are compared";
        return CheckResult::new(NAME, CheckOutcome::Yes, found, therefore);
    };
    found += &format!("; {equal} equal to {}", tokenizer.spec());
    if differing.is_empty() {
        let therefore = "that tokenizer gives the engine's ids: exact blocks without asking";
        return CheckResult::new(NAME, CheckOutcome::Yes, found, therefore);
    }
    found += &format!(", others: {}", differing.join(", "));
    let therefore = "prompts of the other shapes are predicted wrong with that tokenizer: check \
                     file and chat template, or use tokenizer = \"engine\"";
    CheckResult::new(NAME, CheckOutcome::Partly, found, therefore)
}
