//! Load: recorded traces and made-up chats, sent to replicas or engines, and what came back.
//!
//! `quorate replay` drives a trace ([`trace`]); dev mode and the tests use the same generator
//! ([`load`]) with chats of several users ([`chats`]). The hit rate reported is the engines' own,
//! from `usage.prompt_tokens_details.cached_tokens`; the router's prediction is shown next to it.

mod args;
pub mod chats;
pub mod client;
pub mod load;
mod policies;
mod print;
pub mod progress;
pub mod report;
pub mod targets;
#[cfg(test)]
mod tests;
pub mod text;
pub mod trace;

pub use args::{ReplayArgs, run, speed};
pub use policies::ClusterUnderTest;
pub use print::tables;
