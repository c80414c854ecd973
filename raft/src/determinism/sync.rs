//! The primitives under [`super::watch`]. loom's models of it compile the same file beside a module
//! of this name with loom's own primitives (`chaos-tests/src/bin/models`).

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

pub(crate) use tokio::sync::Notify;
