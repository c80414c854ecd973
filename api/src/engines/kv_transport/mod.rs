//! Connections over which engines publish KV events, and the decoding of what they send. It reports
//! messages; [`crate::kv_events`] decides what they mean.

pub mod endpoint;
mod msgpack;
pub mod socket;
pub(crate) mod source;
pub mod wire;
pub mod zmtp;

pub use msgpack::MsgpackError;
pub use source::{AdvertisedEvents, ask_where_published, named_publisher};
