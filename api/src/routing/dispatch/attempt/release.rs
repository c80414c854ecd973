//! What an attempt holds until its end: the permit of its user, and its lease, which is released at
//! once, or once the blocks that the response adds are known.

use std::sync::Arc;

use state::command::LeaseOutcome;
use state::kv_events::KvMode;
use tokio::runtime::Handle;

use super::{Attempt, OpenAttempt};
use crate::routing::UserPermit;
use crate::routing::dispatch::reply::{ReplyChain, ReplyEnd};

impl Attempt {
    /// Keeps the permit of the request until the attempt's end.
    pub(crate) fn holds(&mut self, permit: Option<UserPermit>) {
        if let Some(open) = &mut self.open {
            open.permit = permit;
        }
    }

    /// Adds the blocks of `reply`, if output continues the prompt, to the lease of `open` and
    /// releases it.
    pub(super) fn release(
        &self,
        open: &OpenAttempt,
        reply: Option<ReplyChain>,
        (end, outcome): (ReplyEnd, LeaseOutcome),
    ) {
        let (dispatcher, id) = (Arc::clone(&self.dispatcher), self.id);
        let (backend, from) = (open.backend, open.learnt.prompt);
        // An engine that is followed exactly reports its blocks itself, in the order of releases.
        let is_exact = || {
            let condition = dispatcher.view.registry().kv(backend.slot);
            condition.is_some_and(|it| it.mode == KvMode::Exact)
        };
        let reply = reply.filter(|reply| !(reply.has_engine_blocks() && is_exact()));
        let release = move |reply: Option<ReplyChain>| {
            let blocks = reply.map_or_else(Vec::new, |reply| reply.finish(end));
            dispatcher.known.extended(backend, from, &blocks);
            dispatcher.outbox.with(|outbox| {
                outbox.extend(id, blocks);
                outbox.release(id, outcome);
            });
            dispatcher.flush_soon_for(backend);
        };
        // A runtime that shuts down may skip this. The lease then ends with the session.
        match (reply, Handle::try_current()) {
            (Some(mut reply), Ok(runtime)) if reply.is_asked() => {
                drop(runtime.spawn(async move {
                    reply.ask().await;
                    release(Some(reply));
                }));
            }
            (Some(reply), Ok(runtime)) if reply.is_long() => {
                drop(runtime.spawn_blocking(move || release(Some(reply))));
            }
            (reply, _) => release(reply),
        }
    }
}
