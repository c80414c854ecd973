//! `users.charges = "durable"`: the end of a response waits until its charge is committed.
//!
//! The end shows a client that its response is complete: the last event of a stream, the last piece
//! of a body with a known length, the last chunk of any other. It is withheld until the log has the
//! charge, so a complete response is charged even if this replica fails. The wait is bounded
//! ([`COMMIT_WAIT_MAX`]): without a quorum, responses end anyway and their charges stay in the
//! outbox.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Timeout, timeout};

use crate::proxy::settings::Charges;
use crate::routing::ChargeCommit;

/// Maximum time for which the end of a response waits for a commit.
pub(super) const COMMIT_WAIT_MAX: Duration = Duration::from_secs(5);

/// The withheld end of one response.
pub(in crate::proxy) struct WithheldEnd {
    charges: Charges,
    piece: Option<Bytes>,
    commit: Option<Pin<Box<Timeout<ChargeCommit>>>>,
}

/// The end of a response after its release.
pub(super) struct ReleasedEnd {
    pub(in crate::proxy) piece: Option<Bytes>,
    /// Whether the charge is known to be committed.
    pub(super) is_confirmed: bool,
}

impl WithheldEnd {
    pub(in crate::proxy) fn new(charges: Charges) -> Self {
        Self {
            charges,
            piece: None,
            commit: None,
        }
    }

    /// Whether charges are durable, so that the end of the response waits for a commit.
    pub(in crate::proxy) fn is_on(&self) -> bool {
        self.charges == Charges::Durable
    }

    /// Appends a piece, if any, to the withheld ones.
    pub(in crate::proxy) fn push(&mut self, piece: Option<Bytes>) {
        self.piece = match (self.piece.take(), piece) {
            (Some(first), Some(second)) => Some([first, second].concat().into()),
            (first, second) => first.or(second),
        };
    }

    /// Takes the withheld pieces without waiting.
    pub(in crate::proxy) fn take(&mut self) -> Option<Bytes> {
        self.piece.take()
    }

    /// Lets what is withheld wait for `commit`.
    pub(in crate::proxy) fn wait(&mut self, commit: ChargeCommit) {
        self.commit = Some(Box::pin(timeout(COMMIT_WAIT_MAX, commit)));
    }

    /// Whether something waits for a commit.
    pub(in crate::proxy) fn is_waiting(&self) -> bool {
        self.commit.is_some()
    }

    /// Returns the withheld pieces when the wait for the commit is over, or at once if there is
    /// none.
    pub(super) fn poll_released(&mut self, cx: &mut Context<'_>) -> Poll<ReleasedEnd> {
        let is_confirmed = match &mut self.commit {
            Some(commit) => matches!(ready!(commit.as_mut().poll(cx)), Ok(Ok(_))),
            None => true,
        };
        self.commit = None;
        Poll::Ready(ReleasedEnd {
            piece: self.piece.take(),
            is_confirmed,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use state::ids::LogIndex;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_answer_ends_with_its_commit_or_a_timeout() {
        for (is_committed, expected) in [(true, true), (false, false)] {
            let mut end = WithheldEnd::new(Charges::Durable);
            end.push(Some(Bytes::from_static(b"data: [DONE]\n")));
            end.push(None);
            end.push(Some(Bytes::from_static(b"\n")));
            let (committed, commit) = oneshot::channel();
            end.wait(commit);
            let pending = poll_fn(|cx| Poll::Ready(end.poll_released(cx).is_pending()));
            assert!(pending.await && end.is_waiting());
            let mut committed = Some(committed);
            if is_committed && let Some(committed) = committed.take() {
                committed.send(LogIndex(1)).unwrap();
            }
            let released = poll_fn(|cx| end.poll_released(cx)).await;
            assert_eq!(released.is_confirmed, expected);
            assert_eq!(&released.piece.unwrap()[..], b"data: [DONE]\n\n");
            assert!(!end.is_waiting());
            drop(committed);
        }
    }
}
