//! The gate limits how far a replica may serve its users ahead of users waiting at other replicas.
//!
//! Counters are shared, but a replica can only order the requests that wait with it. With users
//! pinned to replicas, each replica would serve its own users at whatever rate it gets. The gate
//! lets a user go only while their counter is at most `V + G`. `V` is the least counter of users
//! waiting elsewhere, as reported by the peers, and `G` is the slack. docs/internals/fairness.md
//! derives the resulting bound.
//!
//! A peer's report counts while it is fresh. A peer may also wait for capacity that this replica's
//! requests do not compete for (because of other labels, say). If the same report held this replica
//! back for [`GATE_STALL_MS`] while there was capacity here, this replica ignores it until it
//! changes. So no replica leaves engines idle for longer. Each further stalled report of a peer
//! halves this time, down to [`GATE_RETRY_MS`], until one of its reports changes before it stalls.

use std::collections::BTreeMap;

use super::milli_tokens;
use crate::ids::ReplicaId;

/// Time since its last report after which a peer no longer counts as waiting, in milliseconds.
pub const PEER_SILENT_MS: u64 = 500;
/// Time after which a replica uses capacity that one unchanged report held back, in milliseconds.
pub const GATE_STALL_MS: u64 = 500;
/// Delay before asking a held queue again if nothing else wakes it, in milliseconds.
pub const GATE_RETRY_MS: u64 = 50;
/// Maximum that one check adds to the time for which a report has held this replica back, in
/// milliseconds. Between checks, it is unknown whether there was capacity.
const HELD_STEP_MS_MAX: u64 = 2 * GATE_RETRY_MS;

/// Summary of the users and requests that wait at one replica for one model. The replica sends it
/// to its peers when it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backlog {
    /// Highest priority among the waiting requests.
    pub priority: i16,
    /// Least counter among users waiting with that priority, in milli-tokens.
    pub least_milli: u64,
    /// Number of users waiting.
    pub users: u32,
    /// Number of requests waiting.
    pub waiting: u32,
}

/// Latest reports of the peers for one model, and how long each has held this replica back.
#[derive(Debug, Clone, Default)]
pub struct Gate {
    peers: BTreeMap<ReplicaId, PeerBacklog>,
    slack_tokens: u64,
}

#[derive(Debug, Clone, Copy)]
struct PeerBacklog {
    backlog: Backlog,
    heard_ms: u64,
    /// Time for which the report has held this replica back while there was capacity.
    blocked_ms: u64,
    /// When the report was last seen to hold this replica back; `None` if never, or if capacity has
    /// run out since.
    last_blocked_ms: Option<u64>,
    /// Number of consecutive reports of the peer that stalled.
    stalls: u32,
}

impl PeerBacklog {
    fn counts(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.heard_ms) < PEER_SILENT_MS && !self.is_stalled()
    }

    fn is_stalled(&self) -> bool {
        self.blocked_ms >= (GATE_STALL_MS >> self.stalls.min(16)).max(GATE_RETRY_MS)
    }

    /// Whether the peer's users take precedence over a user with this priority and counter, who may
    /// be ahead by `most_milli`.
    fn is_against(&self, priority: i16, counter_milli: u64, most_milli: u64) -> bool {
        let theirs = &self.backlog;
        theirs.priority > priority
            || theirs.priority == priority
                && counter_milli > theirs.least_milli.saturating_add(most_milli)
    }

    /// Returns the entry for the peer's next report, `backlog`, with the history carried over.
    fn followed_by(&self, backlog: Backlog, now_ms: u64) -> Self {
        let is_same = (self.backlog.priority, self.backlog.least_milli)
            == (backlog.priority, backlog.least_milli);
        let next = Self {
            backlog,
            heard_ms: now_ms,
            ..*self
        };
        if is_same {
            return next;
        }
        let stalls = match self.last_blocked_ms {
            _ if self.is_stalled() => self.stalls + 1,
            Some(_) => 0,
            None => self.stalls,
        };
        Self {
            blocked_ms: 0,
            last_blocked_ms: None,
            stalls,
            ..next
        }
    }
}

impl Gate {
    /// Sets `G`, in priced tokens at weight 1; see [`slack_tokens`].
    pub fn set_slack(&mut self, tokens: u64) {
        self.slack_tokens = tokens;
    }

    /// Returns `G`, in priced tokens at weight 1.
    #[must_use]
    pub fn slack(&self) -> u64 {
        self.slack_tokens
    }

    /// Records a report of `peer`; `None` if nothing waits there. Returns whether the report
    /// differs from the previous one.
    pub fn record_report(
        &mut self,
        peer: ReplicaId,
        backlog: Option<Backlog>,
        now_ms: u64,
    ) -> bool {
        let Some(backlog) = backlog else {
            return self.peers.remove(&peer).is_some();
        };
        let before = self.peers.get(&peer);
        let reported = before.map_or(
            PeerBacklog {
                backlog,
                heard_ms: now_ms,
                blocked_ms: 0,
                last_blocked_ms: None,
                stalls: 0,
            },
            |before| before.followed_by(backlog, now_ms),
        );
        let is_news = before.is_none_or(|before| before.backlog != backlog);
        self.peers.insert(peer, reported);
        is_news
    }

    /// Returns the least counter that fresh reports of peers give for `priority`, if any.
    #[must_use]
    pub fn least(&self, priority: i16, now_ms: u64) -> Option<u64> {
        self.peers
            .values()
            .filter(|reported| reported.counts(now_ms) && reported.backlog.priority == priority)
            .map(|reported| reported.backlog.least_milli)
            .min()
    }

    /// Returns the number of users waiting at peers, by fresh reports. A user who waits at several
    /// peers counts more than once.
    #[must_use]
    pub fn users(&self, now_ms: u64) -> u32 {
        let fresh = self
            .peers
            .values()
            .filter(|reported| reported.counts(now_ms));
        fresh.fold(0, |sum, reported| {
            sum.saturating_add(reported.backlog.users)
        })
    }

    /// Whether a peer's report holds back a request with this priority and user counter.
    pub(super) fn holds(
        &self,
        priority: i16,
        counter_milli: u64,
        weight_milli: u32,
        now_ms: u64,
    ) -> bool {
        let most = milli_tokens(self.slack_tokens, weight_milli);
        self.peers.values().any(|reported| {
            reported.counts(now_ms) && reported.is_against(priority, counter_milli, most)
        })
    }

    /// Adds the time since the last check to `blocked_ms` of each report that holds back a request
    /// with this priority and user counter. The caller has found capacity for the request.
    pub(super) fn hold(
        &mut self,
        priority: i16,
        counter_milli: u64,
        weight_milli: u32,
        now_ms: u64,
    ) {
        let most = milli_tokens(self.slack_tokens, weight_milli);
        for reported in self.peers.values_mut() {
            if reported.counts(now_ms) && reported.is_against(priority, counter_milli, most) {
                let since_ms = reported
                    .last_blocked_ms
                    .map_or(0, |last_blocked_ms| now_ms.saturating_sub(last_blocked_ms));
                reported.blocked_ms = reported
                    .blocked_ms
                    .saturating_add(since_ms.min(HELD_STEP_MS_MAX));
                reported.last_blocked_ms = Some(now_ms);
            }
        }
    }

    /// Resets the time for which reports have held this replica back, unless they have stalled.
    /// Without capacity, the engines hold requests back, not the peers.
    pub(super) fn no_room(&mut self) {
        for reported in self
            .peers
            .values_mut()
            .filter(|reported| !reported.is_stalled())
        {
            reported.blocked_ms = 0;
            reported.last_blocked_ms = None;
        }
    }
}

/// Returns `G`: the larger of `largest_request`, the price of the largest request, and twice the
/// rise of a user's counter during `lag_ms`, the delay of reports between replicas. A smaller slack
/// would leave capacity unused merely because the report of a peer's dispatch is in transit.
///
/// `rate` is the service of the whole cluster in priced tokens per second, shared by `users`
/// waiting users.
#[must_use]
pub fn slack_tokens(largest_request: u64, rate: u64, lag_ms: u64, users: u32) -> u64 {
    let lagging = u128::from(rate) * u128::from(lag_ms) / 500 / u128::from(users.max(1));
    largest_request.max(u64::try_from(lagging).unwrap_or(u64::MAX))
}

/// Returns the largest difference in service over any interval between two users who wait
/// throughout, in priced tokens at weight 1: `2(U + X + G)`.
///
/// `largest_request` (`U`) is the maximum cost of one dispatch. `uncharged` (`X`) is the maximum by
/// which one user's requests in flight may exceed what every replica has seen charged: output that
/// is still to be generated, which engines continue regardless of counters, and usage on its way
/// through the log. `slack` is `G`.
#[must_use]
pub fn bound(largest_request: u64, uncharged: u64, slack: u64) -> u64 {
    largest_request
        .saturating_add(uncharged)
        .saturating_add(slack)
        .saturating_mul(2)
}
