//! Cost of a prompt's tokens and hashes.
//!
//! `cargo bench -p api --bench tokenizers`. Measures hashing per block length, and every tokenizer
//! on prompts of 1 and 32 KB: new ones, the next turn of a conversation, and known ones.
//! `QUORATE_BENCH_TOKENIZER` names a `tokenizer.json` of a real model to measure in addition to the
//! small one of the tests. Single-threaded.

// The macros of the bench harness generate items that cannot be documented.
#![allow(missing_docs)]

use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;

use api::prompt::{TokenScope, Tokenizer, TokenizerSpec, chain_of_tokens};
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";
const SIZES: [(&str, usize); 2] = [("1KB", 1 << 10), ("32KB", 32 << 10)];

/// Cost of hashing alone: 128k tokens in blocks of each length.
fn hash(c: &mut Criterion) {
    let tokens: Vec<u32> = (0..128 * 1024_u32)
        .map(|at| at.wrapping_mul(2_654_435_761) >> 15)
        .collect();
    let mut group = c.benchmark_group("hash 128k tokens");
    for block_size in [16, 64, 128] {
        let scope = TokenScope {
            model: "m",
            salt: "",
            block_size,
        };
        let blocks = tokens.len() as u64 / u64::from(block_size);
        group.throughput(Throughput::Elements(blocks));
        group.bench_function(BenchmarkId::new("block", block_size), |b| {
            b.iter(|| chain_of_tokens(&7.into(), &scope, None, black_box(&tokens), &[]));
        });
    }
    group.finish();
}

/// Returns a conversation of `bytes` bytes. Conversations with different `nth` differ from their
/// first word on.
fn chat(bytes: usize, nth: u64, turns: usize) -> Vec<u8> {
    const WORDS: [&str; 12] = [
        "the", "router", "sends", "each", "request", "to", "whoever", "holds", "its", "prefix",
        "isn't", "it?",
    ];
    let turn = |turn: usize| {
        let role = if turn.is_multiple_of(2) {
            "user"
        } else {
            "assistant"
        };
        let mut seed = nth ^ (turn as u64) << 32;
        let mut content = format!("{nth} {turn}");
        while content.len() < bytes / turns {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let word = WORDS[(seed >> 40) as usize % WORDS.len()];
            content.push_str(if seed >> 60 == 0 { ".\n" } else { " " });
            content.push_str(word);
        }
        json!({"role": role, "content": content})
    };
    let messages: Vec<_> = (0..turns).map(turn).collect();
    json!({"model": "m", "messages": messages})
        .to_string()
        .into_bytes()
}

fn tokenizers() -> Vec<(String, Arc<Tokenizer>)> {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers");
    let small = fixtures.join("chatml/tokenizer.json");
    let mut specs = vec![
        ("tiktoken-cl100k".to_owned(), "tiktoken:cl100k_base".parse()),
        ("tiktoken-o200k".to_owned(), "tiktoken:o200k_base".parse()),
        (
            "huggingface-small".to_owned(),
            Ok(TokenizerSpec::HuggingFace(small)),
        ),
    ];
    if let Ok(file) = std::env::var("QUORATE_BENCH_TOKENIZER") {
        let spec = TokenizerSpec::HuggingFace(file.into());
        specs.push(("huggingface-given".to_owned(), Ok(spec)));
    }
    let load = |(name, spec): (String, Result<TokenizerSpec, _>)| {
        let tokenizer = Tokenizer::load(spec.expect("they are well named"), None);
        (name, tokenizer.expect("the files are there"))
    };
    specs.into_iter().map(load).collect()
}

fn tokenize(c: &mut Criterion) {
    for (name, tokenizer) in tokenizers() {
        let mut group = c.benchmark_group(&name);
        group.sample_size(20);
        let mut nth = 0;
        for (size, bytes) in SIZES {
            group.throughput(Throughput::Bytes(bytes as u64));
            group.bench_function(BenchmarkId::new("new", size), |b| {
                let fresh = || {
                    nth += 1;
                    chat(bytes, nth, 1)
                };
                let encode = |body: Vec<u8>| tokenizer.encode_request(CHAT, &body);
                b.iter_batched(fresh, encode, BatchSize::SmallInput);
            });
            group.bench_function(BenchmarkId::new("next turn of 16", size), |b| {
                let fresh = || {
                    nth += 1;
                    let known = chat(bytes, nth, 16);
                    let mut next: serde_json::Value =
                        serde_json::from_slice(&known).expect("it was made above");
                    black_box(tokenizer.encode_request(CHAT, &known));
                    let content = format!("{nth} and then?");
                    let messages = next["messages"].as_array_mut().expect("it has messages");
                    messages.push(json!({"role": "user", "content": content}));
                    next.to_string().into_bytes()
                };
                let encode = |body: Vec<u8>| tokenizer.encode_request(CHAT, &body);
                b.iter_batched(fresh, encode, BatchSize::SmallInput);
            });
            let body = chat(bytes, 0, 16);
            group.bench_function(BenchmarkId::new("known", size), |b| {
                b.iter(|| tokenizer.encode_request(CHAT, black_box(&body)));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, hash, tokenize);
criterion_main!(benches);
