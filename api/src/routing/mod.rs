//! One place where a request meets the view, the overlay, the load and the policy, and where what
//! became of it is recorded.

use std::sync::Arc;

use state::ids::{BackendRef, LogIndex, Slot};
use state::policy::Reason;

use crate::prompt::{Identity, Parsed};

/// Chooses backends and keeps the books of what was dispatched. One per replica.
pub struct Router {}

/// A request as routing sees it.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// Model id.
    pub model: &'a str,
    /// The prompt's blocks.
    pub identity: &'a Identity,
    /// `x-request-id`: its hash breaks ties.
    pub request_id: &'a str,
    /// Backends tried already.
    pub excluded: &'a [Slot],
}

/// A decision, with what the response headers tell.
#[derive(Debug, Clone)]
pub struct Decision {
    /// The backend.
    pub backend: BackendRef,
    /// Its id.
    pub name: Arc<str>,
    /// Leading blocks it is believed to hold.
    pub matched: u32,
    /// Blocks of the prompt.
    pub total: u32,
    /// Why.
    pub reason: Reason,
    /// Name of the policy.
    pub policy: &'static str,
    /// Applied index the decision was made at.
    pub index: LogIndex,
}

/// Why no backend can take a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoBackend {
    /// No registered backend serves the model: 404.
    UnknownModel,
    /// Some do, none of them is healthy and not draining: 503.
    NoneHealthy,
    /// All that could were tried: 502 or 503, as the last attempt ended.
    AllTried,
}

/// Tokens an engine reported, or that were counted when it did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Of these, from the prefix cache; `None` when the engine did not say.
    pub cached_tokens: Option<u64>,
    /// Output tokens.
    pub completion_tokens: u64,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The engine answered to the end.
    Finished,
    /// The engine broke after its first byte.
    Broken,
    /// The client left.
    ClientLeft,
    /// Nothing reached the engine, or it refused before its first byte: the next may be tried.
    NotRun,
}

/// A dispatch under way: counts as running, holds the lease, owes the charge. Dropping it without
/// [`Attempt::end`] counts as [`End::ClientLeft`].
pub struct Attempt {}

impl Router {
    /// The prompt's identity under the model's settings and the cluster's seed.
    #[must_use]
    pub fn identify(&self, parsed: &Parsed) -> Identity {
        let _ = parsed;
        unimplemented!("routing helper")
    }

    /// Chooses a backend. Local memory only; waits for nothing.
    ///
    /// # Errors
    /// [`NoBackend`].
    pub fn decide(&self, ask: &Ask<'_>) -> Result<Decision, NoBackend> {
        let _ = ask;
        unimplemented!("routing helper")
    }

    /// Notes that a request goes to the decided backend now: load, overlay and outbox know it
    /// before this returns. `user` is the name the tokens are charged to.
    pub fn dispatch(
        self: &Arc<Self>,
        decision: &Decision,
        identity: &Identity,
        user: &str,
    ) -> Attempt {
        let _ = (decision, identity, user);
        unimplemented!("routing helper")
    }
}

impl Attempt {
    /// The answer's first byte (of the body) came: its prefill is done.
    pub fn first_byte(&mut self) {
        unimplemented!("routing helper")
    }

    /// What the engine has reported so far; the highest report counts.
    pub fn usage(&mut self, usage: Usage) {
        let _ = usage;
        unimplemented!("routing helper")
    }

    /// Output text as it streams, so that blocks it completes can be recorded. Bounded inside.
    pub fn output(&mut self, text: &str) {
        let _ = text;
        unimplemented!("routing helper")
    }

    /// Ends the attempt: releases the lease, settles the charge.
    pub fn end(self, end: End) {
        let _ = end;
        unimplemented!("routing helper")
    }
}
