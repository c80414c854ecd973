//! Idle connections to an engine, and whether it keeps those that it promises to keep.
//!
//! Some servers close a connection right after a response, without saying so in it: llama.cpp with
//! each stream, while announcing `keep-alive: timeout=5`. The next request then races with the end
//! of the connection. Once an engine was seen to do so, its connections are not used again for a
//! while. A connection that ends after seconds only met the engine's idle timeout.

use std::time::Duration;

use tokio::time::Instant;

use super::pooled_connection::PooledConnection;

/// Idle time below which no idle timeout ends a connection, because servers count them in seconds.
const EARLY: Duration = Duration::from_secs(1);
/// Time for which an early close is remembered. An engine that is shutting down, or a proxy before
/// it, may do so once.
const REMEMBERED: Duration = Duration::from_secs(600);

/// Idle connections of an engine, oldest first.
#[derive(Default)]
pub(super) struct IdleConnections {
    #[expect(
        clippy::vec_box,
        reason = "a connection is large and moves in and out often"
    )]
    pub(super) links: Vec<Box<PooledConnection>>,
    trust: KeepAliveTrust,
}

impl IdleConnections {
    /// Keeps a connection that became idle just now, unless the engine would close it.
    pub(super) fn give_back(&mut self, link: Box<PooledConnection>) {
        if self.trust.is_given(link.idle_since) {
            self.links.push(link);
        }
    }

    /// Whether a connection is used again after a response.
    pub(super) fn are_kept(&self) -> bool {
        self.trust.is_given(Instant::now())
    }

    /// Records that the engine closed a connection after it was idle for at most `idle`. Closes
    /// the others if they cannot be trusted.
    pub(super) fn closed(&mut self, idle: Duration) {
        let now = Instant::now();
        self.trust.closed(idle, now);
        if !self.trust.is_given(now) {
            self.links.clear();
        }
    }
}

/// Last early close by one incarnation of an engine.
#[derive(Debug, Default)]
struct KeepAliveTrust {
    closed_early_at: Option<Instant>,
}

impl KeepAliveTrust {
    /// Records that the engine closed a connection after it was idle for at most `idle`.
    fn closed(&mut self, idle: Duration, now: Instant) {
        if idle < EARLY {
            self.closed_early_at = Some(now);
        }
    }

    /// Whether the engine's idle connections may be used.
    fn is_given(&self, now: Instant) -> bool {
        self.closed_early_at
            .is_none_or(|at| now.duration_since(at) >= REMEMBERED)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Trust is withheld exactly while an early close is remembered, whatever else was seen.
        #[test]
        fn trust_is_withheld_while_an_early_close_is_remembered(
            closes in prop::collection::vec((0_u64..3_000, 0_u64..900_000), 0..20),
            later in 0_u64..900_000,
        ) {
            let (mut trust, mut now) = (KeepAliveTrust::default(), Instant::now());
            let mut withheld_until = now;
            for (idle, after) in closes {
                now += Duration::from_millis(after);
                trust.closed(Duration::from_millis(idle), now);
                if idle < 1_000 {
                    withheld_until = now + Duration::from_secs(600);
                }
                prop_assert_eq!(trust.is_given(now), now >= withheld_until);
            }
            now += Duration::from_millis(later);
            prop_assert_eq!(trust.is_given(now), now >= withheld_until);
        }
    }
}
