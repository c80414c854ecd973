//! Listeners, address prefixes and TLS.

pub mod bounded_listener;
pub mod connections;
pub(super) mod ip_prefix;
pub mod tls;
