//! The deterministic core of Quorate: the replicated state and the pure decisions made from it.
//!
//! The crate opens no files or sockets, reads no clock, draws no random numbers and logs nothing.
//! The state changes only through [`command::Command`]s and snapshots: applying the same commands
//! in the same order yields the same state, replies and digest on every replica. Decisions of one
//! replica, such as routing, also depend on what the caller passes: time, load, health.

pub mod admission;
mod backends;
mod bounds;
pub mod budgets;
pub mod caches;
pub mod capacity;
mod charge;
mod concurrency;
mod cow;
pub mod discovery;
mod encoding;
mod error;
pub mod form;
mod held;
pub mod ids;
pub mod keys;
pub mod kv_events;
mod log;
mod machine;
pub mod outputs;
pub mod ownership;
pub mod permits;
pub mod policy;
pub mod prefix;
mod pricing;
pub mod quotas;
pub mod ratios;
pub mod readable;
pub mod reader_assignment;
mod reject;
pub mod service;
mod settings;
pub mod shares;
pub mod streams;
pub mod trees;
pub mod usage;
pub mod users;
mod validate;
pub mod view;

pub use backends::{
    BLOCK_TOKENS_DEFAULT, BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN, Backend, BlockSizes, RANKS_MAX,
    RankSlots, SIZED_MODELS_MAX, engine_of,
};
pub use error::{DecodeEntryError, InvariantError, SnapshotError};
pub use log::{codec, command};
pub use machine::{
    AUDIT_ENTRIES_MAX, AuditAction, AuditEntry, FrozenState, LeaseView, RESTORE_IDLE_MS_MAX,
    ReadBackup, Registry, RestoreView, RouterState, SNAPSHOT_VERSION, STAMP_AHEAD_MS_MAX,
    STAMP_LATE_MS_MAX, SessionView, StagedBackup, StateView, UNANIMOUS_MS,
};
