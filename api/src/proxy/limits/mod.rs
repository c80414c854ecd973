//! Limits that hold across requests: connections and requests per client, retries, and requests that
//! break engines.

pub(super) mod poison_requests;
pub(super) mod request_ids;
pub(super) mod retry_budget;
pub(super) mod users;
