//! Permits of users with a limit on concurrent requests: this replica's part in the protocol of
//! [`state::permits`].
//!
//! A request of such a user takes a permit before it is queued, and keeps it until it has ended and
//! is not retried. At the user's issuer, and with a permit to spare, that takes two locks; otherwise
//! it takes one question to the issuer. Claims that come up while a question is open go together in
//! the next one. If the limit is in use, a request waits for [`FULL_WAIT`]: another one may just have
//! ended, and its end be on its way to the issuer. A tree of sessions with a limit takes permits like a
//! user.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use state::StateView;
use state::ids::ReplicaId;
use state::permits::{ClaimAnswer, ClaimMessage, PermitHolder, PermitIssuer, PermitSubject};
use state::shares::SILENT_MS;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shares;
use crate::ports::{Cluster, QuestionTopic};

/// Maximum time that a request waits for a permit of a user whose limit is in use.
const FULL_WAIT: Duration = Duration::from_millis(50);
/// Maximum time that a request waits for an answer of the user's issuer: long enough that the members
/// miss a dead issuer ([`SILENT_MS`]) and the next one answers.
const ISSUER_WAIT: Duration = Duration::from_millis(2 * SILENT_MS);
/// Time after which an issuer is asked again.
const RETRY: Duration = Duration::from_millis(5);

/// The permits that this replica holds, and those that it issues.
pub struct Permits {
    me: ReplicaId,
    view: Arc<StateView>,
    shares: Arc<Shares>,
    inner: Mutex<PermitBooks>,
    /// Signal that an issuer is to be told something.
    due: Notify,
    /// Signal that an issuer has answered.
    answered: Notify,
}

#[derive(Default)]
struct PermitBooks {
    holder: PermitHolder,
    issuer: PermitIssuer,
}

/// Permits of a user, of a tree of sessions, or of both for one request. Clones share them; they are
/// returned when the last one is dropped.
#[derive(Debug, Clone)]
pub struct UserPermit {
    #[expect(dead_code, reason = "it is dropped, not read")]
    taken: Arc<TakenPermit>,
    #[expect(dead_code, reason = "it is dropped, not read")]
    and: Option<Arc<Self>>,
}

impl UserPermit {
    /// Returns one permit for both.
    pub(crate) fn and(self, other: Option<Self>) -> Self {
        Self {
            and: other.map(Arc::new),
            ..self
        }
    }
}

/// Where a request keeps its permit while it may be retried. Empty for users without a limit.
pub type PermitCell = OnceLock<UserPermit>;

struct TakenPermit {
    permits: Arc<Permits>,
    subject: PermitSubject,
}

impl std::fmt::Debug for TakenPermit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("TakenPermit").field(&self.subject).finish()
    }
}

impl Drop for TakenPermit {
    fn drop(&mut self) {
        self.permits
            .change(|inner| inner.holder.put_back(self.subject));
    }
}

/// Reason why a request has no permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PermitRejection {
    /// The user's limit is in use.
    Full,
    /// The issuer cannot be asked, or does not know yet what the replicas hold.
    Unconfirmed,
}

/// A request that waits for a permit, until dropped.
struct PermitWait<'a> {
    permits: &'a Permits,
    subject: PermitSubject,
}

impl Drop for PermitWait<'_> {
    fn drop(&mut self) {
        let subject = self.subject;
        self.permits.change(|inner| inner.holder.end_wait(subject));
    }
}

impl Permits {
    pub(super) fn new(me: ReplicaId, view: &Arc<StateView>, shares: &Arc<Shares>) -> Self {
        Self {
            me,
            view: Arc::clone(view),
            shares: Arc::clone(shares),
            inner: Mutex::default(),
            due: Notify::new(),
            answered: Notify::new(),
        }
    }

    /// Takes one of the `limit` permits of `subject`, after a wait of at most [`FULL_WAIT`], or of
    /// [`ISSUER_WAIT`] without an answer. Cancel safe.
    pub(crate) async fn take(
        self: &Arc<Self>,
        subject: PermitSubject,
        limit: u32,
    ) -> Result<UserPermit, PermitRejection> {
        if let Some(permit) = self.take_now(subject) {
            return Ok(permit);
        }
        let began = Instant::now();
        let _wait = {
            let mut inner = self.lock();
            // Those that already wait here count as well: there is no permit for one more.
            if inner.holder.open(subject) >= limit {
                return Err(PermitRejection::Full);
            }
            inner.holder.begin_wait(subject);
            PermitWait {
                permits: self,
                subject,
            }
        };
        self.change(|_| {});
        loop {
            let answered = self.answered.notified();
            if let Some(permit) = self.take_now(subject) {
                return Ok(permit);
            }
            let waited = began.elapsed();
            let is_full = self.lock().holder.is_full(subject);
            let wait_max = match is_full {
                true => FULL_WAIT,
                false => ISSUER_WAIT,
            };
            if waited >= wait_max {
                return Err(match is_full {
                    true => PermitRejection::Full,
                    false => PermitRejection::Unconfirmed,
                });
            }
            drop(tokio::time::timeout(wait_max - waited, answered).await);
        }
    }

    /// Takes a permit that no issuer has confirmed.
    pub(crate) fn take_unconfirmed(self: &Arc<Self>, subject: PermitSubject) -> UserPermit {
        self.change(|inner| inner.holder.take_unconfirmed(subject));
        self.permit(subject)
    }

    fn take_now(self: &Arc<Self>, subject: PermitSubject) -> Option<UserPermit> {
        let is_taken = self.lock().holder.take(subject);
        is_taken.then(|| self.permit(subject))
    }

    fn permit(self: &Arc<Self>, subject: PermitSubject) -> UserPermit {
        let permits = Arc::clone(self);
        UserPermit {
            taken: Arc::new(TakenPermit { permits, subject }),
            and: None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, PermitBooks> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a change, tells it to this replica as an issuer, and has the others told.
    fn change(&self, change: impl FnOnce(&mut PermitBooks)) {
        let mut inner = self.lock();
        change(&mut inner);
        self.claim_here(&mut inner);
        drop(inner);
        self.due.notify_one();
    }

    /// Follows the epoch, and claims permits of which this replica is the issuer.
    fn claim_here(&self, inner: &mut PermitBooks) {
        let now = self.shares.epoch_members();
        inner.holder.follow(&now);
        inner.issuer.follow(&now);
        inner.holder.ask_again(|issuer| issuer == self.me);
        if let Some(message) = inner.holder.message(self.me) {
            let answer = inner
                .issuer
                .answer(self.me, &message, |subject| self.limit(subject));
            self.answered(inner, (self.me, message.number), Some(&answer));
        }
    }

    /// Applies the answer of an issuer to the message with this number, and wakes those whom it
    /// concerns.
    fn answered(
        &self,
        inner: &mut PermitBooks,
        (issuer, number): (ReplicaId, u64),
        answer: Option<&ClaimAnswer>,
    ) {
        if inner.holder.answered(issuer, number, answer) {
            self.answered.notify_waiters();
        }
    }

    fn limit(&self, subject: PermitSubject) -> Option<u32> {
        let limits = self.view.quota(subject.user).limits;
        match subject.tree {
            None => limits.concurrent,
            Some(_) => limits.concurrent_per_tree,
        }
    }

    /// Returns the answer to the question of the peer `from`; `None` if it is unreadable.
    #[must_use]
    pub fn answer(&self, from: ReplicaId, question: &[u8]) -> Option<Vec<u8>> {
        let message = ClaimMessage::from_bytes(question)?;
        let mut inner = self.lock();
        // What the peer returns may be for a request that waits here.
        self.claim_here(&mut inner);
        let answer = inner
            .issuer
            .answer(from, &message, |subject| self.limit(subject));
        self.claim_here(&mut inner);
        drop(inner);
        Some(answer.to_bytes())
    }

    /// Tells the issuers what this replica holds and wants, until `stop`.
    pub async fn run(&self, cluster: Arc<dyn Cluster>, stop: CancellationToken) {
        let mut open = FuturesUnordered::new();
        // Issuers that did not count the last message. They rest until the next retry.
        let mut resting = BTreeSet::new();
        // Outlives the events of a round, which would put it off for as long as they come.
        let mut retry_at = None;
        loop {
            let is_retried = !resting.is_empty() || self.lock().holder.is_waiting();
            retry_at = is_retried.then(|| retry_at.unwrap_or_else(|| Instant::now() + RETRY));
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = until(retry_at) => {
                    retry_at = None;
                    resting.clear();
                    self.lock().holder.ask_again(|_| true);
                }
                Some((issuer, number, answer)) = open.next(), if !open.is_empty() => {
                    if !matches!(answer, Some(ClaimAnswer::Counted { .. })) {
                        resting.insert(issuer);
                    }
                    self.answered(&mut self.lock(), (issuer, number), answer.as_ref());
                }
                () = self.due.notified() => {}
                () = self.shares.epoch_changed() => resting.clear(),
            }
            for (issuer, message) in self.messages(&resting) {
                let (number, question) = (message.number, Bytes::from(message.to_bytes()));
                let asking = cluster.ask(issuer, QuestionTopic::Permits, question);
                open.push(async move {
                    let answer = asking.await.ok();
                    let answer = answer.and_then(|bytes| ClaimAnswer::from_bytes(&bytes));
                    (issuer, number, answer)
                });
            }
        }
    }

    /// Returns the messages that are due to the other issuers, except those that rest.
    fn messages(&self, resting: &BTreeSet<ReplicaId>) -> Vec<(ReplicaId, ClaimMessage)> {
        let mut inner = self.lock();
        self.claim_here(&mut inner);
        let members = inner.holder.members().to_vec();
        let others = members.into_iter().filter(|id| *id != self.me);
        let asked = others.filter(|id| !resting.contains(id));
        asked
            .filter_map(|id| Some((id, inner.holder.message(id)?)))
            .collect()
    }
}

/// Waits until `at`; forever if it is `None`.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
