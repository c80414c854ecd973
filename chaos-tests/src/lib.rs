//! Faults against real clusters: processes that are killed, and what must hold afterwards.
//!
//! [`processes`] brings up `quorate serve` and `quorate engine` processes, on loopback or on hosts in
//! network namespaces ([`netns`]), and does to them what machines, networks, disks and operators do.
//! Each request goes to one replica and is never sent a second time, so a failure cannot hide behind a
//! retry.
//!
//! [`soak`] lets everybody loose at once on such a cluster who means no good or knows no better.
//!
//! [`oracle`] is what is written down of a run, [`invariants`] what must hold of it.

mod command;
pub mod fuzzing;
pub mod invariants;
mod kinds;
pub mod netns;
pub mod oracle;
pub mod planted;
pub mod processes;
pub mod sim;
pub mod soak;
pub mod terminal;
