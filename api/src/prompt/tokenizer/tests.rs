//! Compares token ids with those of Python's `transformers` and `tiktoken`, recorded in
//! `tests/fixtures/tokenizers`, and tests properties that follow from them.

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

use super::*;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers")
}

fn read<T: for<'de> Deserialize<'de>>(file: &str) -> T {
    serde_json::from_slice(&std::fs::read(fixtures().join(file)).unwrap()).unwrap()
}

fn load(name: &str) -> Arc<Tokenizer> {
    // "parts" has a template of its own and uses the tokenizer of "chatml".
    let template = fixtures().join(name).join("chat_template.jinja");
    let (folder, template) = match name {
        "parts" => ("chatml", Some(&*template)),
        name => (name, None),
    };
    let file = fixtures().join(folder).join("tokenizer.json");
    Tokenizer::load(TokenizerSpec::HuggingFace(file), template).unwrap()
}

const MODELS: [&str; 5] = ["chatml", "parts", "llama3", "mistral", "legacy"];

#[derive(Deserialize)]
struct Cases {
    chats: std::collections::BTreeMap<String, ChatCase>,
    prompts: Vec<PromptCase>,
}

#[derive(Deserialize)]
struct ChatCase {
    body: Value,
    /// Text rendered by Python; `None` if its template rejects the chat.
    text: Option<String>,
    #[serde(default)]
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct PromptCase {
    text: String,
    ids: Vec<u32>,
    #[serde(default)]
    plain: Vec<u32>,
}

fn rendered(tokenizer: &Arc<Tokenizer>, body: &Value) -> Result<String, Fallback> {
    match tokenizer.content(
        "/v1/chat/completions",
        body.to_string().as_bytes(),
        ChatRenderer::Vllm,
    )? {
        TokenizerContent::Text(text) => Ok(text.parts.concat()),
        other => panic!("{other:?} is no text"),
    }
}

#[test]
fn chats_match_transformers_text_and_ids() {
    for model in MODELS {
        let tokenizer = load(model);
        let cases: Cases = read(&format!("{model}/cases.json"));
        assert!(cases.chats.len() > 25);
        for (name, case) in &cases.chats {
            let text = rendered(&tokenizer, &case.body);
            assert_eq!(text.ok(), case.text, "{model}: {name}");
            let body = case.body.to_string();
            // The first result is from the tokenizer, the second from the cache.
            for _ in 0..2 {
                let ids = tokenizer.encode_request("/v1/chat/completions", body.as_bytes());
                let expected = case.text.as_ref().map(|_| case.ids.clone());
                assert_eq!(ids, expected, "{model}: {name}");
            }
        }
    }
}

#[test]
fn prompts_match_transformers_ids() {
    for model in MODELS {
        let tokenizer = load(model);
        let cases: Cases = read(&format!("{model}/cases.json"));
        for PromptCase { text, ids, plain } in &cases.prompts {
            let ids_of = |body: Value| {
                let body = body.to_string();
                tokenizer.encode_request("/v1/completions", body.as_bytes())
            };
            assert_eq!(
                ids_of(json!({"prompt": text})).as_ref(),
                Some(ids),
                "{model}: {text:?}"
            );
            let without = json!({"prompt": text, "add_special_tokens": false});
            assert_eq!(ids_of(without).as_ref(), Some(plain), "{model}: {text:?}");
        }
    }
}

#[test]
fn texts_match_tiktoken_ids() {
    let cases: std::collections::BTreeMap<String, Vec<PromptCase>> = read("tiktoken.json");
    for (name, cases) in cases {
        let spec = format!("tiktoken:{name}").parse().unwrap();
        let tokenizer = Tokenizer::load(spec, None).unwrap();
        for PromptCase { text, ids, .. } in cases {
            assert_eq!(
                tokenizer.encode_text(&text).as_ref(),
                Some(&ids),
                "{name}: {text:?}"
            );
            assert_eq!(tokenizer.decode(&ids), Some(text));
        }
    }
}

#[test]
fn tokenizer_names_round_trip() {
    for name in [
        "character",
        "engine",
        "tiktoken:cl100k_base",
        "tiktoken:o200k_base",
        "huggingface:a/b:c.json",
    ] {
        assert_eq!(name.parse::<TokenizerSpec>().unwrap().to_string(), name);
    }
    for name in ["", "Character", "tiktoken:gpt2", "huggingface:", "engine:"] {
        assert_eq!(
            name.parse::<TokenizerSpec>(),
            Err(TokenizerSpecError),
            "{name}"
        );
    }
}

#[test]
fn unusable_tokenizer_files_are_named() {
    let folder = std::env::temp_dir().join(format!("quorate-tokenizers-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    let file = folder.join("tokenizer.json");
    let failure = |template: Option<&Path>| {
        let failure = Tokenizer::load(TokenizerSpec::HuggingFace(file.clone()), template);
        failure
            .unwrap_err()
            .to_string()
            .replace(&*folder.to_string_lossy(), "DIR")
    };
    assert!(failure(None).starts_with("DIR/tokenizer.json: No such file"));
    write("tokenizer.json", "{\"model\": ");
    assert!(failure(None).starts_with("DIR/tokenizer.json: EOF"));
    write("tokenizer.json", "{}");
    assert!(failure(None).starts_with("DIR/tokenizer.json: "));
    let good = fixtures().join("chatml/tokenizer.json");
    std::fs::copy(&good, &file).unwrap();
    assert!(Tokenizer::load(TokenizerSpec::HuggingFace(file.clone()), None).is_ok());
    write("chat_template.jinja", "a\n{% for %}");
    let bad = failure(None);
    assert!(
        bad.starts_with("DIR/chat_template.jinja: syntax error"),
        "{bad}"
    );
    assert!(bad.contains("chat_template:2"), "{bad}");
    let other = folder.join("other.jinja");
    assert!(failure(Some(&other)).starts_with("DIR/other.jinja: No such file"));
    let mut random: Value = read("chatml/tokenizer.json");
    random["model"]["dropout"] = 0.1.into();
    write("tokenizer.json", &random.to_string());
    assert!(failure(None).contains("dropout"));
    std::fs::remove_dir_all(&folder).unwrap();
}

fn seam(tokenizer: &Arc<Tokenizer>, path: &str, body: &Value) -> (Vec<u32>, Option<ReplyBoundary>) {
    let content = tokenizer
        .content(path, body.to_string().as_bytes(), ChatRenderer::Vllm)
        .unwrap();
    let TokenizerContent::Text(text) = content else {
        panic!("{content:?}")
    };
    let encoded = tokenizer.encode(&text, "", usize::MAX).unwrap();
    (encoded.ids, encoded.seam)
}

#[test]
fn a_reply_continues_as_in_the_next_turn() {
    let user = |text: &str| json!({"role": "user", "content": text});
    let chat = |messages: Vec<Value>| json!({"messages": messages});
    let path = "/v1/chat/completions";
    let reply = "Certainly! It's 3.14, né?\n\nAnything else";
    let tiktoken = Tokenizer::load("tiktoken:cl100k_base".parse().unwrap(), None).unwrap();
    let chatml = load("chatml");
    for tokenizer in [&tiktoken, &chatml, &load("llama3"), &load("parts")] {
        let (mut ids, seam_of) = seam(tokenizer, path, &chat(vec![user("Hi")]));
        ids.extend(seam_of.unwrap().continuation(reply, true).unwrap());
        let turns = vec![
            user("Hi"),
            json!({"role": "assistant", "content": reply}),
            user("?"),
        ];
        let (next, _) = seam(tokenizer, path, &chat(turns));
        assert!(next.starts_with(&ids), "{tokenizer:?}");
    }
    // The template renders these differently in the next turn, or may do so.
    let (_, spaced) = seam(&load("llama3"), path, &chat(vec![user("Hi")]));
    assert_eq!(spaced.unwrap().continuation(" trimmed ", true), None);
    let (_, thought) = seam(&chatml, path, &chat(vec![user("Hi")]));
    assert_eq!(
        thought.unwrap().continuation("<think>a</think>b", true),
        None
    );
    assert!(
        seam(&load("mistral"), path, &chat(vec![user("Hi")]))
            .1
            .is_none()
    );
    let (_, partial) = seam(
        &chatml,
        path,
        &json!({"messages": [user("Hi")], "add_generation_prompt": false}),
    );
    assert!(partial.is_none());
}

#[test]
fn a_completion_continues_if_its_tokens_are_unchanged() {
    let tokenizer = load("chatml");
    let (mut ids, seam_of) = seam(
        &tokenizer,
        "/v1/completions",
        &json!({"prompt": "one two "}),
    );
    let seam_of = seam_of.unwrap();
    ids.extend(seam_of.continuation("\nthree", true).unwrap());
    assert_eq!(
        Some(ids),
        tokenizer
            .encode_text("one two \nthree")
            .filter(|ids| !ids.is_empty())
    );
    // " " and "three" form one token, so the prompt's own tokens would change.
    assert_eq!(seam_of.continuation("three", true), None);
}

#[test]
fn only_new_text_counts_toward_the_tokenize_limit() {
    let tokenizer = load("chatml");
    let text = |text: &str| TokenizerText {
        parts: vec![format!("<|im_start|>{text}<|im_end|>\n")],
        adds_special: false,
        after: ReplyPosition::Unknown,
    };
    let long = text(&"words and ".repeat(100));
    let too_much = tokenizer.encode(&long, "", 512).unwrap_err();
    assert_eq!(too_much, EncodeError::MoreThanAllowed);
    let ids = tokenizer.encode(&long, "", 2000).unwrap().ids;
    assert_eq!(tokenizer.encode(&long, "", 0).unwrap().ids, ids);
    let endless = text(&"x".repeat(TOKENIZED_BYTES_MAX));
    let never = tokenizer.encode(&endless, "", usize::MAX).unwrap_err();
    assert_eq!(never, EncodeError::Never(Fallback::TooLong));
}

#[test]
fn pathological_texts_terminate() {
    for spec in ["tiktoken:cl100k_base", "tiktoken:o200k_base"] {
        let tokenizer = Tokenizer::load(spec.parse().unwrap(), None).unwrap();
        for text in [" ".repeat(100_000), "A".repeat(50_000), "é".repeat(30_000)] {
            let _ = tokenizer.encode_text(&text);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Checks that tokenizing the pieces between special tokens equals tokenizing the whole text.
    #[test]
    fn tokenizing_pieces_equals_tokenizing_the_whole(
        pieces in proptest::collection::vec(
            prop_oneof![
                2 => "[ -~\\n\\té漢😀]{0,30}",
                1 => prop_oneof![
                    Just("<|im_start|>".to_owned()), Just("<|im_end|>".to_owned()),
                    Just("<think>".to_owned()), Just("<|eot_id|>".to_owned()),
                    Just("</s>".to_owned()), Just("<s>".to_owned()), Just("[INST]".to_owned()),
                    Just("<|im_".to_owned()), Just(" ".to_owned()),
                ],
            ],
            0..8,
        ),
    ) {
        thread_local! {
            static LOADED: Vec<Arc<Tokenizer>> = MODELS.map(load).into();
        }
        let text = pieces.concat();
        LOADED.with(|loaded| {
            for tokenizer in loaded {
                let TokenizerKind::HuggingFace(files) = &tokenizer.kind else { unreachable!() };
                prop_assert_eq!(tokenizer.encode_text(&text), files.encode(&text));
            }
            Ok(())
        })?;
    }

    #[test]
    fn arbitrary_chat_bodies_never_panic(body in ".{0,200}", path in prop_oneof![
        Just("/v1/chat/completions"), Just("/v1/messages"), Just("/v1/responses"),
        Just("/v1/completions"), Just("/v1/embeddings"), Just("/x"),
    ]) {
        let _ = Tokenizer::character().content(path, body.as_bytes(), ChatRenderer::Vllm);
    }
}
