//! Counts the open streams of gateways, and how each ended.

use std::sync::Arc;

use tonic::Status;

use super::Picker;
use super::metrics::PickedOutcome;
use crate::proxy::answer::signed;

/// Guard that counts an open stream, and its outcome when dropped.
pub(super) struct StreamMeter {
    picker: Arc<Picker>,
    pub(super) outcome: PickedOutcome,
}

impl StreamMeter {
    /// Counts a stream that begins. Fails if the maximum number is open.
    pub(super) fn open(picker: &Arc<Picker>) -> Result<Self, Status> {
        let limits = picker.proxy.limits.load();
        let streams_max = signed(limits.requests().saturating_add(limits.reading()));
        // Dropping the meter undoes the count.
        let meter = Self {
            picker: Arc::clone(picker),
            outcome: PickedOutcome::Refused,
        };
        if picker.metrics.streams.inc() >= streams_max {
            let why =
                format!("{streams_max} streams are open, as many as limits.max_requests allows");
            return Err(Status::resource_exhausted(why));
        }
        Ok(meter)
    }
}

impl Drop for StreamMeter {
    fn drop(&mut self) {
        self.picker.metrics.streams.dec();
        self.picker.metrics.told(self.outcome);
    }
}
