//! Requests that break engines: after its second broken connection, a request is refused for a
//! while.
//!
//! The client of a request that crashes its engine repeats it on the next engine. Requests that
//! broke a connection are remembered by a keyed hash, regardless of the sender. A request is
//! refused if it breaks another connection over which it was sent *after* the first break. Thus
//! each request on a dying engine counts only once. A complete answer to an equal request shows that
//! it was not at fault, and clears it: engines that are restarted break connections too, and a
//! popular request is always among them. This is local to a replica: a request can break two engines
//! per replica that it is sent to.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::prompt::PromptIdentity;

/// Time for which a broken connection is remembered and, after the second one, the request refused.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Maximum number of remembered requests. Beyond it, the oldest break is forgotten.
const POISON_REQUESTS_MAX: usize = 1024;
/// Number of hashed bytes at each end of a body. The prompt's blocks represent the middle.
const EDGE_BYTES: usize = 512;

/// Requests that broke connections recently.
pub(in crate::proxy) struct PoisonRequests {
    seed: u64,
    /// Number of remembered requests, so that nothing is hashed or locked to check a request while
    /// there are none.
    count: AtomicUsize,
    /// Requests that broke a connection, in the order of their last break.
    known: Mutex<VecDeque<Suspect>>,
}

struct Suspect {
    print: u64,
    broke_at: Instant,
    is_refused: bool,
}

/// A request in flight with its fingerprint.
#[derive(Clone)]
pub(in crate::proxy) struct WatchedRequest {
    poison_requests: Arc<PoisonRequests>,
    print: u64,
    sent_at: Instant,
}

impl PoisonRequests {
    pub(in crate::proxy) fn new() -> Self {
        Self {
            seed: rand::random(),
            count: AtomicUsize::new(0),
            known: Mutex::default(),
        }
    }

    /// Whether the request must be refused, because it has broken two connections recently.
    pub(in crate::proxy) fn refuses(&self, body: &[u8], identity: &PromptIdentity) -> bool {
        self.count.load(Relaxed) > 0 && self.is_refused(self.print(body, identity), Instant::now())
    }

    /// Fingerprints the request and sets its time of sending to now.
    pub(in crate::proxy) fn watch(
        self: &Arc<Self>,
        body: &[u8],
        identity: &PromptIdentity,
    ) -> WatchedRequest {
        WatchedRequest {
            poison_requests: Arc::clone(self),
            print: self.print(body, identity),
            sent_at: Instant::now(),
        }
    }

    fn print(&self, body: &[u8], identity: &PromptIdentity) -> u64 {
        let edge = EDGE_BYTES.min(body.len());
        let length = body.len() as u64;
        // With the scope, so that nobody learns what broke under another user's salt.
        let scope = identity.root.partial(&[]);
        let block = identity.chain.last().map_or(scope, |block| block.0);
        [&body[..edge], &body[body.len() - edge..]]
            .into_iter()
            .fold(self.seed ^ length ^ block, |seed, part| {
                xxh3_64_with_seed(part, seed)
            })
    }

    fn is_refused(&self, print: u64, now: Instant) -> bool {
        let known = self.remembered(now);
        known.iter().any(|it| it.print == print && it.is_refused)
    }

    fn broke(&self, print: u64, sent_at: Instant, now: Instant) {
        let mut known = self.remembered(now);
        let place = known.iter().position(|it| it.print == print);
        let before = place.and_then(|at| known.remove(at));
        let is_refused = before
            .as_ref()
            .is_some_and(|it| it.is_refused || it.broke_at <= sent_at);
        if known.len() >= POISON_REQUESTS_MAX {
            known.pop_front();
        }
        known.push_back(Suspect {
            print,
            broke_at: now,
            is_refused,
        });
        self.count.store(known.len(), Relaxed);
    }

    /// Forgets the breaks of a request that was answered.
    fn succeeded(&self, print: u64, now: Instant) {
        let mut known = self.remembered(now);
        known.retain(|it| it.print != print);
        self.count.store(known.len(), Relaxed);
    }

    /// Locks the remembered requests and removes the expired ones.
    fn remembered(&self, now: Instant) -> MutexGuard<'_, VecDeque<Suspect>> {
        // Every change leaves the list well formed.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = |it: &Suspect| now.saturating_duration_since(it.broke_at) >= REMEMBERED;
        while known.front().is_some_and(is_old) {
            known.pop_front();
        }
        self.count.store(known.len(), Relaxed);
        known
    }
}

impl WatchedRequest {
    /// Sets the time of sending to now.
    pub(in crate::proxy) fn sent(&mut self) {
        self.sent_at = Instant::now();
    }

    /// Reports a complete answer, which clears the request. Costs one load while no request is
    /// remembered.
    pub(in crate::proxy) fn succeeded(&self) {
        if self.poison_requests.count.load(Relaxed) > 0 {
            self.poison_requests.succeeded(self.print, Instant::now());
        }
    }

    /// Reports that the connection broke after the request was sent.
    pub(in crate::proxy) fn broke(&self) {
        self.poison_requests
            .broke(self.print, self.sent_at, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_request_that_breaks_two_engines_is_refused_for_a_minute() {
        let (poison_requests, start) = (PoisonRequests::new(), Instant::now());
        poison_requests.broke(7, start, start + SECOND);
        assert!(!poison_requests.is_refused(7, start + SECOND));
        poison_requests.broke(7, start, start + SECOND);
        assert!(
            !poison_requests.is_refused(7, start + SECOND),
            "one engine takes many with it"
        );
        poison_requests.broke(7, start + 2 * SECOND, start + 3 * SECOND);
        assert!(poison_requests.is_refused(7, start + 62 * SECOND));
        assert!(!poison_requests.is_refused(8, start + 62 * SECOND));
        assert!(!poison_requests.is_refused(7, start + 63 * SECOND));
        assert_eq!(poison_requests.count.load(Relaxed), 0);
    }

    #[test]
    fn an_answer_between_two_breaks_clears_a_request() {
        let (poison_requests, start) = (PoisonRequests::new(), Instant::now());
        let at = |seconds| start + seconds * SECOND;
        poison_requests.broke(7, start, at(1));
        poison_requests.succeeded(8, at(2));
        poison_requests.broke(7, at(2), at(3));
        assert!(
            poison_requests.is_refused(7, at(3)),
            "the answer was to another one"
        );
        poison_requests.succeeded(7, at(4));
        assert!(!poison_requests.is_refused(7, at(4)));
        assert_eq!(poison_requests.count.load(Relaxed), 0);
        poison_requests.broke(7, at(5), at(6));
        assert!(
            !poison_requests.is_refused(7, at(6)),
            "the break before does not count"
        );
        poison_requests.broke(7, at(7), at(8));
        assert!(poison_requests.is_refused(7, at(8)));
    }

    #[test]
    fn old_engine_crashes_are_forgotten() {
        let (poison_requests, start) = (PoisonRequests::new(), Instant::now());
        poison_requests.broke(7, start, start);
        poison_requests.broke(7, start + 61 * SECOND, start + 61 * SECOND);
        assert!(!poison_requests.is_refused(7, start + 61 * SECOND));
    }

    #[test]
    fn remembered_poison_requests_are_bounded() {
        let (poison_requests, start) = (PoisonRequests::new(), Instant::now());
        for print in 0..2_000 {
            poison_requests.broke(print, start, start);
        }
        assert_eq!(poison_requests.remembered(start).len(), POISON_REQUESTS_MAX);
    }
}
