//! What replicas tell each other outside the log: how busy each is, and its digest at an index.
//!
//! Both travel in one message, as a peer that is behind gets only the newest one: neither can push
//! the other out. Layout: a version byte, the digest claim's length in one byte, the claim (see
//! [`Digests::message`]), the load report (see [`LoadTable::local_report`]) up to the end.
//!
//! [`LoadTable::local_report`]: api::routing::LoadTable::local_report

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::admin::Digests;
use api::routing::{Reporter, Router};
use bytes::Bytes;
use raft::{PeerHandler, Replica};
use state::ids::ReplicaId;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

/// Time between two looks at this replica's load.
const INTERVAL: Duration = Duration::from_millis(20);
/// First byte of a message.
const VERSION: u8 = 1;

/// Takes in what peers tell.
pub(super) struct Inbox {
    /// Keeps the peers' load.
    pub(super) router: Arc<Router>,
    /// Compares the peers' digests with ours.
    pub(super) digests: Arc<Digests>,
}

impl PeerHandler for Inbox {
    fn message(&self, from: u8, bytes: &[u8]) {
        let Some((claim, report)) = split(bytes) else {
            tracing::warn!(peer = from, "unreadable message of a peer");
            return;
        };
        let peer = ReplicaId(from);
        if !claim.is_empty()
            && let Err(error) = self.digests.receive(peer, claim)
        {
            tracing::warn!(peer = from, %error, "unreadable digest of a peer");
        }
        if let Err(error) = self
            .router
            .load()
            .merge_report(peer, report, Instant::now())
        {
            tracing::warn!(peer = from, %error, "unreadable load report of a peer");
        }
    }
}

fn split(message: &[u8]) -> Option<(&[u8], &[u8])> {
    match message {
        [VERSION, length, rest @ ..] => rest.split_at_checked(usize::from(*length)),
        _ => None,
    }
}

fn join(claim: &[u8], report: &[u8]) -> Bytes {
    let length = u8::try_from(claim.len()).expect("a digest claim has a fixed length below 256");
    let mut message = Vec::with_capacity(2 + claim.len() + report.len());
    message.extend([VERSION, length]);
    message.extend(claim);
    message.extend(report);
    Bytes::from(message)
}

/// Tells the peers until `stop`: a change of load within [`INTERVAL`], everything anew often enough
/// to be counted as alive.
pub(super) async fn tell(
    replica: Replica,
    router: Arc<Router>,
    digests: Arc<Digests>,
    stop: CancellationToken,
) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut reporter = Reporter::default();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        if let Some(report) = reporter.due(router.load(), Instant::now()) {
            let claim = digests.message();
            let claim = claim.as_ref().map_or(&[][..], |claim| &claim[..]);
            replica.broadcast(join(claim, &report));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_taken_apart_as_it_was_put_together() {
        for (claim, report) in [(&b""[..], &b""[..]), (b"claim", b"report"), (b"", b"r")] {
            assert_eq!(split(&join(claim, report)), Some((claim, report)));
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for bytes in [&b""[..], b"\x01", b"\x02\x00", b"\x01\x05abc"] {
            assert_eq!(split(bytes), None, "{bytes:?}");
        }
    }
}
