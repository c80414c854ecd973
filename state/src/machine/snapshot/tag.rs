//! Tags that identify the sections of a snapshot, in the order in which they are written.

pub(super) const CONFIG: u8 = 1;
pub(super) const SETTINGS: u8 = 2;
pub(super) const TIME: u8 = 3;
pub(super) const SESSIONS: u8 = 4;
pub(super) const AUDIT: u8 = 5;
pub(super) const BACKENDS: u8 = 6;
pub(super) const DISCOVERED: u8 = 7;
pub(super) const BLOCK_SIZES: u8 = 8;
pub(super) const READERS: u8 = 9;
pub(super) const SERVICE: u8 = 10;
pub(super) const ASSUMED: u8 = 11;
pub(super) const BELIEFS: u8 = 12;
pub(super) const OUTPUTS: u8 = 13;
pub(super) const RATIOS: u8 = 14;
pub(super) const LEASES: u8 = 15;
pub(super) const USERS_TOTALS: u8 = 16;
pub(super) const USERS: u8 = 17;
pub(super) const KEYS: u8 = 18;
pub(super) const REVOKED_KEYS: u8 = 19;
pub(super) const EXACT: u8 = 20;
pub(super) const RESTORE: u8 = 21;
pub(super) const TREES: u8 = 22;
pub(super) const TREE_SESSIONS: u8 = 23;
pub(super) const TREE_ENDINGS: u8 = 24;
pub(super) const STREAMS: u8 = 25;
pub(super) const END: u8 = 255;
