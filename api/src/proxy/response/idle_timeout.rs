//! The deadline for a response's next data.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// A deadline that moves with every frame, without resetting a timer each time.
pub(super) struct IdleTimeout {
    deadline: Instant,
    /// Timer that is set on the first wait. It may fire early, but never late.
    timer: Option<Pin<Box<Sleep>>>,
}

impl IdleTimeout {
    pub(super) fn until(deadline: Instant) -> Self {
        Self {
            deadline,
            timer: None,
        }
    }

    /// Moves the deadline to `wait` from now.
    pub(super) fn restart(&mut self, wait: Duration) {
        let deadline = Instant::now() + wait;
        if deadline < self.deadline {
            self.timer = None;
        }
        self.deadline = deadline;
    }

    /// Moves the deadline to `wait` from now, unless it is later.
    pub(super) fn extend(&mut self, wait: Duration) {
        self.deadline = self.deadline.max(Instant::now() + wait);
    }

    /// Becomes ready at the deadline.
    pub(super) fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let deadline = self.deadline;
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        loop {
            ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= deadline {
                return Poll::Ready(());
            }
            timer.as_mut().reset(deadline);
        }
    }
}
