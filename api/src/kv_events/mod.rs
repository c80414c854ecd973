//! KV events, by which engines publish changes of their prefix caches. One replica per backend
//! reads the events and reports them to all replicas through the log.
//!
//! [`wire`] decodes payloads. [`stream`] decides which messages count and computes the router's
//! hashes of their blocks. Both are pure. [`zmtp`] is the transport, and [`endpoint`] describes
//! where to connect. [`reader`] combines them in one task per data-parallel rank, and
//! [`stream_status`] shows the status of each.

pub mod endpoint;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod msgpack;
pub mod reader;
pub mod socket;
mod source;
pub mod stream;
pub mod stream_status;
pub mod wire;
pub mod zmtp;

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod recorded;

pub use msgpack::MsgpackError;
pub use source::{AdvertisedEvents, ask_where_published, named_publisher};
