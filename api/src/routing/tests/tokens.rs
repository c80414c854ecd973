//! Tests that blocks of prompts equal the engines' for models with a tokenizer, from the first
//! request to the next turn.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::super::fixture::router_with;
use super::*;
use crate::engines::backends::EngineKind;
use crate::prompt::{
    BlockUnit, Fallback, ModelSettings, ReadError, ReadRequest, ReplyJoin, TokenScope, Tokenizer,
    TokenizerSpec, chain_of_tokens,
};

pub(super) const CHAT: &str = "/v1/chat/completions";

pub(super) fn fixture(name: &str) -> TokenizerSpec {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers");
    TokenizerSpec::HuggingFace(folder.join(name).join("tokenizer.json"))
}

pub(super) fn settings(spec: TokenizerSpec) -> ModelSettings {
    ModelSettings {
        name: "*".to_owned(),
        tokenizer: Tokenizer::load(spec, None).unwrap(),
        block_size: Some(4),
        pairs: Default::default(),
    }
}

fn bench(spec: TokenizerSpec) -> Bench {
    let port = Port::new(Log::new(&[None, None]));
    let router = router_with(&port, OutboxSettings::default(), settings(spec));
    Bench { port, router }
}

pub(super) fn chat(turns: &[(&str, &str)]) -> Value {
    let message = |(role, content): &(&str, &str)| json!({"role": role, "content": content});
    let messages: Vec<_> = turns.iter().map(message).collect();
    json!({"model": "m", "messages": messages})
}

pub(super) async fn read(bench: &Bench, path: &str, body: &Value) -> ReadRequest {
    let body = Bytes::from(body.to_string());
    bench.router.reader().read(path, &body).await.unwrap()
}

#[tokio::test]
async fn token_ids_are_identified_equally_from_any_source() {
    let bench = bench(fixture("chatml"));
    let text = read(&bench, CHAT, &chat(&[("user", "How are you, and who?")])).await;
    assert_eq!(text.identity.unit, BlockUnit::Tokens);
    assert_eq!(text.identity.tokens as usize, text.ids.len());
    assert_eq!(text.identity.matchable as usize, (text.ids.len() - 1) / 4);
    assert_eq!(text.identity.tail.tokens_per_block, 4);
    assert!(text.identity.chain.len() > 3);
    let scope = TokenScope {
        model: "m",
        salt: "",
        block_size: 4,
    };
    let hashing = bench.router.view.registry().hashing();
    let of_events = chain_of_tokens(&hashing, &scope, None, &text.ids, &[]);
    assert_eq!(text.identity.chain[..], of_events);
    let ids = json!({"model": "m", "prompt": text.ids});
    let ids = read(&bench, "/v1/completions", &ids).await;
    assert_eq!(ids.identity.chain, text.identity.chain);
    assert_eq!(ids.ids, text.ids);
    let salted = json!({"model": "m", "prompt": text.ids, "cache_salt": "s"});
    let salted = read(&bench, "/v1/completions", &salted).await;
    assert_ne!(salted.identity.chain[0], text.identity.chain[0]);
    assert!((bench.router.reader().tokens_per_block("m") - 4.0).abs() < f64::EPSILON);
    assert!(
        bench
            .router
            .reader()
            .tokenizer_name("m")
            .starts_with("huggingface:")
    );
}

#[tokio::test]
async fn a_prompt_is_rendered_as_by_its_engine() {
    let body = chat(&[("user", "How are you?"), ("assistant", "I am well.")]);
    let mut last_as_user = body.clone();
    last_as_user["messages"][1]["role"] = "user".into();
    let files = Tokenizer::load(fixture("chatml"), None).unwrap();
    let ids = |body: &Value| files.encode_request(CHAT, body.to_string().as_bytes());
    for (kind, expected) in [
        (EngineKind::Vllm, ids(&body)),
        (EngineKind::Sglang, ids(&last_as_user)),
    ] {
        let bench = bench(fixture("chatml"));
        bench.router.decider().backends.assume_kind(Slot(1), kind);
        assert_eq!(
            Some(read(&bench, CHAT, &body).await.ids),
            expected,
            "{kind}"
        );
    }
}

#[test]
fn an_answer_is_matched_in_the_next_turn() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let read =
        |bench: &Bench, turns: &[(&str, &str)]| runtime.block_on(read(bench, CHAT, &chat(turns)));
    let question = ("user", "How are you?");
    let reply = "I am well, thank you; and how are you yourself on this fine day?";
    for spec in ["tiktoken:o200k_base".parse().unwrap(), fixture("chatml")] {
        for is_interrupted in [false, true] {
            let bench = bench(spec.clone());
            let first = read(&bench, &[question]);
            let (decision, mut attempt) = bench.start(&first.identity);
            for part in reply.split_inclusive(' ') {
                attempt.output(part, Instant::now());
                // The router records a chunk without output like this.
                attempt.other_output(0, Instant::now());
            }
            if is_interrupted {
                // The next turn omits this reasoning.
                attempt.other_output(10, Instant::now());
            }
            attempt.end(AttemptEnd::Finished, Instant::now());
            bench.flush();
            let turns = [question, ("assistant", reply), ("user", "Well.")];
            let next = read(&bench, &turns);
            let again = bench.decide(&next.identity, &[]).unwrap();
            assert_eq!(again.backend, decision.backend);
            let common = first.ids.iter().zip(&next.ids).take_while(|(a, b)| a == b);
            let reply_blocks = again.matched as usize - common.count() / 4;
            assert_eq!(reply_blocks > 2, !is_interrupted, "{spec}: {reply_blocks}");
        }
    }
}

#[test]
fn the_last_token_of_an_answer_is_not_cached() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let read =
        |bench: &Bench, turns: &[(&str, &str)]| runtime.block_on(read(bench, CHAT, &chat(turns)));
    let question = ("user", "How are you?");
    for words in 1..10 {
        let reply = "well and fine ".repeat(words).trim_end().to_owned();
        for has_end in [false, true] {
            let bench = bench(fixture("chatml"));
            let first = read(&bench, &[question]);
            let Some(ReplyJoin::Local(seam)) = &first.identity.tail.seam else {
                panic!("{first:?}");
            };
            let tokens = seam.continuation(&reply, true).unwrap().len();
            let (_, mut attempt) = bench.start(&first.identity);
            attempt.output(&reply, Instant::now());
            // A response that ends by itself ends with an invisible token.
            let made = (tokens + usize::from(has_end)) as u64;
            let usage = Usage {
                completion_tokens: made,
                ..Usage::default()
            };
            attempt.usage(usage, Instant::now());
            attempt.end(AttemptEnd::Finished, Instant::now());
            bench.flush();
            let turns = [question, ("assistant", &*reply), ("user", "Well, well.")];
            let next = read(&bench, &turns);
            let again = bench.decide(&next.identity, &[]).unwrap();
            let computed = first.ids.len() as u64 + made - 1;
            assert_eq!(u64::from(again.matched), computed / 4, "{tokens} {has_end}");
        }
    }
}

#[tokio::test]
async fn requests_without_tokens_are_identified_by_characters() {
    let bench = bench(fixture("mistral"));
    let refused = [
        ("assistant", "I begin, contrary to the template"),
        ("user", "x"),
    ];
    let without = read(&bench, CHAT, &chat(&refused)).await;
    let expected = BlockUnit::CharactersFor(Fallback::Template);
    assert_eq!((without.identity.unit, without.ids.len()), (expected, 0));
    assert_eq!(without.identity.tail.block_bytes, 16);
    assert!(!without.identity.chain.is_empty());
    let tokens = read(&bench, CHAT, &chat(&[("user", "hello")])).await;
    assert_ne!(without.identity.root, tokens.identity.root);
    let bad = bench
        .router
        .reader()
        .read(CHAT, &Bytes::from_static(b"{"))
        .await;
    assert!(matches!(bad, Err(ReadError::Bad(_))));
}

#[tokio::test]
async fn long_texts_are_tokenized_on_workers_with_equal_results() {
    let bench = bench(fixture("llama3"));
    for bytes in [100, 5_000, 80_000, 300_000] {
        let content = "Some words, again. ".repeat(bytes / 19);
        let body = chat(&[("user", &content)]);
        let first = read(&bench, CHAT, &body).await;
        let again = read(&bench, CHAT, &body).await;
        assert_eq!(first.identity.unit, BlockUnit::Tokens, "{bytes} bytes");
        assert_eq!(first.ids, again.ids);
        assert_eq!(first.identity.chain, again.identity.chain);
    }
}

#[tokio::test]
async fn a_batch_is_routed_by_its_first_prompt_and_counted_fully() {
    let bench = bench("tiktoken:cl100k_base".parse().unwrap());
    let prompt = |value: Value| json!({"model": "m", "prompt": value});
    let path = "/v1/completions";
    let text = "one two three four five six seven";
    let one = read(&bench, path, &prompt(json!(text))).await.identity;
    let many = prompt(json!([text, "x".repeat(400), text]));
    let many = read(&bench, path, &many).await.identity;
    assert_eq!(one.chain, many.chain);
    assert!(many.tokens >= one.tokens + 100, "{}", many.tokens);
    let ids = prompt(json!([[1, 2, 3, 4, 5], [1, 2, 3]]));
    assert_eq!(read(&bench, path, &ids).await.identity.tokens, 8);
}

const NINE: &str = "{\"count\":9,\"tokens\":[1,2,3,4,5,6,7,8,9]}";

/// Starts an engine whose `/tokenize` answers `body` with `status`.
async fn engine(status: &'static str, body: &'static str) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut request = Vec::new();
            while !request.ends_with(b"}") {
                socket.read_buf(&mut request).await.unwrap();
            }
            assert!(request.starts_with(b"POST /tokenize HTTP/1.1\r\n"));
            count.fetch_add(1, Ordering::Relaxed);
            let head = format!(
                "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            let answer = head + body;
            socket.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    (url, asked)
}

async fn asking(status: &'static str) -> (Bench, Arc<AtomicUsize>) {
    asking_for(status, NINE).await
}

async fn asking_for(status: &'static str, body: &'static str) -> (Bench, Arc<AtomicUsize>) {
    asking_by(TokenizerSpec::Engine, status, body).await
}

async fn asking_by(
    spec: TokenizerSpec,
    status: &'static str,
    body: &'static str,
) -> (Bench, Arc<AtomicUsize>) {
    let (url, asked) = engine(status, body).await;
    let mut log = Log::new(&[]);
    let backend = super::super::fixture::spec(0, None);
    log.admin(Command::PutBackend(state::command::BackendSpec {
        url,
        ..backend
    }));
    let port = Port::new(log);
    let settings = settings(spec);
    let router = router_with(&port, OutboxSettings::default(), settings);
    (Bench { port, router }, asked)
}

#[tokio::test]
async fn concurrent_equal_tokenize_calls_are_merged() {
    let (bench, asked) = asking("200 OK").await;
    let body = chat(&[("user", "hello")]);
    let reads = join_all((0..20).map(|_| read(&bench, CHAT, &body))).await;
    for read in reads {
        assert_eq!(read.identity.unit, BlockUnit::Tokens);
        assert_eq!(read.ids, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(read.identity.chain.len(), 2);
    }
    read(&bench, CHAT, &body).await;
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    read(&bench, CHAT, &chat(&[("user", "other")])).await;
    assert_eq!(asked.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn an_engine_that_cannot_tokenize_is_paused() {
    let (bench, asked) = asking("404 Not Found").await;
    for turn in 0..10 {
        let read = read(&bench, CHAT, &chat(&[("user", &turn.to_string())])).await;
        let expected = BlockUnit::CharactersFor(Fallback::Engine);
        assert_eq!(read.identity.unit, expected);
    }
    assert!(asked.load(Ordering::Relaxed) < 10);
}

#[tokio::test]
async fn an_empty_token_list_is_ignored() {
    // llama.cpp expects the text in another field.
    let (bench, _) = asking_for("200 OK", "{\"tokens\":[]}").await;
    let read = read(&bench, CHAT, &chat(&[("user", "hello, and how are you?")])).await;
    let expected = BlockUnit::CharactersFor(Fallback::Engine);
    assert_eq!(read.identity.unit, expected);
    assert!(read.identity.tokens > 0 && !read.identity.chain.is_empty());
}

fn engine_or_chatml() -> (TokenizerSpec, Arc<Tokenizer>) {
    let files = fixture("chatml");
    let TokenizerSpec::HuggingFace(file) = &files else {
        panic!("{files}");
    };
    let spec = TokenizerSpec::EngineOr(file.clone());
    (spec, Tokenizer::load(files, None).unwrap())
}

#[tokio::test]
async fn prompts_fall_back_to_local_tokenizer_files() {
    let (spec, files) = engine_or_chatml();
    let body = chat(&[("user", "How are you?")]);
    let own = files.encode_request(CHAT, body.to_string().as_bytes());
    let (bench, asked) = asking_by(spec.clone(), "503 Service Unavailable", NINE).await;
    let unanswered = read(&bench, CHAT, &body).await;
    assert_eq!(unanswered.identity.unit, BlockUnit::Tokens);
    assert_eq!(Some(&unanswered.ids), own.as_ref());
    assert!(unanswered.identity.tail.seam.is_some(), "answers go on");
    assert_eq!(asked.load(Ordering::Relaxed), 1);

    // The engine's own tokens win; if they match, it is known how a response joins them.
    let (bench, _) = asking_by(spec.clone(), "200 OK", NINE).await;
    let other = read(&bench, CHAT, &body).await;
    assert_eq!(other.ids, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert!(other.identity.tail.seam.is_none());
    let same = json!({ "tokens": own }).to_string().leak();
    let (bench, _) = asking_by(spec, "200 OK", same).await;
    let same = read(&bench, CHAT, &body).await;
    assert_eq!(Some(&same.ids), own.as_ref());
    assert!(same.identity.tail.seam.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_prompt_does_not_wait_forever_for_tokenizer_workers() {
    let bench = bench(fixture("chatml"));
    let workers = Arc::clone(&bench.router.reader().workers);
    let cores = u32::try_from(workers.available_permits()).unwrap();
    let all = workers.acquire_many_owned(cores).await.unwrap();
    let long = chat(&[("user", &"How are you, and who? ".repeat(200))]);
    let late = read(&bench, CHAT, &long).await;
    assert_eq!(late.identity.unit, BlockUnit::CharactersFor(Fallback::Busy));
    drop(all);
    let read = read(&bench, CHAT, &long).await;
    assert_eq!(read.identity.unit, BlockUnit::Tokens);
}
