//! The data plane over loopback: real clients, real connections, engines that misbehave on cue.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod access;
mod addresses;
mod admission;
mod agents;
mod archive;
mod bad_input;
mod charging;
mod client;
mod clients;
mod cluster_keys;
mod commands;
mod decisions;
mod descriptors;
mod disaggregated;
mod drain;
mod early_answers;
mod engine;
mod engine_errors;
mod engine_keys;
mod exposure;
mod faults;
mod first_tokens;
mod fleet;
mod forwarding;
mod habits;
mod leaving;
mod limits;
mod liveness;
mod panic;
mod picker;
mod picker_modes;
mod picker_offers;
mod picker_orders;
mod picker_silence;
mod picker_traces;
mod picking;
mod predictions;
mod ranks;
mod retries;
mod reuse;
mod stalls;
mod stored;
mod tenants;
mod traces;
