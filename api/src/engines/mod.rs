//! Clients of the engines: connections, probes and circuits, discovery, and the transport of KV
//! events.

pub mod backends;
pub mod discovery;
pub mod kv_transport;
