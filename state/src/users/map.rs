//! The map of all users, which the table changes and readers share.

use super::user::User;
use crate::cow::{CowMap, PathKey};
use crate::ids::UserKey;

/// Map of all users by key, which is frozen by cloning references.
pub(super) type UserMap = CowMap<UserKey, User>;

impl PathKey for UserKey {
    // Keys are hashes, hence uniform.
    fn path(&self) -> u64 {
        self.0
    }
}
