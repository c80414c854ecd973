//! What [`crate::determinism::watch`] is made of: loom's models of it compile the same file with a module of this
//! name that has loom's twins (`chaos-tests/src/bin/models`).

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

pub(crate) use tokio::sync::Notify;
