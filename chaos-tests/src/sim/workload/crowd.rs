//! Badly behaved clients, which give up and retry, leave at any time, read slowly, use engines that
//! report no usage, leave before the first byte, or make up user names.
//!
//! Their presence is drawn separately from everything else. Half of the seeds have none.

use std::sync::Arc;
use std::time::Duration;

use api::admission::AdmissionTry;
use api::routing::{
    Attempt, AttemptEnd, EarlierAttempts, HiddenOutput, PermitCell, Usage, UserName,
};
use lab::rng::Rng;
use tokio::time::{Instant, sleep};

use super::chat::{self, ChatRequest, ChatState};
use super::engines::EngineTiming;
use super::wait::{GAVE_UP, QUEUE_FULL, TOO_LATE, WAITED_TOO_LONG, admitted};
use super::{ReplicaHandles, think};
use crate::oracle::history::{HistoryId, RequestTokens};

/// Label of these clients' draws, which separates them from those of other kinds.
const KIND: u64 = 7;
/// Label of the draw of the present behaviours, which separates it from others under the same seed.
const RNG_LABEL: u64 = 0x6372_6f77;
/// Mean pause between two requests, in milliseconds.
const THINK_MS: u64 = 250;
/// Number of retries of an impatient client. `BACKOFF_MS` is its pause before the first retry.
const RETRIES: u32 = 2;
const BACKOFF_MS: u64 = 500;
/// Time between two tokens of a hidden response. `SLOW_GAP` is that for a slow reader.
const HIDDEN_GAP: Duration = Duration::from_millis(10);
const SLOW_GAP: Duration = Duration::from_millis(300);
/// Time for which a client of a healed cluster keeps retrying. `TRY_PATIENCE` is the wait per try.
const TRIES_FOR: Duration = Duration::from_secs(15);
const TRY_PATIENCE: Duration = Duration::from_secs(5);

/// Behaviour of a badly behaved client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientBehaviour {
    /// Gives up soon and retries as SDKs do.
    Impatient,
    /// Leaves at any point of the wait or of the response.
    Leaving,
    /// Holds its place for a long time, because it reads slowly.
    Slow,
    /// Uses an engine that reports no usage.
    Unreported,
    /// Leaves before the first byte of the response.
    Hidden,
    /// Uses another user name for every request.
    Names,
}

impl ClientBehaviour {
    const ALL: [Self; 6] = [
        Self::Impatient,
        Self::Leaving,
        Self::Slow,
        Self::Unreported,
        Self::Hidden,
        Self::Names,
    ];

    /// Draws the behaviours that are present in the world of a seed.
    pub(super) fn of(seed: u64) -> Vec<Self> {
        let mut rng = Rng::new(seed, RNG_LABEL);
        if rng.below(2) == 0 {
            return Vec::new();
        }
        let mut drawn = Self::ALL.to_vec();
        drawn.retain(|_| rng.below(2) == 0);
        drawn
    }

    /// Returns the name under which the client's outcomes are counted.
    fn name(self) -> &'static str {
        match self {
            Self::Impatient => "impatient client",
            Self::Leaving => "leaving client",
            Self::Slow => "slow client",
            Self::Unreported => "client without usage",
            Self::Hidden => "client of hidden answers",
            Self::Names => "client of many names",
        }
    }

    /// Returns the time that this client waits per try, in milliseconds.
    fn patience_ms(self, rng: &mut Rng) -> u64 {
        match self {
            Self::Impatient => 100 + rng.below(900),
            Self::Leaving => rng.below(2000),
            Self::Slow | Self::Unreported | Self::Hidden | Self::Names => 10_000,
        }
    }

    /// Returns the maximum number of output tokens that this client requests.
    fn tokens(self, rng: &mut Rng) -> u32 {
        match self {
            Self::Slow => rng.within(5, 15),
            Self::Hidden => rng.within(100, 300),
            Self::Impatient | Self::Leaving | Self::Unreported | Self::Names => rng.within(1, 80),
        }
    }
}

/// Result of one try of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TryResult {
    /// The client received a response, or a sufficient part of one.
    Answer,
    /// The client received no response. The value is the name of the outcome.
    Nothing(&'static str),
}

/// Sends requests with the behaviour `manner` until the workload is over.
pub(super) async fn live(handles: ReplicaHandles, manner: ClientBehaviour) {
    let mut rng = handles.rng(KIND, manner as u64);
    let mut requests = 0;
    while !handles.context.is_over() {
        think(&mut rng, THINK_MS).await;
        requests += 1;
        let mut chat = ChatState::new(&mut rng);
        chat.user = match manner {
            ClientBehaviour::Names => format!("made-up-{}-{requests}", handles.run),
            _ => manner.name().replace(' ', "-"),
        };
        let said = 1 + rng.below(60);
        chat.says(&mut rng, said);
        let tries = if manner == ClientBehaviour::Impatient {
            RETRIES
        } else {
            0
        };
        for attempt in 0..=tries {
            let id = format!("{}-{}-{requests}-{attempt}", handles.run, manner.name());
            let patience = Duration::from_millis(manner.patience_ms(&mut rng));
            let client = CrowdClient {
                handles: &handles,
                manner,
                patience,
            };
            let came = client.ask(&mut rng, &chat, id).await;
            let how = match came {
                TryResult::Answer => "answered",
                TryResult::Nothing(how) => how,
            };
            handles.context.count(manner.name(), how);
            if came == TryResult::Answer || handles.context.is_over() {
                break;
            }
            sleep(Duration::from_millis(BACKOFF_MS << attempt)).await;
        }
    }
}

/// Reports an error if a healed cluster never serves a client that keeps retrying (I64).
pub(super) async fn is_served(handles: &ReplicaHandles) {
    let mut rng = handles.rng(KIND, 0xff);
    let began = Instant::now();
    let mut tries = 0;
    loop {
        tries += 1;
        let mut chat = ChatState::new(&mut rng);
        chat.user = "newcomer".to_owned();
        let client = CrowdClient {
            handles,
            manner: ClientBehaviour::Impatient,
            patience: TRY_PATIENCE,
        };
        let id = format!("{}-newcomer-{tries}", handles.run);
        match client.ask(&mut rng, &chat, id).await {
            TryResult::Nothing(how @ (GAVE_UP | QUEUE_FULL | TOO_LATE | WAITED_TOO_LONG)) => {
                if began.elapsed() >= TRIES_FOR {
                    let detail = format!("{} has a newcomer wait: {how}", handles.run);
                    handles
                        .context
                        .ledger
                        .report_error(format!("I64: {detail}"));
                    return;
                }
                sleep(Duration::from_millis(BACKOFF_MS)).await;
            }
            TryResult::Answer => return handles.context.count("newcomer", "served"),
            TryResult::Nothing(how) => return handles.context.count("newcomer", how),
        }
    }
}

/// A badly behaved client that sends requests.
struct CrowdClient<'a> {
    handles: &'a ReplicaHandles,
    manner: ClientBehaviour,
    patience: Duration,
}

impl CrowdClient<'_> {
    /// Runs one try of a request to its end or the client's departure.
    async fn ask(&self, rng: &mut Rng, chat: &ChatState, id: String) -> TryResult {
        let (handles, until) = (self.handles, Instant::now() + self.patience);
        let request = Arc::new(ChatRequest {
            model: chat.model,
            user: UserName::bounded(&chat.user),
            identity: handles.router.reader().identify(&chat.parsed()),
            id,
            tokens_max: Some(self.manner.tokens(rng)),
            priority: 0,
            session: chat.session(),
            permit: PermitCell::new(),
            earlier: EarlierAttempts::default(),
        });
        let ticket = chat::called(handles, &request);
        let first = (&[][..], AdmissionTry::First);
        let (decision, attempt) = match admitted(handles, &request, first, self.patience).await {
            Ok(admitted) => admitted.into_parts(),
            Err(why) => {
                chat::ended(handles, ticket, Some(RequestTokens::default()));
                return TryResult::Nothing(why);
            }
        };
        let Some(service) = chat::reach(handles, ticket, &request, &decision, chat) else {
            attempt.end(AttemptEnd::NotRun, Instant::now());
            chat::ended(handles, ticket, Some(RequestTokens::default()));
            return TryResult::Nothing("not run");
        };
        let wanted = u64::from(request.tokens_max.unwrap_or(1));
        let made = match self.manner {
            ClientBehaviour::Hidden => rng.below(wanted + 1),
            ClientBehaviour::Leaving => rng.below(wanted + 1),
            _ => wanted,
        };
        let answer = PartialAnswer {
            client: self,
            request: &request,
            service,
            ticket,
            until,
            leaves_after: (made < wanted).then_some(made),
            made,
        };
        match self.manner {
            ClientBehaviour::Hidden => answer.leave_unseen(attempt).await,
            _ => answer.stream(attempt).await,
        }
        TryResult::Answer
    }
}

/// A response of an engine while the client receives it.
struct PartialAnswer<'a> {
    client: &'a CrowdClient<'a>,
    request: &'a ChatRequest,
    service: EngineTiming,
    ticket: HistoryId,
    /// Time at which an impatient client leaves.
    until: Instant,
    /// Number of tokens after which the client leaves; `None` if it may stay to the end.
    leaves_after: Option<u64>,
    /// Maximum number of tokens that the engine generates.
    made: u64,
}

impl PartialAnswer<'_> {
    fn prompt_tokens(&self) -> u64 {
        self.request.identity.tokens.into()
    }

    /// Lets the client leave before any output is visible to the router.
    async fn leave_unseen(&self, mut attempt: Attempt) {
        attempt.set_hidden_output(Some(HiddenOutput {
            choices: 1,
            tokens_max: self.request.tokens_max,
            is_whole_at_once: false,
        }));
        sleep(Duration::from_millis(self.service.first_ms)).await;
        for _ in 0..self.made {
            sleep(HIDDEN_GAP).await;
        }
        attempt.end(AttemptEnd::ClientLeft, Instant::now());
        self.over(self.made, None);
    }

    async fn stream(&self, mut attempt: Attempt) {
        let manner = self.client.manner;
        let gap = match manner {
            ClientBehaviour::Slow => SLOW_GAP,
            _ => Duration::from_millis(self.service.gap_ms),
        };
        sleep(Duration::from_millis(self.service.first_ms)).await;
        attempt.first_byte(Instant::now());
        attempt.first_token(Instant::now());
        let mut end = AttemptEnd::Finished;
        let mut made = 0;
        while made < self.made {
            made += 1;
            attempt.output("abcd", Instant::now());
            if manner != ClientBehaviour::Unreported {
                attempt.usage(self.usage(made), Instant::now());
            }
            sleep(gap).await;
            let has_left = manner == ClientBehaviour::Impatient && Instant::now() >= self.until;
            if has_left || self.leaves_after == Some(made) {
                end = AttemptEnd::ClientLeft;
                break;
            }
        }
        attempt.end(end, Instant::now());
        let is_reported = manner != ClientBehaviour::Unreported && made > 0;
        self.over(made, is_reported.then(|| self.usage(made)));
    }

    fn usage(&self, made: u64) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens(),
            cached_tokens: Some(0),
            completion_tokens: made,
        }
    }

    /// Records the tokens that the engine computed, and the usage that the router saw.
    fn over(&self, made: u64, told: Option<Usage>) {
        let tokens = |usage: Usage| RequestTokens {
            input_uncached: usage.prompt_tokens,
            input_cached: 0,
            output: usage.completion_tokens,
        };
        let handles = self.client.handles;
        handles.context.ledger.with(|record| {
            let computed = tokens(self.usage(made));
            record.history.computed(self.ticket, computed);
        });
        chat::ended(handles, self.ticket, told.map(tokens));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_client_behaviour_occurs_in_some_seed() {
        let crowds: Vec<Vec<ClientBehaviour>> = (0..200).map(ClientBehaviour::of).collect();
        let empty = crowds.iter().filter(|crowd| crowd.is_empty()).count();
        assert!((60..140).contains(&empty), "{empty}");
        for manner in ClientBehaviour::ALL {
            assert!(
                crowds.iter().any(|crowd| crowd.contains(&manner)),
                "{manner:?}"
            );
        }
    }
}
