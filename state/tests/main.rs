//! The replicated state as replicas drive it: commands in, replies and snapshots out.

#![allow(
    clippy::unwrap_used,
    reason = "these are tests, their helpers included"
)]

mod admission;
mod capacity;
#[path = "common/commands.rs"]
mod commands;
mod common;
mod defaults;
mod discovery;
mod kv_codec;
mod kv_events;
mod limits;
mod properties;
mod ranks;
mod restores;
mod scripts;
mod segments;
mod service;
mod snapshots;
