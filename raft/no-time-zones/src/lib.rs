//! Nothing, in place of all time zones of the world.
//!
//! openraft needs `display-more`, which depends on `chrono-tz` but never names it. The real crate compiles
//! 13 MB of tables, and waits for a build script with a parser of its own, before openraft can be compiled.
