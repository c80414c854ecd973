//! One rank's reader: connects its sockets and the outbox through an [`EventStream`].

use std::collections::VecDeque;
use std::time::Duration;

use state::command::Item;
use state::ids::BackendRef;
use state::kv_events::{KvBatch, KvCondition, KvPosition, KvReason, KvUncertainty, KvUpdate};
use tokio::time::{Instant, MissedTickBehavior};

use super::ReaderParts;
use crate::engines::kv_transport::socket::{Socket, SocketMessage};
use crate::engines::kv_transport::source::RankSource;
use crate::kv_events::stream::{EventStream, HashIdentity, StreamContext, StreamEffect};
use crate::kv_events::stream_status::RankStreamStatus;

/// Interval at which the state, the clock and the outbox are checked.
const TICK: Duration = Duration::from_millis(50);
/// Silence of a stream after which the engine is queried for its newest message number.
const QUIET_MAX: Duration = Duration::from_secs(1);
/// Time within which a report must be applied, or else it is repeated.
const APPLIED_WITHIN: Duration = Duration::from_secs(5);
/// Minimum interval between two objections to a state that counts as exact. It is longer than a
/// commit takes.
const OBJECTION_INTERVAL: Duration = Duration::from_millis(500);
/// Initial value and maximum of the pause before a failed replay is retried. Every failure, the
/// first one included, doubles it; a new message resets it.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// Reader of one data-parallel rank; see the module documentation.
pub(super) struct RankReader {
    parts: ReaderParts,
    backend: BackendRef,
    identity: HashIdentity,
    source: RankSource,
    stream: EventStream,
    subscription: Socket,
    replay: Option<Socket>,
    /// Time of the scheduled replay, and the first message number that it requests.
    due: Option<(Instant, u64)>,
    pause: Duration,
    /// Reports that the outbox has not accepted yet.
    pending: VecDeque<KvBatch>,
    /// Time at which the last message arrived or the last replay ended.
    last_sign: Instant,
    /// Time at which the newest number was last queried.
    last_check: Instant,
    /// Time of the last objection to a state that counts as exact.
    last_objection: Option<Instant>,
    /// Position of the state while it lags behind the reports, and when it was first observed
    /// there.
    behind: Option<(Option<KvPosition>, Instant)>,
    shown: RankStreamStatus,
}

/// An event that the reader waits for.
enum ReaderEvent {
    Live(SocketMessage),
    Replayed(SocketMessage),
    Tick,
}

impl RankReader {
    pub(super) fn new(
        parts: ReaderParts,
        backend: BackendRef,
        identity: HashIdentity,
        source: RankSource,
        stream: EventStream,
    ) -> Self {
        let subscription =
            Socket::subscription(&*parts.sockets, source.side, source.events.clone());
        let shown = RankStreamStatus {
            rank: source.rank,
            endpoint: source.events.to_string(),
            ..RankStreamStatus::default()
        };
        Self {
            parts,
            backend,
            identity,
            source,
            stream,
            subscription,
            replay: None,
            due: None,
            pause: PAUSES.0,
            pending: VecDeque::new(),
            last_sign: Instant::now(),
            last_check: Instant::now(),
            last_objection: None,
            behind: None,
            shown,
        }
    }

    /// Reads the rank's events until the task is aborted.
    pub(super) async fn run(mut self) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // While the outbox is full, the reader fetches no messages.
            let has_room = self.pending.is_empty();
            let event = tokio::select! {
                biased;
                _ = ticks.tick() => ReaderEvent::Tick,
                Some(incoming) = next(&mut self.replay), if has_room => ReaderEvent::Replayed(incoming),
                Some(incoming) = self.subscription.next(), if has_room => ReaderEvent::Live(incoming),
            };
            match event {
                ReaderEvent::Live(incoming) => self.live(incoming),
                ReaderEvent::Replayed(incoming) => self.replayed(incoming),
                ReaderEvent::Tick => self.tick(),
            }
            self.act();
        }
    }

    fn live(&mut self, incoming: SocketMessage) {
        match incoming {
            SocketMessage::Connected => {
                self.shown.is_connected = true;
                self.shown.detail = None;
                self.stream.connected();
            }
            SocketMessage::Message(seq, payload) => {
                self.last_sign = Instant::now();
                self.with_stream(|stream, around| stream.live(seq, payload, around));
                self.shown.newest_seq = Some(seq);
            }
            SocketMessage::Broke(why) => {
                self.shown.detail = Some(why);
                if std::mem::take(&mut self.shown.is_connected) {
                    self.replay = None;
                    self.due = None;
                    self.stream.disconnected();
                }
            }
            // A subscription has no end.
            SocketMessage::End => {}
        }
    }

    fn replayed(&mut self, incoming: SocketMessage) {
        match incoming {
            SocketMessage::Message(seq, payload) => {
                self.last_sign = Instant::now();
                let told = self.stream.told();
                self.with_stream(|stream, around| stream.replayed(seq, &payload, around));
                if self.stream.told() != told {
                    self.pause = PAUSES.0;
                }
                self.shown.newest_seq = self.shown.newest_seq.max(Some(seq));
            }
            SocketMessage::End => {
                self.replay = None;
                self.pause = PAUSES.0;
                self.last_sign = Instant::now();
                self.with_stream(EventStream::replay_ended);
            }
            SocketMessage::Broke(why) => {
                self.replay = None;
                self.shown.detail = Some(format!("replay: {why}"));
                self.pause = (self.pause * 2).min(PAUSES.1);
                self.with_stream(EventStream::replay_failed);
            }
            SocketMessage::Connected => {}
        }
    }

    fn tick(&mut self) {
        let now = Instant::now();
        if let Some((_, from)) = self.due.take_if(|(at, _)| *at <= now) {
            self.begin_replay(from);
        }
        let (position, condition, is_unconfirmed) = self.look();
        let is_exact = condition == Some(KvCondition::EXACT);
        let reason = condition.and_then(|it| it.reason);
        let is_in_doubt = matches!(reason, Some(KvReason::Doubt(_)));
        let has_objected = self.last_objection.map(|at| now.duration_since(at));
        if self.is_overtaken(position) || self.is_stuck(position, now) {
            self.start_over(position);
        } else if is_exact
            && self.pending.is_empty()
            && self.stream.is_in_doubt()
            && has_objected.is_none_or(|since| since >= OBJECTION_INTERVAL)
        {
            self.last_objection = Some(now);
            self.stream.object();
        } else if self.pending.is_empty()
            && self.stream.is_following()
            && now.duration_since(self.last_check) >= QUIET_MAX
            && (is_in_doubt || now.duration_since(self.last_sign) >= QUIET_MAX)
        {
            self.last_check = now;
            if is_unconfirmed {
                self.say_again();
            }
            self.stream.check(is_in_doubt);
        }
        self.show(position);
    }

    /// Repeats the last report. Its stamp advances replicated time, so unconfirmed blocks fade even
    /// if nothing else is proposed.
    fn say_again(&mut self) {
        if let Some((publisher, seq)) = self.stream.told()
            && !self.stream.is_in_doubt()
        {
            let current = self.batch(publisher, KvUpdate::Current { seq });
            self.pending.push_back(current);
        }
    }

    /// Returns the applied position and the condition of this rank, and whether it has unconfirmed
    /// blocks.
    fn look(&self) -> (Option<KvPosition>, Option<KvCondition>, bool) {
        let (slot, rank) = (self.backend.slot, self.source.rank);
        let mut seen = (None, None, false);
        self.parts.cluster.with_state(&mut |state| {
            let position = state
                .kv_positions(slot)
                .into_iter()
                .find(|it| it.rank == rank);
            let place = state.rank_slot(slot, rank);
            let status = place.and_then(|place| state.kv_status(place));
            let is_unconfirmed = status.as_ref().is_some_and(|it| it.unconfirmed_blocks > 0);
            let rank = status.and_then(|it| it.ranks.into_iter().find(|it| it.rank == rank));
            seen = (position, rank.map(|it| it.condition), is_unconfirmed);
        });
        seen
    }

    /// Whether another reader has reported a later run than the one followed here.
    fn is_overtaken(&self, position: Option<KvPosition>) -> bool {
        let told = self.stream.told();
        let pair = told.zip(position);
        pair.is_some_and(|((publisher, _), applied)| applied.publisher > publisher)
    }

    /// Whether the state has long lagged behind the reports without moving although the log makes
    /// progress: a report was lost.
    fn is_stuck(&mut self, position: Option<KvPosition>, now: Instant) -> bool {
        let applied = position.map(|it| (it.publisher, it.last.map(|(seq, _)| seq)));
        let is_behind = self.stream.told().is_some_and(|told| applied < Some(told))
            && self.pending.is_empty()
            && !self.stream.is_refused()
            && !self.parts.outbox.status().is_degraded;
        match self.behind {
            Some((at, since)) if is_behind && at == position => {
                now.duration_since(since) >= APPLIED_WITHIN
            }
            _ => {
                self.behind = is_behind.then_some((position, now));
                false
            }
        }
    }

    fn start_over(&mut self, position: Option<KvPosition>) {
        self.replay = None;
        self.due = None;
        self.pending.clear();
        self.behind = None;
        let has_replay = self.source.replay.is_some();
        let (counts, run) = (self.stream.counts(), self.followed_run());
        self.stream =
            EventStream::new(self.identity.clone(), has_replay, position).with_counts(counts);
        self.forget_newest_unless(run);
        if self.shown.is_connected {
            self.stream.connected();
        }
    }

    fn with_stream(&mut self, act: impl FnOnce(&mut EventStream, &StreamContext<'_>)) {
        let (slot, rank) = (self.backend.slot, self.source.rank);
        let cluster = &self.parts.cluster;
        let around = StreamContext {
            now_ms: self.parts.clock.unix_ms(),
            known: &|engine| {
                let mut found = None;
                cluster.with_state(&mut |state| found = state.kv_router_hash(slot, rank, engine));
                found
            },
        };
        let run = self.followed_run();
        act(&mut self.stream, &around);
        self.forget_newest_unless(run);
    }

    /// Returns the publisher run that is followed.
    fn followed_run(&self) -> Option<u64> {
        self.stream.told().map(|(publisher, _)| publisher)
    }

    /// Forgets the newest message number if `run` was followed and another one is now. An engine that
    /// restarts numbers its messages from 0.
    fn forget_newest_unless(&mut self, run: Option<u64>) {
        if run.is_some() && self.followed_run() != run {
            self.shown.newest_seq = None;
        }
    }

    /// Carries out the pending effects of the stream.
    fn act(&mut self) {
        for effect in self.stream.take_effects() {
            match effect {
                StreamEffect::Tell { publisher, news } => {
                    let batch = self.batch(publisher, news);
                    self.pending.push_back(batch);
                }
                StreamEffect::Replay { from } if self.pause > PAUSES.0 => {
                    self.replay = None;
                    self.due = Some((Instant::now() + self.pause, from));
                }
                StreamEffect::Replay { from } => self.begin_replay(from),
            }
        }
        while let Some(batch) = self.pending.front() {
            if !self.parts.outbox.note(Item::KvEvents(batch.clone())) {
                self.fall_behind();
                return;
            }
            self.parts.outbox.flush_soon();
            self.pending.pop_front();
        }
    }

    /// Handles a full outbox. Once it has room, the first report states that the state is out of
    /// date.
    fn fall_behind(&mut self) {
        if self.stream.fall_behind()
            && let Some((publisher, _)) = self.stream.told()
        {
            let doubt = self.batch(publisher, KvUpdate::Doubt(KvUncertainty::Behind));
            self.pending.push_front(doubt);
        }
    }

    fn batch(&self, publisher: u64, news: KvUpdate) -> KvBatch {
        KvBatch {
            backend: self.backend,
            rank: self.source.rank,
            publisher,
            news,
        }
    }

    fn begin_replay(&mut self, from: u64) {
        let address = self.source.replay.clone();
        let sockets = &*self.parts.sockets;
        self.replay = address.map(|address| Socket::replay(sockets, address, from));
    }

    fn show(&mut self, position: Option<KvPosition>) {
        let told = self.stream.told();
        self.shown.told_seq = told.and_then(|(_, seq)| seq);
        self.shown.newest_seq = self.shown.newest_seq.max(self.shown.told_seq);
        // Nothing of a new run is applied before its first report is.
        let position = position.filter(|it| Some(it.publisher) == self.followed_run());
        let applied = position.and_then(|it| it.last).map(|(seq, _)| seq);
        self.shown.lag_messages = match (self.shown.newest_seq, applied) {
            (Some(newest), Some(applied)) => newest.saturating_sub(applied),
            (Some(newest), None) => newest.saturating_add(1),
            (None, _) => 0,
        };
        self.shown.counts = self.stream.counts();
        self.parts
            .board
            .show_rank(self.backend.slot, self.shown.clone());
    }
}

async fn next(socket: &mut Option<Socket>) -> Option<SocketMessage> {
    match socket {
        Some(socket) => socket.next().await,
        None => std::future::pending().await,
    }
}
