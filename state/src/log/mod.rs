//! The commands of the log and their encoding. All of it is the log format, which only ever grows.
//!
//! These modules sit above the areas: a command carries the settings of every area, so they depend
//! on the areas, and only `machine`, which applies commands, depends on them. Types that an area
//! shares with the log (charges, rejections, bounds) live below the areas.

pub mod codec;
pub mod command;
