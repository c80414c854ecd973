//! One replica's side: requests that are dispatched and end, and the batches that tell of them.
//!
//! Between a decision and the batch that tells of it the backend may have gone, and the tip may have
//! been evicted: the state must cope, and the proposer sends the whole chain again.

use std::collections::{BTreeSet, VecDeque};

use rand::Rng;
use rand::rngs::StdRng;
use state::admission::{Advance, CreditLedger, Pricing, TokenDelta};
use state::command::{Charge, Command, Item, Lane, LeaseOutcome, Origin, Reply};
use state::ids::{AttemptId, BackendRef, BlockHash, LogIndex, ReplicaId, SessionId};
use state::prefix::user_key;

use super::{CONVERSATIONS, StateCluster, conversation};
use crate::invariants::PropertyError;
use crate::oracle::history::{Dispatch, HistoryId, RequestEnd, RequestTokens};

/// Users of the cluster.
const USERS: u32 = 5;
/// Seed of every user's key; see [`StateCluster::found`].
pub(super) const HASH_SEED: u64 = 11;
/// Tokens of one block.
const BLOCK_TOKENS: u64 = 16;
/// Most output of one request.
const OUTPUT_TOKENS_MAX: u64 = 200;

/// A replica as one who proposes.
pub(super) struct Proposer {
    replica: ReplicaId,
    pub(super) session: SessionId,
    /// Last sequence numbers: of the outbox, of the admin lane.
    seqs: [u64; 2],
    attempts: u64,
    /// How wrong its clock is.
    pub(super) clock_error_ms: i64,
    /// Decided, and not told of.
    decided: VecDeque<OpenDispatch>,
    /// Told of, and not over.
    open: Vec<OpenDispatch>,
    ledger: CreditLedger,
    named: BTreeSet<u32>,
}

/// A dispatch.
#[derive(Clone)]
struct OpenDispatch {
    id: AttemptId,
    ticket: HistoryId,
    user: u32,
    backend: BackendRef,
    chain: Vec<BlockHash>,
    matched: usize,
    advance: Advance,
    /// What is charged ahead; told of with the acquire.
    ahead: Charge,
    /// Whether its lease is open, for all that is known.
    is_leased: bool,
}

impl Proposer {
    pub(super) fn new(replica: ReplicaId, rng: &mut StdRng) -> Self {
        Self {
            replica,
            session: SessionId(rng.random()),
            seqs: [0; 2],
            attempts: 0,
            clock_error_ms: rng.random_range(-400..400),
            decided: VecDeque::new(),
            open: Vec::new(),
            ledger: CreditLedger::default(),
            named: BTreeSet::new(),
        }
    }

    /// What was in memory is gone; the machine's clock is not.
    pub(super) fn restart(&mut self, rng: &mut StdRng) {
        let clock_error_ms = self.clock_error_ms;
        *self = Self::new(self.replica, rng);
        self.clock_error_ms = clock_error_ms;
    }

    pub(super) fn next_origin(&mut self, is_batch: bool) -> Origin {
        let seq = &mut self.seqs[usize::from(!is_batch)];
        *seq += 1;
        Origin {
            replica: self.replica,
            session: self.session,
            lane: if is_batch { Lane::Outbox } else { Lane::Admin },
            seq: *seq,
        }
    }
}

impl StateCluster {
    /// A proposer decides, ends requests and tells of it all in one batch. `is_last`: it takes on
    /// nothing, and ends everything.
    pub(super) fn flush(&mut self, who: usize, is_last: bool) -> Result<(), PropertyError> {
        if !is_last {
            for _ in 0..self.rng.random_range(0..3) {
                self.decide(who);
            }
        }
        let mut items = Vec::new();
        let mut sent = Vec::new();
        self.begin_requests(who, is_last, &mut items, &mut sent);
        self.end_requests(who, is_last, &mut items);
        // The last one goes out in any case: it ends what an earlier run left open.
        if items.is_empty() && !is_last {
            return Ok(());
        }
        let command = Command::Batch {
            base_attempt: AttemptId(0),
            items,
        };
        let envelope = self.envelope(who, command);
        let (_, reply) = self.propose(who, &envelope)?;
        let Reply::Batch(reply) = reply else {
            // Its session was thought over, or it repeats itself: what it told is not there.
            return Ok(());
        };
        let missing: BTreeSet<AttemptId> = reply.missing_tip.into_iter().collect();
        let proposer = &mut self.proposers[who];
        for mut attempt in sent {
            attempt.is_leased = !missing.contains(&attempt.id);
            proposer.open.push(attempt);
        }
        let run = self.replicas[who].run;
        self.record.observation.outbox_is_empty(self.now_us, run);
        Ok(())
    }

    /// Chooses a backend for a prompt, by what is published here.
    fn decide(&mut self, who: usize) {
        let state = &self.replicas[who].state;
        let (view, applied) = (state.view(), state.applied());
        let registry = view.registry();
        let mut free: Vec<BackendRef> = Vec::new();
        for backend in registry.backends.iter().filter(|it| !it.draining) {
            free.push(backend.handle);
        }
        if free.is_empty() {
            return;
        }
        let backend = free[self.rng.random_range(0..free.len())];
        let number = self.rng.random_range(0..CONVERSATIONS);
        let chain = conversation(number, self.rng.random_range(0..14));
        let owned = |block: &&BlockHash| view.blocks.owns(backend.slot, **block);
        let matched = chain.iter().take_while(owned).count();
        let user = self.rng.random_range(0..USERS);
        let estimate = TokenDelta {
            input_uncached: (chain.len() - matched) as u64 * BLOCK_TOKENS,
            input_cached: matched as u64 * BLOCK_TOKENS,
            output: 0,
        };
        let ticket = self.request(who, user, backend, applied, &estimate);
        let proposer = &mut self.proposers[who];
        proposer.attempts += 1;
        let key = user_key(HASH_SEED, &name(user));
        let (advance, ahead) = proposer.ledger.open(key, &estimate, &Pricing::default());
        proposer.decided.push_back(OpenDispatch {
            id: AttemptId(proposer.attempts),
            ticket,
            user,
            backend,
            chain,
            matched,
            advance,
            ahead,
            is_leased: false,
        });
    }

    fn request(
        &mut self,
        who: usize,
        user: u32,
        backend: BackendRef,
        at: LogIndex,
        estimate: &TokenDelta,
    ) -> HistoryId {
        let (run, now_us) = (self.replicas[who].run, self.now_us);
        let history = &mut self.record.history;
        let most = TokenDelta {
            output: OUTPUT_TOKENS_MAX,
            ..*estimate
        };
        let ticket = history.request(run, &name(user), now_us, tokens(&most));
        let dispatch = Dispatch {
            at_us: now_us,
            backend,
            seen: (at, at),
        };
        history.dispatched(ticket, dispatch);
        ticket
    }

    /// Items of dispatches that were not told of, or not with the whole chain.
    fn begin_requests(
        &mut self,
        who: usize,
        is_last: bool,
        items: &mut Vec<Item>,
        sent: &mut Vec<OpenDispatch>,
    ) {
        let proposer = &mut self.proposers[who];
        let mut again = Vec::new();
        proposer.open.retain(|attempt| {
            if !attempt.is_leased {
                again.push(attempt.clone());
            }
            attempt.is_leased
        });
        for attempt in again {
            items.push(attempt.acquire(0));
            sent.push(attempt);
        }
        while let Some(attempt) = proposer.decided.pop_front() {
            if !is_last && self.rng.random_bool(0.3) {
                proposer.decided.push_front(attempt);
                break;
            }
            let key = user_key(HASH_SEED, &name(attempt.user));
            if proposer.named.insert(attempt.user) {
                let name = name(attempt.user);
                items.push(Item::DefineUser { key, name });
            }
            items.push(Item::Charge(Charge {
                started: 1,
                ..attempt.ahead
            }));
            items.push(attempt.acquire(attempt.matched));
            sent.push(attempt);
        }
    }

    /// Items of requests that end.
    fn end_requests(&mut self, who: usize, is_last: bool, items: &mut Vec<Item>) {
        let now_us = self.now_us;
        let open = std::mem::take(&mut self.proposers[who].open);
        for mut attempt in open {
            if !is_last && self.rng.random_bool(0.6) {
                self.proposers[who].open.push(attempt);
                continue;
            }
            let is_run = self.rng.random_bool(0.85);
            let outcome = match (is_run, self.rng.random_bool(0.8)) {
                (false, _) => LeaseOutcome::Discarded,
                (true, true) => LeaseOutcome::Kept,
                (true, false) => LeaseOutcome::KeptUntouched,
            };
            if is_run && self.rng.random_bool(0.3) {
                let tip = attempt.chain.last().map_or(attempt.id.0, |tip| tip.0);
                let new = vec![BlockHash(tip.rotate_left(9) ^ 0x51)];
                items.push(Item::Materialize {
                    attempt: attempt.offset(),
                    new,
                });
            }
            items.push(Item::Release {
                attempt: attempt.offset(),
                outcome,
            });
            let used = match is_run {
                true => attempt.used(self.rng.random_range(1..=OUTPUT_TOKENS_MAX)),
                false => TokenDelta::default(),
            };
            let key = user_key(HASH_SEED, &name(attempt.user));
            let ledger = &mut self.proposers[who].ledger;
            let settled = ledger.settle(key, &mut attempt.advance, &used, &Pricing::default());
            ledger.close(key, attempt.advance);
            items.push(Item::Charge(Charge {
                ended: 1,
                ..settled
            }));
            let end = RequestEnd {
                at_us: now_us,
                used: Some(tokens(&used)),
            };
            self.record.history.ended(attempt.ticket, end);
        }
    }
}

impl OpenDispatch {
    fn offset(&self) -> u32 {
        u32::try_from(self.id.0).expect("a run has few attempts")
    }

    /// The lease's beginning, behind what is believed to be there.
    fn acquire(&self, matched: usize) -> Item {
        Item::Acquire {
            attempt: self.offset(),
            backend: self.backend,
            tip: matched.checked_sub(1).map(|last| self.chain[last]),
            new: self.chain[matched..].to_vec(),
        }
    }

    fn used(&self, output: u64) -> TokenDelta {
        TokenDelta {
            input_uncached: (self.chain.len() - self.matched) as u64 * BLOCK_TOKENS,
            input_cached: self.matched as u64 * BLOCK_TOKENS,
            output,
        }
    }
}

/// A user's name.
pub(super) fn name(user: u32) -> String {
    format!("user-{user}")
}

fn tokens(used: &TokenDelta) -> RequestTokens {
    RequestTokens {
        input_uncached: used.input_uncached,
        input_cached: used.input_cached,
        output: used.output,
    }
}
