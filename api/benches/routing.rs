//! Cost of one request between its body and its backend: read, identify, decide, account.
//!
//! `cargo bench -p api --bench routing`. The fleet holds a million blocks in total; one backend
//! holds half of each prompt. Single-threaded; the figures include nothing else of a request.

// The macros of the bench harness generate items that cannot be documented.
#![allow(missing_docs)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::{Arc, LazyLock};

use api::admission::{Admission, AdmissionRequest, AdmissionTry};
use api::base::clock::Clock;
use api::engines::backends::{Backends, Health, ProbeSettings};
use api::prompt::{ModelSettings, ParsedBody, PromptIdentity, Tokenizer, parse};
use api::routing::{
    AttemptEnd, DispatchTerms, OutboxSettings, PermitCell, RequestStages, Router, RouterParts,
    RoutingRequest, SelectSettings, Usage, UserName,
};
use api::users::api_keys::{NewSecret, secret_hash};
use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use futures_util::FutureExt as _;
use serde_json::json;
use state::RouterState;
use state::command::{BackendSpec, Command, Envelope, Founding, Item, Lane, LeaseOutcome, Origin};
use state::ids::{ApiKeyId, AttemptId, BlockHash, LogIndex, ReplicaId, SessionId, Slot};
use state::keys::{API_KEYS_MAX, ApiKeySpec};
use state::policy::{CostSettings, PolicyConfig};
use tokio::time::Instant;

const BLOCK_BYTES: u32 = 128;
const BLOCKS_ALL: usize = 1_000_000;

/// Returns a chat of `bytes` bytes: turns of 400 bytes in lines of 80, like typical conversations.
fn chat(bytes: usize) -> Bytes {
    let line = "The quick brown fox jumps over the lazy dog, and says \"hello\" to whoever sees.\n";
    let turn = |i: usize| {
        let role = if i.is_multiple_of(2) {
            "user"
        } else {
            "assistant"
        };
        json!({"role": role, "content": format!("{i} {}", line.repeat(5))})
    };
    let messages: Vec<_> = (0..bytes.div_ceil(440)).map(turn).collect();
    let body = json!({"model": "m", "stream": true, "temperature": 0.7, "messages": messages});
    body.to_string().into()
}

/// Returns one prompt without escapes.
fn plain(bytes: usize) -> Bytes {
    json!({"model": "m", "max_tokens": 16, "prompt": "plain text ".repeat(bytes / 11)})
        .to_string()
        .into()
}

fn read(c: &mut Criterion) {
    let mut group = c.benchmark_group("parse");
    for (name, path, body) in [
        ("chat/1KB", "/v1/chat/completions", chat(1 << 10)),
        ("chat/32KB", "/v1/chat/completions", chat(32 << 10)),
        ("plain/1KB", "/v1/completions", plain(1 << 10)),
        ("plain/32KB", "/v1/completions", plain(32 << 10)),
    ] {
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(name, |b| b.iter(|| parse(path, black_box(&body)).is_ok()));
    }
    group.finish();
}

/// Returns a router over `state` whose backends are all healthy.
fn router(state: &RouterState) -> Arc<Router> {
    let view = state.view();
    let health = Backends::new(ProbeSettings::default());
    for backend in &view.registry().backends {
        health.assume(
            backend.handle.slot,
            &Health {
                is_healthy: true,
                detail: None,
                waiting: 0,
                running: 0,
                kv_usage_permille: 0,
                adapters: None,
            },
        );
    }
    Arc::new(Router::new(RouterParts {
        view,
        backends: Arc::new(health),
        models: vec![ModelSettings {
            name: "*".to_owned(),
            tokenizer: Tokenizer::character(),
            block_size: Some(BLOCK_BYTES),
            pairs: Default::default(),
        }],
        replica: ReplicaId(1),
        session: SessionId(1),
        outbox: OutboxSettings::default(),
        overrides: Vec::new(),
        select: SelectSettings::default(),
        clock: Clock::default(),
    }))
}

struct Fleet {
    state: RouterState,
    index: u64,
    router: Arc<Router>,
}

impl Fleet {
    fn new(backends: usize) -> Self {
        let mut state = RouterState::new();
        let mut index = 0;
        let mut apply = |command| {
            index += 1;
            let origin = Origin {
                replica: ReplicaId(1),
                session: SessionId(1),
                lane: Lane::Admin,
                seq: index,
            };
            state.apply(
                LogIndex(index),
                Envelope {
                    origin,
                    proposed_at_ms: 0,
                    command,
                },
            );
        };
        apply(Command::from(Founding::of_seed(
            7,
            PolicyConfig::Cost(CostSettings::default()),
        )));
        for at in 0..backends {
            apply(Command::PutBackend(BackendSpec {
                id: format!("gpu-{at}"),
                url: format!("http://127.0.0.1:{}", 9000 + at),
                models: vec!["m".to_owned()],
                labels: BTreeMap::new(),
                capacity_blocks: None,
                kv_events: None,
                kv_replay: None,
                role: state::command::BackendRole::Both,
            }));
        }
        let router = router(&state);
        let mut fleet = Self {
            state,
            index,
            router,
        };
        for at in 0..backends {
            let blocks = (0..BLOCKS_ALL / backends).map(|i| {
                BlockHash(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul((at * BLOCKS_ALL + i + 1) as u64))
            });
            let blocks: Vec<_> = blocks.collect();
            for part in blocks.chunks(1000) {
                fleet.own(at, part.to_vec());
            }
        }
        fleet
    }

    /// Makes the backend at index `at` own `new`.
    fn own(&mut self, at: usize, new: Vec<BlockHash>) {
        let backend = self.state.view().registry().backends[at].handle;
        self.index += 1;
        let origin = Origin {
            replica: ReplicaId(2),
            session: SessionId(1),
            lane: Lane::Outbox,
            seq: self.index,
        };
        let command = Command::Batch {
            base_attempt: AttemptId(self.index),
            items: vec![
                Item::Acquire {
                    attempt: 0,
                    backend,
                    tip: None,
                    new,
                },
                Item::Release {
                    attempt: 0,
                    outcome: LeaseOutcome::Kept,
                },
            ],
        };
        let envelope = Envelope {
            origin,
            proposed_at_ms: 0,
            command,
        };
        self.state.apply(LogIndex(self.index), envelope);
    }

    /// Returns a prompt of `blocks` blocks, half of them owned by the first backend.
    fn prompt(&mut self, blocks: usize) -> (ParsedBody, PromptIdentity) {
        let text = format!("{blocks} ").repeat(blocks * BLOCK_BYTES as usize);
        let text = &text[..blocks * BLOCK_BYTES as usize + 1];
        let body = json!({"model": "m", "prompt": text}).to_string();
        let parsed = parse("/v1/completions", &Bytes::from(body)).expect("the body is good");
        let identity = self.router.reader().identify(&parsed);
        self.own(0, identity.chain[..blocks / 2].to_vec());
        (parsed, identity)
    }
}

/// User who sends the requests.
static ADA: LazyLock<UserName> = LazyLock::new(|| UserName::bounded("ada"));

fn ask(identity: &PromptIdentity) -> RoutingRequest<'_> {
    RoutingRequest {
        model: "m",
        identity,
        request_id: "0123456789abcdef",
        user: &ADA,
        session: None,
        headers: None,
        policy: None,
        labels: &[],
        excluded: &[],
        waiting_here: 0,
        client: None,
        endpoints: None,
        stages: RequestStages::Monolithic,
        room: Default::default(),
    }
}

fn route(c: &mut Criterion) {
    for backends in [8, 64, 512] {
        let mut fleet = Fleet::new(backends);
        for blocks in [8, 512] {
            let (parsed, identity) = fleet.prompt(blocks);
            let id = |what: &str| BenchmarkId::new(what, format!("{backends}x{blocks}"));
            if backends == 8 {
                c.bench_function(&format!("identify/{blocks}"), |b| {
                    b.iter(|| fleet.router.reader().identify(black_box(&parsed)));
                });
            }
            c.bench_with_input(id("decide"), &identity, |b, identity| {
                b.iter(|| {
                    fleet
                        .router
                        .decider()
                        .decide(&ask(black_box(identity)), Instant::now())
                        .is_ok()
                });
            });
        }
    }
}

/// Cost of the accounting for one request: dispatch with lease, overlay and charge, first byte,
/// usage, end.
fn book(c: &mut Criterion) {
    let mut fleet = Fleet::new(8);
    let (_, identity) = fleet.prompt(512);
    let decision = fleet
        .router
        .decider()
        .decide(&ask(&identity), Instant::now())
        .expect("backends are healthy");
    c.bench_function("dispatch and end/512 blocks", |b| {
        b.iter(|| {
            let mut attempt = fleet.router.dispatcher().dispatch(
                &decision,
                &ask(&identity),
                DispatchTerms::default(),
                Instant::now(),
            );
            attempt.first_byte(Instant::now());
            attempt.output("some output text", Instant::now());
            attempt.usage(
                Usage {
                    prompt_tokens: 16_384,
                    cached_tokens: Some(8192),
                    completion_tokens: 4,
                },
                Instant::now(),
            );
            attempt.end(AttemptEnd::Finished, Instant::now());
        });
    });
}

/// A request as admission sees it.
struct Request(PromptIdentity, PermitCell);

impl AdmissionRequest for Request {
    fn ask<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a> {
        RoutingRequest {
            excluded,
            ..ask(&self.0)
        }
    }

    fn permit(&self) -> &PermitCell {
        &self.1
    }

    fn priority(&self) -> i16 {
        0
    }

    fn tokens_max(&self) -> Option<u32> {
        None
    }

    fn is_selective(&self) -> bool {
        false
    }
}

/// Cost of admission while nothing waits: `admit` compared with its parts.
fn admit(c: &mut Criterion) {
    let mut fleet = Fleet::new(8);
    let request = Arc::new(Request(fleet.prompt(8).1, PermitCell::new()));
    c.bench_function("decide, dispatch, end/8 blocks", |b| {
        b.iter(|| {
            let asked = ask(&request.0);
            let decision = fleet
                .router
                .decider()
                .decide(&asked, Instant::now())
                .expect("backends are healthy");
            let attempt = fleet.router.dispatcher().dispatch(
                &decision,
                &asked,
                DispatchTerms::default(),
                Instant::now(),
            );
            attempt.end(AttemptEnd::NotRun, Instant::now());
        });
    });
    let admission = Arc::new(Admission::new(&fleet.router));
    c.bench_function("admit, end/8 blocks", |b| {
        b.iter(|| {
            let admitted = admission
                .admit(&request, (&[], AdmissionTry::First))
                .now_or_never();
            let admitted = admitted.and_then(Result::ok).expect("nothing waits");
            admitted
                .into_parts()
                .1
                .end(AttemptEnd::NotRun, Instant::now());
        });
    });
}

/// Lookup of a request's API key among the maximum number of keys: at most 1 us (issue 14).
fn keys(c: &mut Criterion) {
    let mut state = RouterState::new();
    let mut apply = |index: u64, command| {
        let origin = Origin {
            replica: ReplicaId(1),
            session: SessionId(1),
            lane: Lane::Admin,
            seq: index,
        };
        let envelope = Envelope {
            origin,
            proposed_at_ms: 1,
            command,
        };
        state.apply(LogIndex(index), envelope);
    };
    let seed = 7;
    apply(
        1,
        Command::from(Founding::of_seed(
            seed,
            PolicyConfig::Cost(CostSettings::default()),
        )),
    );
    let secrets: Vec<NewSecret> = (0..API_KEYS_MAX).map(|_| NewSecret::draw()).collect();
    for (secret, index) in secrets.iter().zip(2_u64..) {
        let spec = ApiKeySpec {
            id: ApiKeyId(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            secret: secret.hash(seed),
            name: "bench".to_owned(),
            user: "ada".to_owned(),
            ..ApiKeySpec::default()
        };
        apply(index, Command::CreateKey(Box::new(spec)));
    }
    let view = state.view();
    assert_eq!(view.keys().len(), API_KEYS_MAX);
    let mut turn = 0;
    c.bench_function("api key/100000", |b| {
        b.iter(|| {
            turn = (turn + 7919) % secrets.len();
            let hash = secret_hash(seed, black_box(secrets[turn].text().as_bytes()));
            view.keys().find(&hash, 1)
        });
    });
}

criterion_group!(benches, read, route, book, admit, keys);
criterion_main!(benches);
