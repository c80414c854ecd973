//! Listeners, address prefixes and TLS.

pub mod bounded_listener;
pub mod connections;
pub(crate) mod http2_preface;
pub(super) mod ip_prefix;
pub mod tls;
