//! Synchronization primitives of this crate's hand-written concurrency. Loom models compile the
//! same files with a module of this name that contains loom's versions
//! (`chaos-tests/src/bin/models`).
//!
//! Both versions share pointers by the standard library's `Arc`, which is not modelled.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard, RwLock};

pub(crate) use arc_swap::{ArcSwap, ArcSwapOption};
pub(crate) use tokio::sync::Notify;
