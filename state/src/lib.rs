//! The deterministic core of Quorate: replicated facts and the pure decisions made from them.
//!
//! Nothing here does I/O, reads a clock, draws randomness or logs. What the world says arrives as
//! data in a [`command::Command`]; the same commands in the same order give the same state, the
//! same replies and the same digest on every replica.

pub mod codec;
pub mod command;
pub mod ids;
pub mod ownership;
pub mod policy;
pub mod prefix;
mod state;
pub mod view;

pub use state::{
    Backend, Broken, CorruptSnapshot, Frozen, Registry, RouterState, Undecodable, View,
};
