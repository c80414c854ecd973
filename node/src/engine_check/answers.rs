//! Checks of responses: usage, cached tokens, streams, whether an answer is continued, and whether a
//! disconnect ends the work.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api::engines::backends::EngineMetrics;
use http::Method;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use super::client::{EngineClient, refusal};
use super::facts;
use super::{CheckOutcome, CheckResult};

const CHAT: &str = "/v1/chat/completions";
/// Word of the answer that the engine continues. With the space before it, it is one token in common
/// vocabularies.
const WORD: &str = "one";
/// Number of words of that answer.
const WORDS: u64 = 16;
/// Number of tokens by which an open message may differ from that: less than a further message's frame.
const TOKENS_OFF_MAX: u64 = 1;
/// Interval between reads of the engine's counters after a disconnect.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Returns a chat request of a few hundred tokens that no cache can contain yet.
pub(super) fn fresh_chat(model: &str, max_tokens: u32) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_nanos();
    let story = "Once there was a router that asked an engine what it could do. ".repeat(40);
    let content = format!("Check {now}. {story}Go on.");
    json!({
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "messages": [{"role": "user", "content": content}],
    })
}

/// Checks an engine's responses with and without streaming.
pub(super) async fn checks(client: &EngineClient, model: &str) -> Vec<CheckResult> {
    let chat = fresh_chat(model, 8);
    let first = match ask(client, &chat).await {
        Ok(answer) => answer,
        Err(why) => {
            let therefore = "clients get the engine's own error";
            return vec![CheckResult::new("chat", CheckOutcome::No, why, therefore)];
        }
    };
    let again = ask(client, &chat).await.unwrap_or_default();
    vec![
        CheckResult::new(
            "chat",
            CheckOutcome::Yes,
            format!("{CHAT}: 200"),
            "chats are served",
        ),
        usage(&first),
        cached_tokens(&first, &again),
        stream(client, model).await,
        continuation(client, &chat, &first).await,
    ]
}

/// Checks whether the engine continues an answer where it stopped: `chat` with an answer of known
/// length must have a prompt that is longer by just that than the prompt of the `plain` response.
async fn continuation(client: &EngineClient, chat: &Value, plain: &Value) -> CheckResult {
    let mut body = chat.clone();
    let answer = vec![WORD; WORDS as usize].join(" ");
    if let Some(messages) = body["messages"].as_array_mut() {
        messages.push(json!({"role": "assistant", "content": answer}));
    }
    body["add_generation_prompt"] = false.into();
    body["continue_final_message"] = true.into();
    let continued = ask(client, &body).await;
    let (outcome, found) = match &continued {
        Ok(continued) => judge_continuation(plain, continued),
        Err(why) => (CheckOutcome::No, why.clone()),
    };
    let therefore = match outcome {
        CheckOutcome::Yes => {
            "another engine goes on with its chats if it fails, and it with others'"
        }
        CheckOutcome::Partly | CheckOutcome::No => {
            "chats end with an error if it fails, or if another one would go on here"
        }
    };
    CheckResult::new("continuation", outcome, found, therefore)
}

/// Compares the prompts of a `plain` response and of one that has continued an answer.
fn judge_continuation(plain: &Value, continued: &Value) -> (CheckOutcome, String) {
    let prompt = |response: &Value| response["usage"]["prompt_tokens"].as_u64();
    let (Some(plain), Some(continued)) = (prompt(plain), prompt(continued)) else {
        return (CheckOutcome::No, "no usage shows it".to_owned());
    };
    let more = i128::from(continued) - i128::from(plain);
    let found = format!("an answer of {WORDS} tokens makes the prompt {more} tokens longer");
    let is_open = more.abs_diff(i128::from(WORDS)) <= u128::from(TOKENS_OFF_MAX);
    (CheckOutcome::of(is_open), found)
}

async fn ask(client: &EngineClient, body: &Value) -> Result<Value, String> {
    let answer = client.post(CHAT, body).await.map_err(|it| it.to_string())?;
    match answer.status.is_success() {
        true => answer.json().map_err(|error| error.to_string()),
        false => Err(refusal(&answer)),
    }
}

fn usage(answer: &Value) -> CheckResult {
    let usage = &answer["usage"];
    let is_told = usage["prompt_tokens"].is_u64() && usage["completion_tokens"].is_u64();
    let therefore = match is_told {
        true => "users are charged what the engine reports",
        false => "users are charged by an estimate from bytes and time",
    };
    let found = match is_told {
        true => format!(
            "{} prompt tokens, {} output tokens",
            usage["prompt_tokens"], usage["completion_tokens"]
        ),
        false => "no usage".to_owned(),
    };
    CheckResult::new("usage", CheckOutcome::of(is_told), found, therefore)
}

fn cached_tokens(first: &Value, again: &Value) -> CheckResult {
    let of = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    let (outcome, found, therefore) = match (of(first), of(again)) {
        (Some(_), Some(tokens)) if tokens > 0 => (
            CheckOutcome::Yes,
            format!("{tokens} when asked again"),
            "predictions are judged, capacities corrected, cached tokens charged as such",
        ),
        (None, Some(tokens)) => (
            CheckOutcome::Partly,
            format!("{tokens} when asked again, nothing where none were cached"),
            "a response without the count means 0, once another one had it",
        ),
        (_, Some(_)) => (
            CheckOutcome::Partly,
            "0 when asked again".to_owned(),
            "it seems to cache no prefixes: predictions will be off until enough misses are observed",
        ),
        (_, None) => (
            CheckOutcome::No,
            "not told".to_owned(),
            "predictions are never judged, and what is predicted is charged as cached \
             (vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report)",
        ),
    };
    CheckResult::new("cached tokens", outcome, found, therefore)
}

/// Chunks of a streaming response and where they report usage.
#[derive(Debug, Default, PartialEq, Eq)]
struct StreamShape {
    chunks: usize,
    /// Whether the stream had `[DONE]`.
    is_done: bool,
    /// Whether a chunk before the last one reported usage.
    has_running_usage: bool,
    /// Whether the last chunk reported usage.
    has_usage_at_end: bool,
    /// Whether the last chunk has no choices.
    is_usage_alone: bool,
}

impl StreamShape {
    fn read(body: &str) -> Self {
        let mut shape = Self::default();
        let payloads = body.lines().filter_map(|line| line.strip_prefix("data:"));
        for payload in payloads.map(str::trim) {
            if payload == "[DONE]" {
                shape.is_done = true;
                continue;
            }
            let chunk: Value = serde_json::from_str(payload).unwrap_or_default();
            shape.chunks += 1;
            shape.has_running_usage |= shape.has_usage_at_end && !shape.is_usage_alone;
            shape.has_usage_at_end = chunk["usage"].is_object();
            shape.is_usage_alone = chunk["choices"].as_array().is_some_and(Vec::is_empty);
        }
        shape
    }
}

async fn stream(client: &EngineClient, model: &str) -> CheckResult {
    let mut body = fresh_chat(model, 8);
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
    let mut answer = client.post(CHAT, &body).await;
    let mut is_refused = false;
    if answer.as_ref().is_ok_and(|it| it.status.is_client_error()) {
        is_refused = true;
        body["stream_options"] = json!({"include_usage": true});
        answer = client.post(CHAT, &body).await;
    }
    let shape = match answer {
        Ok(answer) if answer.status.is_success() => {
            StreamShape::read(&String::from_utf8_lossy(&answer.body))
        }
        Ok(answer) => return no_stream(refusal(&answer)),
        Err(error) => return no_stream(error.to_string()),
    };
    if shape.chunks == 0 {
        return no_stream("no events".to_owned());
    }
    let found = format!(
        "{} chunks, running usage: {}, usage at the end: {}, [DONE]: {}",
        shape.chunks,
        yes(shape.has_running_usage),
        match (shape.has_usage_at_end, shape.is_usage_alone) {
            (true, true) => "in a chunk of its own",
            (true, false) => "in the last chunk of the choice",
            (false, _) => "no",
        },
        yes(shape.is_done),
    );
    let (outcome, therefore) = if is_refused {
        let therefore = "it refuses continuous_usage_stats: set usage.splice = \"final\"";
        (CheckOutcome::Partly, therefore)
    } else if !shape.has_usage_at_end {
        let therefore = "streams are charged by an estimate from their bytes";
        (CheckOutcome::Partly, therefore)
    } else if shape.has_running_usage {
        let therefore = "a client that hangs up is charged to the token";
        (CheckOutcome::Yes, therefore)
    } else {
        let therefore = "a client that hangs up is charged by an estimate from the bytes it got";
        (CheckOutcome::Partly, therefore)
    };
    CheckResult::new("streams", outcome, found, therefore)
}

fn yes(is_so: bool) -> &'static str {
    if is_so { "yes" } else { "no" }
}

fn no_stream(why: String) -> CheckResult {
    let therefore = "clients that request a stream get what the engine returns";
    CheckResult::new("streams", CheckOutcome::No, why, therefore)
}

/// Checks whether the engine stops working when the client disconnects.
pub(super) async fn hang_up(
    client: &EngineClient,
    model: &str,
    before: Option<&EngineMetrics>,
) -> CheckResult {
    const NAME: &str = "hang-up";
    let Some(before) = before.and_then(|metrics| metrics.running) else {
        let therefore = "not known: without a count of running requests it cannot be seen";
        return CheckResult::new(NAME, CheckOutcome::No, "not seen", therefore);
    };
    let mut body = fresh_chat(model, 1000);
    body["stream"] = true.into();
    body["ignore_eos"] = true.into();
    let begun = client.open(Method::POST, CHAT, Some(&body)).await;
    let mut begun = match begun {
        Ok(begun) if begun.status().is_success() => begun,
        Ok(begun) => {
            let found = format!("{}", begun.status());
            return CheckResult::new(NAME, CheckOutcome::No, found, "not known");
        }
        Err(error) => {
            return CheckResult::new(NAME, CheckOutcome::No, error.to_string(), "not known");
        }
    };
    let first = tokio::time::timeout(client.patience, begun.frame()).await;
    drop((first, begun));
    let freed = tokio::time::timeout(client.patience, async {
        loop {
            let (_, metrics) = facts::metrics(client).await;
            if metrics
                .and_then(|it| it.running)
                .is_some_and(|now| now <= before)
            {
                return;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    });
    match freed.await {
        Ok(()) => CheckResult::new(
            NAME,
            CheckOutcome::Yes,
            "the request ended with its client",
            "a client that leaves frees the engine",
        ),
        Err(_) => CheckResult::new(
            NAME,
            CheckOutcome::No,
            format!("it still runs after {:?}", client.patience),
            "requests whose clients disconnect occupy the engine until they finish",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_message_is_no_continuation() {
        let of = |tokens: u64| json!({"usage": {"prompt_tokens": tokens}});
        for (tokens, expected) in [
            (90, CheckOutcome::No),
            (114, CheckOutcome::No),
            (115, CheckOutcome::Yes),
            (116, CheckOutcome::Yes),
            (117, CheckOutcome::Yes),
            (118, CheckOutcome::No),
            (121, CheckOutcome::No),
        ] {
            let (found, how) = judge_continuation(&of(100), &of(tokens));
            assert_eq!(found, expected, "{how}");
        }
        let (found, _) = judge_continuation(&of(100), &json!({}));
        assert_eq!(found, CheckOutcome::No);
    }

    #[test]
    fn stream_shapes_differ_by_the_place_of_usage() {
        let usage = r#""usage":{"prompt_tokens":1}"#;
        let chunk = r#"{"choices":[{"index":0}]"#;
        let of = |events: &[String]| StreamShape::read(&events.join("\n\n"));
        let vllm = of(&[
            format!("data: {chunk},{usage}}}"),
            format!("data: {chunk},{usage}}}"),
            format!("data: {{\"choices\":[],{usage}}}"),
            "data: [DONE]".to_owned(),
        ]);
        assert!(vllm.is_done && vllm.has_running_usage && vllm.is_usage_alone);
        let llama = of(&[
            format!("data: {chunk}}}"),
            format!("data: {chunk},{usage}}}"),
        ]);
        assert!(llama.has_usage_at_end && !llama.has_running_usage && !llama.is_done);
        let silent = of(&[format!("data: {chunk}}}"), "data: [DONE]".to_owned()]);
        assert!(!silent.has_usage_at_end && silent.is_done);
    }
}
