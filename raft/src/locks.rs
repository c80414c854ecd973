//! Locks that ignore poisoning.
//!
//! The data behind these locks is consistent between any two changes, so a panic elsewhere is no
//! reason to stop. A panic that matters is detected where the thread or task is joined.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, even if a thread panicked while it held the lock.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
