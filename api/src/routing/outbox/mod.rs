//! Holds the updates from this replica that the log has not confirmed yet.
//!
//! [`Outbox`] does no I/O: it accepts items, produces one [`Envelope`] at a time, and receives the
//! outcome of each. [`driver`] waits and proposes. The rules are:
//!
//! - At most one envelope is outstanding. Until its outcome is known, it is proposed again under
//!   the same sequence number, so that a repeat has no effect.
//! - Lease steps of one attempt leave in order: acquire, blocks added by its output, release.
//! - An acquire may refer to a tip that the backend no longer owns. The reply then lists the
//!   attempt, and all its steps are queued again at the front, from the prompt's first block. The
//!   whole chain is kept for this until the acquire is confirmed.
//! - Without a quorum the queue fills. Beyond its bound, the oldest attempts whose acquire was
//!   never sent are forgotten with all their steps. Charges are kept: they add up per user. Beyond
//!   [`CHARGED_USERS_MAX`] queued charges, the requests of further users are charged to the user
//!   [`OVERFLOW_USER`], from start to end.
//! - Charges of a resumable stream add up per stream, and leave with its name. Beyond the same bound,
//!   further streams are charged like other requests.

mod batch;
mod charges;
mod commits;
pub(super) mod driver;
mod outcome;
mod overlay;
mod steps;
#[cfg(test)]
mod tests;

use schemars::JsonSchema;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use state::admission::CreditLedger;
use state::command::{Charge, EngineFacts, Envelope, Item, LeaseOutcome};
use state::ids::{
    AttemptId, BackendRef, BlockHash, LogIndex, ReplicaId, SessionId, SourceKey, UserKey,
};
use state::streams::CarriedStream;
use state::usage::UsageSource;
use tokio::time::Instant;

use self::charges::{ChargeKey, ChargeQueue};
use self::commits::CommitWaiters;
use self::overlay::BlockRun;
use self::steps::{LeaseStep, LeaseStepKind, acquire_steps, runs_of};

pub use commits::ChargeCommit;
pub use driver::SharedOutbox;
pub use outcome::AfterProposal;
pub use overlay::Overlay;

/// Number of queued charges at which further users are charged to [`OVERFLOW_USER`].
/// Reached only without a quorum or with made-up names. Requests in flight may exceed it.
const CHARGED_USERS_MAX: usize = 100_000;
/// Name of the user that is charged for users beyond [`CHARGED_USERS_MAX`].
const OVERFLOW_USER: &str = "overflow";
/// Maximum number of users remembered as named. Beyond it, all are named again, which is harmless.
const NAMED_USERS_MAX: usize = 100_000;
/// Maximum number of queued names of sources.
const NAMED_SOURCES_MAX: usize = 16_384;
/// Maximum size of queued notes, in bytes. Most are KV events, which are recovered if lost.
const NOTES_BYTES_MAX: usize = 4 << 20;
/// Number of forgotten attempts at which their steps are removed from the queue.
const FORGOTTEN_MAX: usize = 1024;
/// Age of an outstanding envelope at which the outbox reports itself as degraded, in milliseconds.
const DEGRADED_AFTER_MS: u64 = 1000;

/// Capacity and flush interval of the outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutboxSettings {
    /// Maximum time between two envelopes.
    pub flush_interval: Duration,
    /// Maximum number of queued lease steps.
    pub queued_items_max: usize,
    /// Maximum encoded size of the queue, in bytes.
    pub queued_bytes_max: usize,
}

impl Default for OutboxSettings {
    fn default() -> Self {
        Self {
            flush_interval: Duration::from_millis(20),
            queued_items_max: 65_536,
            queued_bytes_max: 16 << 20,
        }
    }
}

/// How far the log lags behind what this replica knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, JsonSchema)]
pub struct OutboxStatus {
    /// Number of items queued or proposed.
    pub queued_items: usize,
    /// Approximate size of these items, in bytes.
    pub queued_bytes: usize,
    /// Number of items given up since the start: steps of forgotten attempts, and items that the
    /// state rejected.
    pub dropped: u64,
    /// Age of the oldest envelope not yet committed, in milliseconds; 0 if there is none.
    pub oldest_ms: u64,
    /// Whether an update has waited for at least a second to be committed, so that the replica
    /// routes with what it knows.
    pub is_degraded: bool,
}

/// Lease of an attempt that is open or whose acquire is not confirmed.
#[derive(Debug)]
struct PendingLease {
    backend: BackendRef,
    /// All blocks, to acquire again if the tip is missing; `None` once the acquire is confirmed.
    unconfirmed: Option<Vec<BlockRun>>,
    /// Whether the acquire was sent.
    is_sent: bool,
    end: Option<LeaseOutcome>,
    /// Number and size of the attempt's queued steps.
    queued: QueuedSize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct QueuedSize {
    items: usize,
    bytes: usize,
}

impl QueuedSize {
    fn add(&mut self, bytes: usize) {
        self.items += 1;
        self.bytes += bytes;
    }

    fn take(&mut self, bytes: usize) {
        self.items = self.items.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// An envelope that is proposed and whose outcome is unknown.
#[derive(Debug)]
struct OutstandingEnvelope {
    envelope: Envelope,
    size: QueuedSize,
    /// Attempts with an acquire in the envelope.
    acquires: Vec<AttemptId>,
    /// Runs that leave the overlay when the envelope is applied here.
    runs: Vec<(BackendRef, BlockRun)>,
    /// Charges in the envelope, by user.
    charges: BTreeMap<UserKey, Charge>,
    since: Instant,
}

/// An envelope that is committed but may not be applied here yet.
#[derive(Debug)]
struct CommittedEnvelope {
    index: LogIndex,
    runs: Vec<(BackendRef, BlockRun)>,
    charges: BTreeMap<UserKey, Charge>,
}

/// Updates from this replica that the log has not confirmed. See the module documentation.
pub struct Outbox {
    replica: ReplicaId,
    session: SessionId,
    last_seq: u64,
    settings: OutboxSettings,
    overlay: Arc<Overlay>,
    leases: HashMap<AttemptId, PendingLease>,
    steps: VecDeque<LeaseStep>,
    queued: QueuedSize,
    /// Attempts with an acquire in `steps`, oldest first. May include sent or forgotten attempts.
    unsent: VecDeque<AttemptId>,
    /// Attempts whose queued steps are void.
    forgotten: HashSet<AttemptId>,
    charges: ChargeQueue,
    commits: CommitWaiters,
    /// Index of the last committed envelope.
    committed_to: LogIndex,
    /// Credits of users from unused advances.
    pub ledger: CreditLedger,
    /// Charge that was sent last. The next one in key order follows, so that none starves.
    last_charged: ChargeKey,
    names: VecDeque<(UserKey, String)>,
    /// Names of sources. They leave before the charges, which show them.
    sources: BTreeMap<SourceKey, UsageSource>,
    named: HashSet<UserKey>,
    /// Index of the last loss of names (a restore or a user deletion) that `named` accounts for;
    /// `None` if there was none.
    names_since: Option<LogIndex>,
    facts: BTreeMap<BackendRef, EngineFacts>,
    /// Independent items in order, each with its size.
    notes: VecDeque<(Item, usize)>,
    notes_bytes: usize,
    outstanding: Option<OutstandingEnvelope>,
    /// Committed envelopes that may not be applied here yet, in log order.
    settling: VecDeque<CommittedEnvelope>,
    dropped: u64,
}

impl Outbox {
    /// Creates an empty outbox. `overlay` shows queued runs until they are applied or dropped.
    #[must_use]
    pub fn new(
        replica: ReplicaId,
        session: SessionId,
        settings: OutboxSettings,
        overlay: Arc<Overlay>,
    ) -> Self {
        Self {
            replica,
            session,
            last_seq: 0,
            settings,
            overlay,
            leases: HashMap::new(),
            steps: VecDeque::new(),
            queued: QueuedSize::default(),
            unsent: VecDeque::new(),
            forgotten: HashSet::new(),
            charges: BTreeMap::new(),
            ledger: CreditLedger::default(),
            last_charged: ChargeKey::default(),
            commits: CommitWaiters::default(),
            committed_to: LogIndex(0),
            names: VecDeque::new(),
            sources: BTreeMap::new(),
            named: HashSet::new(),
            names_since: None,
            facts: BTreeMap::new(),
            notes: VecDeque::new(),
            notes_bytes: 0,
            outstanding: None,
            settling: VecDeque::new(),
            dropped: 0,
        }
    }

    /// Queues the acquire of a request at `backend`, which is believed to hold the first `matched`
    /// blocks of `chain`.
    pub fn acquire(
        &mut self,
        attempt: AttemptId,
        backend: BackendRef,
        chain: &Arc<[BlockHash]>,
        matched: usize,
    ) {
        let whole = BlockRun::new(Arc::clone(chain), 0..chain.len());
        let lease = PendingLease {
            backend,
            unconfirmed: Some(vec![whole]),
            is_sent: false,
            end: None,
            queued: QueuedSize::default(),
        };
        self.leases.insert(attempt, lease);
        self.unsent.push_back(attempt);
        let tip = matched.checked_sub(1).map(|last| chain[last]);
        for step in acquire_steps(attempt, backend, tip, chain, matched) {
            self.push(step);
        }
        self.bound();
    }

    /// Queues `blocks` that the output completed, which follow all earlier blocks of the attempt.
    pub fn extend(&mut self, attempt: AttemptId, blocks: Vec<BlockHash>) {
        if blocks.is_empty() {
            return;
        }
        let Some(lease) = self.leases.get_mut(&attempt) else {
            return;
        };
        let backend = lease.backend;
        let chain: Arc<[BlockHash]> = blocks.into();
        if let Some(unconfirmed) = &mut lease.unconfirmed {
            unconfirmed.push(BlockRun::new(Arc::clone(&chain), 0..chain.len()));
        }
        for run in runs_of(&chain, 0) {
            self.push(LeaseStep {
                attempt,
                backend,
                what: LeaseStepKind::Extend { run },
            });
        }
        self.bound();
    }

    /// Queues the release of the attempt's lease.
    ///
    /// # Panics
    /// Panics if the attempt was released before and its acquire is not confirmed.
    pub fn release(&mut self, attempt: AttemptId, outcome: LeaseOutcome) {
        let Some(lease) = self.leases.get_mut(&attempt) else {
            return;
        };
        assert!(lease.end.is_none(), "attempt {attempt} released twice");
        let backend = lease.backend;
        lease.end = Some(outcome);
        let is_confirmed = lease.unconfirmed.is_none();
        self.push(LeaseStep {
            attempt,
            backend,
            what: LeaseStepKind::Release { outcome },
        });
        if is_confirmed {
            self.leases.remove(&attempt);
        }
        self.bound();
    }

    /// Returns the sum of the unapplied charges to `user` from here. Call [`Outbox::settle`] first.
    #[must_use]
    pub fn unapplied(&self, user: UserKey) -> Charge {
        let outstanding = self.outstanding.iter().map(|it| &it.charges);
        let settling = self.settling.iter().map(|it| &it.charges);
        let sent = outstanding.chain(settling).filter_map(|it| it.get(&user));
        let queued = self.queued_for(user).map(|queued| &queued.charge);
        let mut sum = Charge {
            user,
            ..Charge::default()
        };
        sent.chain(queued).for_each(|charge| sum.add(charge));
        sum
    }

    /// Returns a receiver for the commit of all charges to `user` for the stream, or for requests that
    /// carry none; `None` if they are committed.
    pub fn commit_of(
        &mut self,
        user: UserKey,
        carried: Option<CarriedStream>,
    ) -> Option<ChargeCommit> {
        let is_outstanding = |it: &OutstandingEnvelope| it.charges.contains_key(&user);
        if ChargeKey::are_queued(&self.charges, (user, carried)) {
            Some(self.commits.wait_queued((user, carried)))
        } else if self.outstanding.as_ref().is_some_and(is_outstanding) {
            Some(self.commits.wait_outstanding())
        } else {
            None
        }
    }

    /// Returns the index of the last committed envelope.
    #[must_use]
    pub fn committed_to(&self) -> LogIndex {
        self.committed_to
    }

    /// Returns the user to charge for a request of user `name`, and queues the user's name.
    pub fn payer(&mut self, hash_seed: u64, name: &str) -> UserKey {
        let user = state::prefix::user_key(hash_seed, name);
        let has_room =
            self.charges.len() < CHARGED_USERS_MAX || self.queued_for(user).next().is_some();
        let (user, name) = if has_room {
            (user, name)
        } else {
            (
                state::prefix::user_key(hash_seed, OVERFLOW_USER),
                OVERFLOW_USER,
            )
        };
        self.name_user(user, name);
        user
    }

    /// Forgets which users were named if the state lost names at `since`, in a restore or deletion.
    pub fn follow_names(&mut self, since: Option<LogIndex>) {
        if since != self.names_since {
            self.names_since = since;
            self.named.clear();
        }
    }

    /// Queues the name of a user, unless it was queued since the last loss of names.
    fn name_user(&mut self, key: UserKey, name: &str) {
        if self.named.contains(&key) {
            return;
        }
        if self.named.len() >= NAMED_USERS_MAX {
            self.named.clear();
        }
        // Leaves room for the overflow user. Other users are named by a later request.
        if self.names.len() > CHARGED_USERS_MAX {
            return;
        }
        self.named.insert(key);
        self.names.push_back((key, name.to_owned()));
    }

    /// Queues the name of a source. Without room, the next request of the source does.
    pub fn name_source(&mut self, key: SourceKey, source: UsageSource) {
        if self.sources.len() < NAMED_SOURCES_MAX {
            self.sources.entry(key).or_insert(source);
        }
    }

    /// Queues the facts that an engine reported. Fields that are present replace earlier ones.
    pub(super) fn observe(&mut self, backend: BackendRef, facts: EngineFacts) {
        self.facts.entry(backend).or_default().update(facts);
    }

    /// Queues an independent item behind earlier notes. Drops it and returns `false` if the notes
    /// are full or no envelope could hold it.
    pub fn note(&mut self, item: Item) -> bool {
        let bytes = state::codec::item_bytes(&item);
        if bytes > batch::BATCH_BYTES_MAX || self.notes_bytes + bytes > NOTES_BYTES_MAX {
            return false;
        }
        self.notes_bytes += bytes;
        self.notes.push_back((item, bytes));
        true
    }

    fn push(&mut self, step: LeaseStep) {
        if let Some(run) = step.run() {
            self.overlay.add(step.backend, run);
        }
        let bytes = step.bytes();
        self.queued.add(bytes);
        if let Some(lease) = self.leases.get_mut(&step.attempt) {
            lease.queued.add(bytes);
        }
        self.steps.push_back(step);
    }

    /// Forgets the oldest unsent attempts until the queue is within its bounds.
    fn bound(&mut self) {
        while self.queued.items > self.settings.queued_items_max
            || self.queued.bytes > self.settings.queued_bytes_max
        {
            let Some(oldest) = self.unsent.pop_front() else {
                return;
            };
            if self.leases.get(&oldest).is_some_and(|lease| !lease.is_sent) {
                self.forget(oldest);
            }
        }
    }

    fn forget(&mut self, attempt: AttemptId) {
        let Some(lease) = self.leases.remove(&attempt) else {
            return;
        };
        self.queued.items = self.queued.items.saturating_sub(lease.queued.items);
        self.queued.bytes = self.queued.bytes.saturating_sub(lease.queued.bytes);
        self.dropped += lease.queued.items as u64;
        self.forgotten.insert(attempt);
        if self.forgotten.len() >= FORGOTTEN_MAX {
            self.sweep();
        }
    }

    /// Removes the steps of forgotten attempts from the queue.
    fn sweep(&mut self) {
        if self.forgotten.is_empty() {
            return;
        }
        let Self {
            steps,
            forgotten,
            overlay,
            ..
        } = self;
        steps.retain(|step| {
            let is_kept = !forgotten.contains(&step.attempt);
            if let (false, Some(run)) = (is_kept, step.run()) {
                overlay.remove(step.backend, run);
            }
            is_kept
        });
        forgotten.clear();
    }

    /// Returns the envelope whose outcome is unknown, to propose it again; `None` if there is none.
    pub fn outstanding(&self) -> Option<&Envelope> {
        self.outstanding
            .as_ref()
            .map(|outstanding| &outstanding.envelope)
    }

    /// Whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.queued.items == 0
            && self.charges.is_empty()
            && self.names.is_empty()
            && self.sources.is_empty()
            && self.facts.is_empty()
            && self.notes.is_empty()
    }

    /// Whether everything committed is applied here, as of the last [`Outbox::settle`].
    pub fn is_settled(&self) -> bool {
        self.settling.is_empty()
    }

    /// Forgets the envelopes that are applied up to `applied`: removes their runs from the overlay
    /// and their charges from [`Outbox::unapplied`].
    pub fn settle(&mut self, applied: LogIndex) {
        while let Some(settled) = self.settling.pop_front_if(|it| it.index <= applied) {
            for (backend, run) in settled.runs {
                self.overlay.remove(backend, &run);
            }
        }
    }

    pub(super) fn status(&self, now: Instant) -> OutboxStatus {
        let outstanding = self.outstanding.as_ref();
        let sent = outstanding.map_or(QueuedSize::default(), |outstanding| outstanding.size);
        let others = self.charges.len() + self.names.len() + self.sources.len() + self.facts.len();
        let queued_items = self.queued.items + self.notes.len();
        let oldest_ms = outstanding.map_or(0, |outstanding| {
            let age = now.saturating_duration_since(outstanding.since).as_millis();
            u64::try_from(age).unwrap_or(u64::MAX)
        });
        OutboxStatus {
            queued_items: queued_items + others + sent.items,
            queued_bytes: self.queued.bytes
                + self.notes_bytes
                + others * batch::CHARGE_BYTES
                + sent.bytes,
            dropped: self.dropped,
            oldest_ms,
            is_degraded: oldest_ms >= DEGRADED_AFTER_MS,
        }
    }
}
