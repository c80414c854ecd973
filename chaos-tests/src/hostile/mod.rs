//! Hostile and careless clients and engines, all of them at once ([`soak`]) or one attack at a time
//! ([`abuse`]), against clusters of real processes.

pub mod abuse;
mod client;
mod engine;
mod record;
pub mod soak;
