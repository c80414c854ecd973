//! Serves the calls of peers: the gRPC service, the admission of calls, and the message streams
//! outside the log.

#[cfg(test)]
mod certificate_tests;
#[cfg(feature = "fuzzing")]
pub mod forged_calls;
mod guard;
mod messages;
mod service;
#[cfg(test)]
mod tests;

pub(crate) use self::guard::check_store;
pub(super) use self::messages::{ask, keep_streams};
pub(super) use self::service::serve;
