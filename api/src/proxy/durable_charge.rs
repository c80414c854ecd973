//! `users.charges = "durable"`: the end of an answer waits until its charge is committed.
//!
//! The end is what tells a client that its answer is complete: the event `[DONE]` of a stream, the
//! last piece of a body of announced length, the last chunk of any other. It is withheld until the
//! log has the charge, so that no complete answer is free, whichever replica dies. The wait is
//! bounded: without a quorum, answers end anyway, and their charges stay in the outbox.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Timeout, timeout};

use super::settings::Charges;
use crate::routing::ChargeCommit;

/// Longest wait for a commit.
pub(super) const COMMIT_WAIT_MAX: Duration = Duration::from_secs(5);

/// The end of one answer.
pub(super) struct WithheldEnd {
    charges: Charges,
    piece: Option<Bytes>,
    commit: Option<Pin<Box<Timeout<ChargeCommit>>>>,
}

/// An end that is withheld no more.
pub(super) struct ReleasedEnd {
    pub(super) piece: Option<Bytes>,
    /// Whether the charge is known to be committed.
    pub(super) is_confirmed: bool,
}

impl WithheldEnd {
    pub(super) fn new(charges: Charges) -> Self {
        Self {
            charges,
            piece: None,
            commit: None,
        }
    }

    /// Whether the end of an answer waits at all.
    pub(super) fn is_on(&self) -> bool {
        self.charges == Charges::Durable
    }

    /// Keeps back a piece behind those that are kept back.
    pub(super) fn push(&mut self, piece: Option<Bytes>) {
        self.piece = match (self.piece.take(), piece) {
            (Some(first), Some(second)) => Some([first, second].concat().into()),
            (first, second) => first.or(second),
        };
    }

    /// Takes what is kept back, without a wait.
    pub(super) fn take(&mut self) -> Option<Bytes> {
        self.piece.take()
    }

    /// All of the answer is here: its end waits for `commit`.
    pub(super) fn wait(&mut self, commit: ChargeCommit) {
        self.commit = Some(Box::pin(timeout(COMMIT_WAIT_MAX, commit)));
    }

    /// Whether all of the answer is here.
    pub(super) fn is_waiting(&self) -> bool {
        self.commit.is_some()
    }

    /// Ready when the wait is over, or there is none.
    pub(super) fn poll_released(&mut self, cx: &mut Context<'_>) -> Poll<ReleasedEnd> {
        let is_confirmed = match &mut self.commit {
            Some(commit) => matches!(ready!(commit.as_mut().poll(cx)), Ok(Ok(()))),
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

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_end_is_released_with_the_commit_and_at_the_latest_after_a_while() {
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
                committed.send(()).unwrap();
            }
            let released = poll_fn(|cx| end.poll_released(cx)).await;
            assert_eq!(released.is_confirmed, expected);
            assert_eq!(&released.piece.unwrap()[..], b"data: [DONE]\n\n");
            assert!(!end.is_waiting());
            drop(committed);
        }
    }
}
