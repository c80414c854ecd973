//! Relays a response: its body, the usage that it reports, and the headers that it gets.

pub(super) mod answer_source;
pub(super) mod answer_usage;
pub(super) mod durable_charge;
pub(super) mod expose;
pub(super) mod first_byte;
pub(super) mod json_answer;
pub(super) mod json_scan;
pub(super) mod ratelimit;
pub(super) mod read_ahead;
pub(super) mod response_body;
pub(super) mod response_chunk;
pub(super) mod sse;
