//! With whom users share cached blocks.
//!
//! A prompt that starts like another user's finds that user's blocks in an engine's cache, which
//! its time to first token and its usage reveal. A user with its own scope, or that of a group,
//! finds only what that scope computed: prompts are hashed under the scope, and engines get it as
//! `cache_salt` (ADR 0072). Which salt a scope has, is not part of the state: it follows from the
//! scope and the cluster's hash secret.
//!
//! The list is published as one immutable image, which a request looks up without a lock.

mod table;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};

use crate::reject::Rejection;
use crate::validate::{ensure, is_name};

pub use table::CacheScopesView;
pub(crate) use table::{CacheScopes, CacheScopesImage};

/// With whom a user shares cached blocks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub enum CacheScope {
    /// With all who share.
    #[default]
    Shared,
    /// With nobody.
    Own,
    /// With the users of this cache group.
    Group(String),
}

impl CacheScope {
    /// Checks the name of the group.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        match self {
            Self::Shared | Self::Own => Ok(()),
            Self::Group(name) => ensure(is_name(name), "cache_group", "1 to 256 bytes"),
        }
    }
}
