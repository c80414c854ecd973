//! A value with change notification.
//!
//! Like tokio's `watch`, except that waiters wake in the order in which they began to wait. tokio's
//! order comes from a generator that cannot be seeded, so a simulation would not be repeatable.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, PoisonError};

use super::sync::{AtomicUsize, Notify, Ordering, RwLock, RwLockReadGuard, RwLockWriteGuard};

struct WatchShared<T> {
    current: RwLock<Versioned<T>>,
    changed: Notify,
    senders: AtomicUsize,
    receivers: AtomicUsize,
}

struct Versioned<T> {
    value: T,
    version: u64,
}

/// Sender of a watched value. Clones send to the same receivers.
pub struct WatchSender<T>(Arc<WatchShared<T>>);

/// Receiver of a watched value. A clone starts with the version that the original has seen.
pub struct WatchReceiver<T> {
    shared: Arc<WatchShared<T>>,
    seen: u64,
}

/// Read guard of the value. Blocks changes while held, so hold it only briefly.
pub struct WatchRef<'a, T>(RwLockReadGuard<'a, Versioned<T>>);

/// Error of waiting for a value when all senders are gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the sender was dropped")]
pub struct WatchClosedError;

impl<T> WatchShared<T> {
    fn read(&self) -> RwLockReadGuard<'_, Versioned<T>> {
        self.current.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Versioned<T>> {
        self.current.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the version differs from `seen`, and stores it there.
    async fn changed(&self, seen: &mut u64) -> Result<(), WatchClosedError> {
        loop {
            // Register before reading the value, so that a change in between still wakes this call.
            let notified = self.changed.notified();
            // Load this first too: the last value may arrive just before the end.
            let is_closed = self.senders.load(Ordering::Acquire) == 0;
            let version = self.read().version;
            if version != *seen {
                *seen = version;
                return Ok(());
            }
            if is_closed {
                return Err(WatchClosedError);
            }
            notified.await;
        }
    }
}

impl<T> WatchSender<T> {
    /// Creates a sender with the initial `value`.
    pub fn new(value: T) -> Self {
        Self(Arc::new(WatchShared {
            current: RwLock::new(Versioned { value, version: 0 }),
            changed: Notify::new(),
            senders: AtomicUsize::new(1),
            receivers: AtomicUsize::new(0),
        }))
    }

    /// Creates a receiver that has seen the current value.
    #[must_use]
    pub fn subscribe(&self) -> WatchReceiver<T> {
        self.0.receivers.fetch_add(1, Ordering::Relaxed);
        WatchReceiver {
            seen: self.0.read().version,
            shared: self.0.clone(),
        }
    }

    /// Returns the current value.
    #[must_use]
    pub fn borrow(&self) -> WatchRef<'_, T> {
        WatchRef(self.0.read())
    }

    /// Replaces the value and returns the previous one.
    pub fn send_replace(&self, value: T) -> T {
        let mut value = value;
        self.send_modify(|present| std::mem::swap(present, &mut value));
        value
    }

    /// Changes the value with `change` and wakes the waiters.
    pub fn send_modify(&self, change: impl FnOnce(&mut T)) {
        self.send_if_modified(|value| {
            change(value);
            true
        });
    }

    /// Changes the value and wakes the waiters, unless `change` returns `false`. Returns its
    /// result.
    pub fn send_if_modified(&self, change: impl FnOnce(&mut T) -> bool) -> bool {
        {
            let mut current = self.0.write();
            if !change(&mut current.value) {
                return false;
            }
            current.version += 1;
        }
        self.0.changed.notify_waiters();
        true
    }

    /// Whether any receiver exists.
    pub(crate) fn has_receivers(&self) -> bool {
        self.0.receivers.load(Ordering::Relaxed) > 0
    }
}

impl<T> Clone for WatchSender<T> {
    fn clone(&self) -> Self {
        self.0.senders.fetch_add(1, Ordering::Relaxed);
        Self(self.0.clone())
    }
}

impl<T> Drop for WatchSender<T> {
    fn drop(&mut self) {
        if self.0.senders.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.changed.notify_waiters();
        }
    }
}

impl<T: Default> Default for WatchSender<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: fmt::Debug> fmt::Debug for WatchSender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sender").field(&*self.borrow()).finish()
    }
}

impl<T> WatchReceiver<T> {
    /// Returns the current value without marking it as seen.
    #[must_use]
    pub fn borrow(&self) -> WatchRef<'_, T> {
        WatchRef(self.shared.read())
    }

    /// Returns the current value and marks it as seen.
    pub fn borrow_and_update(&mut self) -> WatchRef<'_, T> {
        let current = self.shared.read();
        self.seen = current.version;
        WatchRef(current)
    }

    /// Whether the current value has not been seen yet.
    #[must_use]
    pub fn has_changed(&self) -> bool {
        self.shared.read().version != self.seen
    }

    /// Marks the current value as seen.
    pub fn mark_unchanged(&mut self) {
        self.seen = self.shared.read().version;
    }

    /// Waits for a value that has not been seen yet, and marks it as seen.
    ///
    /// # Errors
    /// [`WatchClosedError`] if there is no such value and all senders are gone.
    pub async fn changed(&mut self) -> Result<(), WatchClosedError> {
        self.shared.changed(&mut self.seen).await
    }

    /// Waits for a value that satisfies `wish`, starting with the current one.
    ///
    /// # Errors
    /// [`WatchClosedError`] if there is no such value and all senders are gone.
    pub async fn wait_for(
        &mut self,
        mut wish: impl FnMut(&T) -> bool,
    ) -> Result<WatchRef<'_, T>, WatchClosedError> {
        loop {
            {
                let current = self.shared.read();
                self.seen = current.version;
                if wish(&current.value) {
                    return Ok(WatchRef(current));
                }
            }
            self.shared.changed(&mut self.seen).await?;
        }
    }
}

impl<T> Clone for WatchReceiver<T> {
    fn clone(&self) -> Self {
        self.shared.receivers.fetch_add(1, Ordering::Relaxed);
        Self {
            shared: self.shared.clone(),
            seen: self.seen,
        }
    }
}

impl<T> Drop for WatchReceiver<T> {
    fn drop(&mut self) {
        self.shared.receivers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<T: fmt::Debug> fmt::Debug for WatchReceiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Receiver").field(&*self.borrow()).finish()
    }
}

impl<T> Deref for WatchRef<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T: fmt::Debug> fmt::Debug for WatchRef<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test]
    async fn waiters_wake_in_order_of_arrival() {
        let sender = WatchSender::new(0);
        let woken = Arc::new(Mutex::new(Vec::new()));
        let mut waiting = Vec::new();
        for number in 0..20 {
            let (mut receiver, woken) = (sender.subscribe(), woken.clone());
            waiting.push(tokio::spawn(async move {
                receiver.changed().await.unwrap();
                woken.lock().unwrap().push(number);
            }));
        }
        tokio::task::yield_now().await;
        sender.send_replace(1);
        for waiter in waiting {
            waiter.await.unwrap();
        }
        assert_eq!(*woken.lock().unwrap(), (0..20).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_receiver_sees_each_change_once_and_the_close() {
        let sender = WatchSender::new(0);
        let mut receiver = sender.subscribe();
        assert!(!sender.send_if_modified(|_| false));
        assert!(!receiver.has_changed());
        sender.send_modify(|value| *value += 1);
        assert!(receiver.has_changed());
        receiver.changed().await.unwrap();
        assert_eq!(*receiver.borrow(), 1);
        assert_eq!(sender.send_replace(5), 1);
        assert_eq!(*receiver.borrow_and_update(), 5);
        let later = tokio::spawn(async move {
            assert_eq!(
                receiver.wait_for(|value| *value > 6).await.map(|v| *v),
                Ok(7)
            );
            receiver.changed().await
        });
        tokio::task::yield_now().await;
        let other = sender.clone();
        sender.send_replace(6);
        drop(sender);
        other.send_replace(7);
        drop(other);
        assert_eq!(later.await.unwrap(), Err(WatchClosedError));
    }
}
