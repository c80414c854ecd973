//! Limits the informational responses (1xx) that an engine sends before its response to a request.
//!
//! They contain nothing to pass on. An engine that sends them endlessly keeps a request and its
//! place until `timeouts.first_byte`, and makes this replica read all the while.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use http::Request;

/// Maximum number of informational responses to one request. A server sends a `100 Continue`,
/// perhaps some `103 Early Hints`, and a gateway in front of a slow engine an occasional `102
/// Processing`; engines send none.
pub(super) const INFORMATIONAL_MAX: u32 = 8;

/// Counts the informational responses to the request that a connection carries.
#[derive(Debug, Clone, Default)]
pub(super) struct InformationalCount(Arc<AtomicU32>);

impl InformationalCount {
    /// Starts to count the informational responses to `request`, from zero.
    pub(super) fn watch<B>(&self, request: &mut Request<B>) {
        // The task that drives the connection sets and reads the count, which orders nothing else.
        self.0.store(0, Relaxed);
        let count = Arc::clone(&self.0);
        hyper::ext::on_informational(request, move |_| {
            count.fetch_add(1, Relaxed);
        });
    }

    /// Whether any informational response arrived.
    pub(super) fn is_any(&self) -> bool {
        self.0.load(Relaxed) > 0
    }

    /// Whether more than [`INFORMATIONAL_MAX`] informational responses arrived.
    pub(super) fn is_exceeded(&self) -> bool {
        self.0.load(Relaxed) > INFORMATIONAL_MAX
    }
}
