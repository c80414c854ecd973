//! Facts about the whole cluster: events, digests compared between replicas, and the figures that
//! replicas exchange.

pub mod divergence;
pub mod events;
pub mod figures;
