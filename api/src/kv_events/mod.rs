//! KV events, by which engines publish changes of their prefix caches. One replica per backend
//! reads the events and reports them to all replicas through the log.
//!
//! [`crate::engines::kv_transport`] connects to the engines and decodes what they send. [`stream`]
//! decides which messages count and computes the router's hashes of their blocks; it is pure.
//! [`reader`] combines both in one task per data-parallel rank, and [`stream_status`] shows the
//! status of each.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
pub mod reader;
pub mod stream;
pub mod stream_status;

#[cfg(test)]
pub(crate) mod fixtures;
#[cfg(test)]
mod recorded;
