//! Faults against real clusters: processes that are killed, and what must hold afterwards.
//!
//! [`processes`] brings up `quorate serve` and `quorate engine` processes on loopback and kills them
//! with SIGKILL. The load comes from the same generator that `quorate replay` uses
//! ([`node::replay::load`]); each request goes to one replica and is never sent a second time, so a
//! failure cannot hide behind a retry.

pub mod processes;
