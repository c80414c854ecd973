//! Locking without a word about poison.
//!
//! What is behind a lock here is whole between any two of its changes, so a panic elsewhere is no
//! reason to stop. A panic that matters is noticed where the thread or task is joined.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, whether or not somebody panicked while holding it.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
