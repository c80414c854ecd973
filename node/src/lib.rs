//! The `quorate` program as a library: config, command line, wiring of a replica, emulated engine.

pub mod app;
pub mod cli;
pub mod config;
pub mod descriptors;
pub mod dev;
pub mod engine;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod memory;
pub mod planted;
mod private;
pub mod replay;
pub mod simulate;
pub mod telemetry;
pub mod terminal;
