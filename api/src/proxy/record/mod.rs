//! Records requests: metrics, access log, past decisions and recordings.

pub(super) mod access;
pub(super) mod archive;
pub(super) mod broken_streams;
pub(super) mod decision_filter;
pub(super) mod decisions;
pub(super) mod metrics;
pub(super) mod model_metrics;
pub(super) mod outcome;
mod peer_question;
pub(super) mod recorder;
pub(super) mod request_record;
pub(super) mod stage_metrics;
pub(super) mod status_label;
