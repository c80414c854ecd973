//! What makes a run repeatable: with these parts a simulation runs whole replicas on one thread,
//! and the same seed gives the same run, bit for bit (ADR 0017, ADR 0019).
//!
//! The simulated clusters of `chaos-tests`, the tests of `node::app` and this crate's own
//! `tests/repeatable.rs` depend on that: a failure that a seed finds can be replayed. A replica in
//! production runs the same code; only random numbers come from the system and blocking work goes
//! to a pool of threads. The rest of the crate draws, waits and blocks through this folder alone
//! and does not know whether it is simulated. The disk of a simulation is in `crate::memory`,
//! behind the same ports as the real one, and `chaos-tests` has its own network behind
//! [`crate::Transport`].
//!
//! | module | what | in place of |
//! | --- | --- | --- |
//! | `random` | random numbers, of the system or from a seed | `rand` |
//! | `watch` | a value whose waiters wake in order | tokio's, whose order is random |
//! | `blocking` | blocking work, on a pool or in place | `spawn_blocking` |
//! | `timeout` | timeouts that a call may extend (ADR 0039) | tokio's |
//! | `runtime` | openraft's runtime, made of the above | `TokioRuntime` |
//! | `sync` | the primitives under `watch`, which loom replaces | |

pub(crate) mod blocking;
pub mod random;
pub(crate) mod runtime;
mod sync;
pub(crate) mod timeout;
pub mod watch;
