//! The commands of the log and their encoding. All of it is the log format, which only ever grows.
//!
//! These modules sit at the top of the crate: a command carries the settings of every area, so they
//! depend on all areas, and no area depends on them. Types that an area shares with the log
//! (charges, rejections, bounds) live below the areas.

pub mod codec;
pub mod command;
