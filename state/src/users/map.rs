//! The map of all users, which the table changes and readers share.

use super::user::User;
use crate::cow::{CowMap, ShardKey};
use crate::ids::UserKey;

/// Map of all users by key, which is frozen by cloning references.
pub(super) type UserMap = CowMap<UserKey, User>;

impl ShardKey for UserKey {
    const BRANCHES: usize = 1024;

    // Shards by the highest bits, so that shard order is key order. Keys are hashes, hence uniform.
    fn shard(&self) -> usize {
        (self.0 >> 48) as usize
    }
}
