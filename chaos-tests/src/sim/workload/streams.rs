//! Clients of streams that go on at other engines: in the middle of an answer, its engine fails,
//! pauses or drains, any number of times. The user pays for one undisturbed answer (I166).
//!
//! The attempts are ended, lent and joined in the order of the proxy. Like the proxy, these clients
//! turn what an engine that goes on reports into the usage of the whole answer.
//!
//! Their presence is drawn separately from everything else. Half of the seeds have none.

use std::sync::Arc;
use std::time::Duration;

use api::admission::AdmissionTry;
use api::routing::{Attempt, AttemptEnd, EarlierAttempts, PermitCell, Usage, UserName};
use api::sessions::NamedSession;
use lab::rng::Rng;
use state::ids::{AgentSessionKey, Slot};
use tokio::time::{Instant, sleep, timeout};
use xxhash_rust::xxh3::xxh3_64;

use super::chat::{self, ChatRequest, ChatState};
use super::engines::EngineTiming;
use super::{ReplicaHandles, think, wait};
use crate::oracle::history::{HistoryId, OnlyTurn, RequestTokens};

/// Label of these clients' draws, which separates them from those of other kinds.
const KIND: u64 = 11;
/// Label of the draw of their presence, which separates it from others under the same seed.
const RNG_LABEL: u64 = 0x7374_7265;
/// Mean pause between two requests, in milliseconds.
const THINK_MS: u64 = 200;
/// Maximum number of backends that are asked for an answer, moves included.
const BACKENDS_MAX: usize = 8;
/// Time for which a request waits for a backend.
const PATIENCE: Duration = Duration::from_secs(3);
/// Name of the user of these requests.
const USER: &str = "stream-watcher";

/// Returns whether the world of a seed has such clients.
pub(super) fn are_in(seed: u64) -> bool {
    Rng::new(seed, RNG_LABEL).below(2) == 0
}

/// When engines report the usage of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UsageReports {
    /// With each event.
    Running,
    /// With the last event.
    Last,
    /// Never.
    None,
}

/// What happens to an answer next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NextEvent {
    /// Its engine completes it.
    Finish,
    /// Its engine fails.
    Fail,
    /// Its engine pauses, and another one may go on meanwhile.
    Pause,
    /// Its engine drains, and another one may go on if it has room.
    Move,
}

/// Sends requests until the workload is over.
pub(super) async fn watch(handles: ReplicaHandles) {
    let mut rng = handles.rng(KIND, 0);
    let mut number = 0;
    while !handles.context.is_over() {
        think(&mut rng, THINK_MS).await;
        number += 1;
        ask(&handles, &mut rng, number).await;
    }
}

/// Runs one request to its end, or until its client leaves.
async fn ask(handles: &ReplicaHandles, rng: &mut Rng, number: u64) {
    let mut chat = ChatState::new(rng);
    let said = 1 + rng.below(60);
    chat.says(rng, said);
    let id = format!("{}-stream-{number}", handles.run);
    let key = AgentSessionKey(xxh3_64(id.as_bytes()) | 1);
    let session = NamedSession {
        key,
        parent: None,
        is_final: false,
        ..chat.session()
    };
    let request = Arc::new(ChatRequest {
        model: chat.model,
        user: UserName::bounded(USER),
        identity: handles.router.reader().identify(&chat.parsed()),
        id,
        tokens_max: None,
        priority: 0,
        session,
        permit: PermitCell::new(),
        earlier: EarlierAttempts::default(),
    });
    let ticket = chat::called(handles, &request);
    let stays = match rng.below(4) {
        0 => Duration::from_millis(rng.below(1500)),
        _ => Duration::MAX,
    };
    let mut answer = BrokenAnswer {
        handles,
        chat: &chat,
        ticket,
        reports: [
            UsageReports::Running,
            UsageReports::Last,
            UsageReports::None,
        ][[0, 0, 0, 1, 2][rng.below(5) as usize]],
        output: 1 + rng.below(80),
        text: String::new(),
        made: 0,
        reported: None,
        excluded: Vec::new(),
        is_open: false,
        has_run: false,
        request,
    };
    let how = timeout(stays, answer.run(rng)).await.unwrap_or("left");
    handles.context.count("stream", how);
    answer.ended(key);
}

/// An answer on its way to the client.
struct BrokenAnswer<'a> {
    handles: &'a ReplicaHandles,
    chat: &'a ChatState,
    ticket: HistoryId,
    request: Arc<ChatRequest>,
    reports: UsageReports,
    /// Number of output tokens of the undisturbed answer.
    output: u64,
    /// What the client has received.
    text: String,
    /// Number of output tokens that the client has received.
    made: u64,
    /// Last usage that the router was told; `None` before.
    reported: Option<Usage>,
    /// Backends that are not asked again.
    excluded: Vec<Slot>,
    /// Whether an attempt is in flight.
    is_open: bool,
    /// Whether an engine may have run the request.
    has_run: bool,
}

impl BrokenAnswer<'_> {
    /// Runs the answer until it ends, and returns how.
    async fn run(&mut self, rng: &mut Rng) -> &'static str {
        let Some((mut attempt, mut service)) = self.begin(rng, AdmissionTry::First).await else {
            return "not begun";
        };
        self.request.earlier.go_on(&mut attempt, "");
        loop {
            let next = self.stream(rng, &mut attempt, service).await;
            let is_move = next == NextEvent::Move;
            match next {
                NextEvent::Finish => {
                    self.end(attempt, AttemptEnd::Finished);
                    return "finished";
                }
                NextEvent::Fail => {
                    let end = self.failure(rng);
                    self.has_run |= end != AttemptEnd::NotRun;
                    self.is_open = false;
                    let earlier = &self.request.earlier;
                    earlier.hand_over(attempt, end, Instant::now());
                    if rng.below(8) == 0 {
                        return "not continued";
                    }
                    let Some(went_on) = self.begin(rng, AdmissionTry::Again).await else {
                        return "continued by none";
                    };
                    (attempt, service) = went_on;
                    self.request.earlier.go_on(&mut attempt, &self.text);
                    self.handles.context.count("stream", "continued");
                }
                NextEvent::Pause | NextEvent::Move => {
                    // It has generated output, however the next one ends.
                    self.has_run = true;
                    self.request.earlier.lend(&attempt);
                    let which = match is_move {
                        true => AdmissionTry::Now,
                        false => AdmissionTry::Again,
                    };
                    let Some((mut other, its)) = self.begin(rng, which).await else {
                        self.request.earlier.take_back();
                        self.is_open = true;
                        self.handles.context.count("stream", "stayed");
                        continue;
                    };
                    self.request.earlier.go_on(&mut other, &self.text);
                    let end = match is_move {
                        true => AttemptEnd::Moved,
                        false => AttemptEnd::Broken,
                    };
                    other.replaces(attempt, end, Instant::now());
                    (attempt, service) = (other, its);
                    self.handles.context.count("stream", "taken over");
                }
            }
        }
    }

    /// Draws how an engine fails: before any output, an error may say that it did not run the
    /// request.
    fn failure(&self, rng: &mut Rng) -> AttemptEnd {
        let early = [AttemptEnd::NotRun, AttemptEnd::Failed, AttemptEnd::Broken];
        match self.made {
            0 => early[rng.below(3) as usize],
            _ => AttemptEnd::Broken,
        }
    }

    fn end(&mut self, attempt: Attempt, end: AttemptEnd) {
        self.has_run |= end != AttemptEnd::NotRun;
        self.is_open = false;
        attempt.end(end, Instant::now());
    }

    /// Asks backends one after another until one begins, or goes on. Returns the attempt and how the
    /// engine serves it.
    async fn begin(
        &mut self,
        rng: &mut Rng,
        mut which: AdmissionTry,
    ) -> Option<(Attempt, EngineTiming)> {
        while self.excluded.len() < BACKENDS_MAX {
            let (handles, from) = (self.handles, (&*self.excluded, which));
            let admitted = wait::admitted(handles, &self.request, from, PATIENCE).await;
            let (decision, attempt) = admitted.ok()?.into_parts();
            self.is_open = true;
            self.excluded.push(decision.backend.slot);
            if which == AdmissionTry::First {
                which = AdmissionTry::Again;
            }
            let reached = chat::reach(handles, self.ticket, &self.request, &decision, self.chat);
            let Some(service) = reached else {
                self.end(attempt, AttemptEnd::NotRun);
                continue;
            };
            sleep(Duration::from_millis(service.first_ms)).await;
            match rng.below(12) {
                // The connection breaks before the response.
                0 => {
                    (self.is_open, self.has_run) = (false, true);
                    let end = [AttemptEnd::Failed, AttemptEnd::Broken][rng.below(2) as usize];
                    let earlier = &self.request.earlier;
                    earlier.hand_over(attempt, end, Instant::now());
                }
                // The response is an error, or begins another answer.
                1 => {
                    let end = self.failure(rng);
                    self.end(attempt, end);
                    return None;
                }
                _ => return Some((attempt, service)),
            }
        }
        None
    }

    /// Passes output to the client until the next event.
    async fn stream(
        &mut self,
        rng: &mut Rng,
        attempt: &mut Attempt,
        service: EngineTiming,
    ) -> NextEvent {
        attempt.first_byte(Instant::now());
        let next = [
            NextEvent::Fail,
            NextEvent::Pause,
            NextEvent::Move,
            NextEvent::Finish,
        ][rng.below(4) as usize];
        let left = self.output - self.made;
        let until = match next {
            NextEvent::Finish => self.output,
            NextEvent::Fail if rng.below(4) == 0 => self.made,
            NextEvent::Fail => self.made + rng.below(left + 1),
            // Another engine goes on behind some output only.
            NextEvent::Pause | NextEvent::Move => self.made + rng.below(left + 1).max(1).min(left),
        };
        if self.reports == UsageReports::Running && rng.below(2) == 0 {
            self.report(attempt, service);
        }
        while self.made < until {
            let tokens = (1 + rng.below(3)).min(until - self.made);
            if self.made == 0 {
                attempt.first_token(Instant::now());
            }
            let text = "abcd".repeat(tokens as usize);
            self.made += tokens;
            self.text.push_str(&text);
            attempt.output(&text, Instant::now());
            if self.reports == UsageReports::Running {
                self.report(attempt, service);
            }
            sleep(Duration::from_millis(service.gap_ms)).await;
        }
        if next == NextEvent::Finish && self.reports == UsageReports::Last {
            self.report(attempt, service);
        }
        match next {
            NextEvent::Pause | NextEvent::Move if self.made == 0 => NextEvent::Fail,
            next => next,
        }
    }

    /// Reports the usage of the whole answer. Of cached tokens, the first report counts.
    fn report(&mut self, attempt: &mut Attempt, service: EngineTiming) {
        let identity = &self.request.identity;
        let prompt_tokens = u64::from(identity.tokens);
        let block = u64::from(identity.tail.tokens_per_block.max(1));
        let cached = (service.cached_blocks * block).min(prompt_tokens.saturating_sub(1));
        let before = self.reported.and_then(|usage| usage.cached_tokens);
        let usage = Usage {
            prompt_tokens,
            cached_tokens: Some(before.unwrap_or(cached)),
            completion_tokens: self.made,
        };
        self.reported = Some(usage);
        attempt.usage(usage, Instant::now());
    }

    /// Records the end of the request, which must have no attempt in flight any more.
    fn ended(self, session: AgentSessionKey) {
        let Self {
            handles,
            ticket,
            request,
            reports,
            made,
            reported,
            is_open,
            has_run,
            ..
        } = self;
        let input = u64::from(request.identity.tokens);
        // What is not continued is settled now.
        drop(request);
        // An engine that reports usage has run the request, whatever it says at its end.
        let has_run = has_run || is_open || reported.is_some();
        let reported = reported.filter(|_| reports == UsageReports::Running);
        let used = reported.map(|usage| {
            let cached = usage.cached_tokens.unwrap_or(0);
            RequestTokens {
                input_uncached: input - cached,
                input_cached: cached,
                output: made,
            }
        });
        handles.context.ledger.with(|record| {
            let history = &mut record.history;
            history.turned(
                ticket,
                OnlyTurn {
                    session,
                    has_run,
                    input,
                    output: (made == 0 || used.is_some()).then_some(made),
                },
            );
            history.computed(
                ticket,
                RequestTokens {
                    input_uncached: input,
                    input_cached: 0,
                    output: made,
                },
            );
        });
        let used = match has_run {
            true => used,
            false => Some(RequestTokens::default()),
        };
        chat::ended(handles, ticket, used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_seeds_have_such_clients() {
        let present = (0..200).filter(|seed| are_in(*seed)).count();
        assert!((60..140).contains(&present), "{present}");
    }
}
