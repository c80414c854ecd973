//! Messages between replicas outside the log: load, backlogs, shares, figures and digests.
//!
//! All parts travel in one message: a slow peer receives only the newest message, so separate ones
//! could displace each other. Layout: a version byte, then the parts, each after its length
//! (little-endian): the digest claim (see [`Digests::message`]; length in one byte), the backlog
//! (see [`backlog::encode`]; two bytes), the load report (see [`LoadTable::local_report`]; four
//! bytes) and the shares (see [`share_reports`]; four bytes). The figures (see [`api::cluster::figures`])
//! follow without a length. A replica drops a message of a version that it does not know.
//!
//! [`LoadTable::local_report`]: api::routing::LoadTable::local_report

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use api::admission::{Admission, backlog};
use api::cluster::divergence::Digests;
use api::cluster::figures::FigureBoard;
use api::ports::QuestionTopic;
use api::proxy::DecisionLog;
use api::routing::{LoadReporter, LoadTable, Permits, Shares, share_reports};
use bytes::Bytes;
use raft::{PeerHandler, Replica, Status};
use state::ids::ReplicaId;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::clocks::ClusterClocks;
use super::intervals::every;
use super::machine::ApplyObserver;

/// Interval at which this replica checks its load and backlog for changes.
const INTERVAL: Duration = Duration::from_millis(20);
/// Interval while nothing runs or waits anywhere: the longest with which shares remain valid.
const IDLE_INTERVAL: Duration = Duration::from_millis(state::shares::LOOK_MS_MAX);
/// Version of the layout.
const VERSION: u8 = 1;
/// Maximum length of the backlog in a message, in bytes.
const BACKLOG_BYTES_MAX: usize = u16::MAX as usize;
const _: () = assert!(backlog::REPORT_BYTES_MAX <= BACKLOG_BYTES_MAX);

/// Receiver of peers' messages, which passes each part to its component.
pub(super) struct GossipInbox {
    /// Receives the peers' load.
    pub(super) load: Arc<LoadTable>,
    /// Receives the peers' shares.
    pub(super) shares: Arc<Shares>,
    /// Receives the peers' backlogs.
    pub(super) admission: Arc<Admission>,
    /// Compares the peers' digests with this replica's.
    pub(super) digests: Arc<Digests>,
    /// Receives the peers' figures.
    pub(super) figures: Arc<FigureBoard>,
    /// Compares the peers' clocks with this replica's.
    pub(super) clocks: Arc<ClusterClocks>,
    /// Answers the peers' questions about permits of users.
    pub(super) permits: Arc<Permits>,
    /// Answers the peers' questions about decisions, once the data plane has started.
    pub(super) decisions: Arc<OnceLock<Arc<DecisionLog>>>,
    /// Observer that is notified of unreadable messages, if there is one.
    pub(super) observer: Option<Arc<dyn ApplyObserver>>,
}

impl PeerHandler for GossipInbox {
    fn message(&self, from: u8, bytes: &[u8]) {
        let Some(message) = GossipMessage::read(bytes) else {
            tracing::warn!(peer = from, "could not decode a peer's message");
            if let Some(observer) = &self.observer {
                observer.message_unreadable(from);
            }
            return;
        };
        let (peer, now) = (ReplicaId(from), Instant::now());
        if !message.claim.is_empty()
            && let Err(error) = self.digests.receive(peer, message.claim)
        {
            tracing::warn!(peer = from, %error, "could not decode a peer's digest");
        }
        if !message.figures.is_empty()
            && let Err(error) = self.figures.receive(peer, message.figures, now)
        {
            tracing::warn!(peer = from, %error, "could not decode a peer's figures");
        }
        // Shares are read before the load, whose update wakes requests that wait for a place.
        if !message.shares.is_empty()
            && let Err(error) = self.shares.hear(peer, message.shares)
        {
            tracing::warn!(peer = from, %error, "could not decode a peer's share report");
        }
        if let Err(error) = self.load.merge_report(peer, message.load, now) {
            tracing::warn!(peer = from, %error, "could not decode a peer's load report");
        }
        if let Err(error) = self.admission.apply_peer_report(peer, message.backlog) {
            tracing::warn!(peer = from, %error, "could not decode a peer's backlog report");
        }
    }

    fn answer(&self, from: u8, question: &[u8]) -> Option<Vec<u8>> {
        let (topic, question) = question.split_first()?;
        match QuestionTopic::of(*topic)? {
            QuestionTopic::Decisions => self.decisions.get()?.answer(ReplicaId(from), question),
            QuestionTopic::Permits => self.permits.answer(ReplicaId(from), question),
        }
    }

    fn unix_ms(&self) -> u64 {
        self.clocks.own_unix_ms()
    }

    fn clock(&self, from: u8, unix_ms: u64) {
        self.clocks.heard(from, unix_ms);
    }
}

/// A decoded message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GossipMessage<'a> {
    pub(super) claim: &'a [u8],
    pub(super) backlog: &'a [u8],
    pub(super) load: &'a [u8],
    /// Share reports; empty if the message has none.
    pub(super) shares: &'a [u8],
    /// Figures of the peer; empty if the message has none.
    pub(super) figures: &'a [u8],
}

impl<'a> GossipMessage<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Option<Self> {
        let [VERSION, length, rest @ ..] = bytes else {
            return None;
        };
        let (claim, rest) = rest.split_at_checked(usize::from(*length))?;
        let (length, rest) = rest.split_first_chunk()?;
        let (backlog, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
        let (load, rest) = split_long(rest)?;
        let (shares, figures) = split_long(rest)?;
        Some(Self {
            claim,
            backlog,
            load,
            shares,
            figures,
        })
    }

    pub(super) fn write(self) -> Bytes {
        let claim_length = u8::try_from(self.claim.len());
        let claim_length = claim_length.expect("a digest claim has a fixed length below 256");
        let backlog_length = u16::try_from(self.backlog.len());
        let backlog_length = backlog_length.expect("a backlog is bounded, as asserted above");
        let length = |part: &[u8]| {
            let length = u32::try_from(part.len());
            length
                .expect("reports are bounded by the slots")
                .to_le_bytes()
        };
        let parts = [
            &[VERSION, claim_length][..],
            self.claim,
            &backlog_length.to_le_bytes(),
            self.backlog,
            &length(self.load),
            self.load,
            &length(self.shares),
            self.shares,
            self.figures,
        ];
        Bytes::from(parts.concat())
    }
}

/// Splits off a part that follows its length in four bytes, and returns it with the rest. `None` if
/// `bytes` is too short.
fn split_long(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)
}

/// Updates the clocks and replicated time, and sends messages to the peers until `stop`. Sends a
/// change of load or backlog within [`INTERVAL`], and at once if the first request waits, the last
/// one has gone, or places are wanted or handed over. Repeats everything often enough to count as
/// alive.
pub(super) async fn run_broadcast(
    replica: Replica,
    (load, shares): (Arc<LoadTable>, Arc<Shares>),
    admission: Arc<Admission>,
    digests: Arc<Digests>,
    (clocks, figures): (Arc<ClusterClocks>, Arc<FigureBoard>),
    stop: CancellationToken,
) {
    let (mut ticks, mut idle_ticks) = (every(INTERVAL), every(IDLE_INTERVAL));
    let mut is_idle = false;
    let mut reporter = LoadReporter::default();
    let (mut told, mut told_shares) = (Vec::new(), Vec::new());
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = admission.waiting_changed() => {}
            () = load.report_due().notified() => {}
            _ = ticks.tick(), if !is_idle => {}
            _ = idle_ticks.tick(), if is_idle => {}
        }
        clocks.turn();
        admission.pass_time();
        let now = Instant::now();
        let status = replica.status();
        shares.turn(now, &others(&status));
        let share_report = shares.report();
        let backlog = admission.report();
        is_idle = backlog.is_empty() && load.is_idle(now);
        if is_idle {
            load.set_idle();
        }
        let is_news = backlog != told || !share_reports::is_same(&share_report, &told_shares);
        let load = match reporter.due(&load, now) {
            Some(report) => report,
            None if is_news => load.local_report(),
            None => continue,
        };
        let claim = digests.message();
        let figures = figures.report();
        let message = GossipMessage {
            claim: claim.as_ref().map_or(&[][..], |claim| &claim[..]),
            backlog: &backlog,
            load: &load,
            shares: &share_report,
            figures: &figures,
        };
        replica.broadcast(message.write());
        (told, told_shares) = (backlog, share_report);
    }
}

/// Returns the ids of the other members.
fn others(status: &Status) -> Vec<ReplicaId> {
    let ids = status.members.keys().filter(|id| **id != status.id);
    ids.map(|id| ReplicaId(*id)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gossip_messages_round_trip() {
        let parts = [&b""[..], b"a", b"several"];
        for claim in parts {
            for backlog in parts {
                for (load, shares) in parts.into_iter().zip(parts) {
                    for figures in parts {
                        let message = GossipMessage {
                            claim,
                            backlog,
                            load,
                            shares,
                            figures,
                        };
                        assert_eq!(GossipMessage::read(&message.write()), Some(message));
                    }
                }
            }
        }
    }

    #[test]
    fn gossip_messages_encode_to_golden_bytes() {
        let message = GossipMessage {
            claim: b"cl",
            backlog: b"b",
            load: b"load",
            shares: b"shares",
            figures: b"figures",
        };
        let expected = b"\x01\x02cl\x01\x00b\x04\x00\x00\x00load\x06\x00\x00\x00sharesfigures";
        assert_eq!(&message.write()[..], expected);
    }

    #[test]
    fn malformed_gossip_messages_are_refused() {
        let whole = b"\x01\x01c\x01\x00b\x04\x00\x00\x00load\x00\x00\x00\x00";
        assert!(GossipMessage::read(whole).is_some());
        for length in 0..whole.len() {
            assert_eq!(GossipMessage::read(&whole[..length]), None, "{length}");
        }
        let other_version = [&[2][..], &whole[1..]].concat();
        assert_eq!(GossipMessage::read(&other_version), None);
        let forged = b"\x01\x00\x00\x00\xff\xff\xff\xffload";
        assert_eq!(GossipMessage::read(forged), None);
    }
}
