//! Reads a request: head, key, user, path and body, up to a [`ClientRequest`](super::ClientRequest).

pub(super) mod bootstrap;
mod bounded_bytes;
pub(super) mod client_request;
pub(super) mod cluster_keys;
pub(super) mod deadline;
pub(super) mod dialect;
pub(super) mod encoding;
pub(super) mod headers;
pub(super) mod identify;
pub(super) mod models;
mod refusal;
mod renamed;
pub(super) mod request_body;
pub(super) mod routes;
pub(super) mod usage_options;
pub(super) mod user_models;
mod zstd;
