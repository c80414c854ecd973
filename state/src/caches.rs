//! Cache scopes, which determine the users that share cached blocks.
//!
//! A prompt that starts like another user's finds that user's blocks in an engine's cache, which is
//! visible in its time to first token and usage. A user with its own scope, or that of a group,
//! finds only blocks computed in that scope: prompts are hashed under the scope, and engines
//! receive it as `cache_salt` (ADR 0017). The salt is not part of the state: it follows from the
//! scope and the cluster's hash secret.

use bincode::{Decode, Encode};

use crate::reject::Rejection;
use crate::validate::{ensure, is_name};

/// Set of users with whom a user shares cached blocks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub enum CacheScope {
    /// All users with this scope.
    #[default]
    Shared,
    /// No other user.
    Own,
    /// All users of the cache group with this name.
    Group(String),
}

impl CacheScope {
    /// Checks the name of the cache group, if any.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] if the name is empty or too long.
    pub fn validate(&self) -> Result<(), Rejection> {
        match self {
            Self::Shared | Self::Own => Ok(()),
            Self::Group(name) => ensure(is_name(name), "cache", "a group of 1 to 256 bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_group_needs_a_valid_name() {
        let group = |name: &str| CacheScope::Group(name.to_owned());
        assert!(group("").validate().is_err());
        assert!(group(&"x".repeat(257)).validate().is_err());
        assert_eq!(group("team").validate(), Ok(()));
    }
}
