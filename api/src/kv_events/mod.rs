//! KV events: what engines publish about their prefix caches, read by one replica per backend and
//! told to all through the log.
//!
//! [`wire`] decodes payloads, [`stream`] decides what of them counts and gives blocks the router's
//! hashes; both are pure. [`zmtp`] is the transport, [`endpoint`] says where it leads, [`reader`]
//! joins them, one task per data-parallel rank, and [`board`] shows how each of them stands.

pub mod board;
pub mod endpoint;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod pack;
pub mod reader;
pub mod socket;
mod source;
pub mod stream;
pub mod wire;
pub mod zmtp;

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod recorded;

pub use pack::MsgpackError;
