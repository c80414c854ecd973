//! One dispatch: what it holds from its start, and what it owes at its end.
//!
//! Who pays what: prompt tokens are charged once the engine has told how many of them it had
//! cached, at the latest at the end; output tokens as they are reported, in steps of
//! [`OUTPUT_STEP_TOKENS`], so that a client that hangs up has paid for what was made. Counters never
//! fall, so nothing is charged on a guess that may turn out too high: what no report covers when
//! the attempt ends, all of it or what was made since the last report, is estimated from its bytes
//! then, and the believed prefix counts as cached. An attempt that never ran costs nothing.

use std::sync::Arc;

use state::command::{Charge, Outcome};
use state::ids::{AttemptId, BackendRef, UserKey};

use super::load::Underway;
use super::metrics::InFlight;
use super::reply::ReplyChain;
use super::{Decision, End, Router, Usage};
use crate::prompt::{Identity, TokenRatio};

/// Output tokens reported but not charged at most, while the answer streams.
const OUTPUT_STEP_TOKENS: u64 = 32;

/// A dispatch under way: counts as running, holds the lease, owes the charge. Dropping it without
/// [`Attempt::end`] counts as [`End::ClientLeft`].
pub struct Attempt {
    router: Arc<Router>,
    id: AttemptId,
    user: UserKey,
    /// `None` once the attempt is over.
    open: Option<Open>,
}

/// What an attempt holds until its end.
struct Open {
    underway: Underway,
    meter: InFlight,
    /// `None`: output cannot continue the prompt.
    reply: Option<ReplyChain>,
    prompt: PromptSize,
    usage: Option<Usage>,
    /// Bytes of output that no report covers.
    unreported_bytes: usize,
    /// Charged so far, without the counts of requests.
    charged: Charge,
}

/// A prompt's size as far as known before an engine counts it.
struct PromptSize {
    /// 0 for token ids.
    bytes: u64,
    tokens: u64,
    /// Of these, believed cached.
    predicted: u64,
    ratio: TokenRatio,
}

impl PromptSize {
    fn of(identity: &Identity, matched: usize) -> Self {
        let tail = &identity.tail;
        let tokens = u64::from(identity.tokens);
        let predicted = match tail.block_bytes {
            0 => matched as u64 * u64::from(tail.tokens_per_block),
            block_bytes => u64::from(tail.ratio.tokens(matched * block_bytes)),
        };
        Self {
            bytes: (identity.chain.len() * tail.block_bytes + tail.bytes.len()) as u64,
            tokens,
            predicted: predicted.min(tokens),
            ratio: tail.ratio.clone(),
        }
    }
}

impl Router {
    /// Notes that a request goes to the decided backend now: load, overlay and outbox know it
    /// before this returns. `user` is the name the tokens are charged to.
    pub fn dispatch(
        self: &Arc<Self>,
        decision: &Decision,
        identity: &Identity,
        user: &str,
    ) -> Attempt {
        let id = self.next_attempt();
        let backend = decision.backend;
        let name = super::bounded_name(user);
        let hash_seed = self.view.registry().hash_seed;
        let prompt = PromptSize::of(identity, decision.matched as usize);
        let underway = self.load.begin(backend, prompt.tokens - prompt.predicted);
        let meter = InFlight::at(self.meter(backend, &decision.name));
        let held = self.held(backend, &identity.chain, decision.matched);
        let user = self.desk.with(|outbox| {
            let user = outbox.payer(hash_seed, &name);
            outbox.charge(Charge {
                user,
                started: 1,
                ..Charge::default()
            });
            outbox.acquire(id, backend, &identity.chain, held);
            user
        });
        let open = Open {
            underway,
            meter,
            reply: ReplyChain::of(identity),
            prompt,
            usage: None,
            unreported_bytes: 0,
            charged: Charge {
                user,
                ..Charge::default()
            },
        };
        Attempt {
            router: Arc::clone(self),
            id,
            user,
            open: Some(open),
        }
    }

    /// Leading blocks of `chain` that `backend` holds or is about to, `matched` at least: beyond
    /// what a match may count, for the tip of a lease.
    fn held(&self, backend: BackendRef, chain: &[state::ids::BlockHash], matched: u32) -> usize {
        let mut held = matched;
        while chain
            .get(held as usize)
            .is_some_and(|block| self.view.blocks.owns(backend.slot, *block))
        {
            held += 1;
        }
        self.overlay
            .extend(chain, std::iter::once((backend, &mut held)));
        chain.len().min(held as usize)
    }
}

impl Attempt {
    /// The answer's first byte (of the body) came: its prefill is done.
    pub fn first_byte(&mut self) {
        if let Some(open) = &mut self.open {
            open.underway.first_byte();
        }
    }

    /// What the engine has reported so far; the highest report counts.
    pub fn usage(&mut self, usage: Usage) {
        let Some(open) = &mut self.open else { return };
        let mut known = open.usage.unwrap_or_default();
        known.prompt_tokens = known.prompt_tokens.max(usage.prompt_tokens);
        known.cached_tokens = known.cached_tokens.max(usage.cached_tokens);
        known.completion_tokens = known.completion_tokens.max(usage.completion_tokens);
        open.usage = Some(known);
        if usage.completion_tokens > 0 {
            open.unreported_bytes = 0;
        }
        let due = open.due(known);
        let is_input_due =
            known.cached_tokens.is_some() && due.input_uncached + due.input_cached > 0;
        if !is_input_due && due.output < OUTPUT_STEP_TOKENS {
            return;
        }
        let charge = if known.cached_tokens.is_some() {
            due
        } else {
            Charge {
                input_uncached: 0,
                input_cached: 0,
                ..due
            }
        };
        open.note_charged(charge);
        self.router.desk.with(|outbox| outbox.charge(charge));
    }

    /// Output that does not continue the prompt: other choices, reasoning, tool calls.
    pub fn other_output(&mut self, bytes: usize) {
        if let Some(open) = &mut self.open {
            open.unreported_bytes = open.unreported_bytes.saturating_add(bytes);
        }
    }

    /// Output text as it streams, so that blocks it completes can be recorded. Bounded inside. Comes
    /// before the report that covers it.
    pub fn output(&mut self, text: &str) {
        let Some(open) = &mut self.open else { return };
        open.unreported_bytes = open.unreported_bytes.saturating_add(text.len());
        if let Some(reply) = &mut open.reply {
            reply.push(text);
        }
    }

    /// Ends the attempt: releases the lease, settles the charge.
    pub fn end(mut self, end: End) {
        self.close(end);
    }

    fn close(&mut self, end: End) {
        let Some(mut open) = self.open.take() else {
            return;
        };
        let mut charge = match end {
            End::NotRun => Charge {
                user: self.user,
                ..Charge::default()
            },
            End::Finished | End::Broken | End::ClientLeft => open.due(open.usage_or_estimate()),
        };
        charge.ended = 1;
        let outcome = match end {
            End::NotRun => Outcome::Discarded,
            End::Finished | End::Broken | End::ClientLeft => Outcome::Kept,
        };
        let blocks = match (outcome, open.reply.take()) {
            (Outcome::Kept, Some(reply)) => reply.finish(end == End::Finished),
            (Outcome::Kept | Outcome::Discarded, _) => Vec::new(),
        };
        self.router.desk.with(|outbox| {
            outbox.extend(self.id, blocks);
            outbox.release(self.id, outcome);
            outbox.charge(charge);
        });
        open.report(end);
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.close(End::ClientLeft);
    }
}

impl Open {
    fn usage_or_estimate(&self) -> Usage {
        let mut usage = self.usage.unwrap_or_default();
        if usage.prompt_tokens == 0 {
            usage.prompt_tokens = self.prompt.tokens;
        }
        let unreported = u64::from(self.prompt.ratio.tokens(self.unreported_bytes));
        usage.completion_tokens = usage.completion_tokens.saturating_add(unreported);
        usage
    }

    /// What of `usage` is not charged yet. Where the engine did not tell, what was believed cached
    /// counts as cached. A later word on the cache never makes the prompt longer.
    fn due(&self, usage: Usage) -> Charge {
        let cached = usage
            .cached_tokens
            .unwrap_or(self.prompt.predicted)
            .min(usage.prompt_tokens);
        let uncached = usage.prompt_tokens - cached;
        let charged = &self.charged;
        let room = usage
            .prompt_tokens
            .saturating_sub(charged.input_uncached + charged.input_cached);
        let input_uncached = uncached.saturating_sub(charged.input_uncached).min(room);
        let input_cached = cached.saturating_sub(charged.input_cached);
        Charge {
            user: charged.user,
            input_uncached,
            input_cached: input_cached.min(room - input_uncached),
            output: usage.completion_tokens.saturating_sub(self.charged.output),
            started: 0,
            ended: 0,
        }
    }

    fn note_charged(&mut self, charge: Charge) {
        self.charged.input_uncached += charge.input_uncached;
        self.charged.input_cached += charge.input_cached;
        self.charged.output += charge.output;
    }

    /// Metrics, and what the engine's count teaches about bytes per token.
    fn report(&self, end: End) {
        self.meter.count_end(end);
        let Some(usage) = self.usage else { return };
        self.prompt
            .ratio
            .learn(self.prompt.bytes, usage.prompt_tokens);
        if let Some(cached) = usage.cached_tokens {
            let predicted = self.prompt.predicted.min(usage.prompt_tokens);
            self.meter
                .count_prefix(usage.prompt_tokens, predicted, cached);
        }
    }
}
