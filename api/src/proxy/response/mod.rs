//! Relays a response: its body, the usage that it reports, and the headers that it gets.

mod accounting;
pub(super) mod answer_source;
pub(super) mod answer_usage;
mod choice_output;
pub(super) mod continuation;
pub(super) mod durable_charge;
mod edits;
pub(super) mod engine_error;
mod event_scan;
pub(super) mod expose;
mod idle_timeout;
pub(super) mod json_answer;
pub(super) mod json_scan;
mod judged_event;
mod long_event;
mod member_scanner;
pub(super) mod opening;
pub(super) mod ratelimit;
pub(super) mod read_ahead;
pub(super) mod response_body;
pub(super) mod response_chunk;
pub(super) mod sse;
