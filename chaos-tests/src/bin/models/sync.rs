//! Loom counterparts of the items in `api/src/sync.rs` and `raft/src/determinism/sync.rs`, for the
//! production files compiled next to this module.
//!
//! loom supports neither `arc_swap` nor tokio. A lock stands in for a swapped pointer; readers keep
//! the value that they loaded, as with the real one. [`Notify`] guarantees what tokio's does and no
//! more.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use loom::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

const NO_PANIC: &str = "no model panics while it holds a lock";

/// A pointer that some threads replace while others read it.
pub(crate) struct ArcSwap<T>(RwLock<Arc<T>>);

/// A pointer like [`ArcSwap`] that may be empty.
pub(crate) struct ArcSwapOption<T>(RwLock<Option<Arc<T>>>);

/// Guard of the value at the time of the load.
pub(crate) struct Guard<T>(T);

impl<T> Deref for Guard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> ArcSwap<T> {
    pub(crate) fn load(&self) -> Guard<Arc<T>> {
        Guard(Arc::clone(&self.0.read().expect(NO_PANIC)))
    }

    pub(crate) fn store(&self, value: Arc<T>) {
        *self.0.write().expect(NO_PANIC) = value;
    }
}

impl<T: Default> Default for ArcSwap<T> {
    fn default() -> Self {
        Self(RwLock::new(Arc::default()))
    }
}

impl<T> ArcSwapOption<T> {
    pub(crate) fn empty() -> Self {
        Self(RwLock::new(None))
    }

    pub(crate) fn load(&self) -> Guard<Option<Arc<T>>> {
        Guard(self.load_full())
    }

    pub(crate) fn load_full(&self) -> Option<Arc<T>> {
        self.0.read().expect(NO_PANIC).clone()
    }

    pub(crate) fn store(&self, value: Option<Arc<T>>) {
        *self.0.write().expect(NO_PANIC) = value;
    }
}

impl<T> Default for ArcSwapOption<T> {
    fn default() -> Self {
        Self::empty()
    }
}

/// Notification of waiting tasks. [`Notify::notify_one`] stores a permit for the next waiter.
/// [`Notify::notify_waiters`] reaches every [`Notified`] created before it, polled or not.
#[derive(Debug)]
pub(crate) struct Notify(Mutex<WaitingTask>);

#[derive(Debug, Default)]
struct WaitingTask {
    has_permit: bool,
    /// Number of calls of `notify_waiters`.
    round: u64,
    wakers: VecDeque<Waker>,
}

impl Notify {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(WaitingTask::default()))
    }

    pub(crate) fn notify_one(&self) {
        let mut waiting = self.0.lock().expect(NO_PANIC);
        waiting.has_permit = true;
        let first = waiting.wakers.pop_front();
        drop(waiting);
        first.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn notify_waiters(&self) {
        let mut waiting = self.0.lock().expect(NO_PANIC);
        waiting.round += 1;
        let all = std::mem::take(&mut waiting.wakers);
        drop(waiting);
        all.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn notified(&self) -> Notified<'_> {
        let round = self.0.lock().expect(NO_PANIC).round;
        Notified {
            notify: self,
            round,
        }
    }
}

impl Default for Notify {
    fn default() -> Self {
        Self::new()
    }
}

/// Future that waits for a notification from [`Notify`].
pub(crate) struct Notified<'a> {
    notify: &'a Notify,
    round: u64,
}

impl Future for Notified<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut waiting = self.notify.0.lock().expect(NO_PANIC);
        if waiting.round != self.round || std::mem::take(&mut waiting.has_permit) {
            return Poll::Ready(());
        }
        waiting.wakers.push_back(cx.waker().clone());
        Poll::Pending
    }
}
