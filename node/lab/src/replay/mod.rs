//! Load generation: sends recorded traces and synthetic chats to replicas or engines, and reports
//! the results.
//!
//! `quorate replay` sends a trace ([`trace`]). Dev mode and the tests use the same generator
//! ([`load`]) with chats of several users ([`chats`]). Agents ([`agents`]) send
//! growing prompts and start sub-agents. The hit rate is the engines' own, from
//! `usage.prompt_tokens_details.cached_tokens`; the report also has the router's prediction.

pub mod agents;
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
