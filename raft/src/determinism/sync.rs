//! Primitives used by [`super::watch`]. The loom models compile that file next to a module of this
//! name with loom's own primitives (`chaos-tests/src/bin/models`).

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

pub(crate) use tokio::sync::Notify;
