//! The client's side of the data plane: connections, their limits in time, and the body that each
//! response is written from.

pub(super) mod answer_body;
pub(super) mod readiness_gate;
pub(super) mod server;
pub(super) mod write_timeout;
