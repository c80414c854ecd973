//! The HTTP layer around the deterministic core: data plane, admin API and engine clients.

pub mod admin;
pub mod admission;
pub mod api_keys;
pub mod backends;
pub mod backup;
mod bounded_listener;
pub mod clock;
pub mod discovery;
pub mod divergence;
pub mod error;
pub mod events;
pub mod figures;
pub mod file_stamp;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod ip_prefix;
pub mod isolation;
pub mod kv_events;
mod log_rate_limit;
pub mod metrics;
pub mod planted;
pub mod ports;
pub mod printable;
pub mod prompt;
pub mod proxy;
pub mod readiness;
pub mod recording;
pub mod routing;
pub mod settings;
mod sync;
pub mod tls;
pub mod traces;
mod user_name;
