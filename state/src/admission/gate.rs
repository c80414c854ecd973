//! The gate: how far a replica may serve its users ahead of users who wait at other replicas.
//!
//! Counters are shared, but a replica can only order the requests that wait with it. When users are
//! pinned to replicas, each replica would serve its own at whatever rate it gets. The gate lets a
//! user go only while their counter is at most `V + G`: `V` is the least counter of those who wait
//! elsewhere, as the peers told, and `G` the slack. See docs/internals/fairness.md for what that
//! bounds.
//!
//! A peer's word counts while it is fresh. And a peer may wait for room that this replica's requests
//! do not compete for (other labels, say): if there was room here for [`GATE_STALL_MS`] and all that
//! time the same word held it back, that word counts nothing until it changes. So no replica leaves
//! engines idle for longer than that. A peer whose words stall again and again is waited for less
//! each time, down to [`GATE_RETRY_MS`], until one of them gives way by itself.

use std::collections::BTreeMap;

use super::milli_tokens;
use crate::ids::ReplicaId;

/// A peer not heard from for this long waits for nothing.
pub const PEER_SILENT_MS: u64 = 500;
/// Room unused for this long because of one unchanged word of a peer is used.
pub const GATE_STALL_MS: u64 = 500;
/// How soon a held queue should be asked again, should nothing else wake it.
pub const GATE_RETRY_MS: u64 = 50;
/// Most that one look adds to the time held: room is only known when somebody looks.
const HELD_STEP_MS_MAX: u64 = 2 * GATE_RETRY_MS;

/// What waits at one replica for one model: told to the peers when it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backlog {
    /// Highest priority that waits.
    pub priority: i16,
    /// Least counter among users who wait with that priority, in milli-tokens.
    pub least_milli: u64,
    /// Users who wait.
    pub users: u32,
    /// Requests that wait.
    pub waiting: u32,
}

/// What the peers told of one model, and how long it held this replica back.
#[derive(Debug, Clone, Default)]
pub struct Gate {
    peers: BTreeMap<ReplicaId, PeerBacklog>,
    slack_tokens: u64,
}

#[derive(Debug, Clone, Copy)]
struct PeerBacklog {
    backlog: Backlog,
    heard_ms: u64,
    /// How long it has held this replica back while there was room, since it changed.
    held_ms: u64,
    /// When it last did; `None`: not since there was no room.
    looked_ms: Option<u64>,
    /// How often in a row the peer's words have stalled.
    stalls: u32,
}

impl PeerBacklog {
    fn counts(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.heard_ms) < PEER_SILENT_MS && !self.is_stalled()
    }

    fn is_stalled(&self) -> bool {
        self.held_ms >= (GATE_STALL_MS >> self.stalls.min(16)).max(GATE_RETRY_MS)
    }

    /// Whether who waits there goes before one of this priority and counter, who may be ahead by
    /// `most_milli`.
    fn is_against(&self, priority: i16, counter_milli: u64, most_milli: u64) -> bool {
        let theirs = &self.backlog;
        theirs.priority > priority
            || theirs.priority == priority
                && counter_milli > theirs.least_milli.saturating_add(most_milli)
    }

    /// The peer's next word, with what is remembered of this one.
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
        let stalls = match self.looked_ms {
            _ if self.is_stalled() => self.stalls + 1,
            Some(_) => 0,
            None => self.stalls,
        };
        Self {
            held_ms: 0,
            looked_ms: None,
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

    /// `G`, in priced tokens at weight 1.
    #[must_use]
    pub fn slack(&self) -> u64 {
        self.slack_tokens
    }

    /// A peer told what waits there; `None`: nothing does. Answers whether that is news.
    pub fn tell(&mut self, peer: ReplicaId, backlog: Option<Backlog>, now_ms: u64) -> bool {
        let Some(backlog) = backlog else {
            return self.peers.remove(&peer).is_some();
        };
        let before = self.peers.get(&peer);
        let told = before.map_or(
            PeerBacklog {
                backlog,
                heard_ms: now_ms,
                held_ms: 0,
                looked_ms: None,
                stalls: 0,
            },
            |before| before.followed_by(backlog, now_ms),
        );
        let is_news = before.is_none_or(|before| before.backlog != backlog);
        self.peers.insert(peer, told);
        is_news
    }

    /// Least counter that peers told of, among those who wait with `priority`.
    #[must_use]
    pub fn least(&self, priority: i16, now_ms: u64) -> Option<u64> {
        self.peers
            .values()
            .filter(|told| told.counts(now_ms) && told.backlog.priority == priority)
            .map(|told| told.backlog.least_milli)
            .min()
    }

    /// Users who wait at peers, a user at several of them counted more than once.
    #[must_use]
    pub fn users(&self, now_ms: u64) -> u32 {
        let fresh = self.peers.values().filter(|told| told.counts(now_ms));
        fresh.fold(0, |sum, told| sum.saturating_add(told.backlog.users))
    }

    /// Whether a peer's word is against a request of this priority whose user has this counter.
    pub(super) fn holds(
        &self,
        priority: i16,
        counter_milli: u64,
        weight_milli: u32,
        now_ms: u64,
    ) -> bool {
        let most = milli_tokens(self.slack_tokens, weight_milli);
        self.peers
            .values()
            .any(|told| told.counts(now_ms) && told.is_against(priority, counter_milli, most))
    }

    /// Such a request is held although there is room for it: notes for how long.
    pub(super) fn hold(
        &mut self,
        priority: i16,
        counter_milli: u64,
        weight_milli: u32,
        now_ms: u64,
    ) {
        let most = milli_tokens(self.slack_tokens, weight_milli);
        for told in self.peers.values_mut() {
            if told.counts(now_ms) && told.is_against(priority, counter_milli, most) {
                let since_ms = told
                    .looked_ms
                    .map_or(0, |looked_ms| now_ms.saturating_sub(looked_ms));
                told.held_ms = told.held_ms.saturating_add(since_ms.min(HELD_STEP_MS_MAX));
                told.looked_ms = Some(now_ms);
            }
        }
    }

    /// There is no room: nobody holds anybody back, the engines do.
    pub(super) fn no_room(&mut self) {
        for told in self.peers.values_mut().filter(|told| !told.is_stalled()) {
            told.held_ms = 0;
            told.looked_ms = None;
        }
    }
}

/// `G`: the largest request's price, or twice what a user's counter rises by in the time that the
/// replicas' knowledge is old, whichever is more. Less would leave room unused only because news of
/// a peer's dispatch is still under way.
///
/// `rate` is the whole cluster's service in priced tokens per second, shared by `users` who wait.
#[must_use]
pub fn slack_tokens(largest_request: u64, rate: u64, lag_ms: u64, users: u32) -> u64 {
    let lagging = u128::from(rate) * u128::from(lag_ms) / 500 / u128::from(users.max(1));
    largest_request.max(u64::try_from(lagging).unwrap_or(u64::MAX))
}

/// Largest difference in service, in priced tokens at weight 1, that two users who wait all the time
/// can see over any interval: `2(U + X + G)`.
///
/// `largest_request` (`U`) is the most that one dispatch costs. `uncharged` (`X`) is the most that one
/// user's requests under way may come to beyond what every replica has seen charged: output that they
/// have yet to make, as an engine goes on with it whatever the counters say, and what was used and is
/// on its way through the log. `slack` is `G`.
#[must_use]
pub fn bound(largest_request: u64, uncharged: u64, slack: u64) -> u64 {
    largest_request
        .saturating_add(uncharged)
        .saturating_add(slack)
        .saturating_mul(2)
}
