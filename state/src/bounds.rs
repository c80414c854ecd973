//! Bounds that several areas keep to. What only one area bounds stands with it.

/// Most backends one cluster holds.
pub const BACKENDS_MAX: usize = 1024;
/// Most blocks one item may name.
pub const BLOCKS_PER_ITEM_MAX: usize = 65_536;
/// Most bytes that the names in one list of a backend take together: its models, its labels, and the
/// models its engine lists.
pub const LIST_BYTES_MAX: usize = 64 << 10;
/// Most tokens one field of a charge counts; more is taken as this. An engine's `usage` is foreign
/// input: without the bound one absurd report would end a user's service for ever.
pub const CHARGE_TOKENS_MAX: u64 = 1 << 40;
/// Longest name of a user, backend, model or label, in bytes.
pub const NAME_BYTES_MAX: usize = 256;
/// Most output lengths one item may tell.
pub const OUTPUTS_PER_ITEM_MAX: usize = 256;
/// Bytes of one part of a backup; only the last part is shorter.
pub const RESTORE_PART_BYTES: usize = 512 << 10;
/// Most bytes of the state in a backup: more than the largest state there can be.
pub const RESTORE_BYTES_MAX: u64 = 1 << 30;
/// Most users kept; `state/src/users/forgettable.rs` says who is forgotten beyond it.
pub const USERS_MAX: usize = 1_000_000;
