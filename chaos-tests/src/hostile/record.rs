//! What engines saw and computed, by which tests judge a cluster.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

/// Work of all engines for one request.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ComputedRequest {
    /// Number of prompt tokens, counted each time the request reached an engine.
    pub(super) seen: u64,
    /// Number of prompt tokens, counted each time an engine computed them.
    pub(super) prompt: u64,
    /// Number of output tokens.
    pub(super) output: u64,
    /// Number of times that an engine began with the request.
    pub(super) runs: u32,
    /// Time at which an engine last began with the request; `None` if none has.
    pub(super) began: Option<Instant>,
}

/// Record that all engines of a test share.
#[derive(Debug, Default)]
pub(super) struct EngineRecord {
    /// Work by request; `None` if it is not recorded.
    computed: Option<Mutex<HashMap<String, ComputedRequest>>>,
    /// Heads of requests; `None` if they are not recorded.
    heads: Option<Mutex<Vec<String>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EngineRecord {
    /// Creates a record of the work for each request.
    pub(super) fn of_work() -> Self {
        Self {
            computed: Some(Mutex::default()),
            heads: None,
        }
    }

    /// Creates a record of the heads of requests.
    pub(super) fn of_heads() -> Self {
        Self {
            computed: None,
            heads: Some(Mutex::default()),
        }
    }

    /// Returns the work for each request so far.
    pub(super) fn computed(&self) -> HashMap<String, ComputedRequest> {
        self.computed
            .as_ref()
            .map(|it| lock(it).clone())
            .unwrap_or_default()
    }

    /// Removes and returns the recorded heads.
    pub(super) fn take_heads(&self) -> Vec<String> {
        let heads = self.heads.as_ref();
        heads
            .map(|it| std::mem::take(&mut *lock(it)))
            .unwrap_or_default()
    }

    pub(super) fn head(&self, head: String) {
        if let Some(heads) = &self.heads {
            lock(heads).push(head);
        }
    }

    /// Records that a request reached an engine.
    pub(super) fn saw(&self, request: &str, prompt: u64) {
        self.change(request, |computed| computed.seen += prompt);
    }

    /// Records that an engine computes a prompt.
    pub(super) fn began(&self, request: &str, prompt: u64) {
        self.change(request, |computed| {
            computed.prompt += prompt;
            computed.runs += 1;
            computed.began = Some(Instant::now());
        });
    }

    /// Records an output token.
    pub(super) fn made(&self, request: &str) {
        self.change(request, |computed| computed.output += 1);
    }

    fn change(&self, request: &str, change: impl FnOnce(&mut ComputedRequest)) {
        if let Some(computed) = &self.computed {
            change(lock(computed).entry(request.to_owned()).or_default());
        }
    }
}
