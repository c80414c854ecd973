//! What the log carries, and its bytes. Everything in here is the format of the log: it only grows.
//!
//! This is the roof of the crate. A command carries the settings of every area, so these modules see all
//! areas, and no area sees them: what an area shares with the log (a charge, a rejection, a bound)
//! stands below the areas.

pub mod codec;
pub mod command;
