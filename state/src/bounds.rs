//! Bounds that several areas share. A bound of a single area is defined in that area.

/// Maximum number of API keys in a cluster.
pub const API_KEYS_MAX: usize = 100_000;
/// Maximum number of backends in a cluster.
pub const BACKENDS_MAX: usize = 1024;
/// Maximum number of concurrent requests per backend.
pub const BATCH_MAX: u32 = 1 << 16;
/// Maximum number of blocks in one item of a batch.
pub const BLOCKS_PER_ITEM_MAX: usize = 65_536;
/// Maximum total length of the names in one list of a backend (models, labels, or models that its
/// engine reports), in bytes.
pub const LIST_BYTES_MAX: usize = 64 << 10;
/// Maximum of each token count in a charge; larger counts are capped. An engine's `usage` is
/// untrusted input: without the cap, one absurd report would lock a user out for good.
pub const CHARGE_TOKENS_MAX: u64 = 1 << 40;
/// Maximum length of a name of a user, backend, model or label, in bytes.
pub const NAME_BYTES_MAX: usize = 256;
/// Maximum number of output lengths in one item of a batch.
pub const OUTPUTS_PER_ITEM_MAX: usize = 256;
/// Length of one part of a backup, in bytes. Only the last part is shorter.
pub const RESTORE_PART_BYTES: usize = 512 << 10;
/// Maximum length of the state in a backup, in bytes. The largest possible state is smaller.
pub const RESTORE_BYTES_MAX: u64 = 1 << 30;
/// Maximum number of users. `state/src/users/forgettable.rs` describes which users are forgotten to
/// stay below it.
pub const USERS_MAX: usize = 1_000_000;
/// Maximum length of a window, in milliseconds: one day.
pub const WINDOW_MS_MAX: u32 = 24 * 60 * 60 * 1000;
/// Maximum number of days for which usage is kept.
pub(crate) const USAGE_DAYS_MAX: u16 = 400;
/// Default number of days for which usage is kept.
pub(crate) const USAGE_DAYS_DEFAULT: u16 = 92;
