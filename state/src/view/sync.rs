//! The concurrency primitives of the block index, in one place so that `--cfg loom` can replace
//! them with loom's checked versions.
//!
//! [`Swap`] is an `Arc` that one thread replaces while others read it. In production it is
//! `arc_swap::ArcSwap`, whose readers never wait. Loom does not support `ArcSwap`, so models use a
//! lock in its place and check what is built on top.

#[cfg(not(loom))]
mod imp {
    pub(crate) use std::sync::Arc;
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

    /// A shared pointer that one writer replaces while many readers use it.
    pub(crate) struct Swap<T>(arc_swap::ArcSwap<T>);

    impl<T> Swap<T> {
        pub(crate) fn new(value: Arc<T>) -> Self {
            Self(arc_swap::ArcSwap::new(value))
        }

        /// Runs `read` on the current value and keeps the value alive meanwhile.
        #[inline]
        pub(crate) fn read<R>(&self, read: impl FnOnce(&T) -> R) -> R {
            read(&self.0.load())
        }

        /// Replaces the value. Readers that have already started keep the old one.
        pub(crate) fn publish(&self, value: Arc<T>) {
            self.0.store(value);
        }
    }
}

#[cfg(loom)]
mod imp {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    pub(crate) use loom::sync::{Arc, RwLock};

    /// A shared pointer that one writer replaces while many readers use it.
    pub(crate) struct Swap<T>(RwLock<Arc<T>>);

    impl<T> Swap<T> {
        pub(crate) fn new(value: Arc<T>) -> Self {
            Self(RwLock::new(value))
        }

        /// Runs `read` on the current value and keeps the value alive meanwhile. Holds the lock
        /// only to clone the pointer, because a reader of the real `Swap` may also continue with an
        /// old value.
        pub(crate) fn read<R>(&self, read: impl FnOnce(&T) -> R) -> R {
            let value = self.0.read().expect("no model thread panics").clone();
            read(&value)
        }

        /// Replaces the value. Readers that have already started keep the old one.
        pub(crate) fn publish(&self, value: Arc<T>) {
            *self.0.write().expect("no model thread panics") = value;
        }
    }
}

pub(crate) use imp::{Arc, AtomicU32, AtomicU64, AtomicUsize, Ordering, Swap};
