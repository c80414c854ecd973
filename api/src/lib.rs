//! The HTTP layer around the deterministic core: data plane and clients of the engines.

pub mod admission;
pub mod base;
pub mod cluster;
pub mod engines;
pub mod error;
pub mod files;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod kv_events;
pub mod metrics;
pub mod model_names;
pub mod net;
pub mod planted;
pub mod ports;
pub mod prices;
pub mod prompt;
pub mod proxy;
pub mod readiness;
pub mod routing;
pub mod scaler;
pub mod sessions;
pub mod settings;
mod sync;
pub mod traces;
pub mod users;
