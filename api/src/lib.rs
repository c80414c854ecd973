//! HTTP around the deterministic core: the data plane, the admin API and the clients of engines.

pub mod admin;
pub mod backends;
pub mod error;
pub mod metrics;
pub mod ports;
pub mod prompt;
pub mod proxy;
pub mod routing;
