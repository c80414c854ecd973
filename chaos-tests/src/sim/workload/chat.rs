//! Clients that chat with models. Chats grow and share prefixes.

use std::sync::Arc;
use std::time::Duration;

use api::admission::{AdmissionRequest, AdmissionTry};
use api::prompt::{ParsedBody, Prompt, PromptIdentity, ReplyShape};
use api::routing::{
    Attempt, AttemptEnd, Decision, EarlierAttempts, EarlierCharge, PermitCell, RequestStages,
    RoutingRequest, Usage, UserName,
};
use api::sessions::NamedSession;
use lab::rng::Rng;
use state::ids::{AgentSessionKey, Slot};
use tokio::time::{Instant, sleep};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::engines::{EnginePrompt, EngineTiming};
use super::{ReplicaHandles, think, user, wait};
use crate::oracle::history::{self, HistoryId, RequestTokens};

/// Label of these clients' draws, which separates them from those of other kinds.
const KIND: u64 = 2;
/// Mean pause between two requests, in milliseconds.
const THINK_MS: u64 = 150;
/// Number of tokens at which a chat ends.
const CHAT_TOKENS_MAX: usize = 500;
/// Maximum number of attempts of one request.
const ATTEMPTS_MAX: usize = 3;
/// Upper bound of the output tokens that an engine makes or the router estimates.
const OUTPUT_TOKENS_MAX: u64 = 1000;
/// Number of bytes per token in prompts that are sent as text.
const TOKEN_BYTES: usize = 4;

/// A chat request, as admission and routing see it.
pub(super) struct ChatRequest {
    pub(super) model: &'static str,
    pub(super) user: UserName,
    pub(super) id: String,
    pub(super) identity: PromptIdentity,
    pub(super) tokens_max: Option<u32>,
    pub(super) priority: i16,
    pub(super) session: NamedSession,
    pub(super) permit: PermitCell,
    /// Attempts at the answer before the one that goes on.
    pub(super) earlier: EarlierAttempts,
}

impl AdmissionRequest for ChatRequest {
    fn ask<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a> {
        RoutingRequest {
            model: self.model,
            identity: &self.identity,
            request_id: &self.id,
            user: &self.user,
            session: Some(self.session),
            headers: None,
            policy: None,
            labels: &[],
            excluded,
            waiting_here: 0,
            client: None,
            endpoints: None,
            stages: RequestStages::Monolithic,
            room: Default::default(),
        }
    }

    fn permit(&self) -> &PermitCell {
        &self.permit
    }

    fn priority(&self) -> i16 {
        self.priority
    }

    fn tokens_max(&self) -> Option<u32> {
        self.tokens_max
    }

    fn is_selective(&self) -> bool {
        false
    }

    fn earlier(&self) -> Option<EarlierCharge> {
        self.earlier.charge()
    }
}

/// A chat with its tokens so far.
pub(super) struct ChatState {
    pub(super) model: &'static str,
    pub(super) user: String,
    tokens: Vec<u32>,
    is_text: bool,
    /// Which of the instructions it begins with.
    which: u64,
}

impl ChatState {
    /// Creates a chat that begins with one of a few instructions.
    pub(super) fn new(rng: &mut Rng) -> Self {
        let (which, is_text) = (rng.below(4), rng.below(3) == 0);
        let length = 40 + 30 * which;
        Self {
            model: if rng.below(3) == 0 { "m1" } else { "m0" },
            user: user(rng),
            tokens: (0..length).map(|at| token(which * 1000 + at)).collect(),
            is_text,
            which,
        }
    }

    /// Returns the session of the next turn. A user's chats with the same instruction are turns of
    /// one session, whichever replicas they reach; the first instruction is the parent of the
    /// others.
    pub(super) fn session(&self) -> NamedSession {
        // The lowest bit is left to sessions with one turn, so that no late item finds one of them.
        let key = |which: u64| AgentSessionKey(xxh3_64_with_seed(self.user.as_bytes(), which) << 1);
        NamedSession {
            key: key(self.which),
            parent: (self.which > 0).then(|| key(0)),
            is_final: self.tokens.len().is_multiple_of(7),
            source: "header:x-quorate-session",
        }
    }

    pub(super) fn says(&mut self, rng: &mut Rng, tokens: u64) {
        self.tokens
            .extend((0..tokens).map(|_| token(rng.below(1 << 20))));
    }

    pub(super) fn parsed(&self) -> ParsedBody {
        let prompt = if self.is_text {
            let bytes = |token: &u32| format!("{:0width$x}", token % 0xffff, width = TOKEN_BYTES);
            Prompt::Text(
                self.tokens
                    .iter()
                    .flat_map(|it| bytes(it).into_bytes())
                    .collect(),
            )
        } else {
            Prompt::Tokens(self.tokens.clone())
        };
        ParsedBody {
            model: self.model.to_owned(),
            prompt,
            reply: if self.is_text {
                ReplyShape::Continuation
            } else {
                ReplyShape::None
            },
            ..ParsedBody::default()
        }
    }
}

fn token(of: u64) -> u32 {
    u32::try_from(of % 100_000).unwrap_or(0)
}

/// Sends the turns of chats until the workload is over.
pub(super) async fn talk(handles: ReplicaHandles, number: u8) {
    let mut rng = handles.rng(KIND, u64::from(number));
    let mut chat = ChatState::new(&mut rng);
    let mut requests = 0;
    while !handles.context.is_over() {
        think(&mut rng, THINK_MS).await;
        if chat.tokens.len() > CHAT_TOKENS_MAX || rng.below(10) == 0 {
            chat = ChatState::new(&mut rng);
        }
        let said = 1 + rng.below(60);
        chat.says(&mut rng, said);
        requests += 1;
        let id = format!("{}-{number}-{requests}", handles.run);
        let (output, _) = request(&handles, &mut rng, &chat, id).await;
        chat.says(&mut rng, output);
    }
}

/// Sends one request to a healed cluster, to check that it ends.
pub(super) async fn ask_once(handles: &ReplicaHandles) {
    let mut rng = handles.rng(KIND, u64::from(u8::MAX));
    let chat = ChatState::new(&mut rng);
    let id = format!("{}-last", handles.run);
    request(handles, &mut rng, &chat, id).await;
}

/// Sends one request of `user` and returns the name of its outcome.
pub(super) async fn ask_as(
    handles: &ReplicaHandles,
    rng: &mut Rng,
    user: &str,
    id: String,
) -> &'static str {
    let chat = ChatState {
        user: user.to_owned(),
        ..ChatState::new(rng)
    };
    request(handles, rng, &chat, id).await.1
}

/// Runs one request to its end. Returns the number of received tokens, and the name of the outcome.
async fn request(
    handles: &ReplicaHandles,
    rng: &mut Rng,
    chat: &ChatState,
    id: String,
) -> (u64, &'static str) {
    let request = Arc::new(ChatRequest {
        model: chat.model,
        user: UserName::bounded(&chat.user),
        identity: handles.router.reader().identify(&chat.parsed()),
        id,
        tokens_max: (rng.below(2) == 0).then(|| rng.within(1, 100)),
        priority: i16::from(rng.below(8) == 0),
        session: chat.session(),
        permit: PermitCell::new(),
        earlier: EarlierAttempts::default(),
    });
    let patience = Duration::from_millis(200 + rng.below(6000));
    let ticket = called(handles, &request);
    let mut excluded = Vec::new();
    while excluded.len() < ATTEMPTS_MAX {
        let which = match excluded.is_empty() {
            true => AdmissionTry::First,
            false => AdmissionTry::Again,
        };
        let admitted = wait::admitted(handles, &request, (&excluded, which), patience).await;
        let (decision, attempt) = match admitted {
            Ok(admitted) => admitted.into_parts(),
            Err(why) => {
                handles.context.count("request", why);
                ended(handles, ticket, Some(RequestTokens::default()));
                return (0, why);
            }
        };
        let Some(service) = reach(handles, ticket, &request, &decision, chat) else {
            attempt.end(AttemptEnd::NotRun, Instant::now());
            excluded.push(decision.backend.slot);
            continue;
        };
        let stream = AnswerStream {
            handles,
            request: &request,
            decision: &decision,
            service,
            ticket,
        };
        return (stream.run(rng, attempt).await, "run");
    }
    handles.context.count("request", "all-tried");
    ended(handles, ticket, Some(RequestTokens::default()));
    (0, "all-tried")
}

/// Sends a request to the chosen backend. Returns how the engine serves it, or `None` if the engine
/// does not accept it.
pub(super) fn reach(
    handles: &ReplicaHandles,
    ticket: HistoryId,
    request: &ChatRequest,
    decision: &Decision,
    chat: &ChatState,
) -> Option<EngineTiming> {
    let dispatch = history::Dispatch {
        at_us: handles.now_us(),
        backend: decision.backend,
        seen: (decision.index, handles.view.applied()),
    };
    handles.context.ledger.with(|record| {
        if !record.observation.is_spoiled(handles.run) {
            record.history.dispatched(ticket, dispatch);
        }
    });
    // An engine sees tokens, however the prompt was sent.
    let tokens = handles.router.reader().identify(&ParsedBody {
        prompt: Prompt::Tokens(chat.tokens.clone()),
        ..chat.parsed()
    });
    let registry = handles.view.registry();
    let mut backends = registry.backends.iter();
    let backend = backends.find(|it| it.handle == decision.backend)?;
    let told = backend.spec.kv_events.is_some();
    let told = told.then(|| (&*tokens.chain, &*chat.tokens));
    let chain = &request.identity.chain;
    serve(handles, &backend.spec.url, EnginePrompt { chain, told })
}

/// Records the arrival of a request with its maximum charge.
pub(super) fn called(handles: &ReplicaHandles, request: &ChatRequest) -> HistoryId {
    let prompt_tokens = u64::from(request.identity.tokens);
    let most = RequestTokens {
        input_uncached: prompt_tokens,
        input_cached: prompt_tokens,
        output: OUTPUT_TOKENS_MAX,
    };
    let (run, now_us) = (handles.run, handles.now_us());
    handles.context.ledger.with(|record| {
        record
            .history
            .request(run, request.user.as_str(), now_us, most)
    })
}

/// Sends a prompt to an engine and records the KV events that it publishes. Returns `None` if the
/// engine does not accept it.
fn serve(handles: &ReplicaHandles, url: &str, prompt: EnginePrompt<'_>) -> Option<EngineTiming> {
    let mut engines = handles.context.engines();
    let service = engines.serve(url, prompt);
    for message in engines.take_published() {
        let mark = xxh3_64(&message.payload);
        handles.context.count("kv-message", "published");
        handles.context.ledger.with(|record| {
            let observation = &mut record.observation;
            observation.published(message.seq, mark, message.cached);
        });
    }
    service
}

/// A response of an engine while it streams to the client.
struct AnswerStream<'a> {
    handles: &'a ReplicaHandles,
    request: &'a ChatRequest,
    decision: &'a Decision,
    service: EngineTiming,
    ticket: HistoryId,
}

impl AnswerStream<'_> {
    async fn run(&self, rng: &mut Rng, mut attempt: Attempt) -> u64 {
        let identity = &self.request.identity;
        let service = &self.service;
        // A client that leaves does so at some point of the response.
        let leaves_after = (rng.below(10) == 0).then(|| rng.below(service.output + 1));
        let prompt_tokens = u64::from(identity.tokens);
        let block = u64::from(identity.tail.tokens_per_block.max(1));
        let cached_tokens = (service.cached_blocks * block).min(prompt_tokens.saturating_sub(1));
        let usage = |completion_tokens| Usage {
            prompt_tokens,
            cached_tokens: Some(cached_tokens),
            completion_tokens,
        };
        let told = |output| RequestTokens {
            input_uncached: prompt_tokens - cached_tokens,
            input_cached: cached_tokens,
            output,
        };
        if leaves_after == Some(0) {
            attempt.end(AttemptEnd::ClientLeft, Instant::now());
            self.end("left-early", None);
            return 0;
        }
        sleep(Duration::from_millis(service.first_ms)).await;
        attempt.first_byte(Instant::now());
        attempt.first_token(Instant::now());
        for made in 1..=service.output {
            let text = format!("{:04x}", token(rng.below(1 << 20)) % 0xffff);
            attempt.output(&text, Instant::now());
            attempt.usage(usage(made), Instant::now());
            if service.breaks_after == Some(made) {
                attempt.end(AttemptEnd::Broken, Instant::now());
                self.end("broken", Some(told(made)));
                return made;
            }
            if leaves_after == Some(made) {
                attempt.end(AttemptEnd::ClientLeft, Instant::now());
                self.end("left", Some(told(made)));
                return made;
            }
            if made % 8 == 0 {
                sleep(Duration::from_millis(service.gap_ms)).await;
            }
        }
        attempt.end(AttemptEnd::Finished, Instant::now());
        self.end("finished", Some(told(service.output)));
        service.output
    }

    fn end(&self, how: &'static str, used: Option<RequestTokens>) {
        self.handles.context.count("request", how);
        if self.decision.matched > 0 {
            self.handles.context.count("prefix", "matched");
        }
        ended(self.handles, self.ticket, used);
    }
}

pub(super) fn ended(handles: &ReplicaHandles, ticket: HistoryId, used: Option<RequestTokens>) {
    let end = history::RequestEnd {
        at_us: handles.now_us(),
        used,
    };
    handles
        .context
        .ledger
        .with(|record| record.history.ended(ticket, end));
}
