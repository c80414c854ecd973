//! Admission: which waiting request goes next, as pure values and functions.
//!
//! A request waits when every backend that could take it is at its limit. The settings are
//! replicated. Each replica has its own queues and orders them by replicated counters.

mod client_timeouts;
mod figures;
mod gate;
mod ledger;
mod overload;
mod queue;
mod retries;
#[cfg(test)]
mod tests;

pub use figures::{Counters, PendingCharges, UserFigures};
pub use gate::{Backlog, GATE_RETRY_MS, GATE_STALL_MS, Gate, PEER_SILENT_MS, bound, slack_tokens};
pub use ledger::{Advance, CREDITED_USERS_MAX, CreditLedger, TokenDelta};
pub use overload::{CODEL_INTERVAL_MS, CODEL_TARGET_MS, Overload, SHORT_QUEUE};
pub use queue::{
    DispatchVerdict, Expired, ExpiryReason, Forecast, Next, Prospect, Queue, QueueRejection,
    QueueSettings, QueuedRequest,
};
pub use retries::RetryAllowance;

pub(crate) use crate::pricing::milli_tokens;
pub use crate::pricing::{ChargeInput, Pricing};
pub use crate::settings::{
    AdmissionSettings, BATCH_MAX, Batching, BinSelection, Concurrency, Order,
};
