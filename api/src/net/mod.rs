//! Listeners, address prefixes and TLS.

pub(super) mod bounded_listener;
pub(super) mod ip_prefix;
pub mod tls;
