//! What the hand-written concurrency of this crate is made of, in one place: loom's models of it compile
//! the same files with a module of this name that has loom's twins (`chaos-tests/src/bin/models`).
//!
//! Pointers are shared by the standard library's `Arc` in both: it is not what is modelled.

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard, RwLock};

pub(crate) use arc_swap::{ArcSwap, ArcSwapOption};
pub(crate) use tokio::sync::Notify;
