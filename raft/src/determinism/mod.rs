//! Makes runs repeatable: a simulation runs whole replicas on one thread, and the same seed gives
//! the same run, bit for bit (ADR 0045).
//!
//! The simulated clusters of `chaos-tests`, the tests of `node::app` and this crate's own
//! `tests/repeatable.rs` depend on that: a failure found under a seed can be replayed. A production
//! replica runs the same code, but its random numbers come from the system and its blocking work
//! runs on a thread pool. Code that a simulation runs draws random numbers, watches values and does
//! blocking work only through this module. Its time is tokio's, which a simulation pauses. The rest
//! is replaced: a simulation's disk is in `crate::memory`, behind the same ports as the real one,
//! and `chaos-tests` brings its own network behind [`crate::Transport`].
//!
//! | module | purpose | replaces |
//! | --- | --- | --- |
//! | `random` | random numbers, from the system or a seed | `rand` |
//! | `watch` | a value that wakes its waiters in order | tokio's, whose order is random |
//! | `blocking` | blocking work, on a pool or in place | `spawn_blocking` |
//! | `timeout` | timeouts that a call may extend (ADR 0006) | tokio's |
//! | `runtime` | openraft's runtime, built from the above | `TokioRuntime` |
//! | `sync` | primitives used by `watch`, which loom replaces | |

pub(crate) mod blocking;
pub mod random;
pub(crate) mod runtime;
mod sync;
pub(crate) mod timeout;
pub mod watch;
