//! Bounds how many informational answers (1xx) an engine sends before its answer to a request.
//!
//! They say nothing that is passed on. An engine that sends one after the other keeps a request, and
//! its place, until `timeouts.first_byte`, and makes this replica read all the while.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use http::Request;

/// Informational answers to one request. A server sends a `100 Continue`, perhaps some `103 Early
/// Hints`, and a gateway in front of a slow engine a `102 Processing` now and then; engines send
/// none.
pub(super) const INFORMATIONAL_MAX: u32 = 8;

/// Counts the informational answers to the request that a connection carries.
#[derive(Debug, Clone, Default)]
pub(super) struct InformationalCount(Arc<AtomicU32>);

impl InformationalCount {
    /// Begins anew with this request.
    pub(super) fn watch<B>(&self, request: &mut Request<B>) {
        // Set and read by whoever drives the connection; nothing else is ordered by it.
        self.0.store(0, Relaxed);
        let count = Arc::clone(&self.0);
        hyper::ext::on_informational(request, move |_| {
            count.fetch_add(1, Relaxed);
        });
    }

    /// Whether there were more than may be.
    pub(super) fn is_exceeded(&self) -> bool {
        self.0.load(Relaxed) > INFORMATIONAL_MAX
    }
}
