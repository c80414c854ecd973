//! Holds the first fatal error of a replica.

use std::sync::Arc;

use crate::determinism::watch;

/// First fatal error of the log, the machine or Raft; `None` before it. Clones share the value.
#[derive(Debug, Clone)]
pub(crate) struct FatalError(Arc<watch::WatchSender<Option<String>>>);

impl FatalError {
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::WatchSender::new(None)))
    }

    /// Records a fatal error. Keeps only the first, because later ones are consequences of it.
    pub(crate) fn set(&self, what: impl Into<String>) {
        let what = what.into();
        self.0.send_if_modified(|fault| {
            if fault.is_some() {
                return false;
            }
            tracing::error!(fault = %what, "replica cannot continue");
            *fault = Some(what);
            true
        });
    }

    pub(crate) fn get(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    pub(crate) fn watch(&self) -> watch::WatchReceiver<Option<String>> {
        self.0.subscribe()
    }
}
