//! Resumable streams: a request takes one over from another request, or loses its own to one.
//!
//! What all requests that carried a stream have charged is in the log (`state/src/streams`). Whoever
//! takes it over begins with that, like an attempt that goes on with the answer of an earlier one.

use std::sync::Arc;
use std::time::Duration;

use state::admission::Advance;
use state::command::Charge;
use state::ids::{LogIndex, StreamCarrier, StreamId, UserKey};
use state::streams::{CarriedStream, StreamKey, StreamRecord};
use state::trees::TurnUsage;
use tokio::sync::oneshot;
use tokio::time::timeout;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::handover::Debt;
use super::{
    Attempt, EarlierAttempt, EarlierCharge, OUTPUT_STEP_TOKENS, OpenAttempt, nothing, pricing_of,
};
use crate::routing::Usage;
use crate::routing::dispatch::Dispatcher;
use crate::sessions::NamedSession;
use crate::users::user_name::UserName;

/// Maximum time for which a client waits until the log has its take-over.
const TAKE_OVER_MAX: Duration = Duration::from_secs(5);
/// Number of output tokens by which an answer may be charged ahead of what its client has: those of the
/// charge that was on its way. What is generated again beyond them is charged again.
const AHEAD_TOKENS_MAX: u64 = 2 * OUTPUT_STEP_TOKENS;
/// Number of take-overs of a stream after which its answer is charged from its beginning.
const TAKE_OVERS_MAX: u32 = 16;
/// Maximum number of take-overs that wait for the log.
pub(in crate::routing) const TAKE_OVERS_PENDING_MAX: usize = 1024;
/// Time between two looks at the applied index.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// A stream of another replica that a client goes on with at this one.
#[derive(Debug)]
pub(crate) struct ResumedStream {
    pub(crate) user: UserName,
    pub(crate) model: String,
    pub(crate) session: Option<NamedSession>,
    /// The stream, with the request that is to carry it.
    pub(crate) carried: CarriedStream,
    /// Usage of what the client has received.
    pub(crate) usage: Usage,
    /// Number of prompt tokens, if no engine has reported it yet.
    pub(crate) estimated_prompt: u64,
}

impl Dispatcher {
    /// Returns the name of a request that carries a stream, or of a stream: a hash of this replica's
    /// run and a number.
    fn new_name(&self) -> u64 {
        let number = self.next_attempt().0;
        xxh3_64_with_seed(&number.to_le_bytes(), self.session.0)
    }

    /// Names a stream that begins, with the request that carries it.
    pub(crate) fn new_stream(&self) -> CarriedStream {
        let name = self.new_name();
        CarriedStream {
            stream: StreamId(name),
            carrier: StreamCarrier(name),
        }
    }

    /// Names a request that carries the `stream` of another one on.
    pub(crate) fn new_carrier(&self, stream: StreamId) -> CarriedStream {
        CarriedStream {
            stream,
            carrier: StreamCarrier(self.new_name()),
        }
    }

    /// Takes a user's stream over, and returns what was charged for it once the log and this replica
    /// know it; `None` if they do not in time. Whoever leaves meanwhile, or gets nothing, has taken it
    /// over nevertheless if the log says so, and pays what its client has received.
    pub(crate) async fn take_over(
        self: &Arc<Self>,
        stream: ResumedStream,
    ) -> Option<EarlierAttempt> {
        let dispatcher = Arc::clone(self);
        let pending = Arc::clone(&self.take_overs).try_acquire_owned().ok()?;
        let (sender, receiver) = oneshot::channel();
        tokio::spawn(async move {
            let _pending = pending;
            loop {
                match dispatcher.try_take_over(&stream.user, stream.carried).await {
                    // Another take-over came first. Whoever proposed it may have left.
                    Some((_, record)) if record.carrier != stream.carried.carrier => {
                        if sender.is_closed() {
                            return;
                        }
                    }
                    None => return,
                    Some((user, record)) => {
                        // Nobody receives it, so it is dropped, and pays.
                        let _left = sender.send(dispatcher.taken_over(&stream, user, &record));
                        return;
                    }
                }
            }
        });
        timeout(TAKE_OVER_MAX, receiver).await.ok()?.ok()
    }

    /// Returns what the attempts at a stream have charged that this replica has taken over, and what
    /// its client has received and not paid.
    fn taken_over(
        self: &Arc<Self>,
        stream: &ResumedStream,
        user: UserKey,
        record: &StreamRecord,
    ) -> EarlierAttempt {
        let (carried, usage) = (stream.carried, stream.usage);
        let registry = self.view.registry();
        let source = self.source_of(registry.hash_seed, stream.user.api_key(), &stream.model);
        let paid = match record.epoch > TAKE_OVERS_MAX {
            true => TurnUsage::default(),
            false => record.charged,
        };
        let charged = Charge {
            input_uncached: paid.input_uncached,
            input_cached: paid.input_cached,
            output: paid.output.min(usage.completion_tokens + AHEAD_TOKENS_MAX),
            source,
            ..nothing(user)
        };
        let prompt_tokens = paid.input();
        let received_prompt = match usage.prompt_tokens {
            0 => stream.estimated_prompt,
            reported => reported,
        };
        let estimate = Charge {
            input_uncached: received_prompt.saturating_sub(prompt_tokens),
            output: usage.completion_tokens.saturating_sub(charged.output),
            ..nothing(user)
        };
        EarlierAttempt {
            dispatcher: Arc::clone(self),
            session: stream.session,
            charge: EarlierCharge {
                charged,
                usage: Some(usage),
                has_run: true,
            },
            carried: Some(carried),
            debt: Some(Debt {
                estimate,
                advance: Advance::left_over(record.advance, prompt_tokens > 0),
                pricing: pricing_of(&registry),
            }),
        }
    }

    /// Proposes once to take a user's stream over. Returns the record that this replica then knows;
    /// `None` if the proposal or the record is lost.
    async fn try_take_over(
        &self,
        user: &UserName,
        carried: CarriedStream,
    ) -> Option<(UserKey, StreamRecord)> {
        let registry = self.view.registry();
        let (key, commit) = self.outbox.with(|outbox| {
            outbox.follow_names(registry.names_since);
            let key = StreamKey {
                stream: carried.stream,
                user: outbox.payer(registry.hash_seed, user.as_str()),
            };
            outbox.admits(key.user, carried)?;
            let known = self.view.streams().record(key).map_or(0, |it| it.epoch);
            outbox.take_over(key.user, carried, known.saturating_add(1));
            Some((key, outbox.commit_of(key.user, Some(carried))))
        })?;
        self.outbox.flush_soon();
        let index: LogIndex = commit?.await.ok()?;
        while self.view.applied() < index {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Some((key.user, *self.view.streams().record(key)?))
    }
}

impl Attempt {
    /// Whether another request has taken over the stream that the attempt carries.
    pub(crate) fn is_taken_over(&self) -> bool {
        let carried = self.open.as_ref().and_then(|open| open.carried);
        carried.is_some_and(|carried| {
            let key = StreamKey {
                stream: carried.stream,
                user: self.user,
            };
            let streams = self.dispatcher.view.streams();
            streams.is_taken_over(key, carried.carrier)
        })
    }
}

impl OpenAttempt {
    /// Leaves charge, advance and turn to the request that has taken the stream over.
    pub(super) fn is_lost(&mut self) {
        self.owes = true;
        self.session = None;
        self.advance = Advance::default();
    }
}
