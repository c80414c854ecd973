//! Timeouts that a call may extend.
//!
//! openraft waits for a vote as long as the shortest election timeout and for a heartbeat as long
//! as its interval (by default 150 and 50 ms), and then drops the call. A voter syncs its disk
//! before it responds. While that takes longer, every vote is lost and the next candidacy asks
//! again: an eight-second disk stall left a cluster without a leader for that long, and a disk that
//! is always that slow would do so forever. A late vote is still useful during the candidacy, so a
//! call may request more time: [`patient`] informs the [`Timeout`] that polls it.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::time::{Instant, Sleep};

thread_local! {
    /// Deadline requested by the call that was polled last on this thread.
    static ASKED: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Error of a timeout that expired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no response in time")
    }
}

/// Future that waits for another one until a deadline, which that one may extend.
pub(crate) struct Timeout<F> {
    future: Pin<Box<F>>,
    limit: Pin<Box<Sleep>>,
}

impl<F> Timeout<F> {
    /// Creates a timeout that waits for `future` until `limit` ends.
    pub(crate) fn new(limit: Sleep, future: F) -> Self {
        Self {
            future: Box::pin(future),
            limit: Box::pin(limit),
        }
    }
}

impl<F: Future> Future for Timeout<F> {
    type Output = Result<F::Output, Elapsed>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        ASKED.set(None);
        if let Poll::Ready(output) = self.future.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        if let Some(until) = ASKED.take()
            && until > self.limit.deadline()
        {
            self.limit.as_mut().reset(until);
        }
        self.limit.as_mut().poll(context).map(|()| Err(Elapsed))
    }
}

/// Makes the [`Timeout`] around `call` wait at least until `until`.
pub(crate) async fn patient<F: Future>(until: Instant, call: F) -> F::Output {
    let mut call = std::pin::pin!(call);
    std::future::poll_fn(|context| {
        let polled = call.as_mut().poll(context);
        if polled.is_pending() {
            ASKED.set(Some(until));
        }
        polled
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::sleep;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Runs a call under a 100 ms timeout. Returns whether it finished, and when.
    async fn end_of(takes: Duration, asks: Option<Duration>) -> (bool, Duration) {
        let began = Instant::now();
        let call = async {
            match asks {
                Some(asked) => patient(began + asked, sleep(takes)).await,
                None => sleep(takes).await,
            }
        };
        let ended = Timeout::new(sleep(100 * MS), call).await;
        (ended.is_ok(), began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_may_extend_its_timeout() {
        assert_eq!(end_of(50 * MS, None).await, (true, 50 * MS));
        assert_eq!(end_of(150 * MS, None).await, (false, 100 * MS));
        assert_eq!(end_of(150 * MS, Some(200 * MS)).await, (true, 150 * MS));
        assert_eq!(end_of(250 * MS, Some(200 * MS)).await, (false, 200 * MS));
        assert_eq!(end_of(150 * MS, Some(50 * MS)).await, (false, 100 * MS));
    }
}
