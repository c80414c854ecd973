//! The `quorate` program as a library: its config, its command line and the wiring of a replica.

pub mod app;
pub mod cli;
pub mod config;
pub mod descriptors;
pub mod dev;
pub mod engine_check;
mod file_permissions;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod json_client;
mod memory;
pub mod planted;
mod process;
mod service_manager;
pub mod telemetry;

/// Version of this build, with its commit if it is a release build.
pub const VERSION: &str = env!("QUORATE_VERSION");
