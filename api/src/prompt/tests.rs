//! Tests body fields, rejections and their messages, and that flattened prompts only grow.

use bytes::Bytes;
use expect_test::expect;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{ParsedBody, Prompt, ReplyShape, append_reply, parse};

fn chat(body: &Value) -> ParsedBody {
    read("/v1/chat/completions", &body.to_string())
}

fn read(path: &str, body: &str) -> ParsedBody {
    parse(path, &Bytes::copy_from_slice(body.as_bytes())).unwrap()
}

fn text(parsed: &ParsedBody) -> String {
    match &parsed.prompt {
        Prompt::Text(bytes) => String::from_utf8(bytes.clone()).unwrap(),
        Prompt::Tokens(tokens) => format!("{tokens:?}"),
    }
}

fn refused(path: &str, body: impl AsRef<[u8]>) -> String {
    let bad = parse(path, &Bytes::copy_from_slice(body.as_ref())).unwrap_err();
    format!("{:?}: {}", bad.param.as_deref().unwrap_or("-"), bad.message)
}

#[test]
fn every_part_of_a_chat_request_is_read() {
    let body = r#" {"messages":[{"content":"be \"kind\"","role":"system"},{"role":"user","content":"hi"}],
        "model":"m","stream":true,"user":"ada","cache_salt":"s","max_tokens":null,
        "max_completion_tokens":12,"unknown":{"deep":[1,2,{"x":"}"}]}}"#;
    let parsed = read("/v1/chat/completions", body);
    assert_eq!(parsed.model, "m");
    assert!(parsed.stream);
    assert_eq!(parsed.user.as_deref(), Some("ada"));
    assert_eq!(parsed.cache_salt.as_deref(), Some("s"));
    assert_eq!(parsed.max_tokens, Some(12));
    assert_eq!(parsed.stream_options_span, None);
    assert_eq!(&body[..parsed.insert_at], " {");
    assert_eq!(parsed.reply, ReplyShape::Message);
    assert_eq!(text(&parsed), "<|system|>\nbe \"kind\"\n<|user|>\nhi\n");
}

#[test]
fn stream_options_are_found_with_their_bytes() {
    let body = r#"{"model":"m","stream_options" : {"include_usage":true,"x":[{}]} ,"n":1}"#;
    let parsed = read("/v1/chat/completions", body);
    assert_eq!(parsed.include_usage, Some(true));
    assert_eq!(parsed.continuous_usage, None);
    let (start, end) = parsed.stream_options_span.unwrap();
    assert_eq!(&body[start..end], r#"{"include_usage":true,"x":[{}]}"#);

    let body = r#"{"stream_options":null,"model":"m"}"#;
    let parsed = read("/v1/completions", body);
    assert_eq!(parsed.stream_options_span, None);
    let (start, end) = parsed.stream_options_null_span.unwrap();
    assert_eq!(&body[start..end], "null");
}

#[test]
fn the_last_duplicate_field_wins() {
    let body = r#"{"model":"a","messages":[{"role":"user","content":"x"}],"model":"b",
        "stream_options":{"include_usage":true},"stream_options":{"include_usage":false},
        "messages":[{"role":"user","content":"no","content":"yes"}]}"#;
    let parsed = read("/v1/chat/completions", body);
    assert_eq!(parsed.model, "b");
    assert_eq!(parsed.include_usage, Some(false));
    assert_eq!(text(&parsed), "<|user|>\nyes\n");
}

#[test]
fn mistyped_flags_and_counts_are_not_refused() {
    let parsed = chat(&json!({"model": "m", "stream": "true", "max_tokens": 256.0,
        "stream_options": {"include_usage": 1}}));
    assert!(parsed.stream);
    assert_eq!(parsed.max_tokens, Some(256));
    assert_eq!(parsed.include_usage, Some(true));
    let parsed = chat(&json!({"model": "m", "stream": [1], "max_tokens": -1,
        "stream_options": {"include_usage": "x"}}));
    assert!(!parsed.stream);
    assert_eq!(parsed.max_tokens, None);
    assert!(parsed.are_options_unclear);
    assert_eq!(parsed.stream_options_span, None);
}

#[test]
fn a_field_name_may_be_escaped() {
    assert_eq!(read("/v1/completions", r#"{"mo\u0064el":"m"}"#).model, "m");
}

#[test]
fn tools_and_system_precede_messages_in_any_field_order() {
    let parsed = read(
        "/v1/messages",
        r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"system":[{"type":"text",
        "text":"be kind","cache_control":{"type":"ephemeral"}}],"tools":[{"name":"f"}]}"#,
    );
    assert_eq!(
        text(&parsed),
        "<|tools|>\n[{\"name\":\"f\"}]\n<|system|>\nbe kind\n<|user|>\nhi\n"
    );
}

#[test]
fn content_parts_are_text_media_hashes_or_json() {
    let parsed = chat(&json!({"model": "m", "messages": [
        {"role": "user", "content": [
            {"text": "see ", "type": "text"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "tool_result", "tool_use_id": "t1", "content": "42"},
        ]},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function"}]},
    ]}));
    expect![[r#"
        <|user|>
        see <|image_url:cf24a428a7eb9aca|><|input_audio:f3f24a769da31af7|><|tool_result|>tool_use_id:"t1",content:"42",
        <|assistant|>
        [{"id":"c","type":"function"}]
    "#]]
    .assert_eq(&text(&parsed));
}

#[test]
fn cache_control_marks_do_not_change_the_identity() {
    let marked = json!({"model": "m", "messages": [{"role": "user", "content": [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]});
    let plain = json!({"model": "m", "messages": [{"role": "user", "content": "a"}]});
    assert_eq!(chat(&marked).prompt, chat(&plain).prompt);
}

#[test]
fn responses_read_input_and_instructions() {
    let parsed = read(
        "/v1/responses",
        r#"{"model":"m","input":"hi","instructions":"short","stream":true}"#,
    );
    assert_eq!(text(&parsed), "<|system|>\nshort\n<|user|>\nhi\n");
    let parsed = read(
        "/v1/responses",
        r#"{"model":"m","input":[{"role":"user","content":[{"type":"input_text","text":"hi"}]},
        {"type":"function_call","id":"x1","name":"f","arguments":"{}"},
        {"type":"message","role":"assistant","content":[{"type":"output_text","text":"ok","annotations":[]}]}]}"#,
    );
    assert_eq!(
        text(&parsed),
        "<|user|>\nhi\n<|function_call|>\nname:\"f\",arguments:\"{}\",\n<|assistant|>\nok\n"
    );
}

#[test]
fn completions_accept_strings_tokens_and_batches() {
    let prompt = |value: Value| {
        let parsed = read(
            "/v1/completions",
            &json!({"model": "m", "prompt": value}).to_string(),
        );
        assert_eq!(parsed.reply, ReplyShape::Continuation);
        text(&parsed)
    };
    assert_eq!(prompt(json!("once")), "once");
    assert_eq!(prompt(json!(["one", "two"])), "one");
    assert_eq!(
        prompt(json!([1, 2, 4_294_967_295_u32])),
        "[1, 2, 4294967295]"
    );
    assert_eq!(prompt(json!([[1, 2], [3]])), "[1, 2]");
    assert_eq!(prompt(json!([])), "");
    assert_eq!(prompt(json!(null)), "");
}

#[test]
fn other_apis_have_their_own_fields() {
    let pooled = read("/v1/embeddings", r#"{"model":"m","input":["a","b"]}"#);
    assert_eq!(
        (text(&pooled).as_str(), pooled.reply),
        ("a", ReplyShape::None)
    );
    assert_eq!(
        text(&read(
            "/v1/rerank",
            r#"{"model":"m","query":"q","documents":["d"]}"#
        )),
        "q"
    );
    assert_eq!(
        text(&read(
            "/v1/score",
            r#"{"model":"m","text_1":"q","text_2":"d"}"#
        )),
        "q"
    );
    let chat = r#"{"model":"m","messages":[{"role":"user","content":"a"}]}"#;
    assert_eq!(text(&read("/tokenize", chat)), "<|user|>\na\n");
    assert_eq!(
        text(&read(
            "/v1/other",
            r#"{"model":"m","prompt":3,"messages":4}"#
        )),
        ""
    );
}

const BAD_CHATS: &[&str] = &[
    "[]",
    "\"model\"",
    "{",
    r#"{"model":"m""#,
    r#"{"model":"m"} x"#,
    r#"{"model":"m",}"#,
    r#"{"stream":true}"#,
    r#"{"model":""}"#,
    r#"{"model":7}"#,
    r#"{"model":null}"#,
    r#"{"model":"m","user":{}}"#,
    r#"{"model":"m","messages":"hi"}"#,
    r#"{"model":"m","messages":["hi"]}"#,
    r#"{"model":"m","messages":[{"role":1}]}"#,
    r#"{"model":"m","messages":[{"role":"user","content":5}]}"#,
    r#"{"model":"m","messages":[{"role":"user","content":[5]}]}"#,
    r#"{"model":"m","temperature":NaN}"#,
];

#[test]
fn body_errors_name_cause_and_position() {
    let chat = "/v1/chat/completions";
    let mut seen = String::new();
    let long = format!(r#"{{"model":"m","messages":"{}"}}"#, "é".repeat(10_000));
    assert!(refused(chat, &long).len() < 400);
    for empty in ["", " \n"] {
        assert_eq!(
            refused(chat, empty),
            "\"-\": body is empty, expected a JSON object"
        );
    }
    for body in BAD_CHATS {
        seen.push_str(&format!("{body:<58} {}\n", refused(chat, body)));
    }
    seen.push_str(&format!("{}\n", refused(chat, b"{\"model\":\"\xff\"}")));
    let prompt = refused("/v1/completions", r#"{"model":"m","prompt":[1,-2]}"#);
    seen.push_str(&format!("{prompt}\n"));
    let prompt = refused("/v1/completions", r#"{"model":"m","prompt":[5000000000]}"#);
    seen.push_str(&format!("{prompt}\n"));
    let prompt = refused("/v1/completions", r#"{"model":"m","prompt":true}"#);
    seen.push_str(&format!("{prompt}\n"));
    expect![[r#"
        []                                                         "-": invalid type: sequence, expected a JSON object at line 1 column 0
        "model"                                                    "-": invalid type: string "model", expected a JSON object at line 1 column 7
        {                                                          "-": body is not valid JSON: EOF while parsing an object at line 1 column 1
        {"model":"m"                                               "-": body is not valid JSON: EOF while parsing an object at line 1 column 12
        {"model":"m"} x                                            "-": body is not valid JSON: trailing characters at line 1 column 15
        {"model":"m",}                                             "-": body is not valid JSON: trailing comma at line 1 column 14
        {"stream":true}                                            "model": model is missing, expected a model id
        {"model":""}                                               "model": model: is empty, expected a model id
        {"model":7}                                                "model": model: invalid type: integer `7`, expected a string at line 1 column 10
        {"model":null}                                             "model": model is missing, expected a model id
        {"model":"m","user":{}}                                    "user": user: invalid type: map, expected a string at line 1 column 20
        {"model":"m","messages":"hi"}                              "messages": messages: invalid type: string "hi", expected an array of messages at line 1 column 28
        {"model":"m","messages":["hi"]}                            "messages": messages: invalid type: string "hi", expected a message object at line 1 column 29
        {"model":"m","messages":[{"role":1}]}                      "messages": messages: invalid type: integer `1`, expected a string at line 1 column 34
        {"model":"m","messages":[{"role":"user","content":5}]}     "messages": messages: invalid type: integer `5`, expected a string, an array of content parts, or null at line 1 column 51
        {"model":"m","messages":[{"role":"user","content":[5]}]}   "messages": messages: invalid type: integer `5`, expected a content part: an object or a string at line 1 column 52
        {"model":"m","temperature":NaN}                            "-": body is not valid JSON: expected value at line 1 column 28
        "-": body is not UTF-8 at byte 10, expected a JSON object in UTF-8
        "prompt": prompt: invalid value: integer `-2`, expected u32 at line 1 column 27
        "prompt": prompt: token id 5000000000 is above 4294967295 at line 1 column 33
        "prompt": prompt: invalid type: boolean `true`, expected a string, an array of strings, an array of token ids, or an array of those at line 1 column 26
    "#]].assert_eq(&seen);
}

#[test]
fn nesting_cannot_exhaust_the_stack() {
    let deep = "[".repeat(1_000_000);
    refused("/v1/chat/completions", &deep);
    refused(
        "/v1/chat/completions",
        format!(r#"{{"model":"m","x":{deep}"#),
    );
    refused(
        "/v1/chat/completions",
        format!(r#"{{"model":"m","messages":{deep}"#),
    );
    refused(
        "/v1/chat/completions",
        format!(r#"{{"model":"m","tools":{deep}"#),
    );
    refused(
        "/v1/completions",
        format!(r#"{{"model":"m","prompt":{deep}"#),
    );
    let objects = r#"{"content":"#.repeat(100_000);
    refused(
        "/v1/chat/completions",
        format!(r#"{{"model":"m","messages":[{objects}"#),
    );
}

fn content() -> impl Strategy<Value = Value> {
    let part = prop_oneof![
        ".{0,40}".prop_map(|text| json!({"type": "text", "text": text})),
        "[a-z]{1,8}".prop_map(|url| json!({"type": "image_url", "image_url": {"url": url}})),
    ];
    prop_oneof![
        4 => "[ -~\\n\"\\\\é漢]{0,60}".prop_map(Value::from),
        1 => proptest::collection::vec(part, 0..3).prop_map(Value::from),
        1 => Just(Value::Null),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn the_next_turn_extends_prompt_and_reply(
        turns in proptest::collection::vec(("(system|user|tool)", content()), 1..5),
        reply in ".{0,80}",
        next in content(),
        with_tools in any::<bool>(),
        path in "/v1/(chat/completions|messages|responses)",
    ) {
        let field = if path == "/v1/responses" { "input" } else { "messages" };
        let mut messages: Vec<Value> = turns
            .into_iter()
            .map(|(role, content)| json!({"role": role, "content": content}))
            .collect();
        let body = |messages: &[Value]| {
            let mut body = json!({"model": "m"});
            body[field] = messages.to_vec().into();
            if with_tools {
                body["tools"] = json!([{"type": "function"}]);
            }
            let Prompt::Text(text) = read(&path, &body.to_string()).prompt else { unreachable!() };
            text
        };
        let mut expected = body(&messages);
        append_reply(&mut expected, &reply);
        messages.push(json!({"role": "assistant", "content": reply}));
        prop_assert_eq!(&body(&messages), &expected);
        messages.push(json!({"role": "user", "content": next}));
        prop_assert!(body(&messages).starts_with(&expected));
    }

    #[test]
    fn arbitrary_bodies_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse("/v1/chat/completions", &Bytes::from(bytes));
    }

    #[test]
    fn damaged_bodies_never_panic(at in 0_usize..200, byte in any::<u8>()) {
        let mut body = json!({"model": "m", "stream_options": {"include_usage": true},
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a\u{e9}"}]}]})
            .to_string()
            .into_bytes();
        let at = at % body.len();
        body[at] = byte;
        let _ = parse("/v1/chat/completions", &Bytes::from(body));
    }
}
