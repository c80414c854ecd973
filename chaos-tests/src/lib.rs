//! Tests of whole clusters under faults.
//!
//! - [`sim`] runs simulated clusters, in which one seed decides everything.
//! - [`processes`] starts real `quorate serve` and `quorate engine` processes, on loopback or on
//!   hosts in network namespaces ([`netns`]), and injects faults of machines, networks, disks and
//!   operators. Each request goes to one replica and is never sent twice, so that no retry hides a
//!   failure.
//! - [`hostile`] loads such a cluster with hostile and careless clients and engines, all at once or
//!   one attack at a time.
//! - [`live`] compares predictions with what real engines find cached.
//! - [`fuzzing`] feeds mutated bytes to readers of untrusted bytes.
//! - [`gateway`] asks endpoint pickers as Envoy does; the tests of `node` compile it too.
//!
//! [`oracle`] records a simulated run and [`invariants`] states what must hold for it. [`planted`]
//! plants bugs, to prove that the tests find them.

mod command;
pub mod fuzzing;
pub mod gateway;
pub mod hostile;
pub mod invariants;
mod kinds;
pub mod live;
pub mod netns;
pub mod oracle;
pub mod planted;
pub mod processes;
pub mod sim;
pub mod terminal;
