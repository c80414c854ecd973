//! Identity of sessions: to which chain of an agent's or chat's turns a request belongs.
//!
//! Clients name their sessions in different ways, which `sources` lists in order. The first source
//! that names a session gives all names of a request: a session of one client is never combined with
//! the parent of another.
//!
//! A name only groups requests of one user. It is hashed with the user's key, so nobody can name a
//! session of another user, and it changes neither the user nor what the user may do. Names are
//! therefore accepted from every client, and a session is trusted as far as its user is.

mod names;
mod sources;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};
use http::HeaderMap;
use state::ids::{AgentSessionKey, UserKey};
use state::trees::session_key;

pub use names::NAME_BYTES_MAX;
pub use sources::{BodySessionNames, ProgramNames, SessionHeaders};

use crate::base::label::Label;
use sources::HeaderSource;

/// Maximum number of entries that the config may add to the built-in headers.
pub const CONFIGURED_MAX: usize = 16;

/// Rules by which requests name their sessions.
#[derive(Debug, Clone)]
pub struct SessionRules {
    /// Sources in headers, in order; none if sessions are off.
    headers: Box<[HeaderSource]>,
    /// Whether requests have sessions.
    is_enabled: bool,
}

/// The session of a request, as its client names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionNames<'a> {
    /// Name of the session.
    pub session: &'a str,
    /// Name of the session that started it; `None` for a root.
    pub parent: Option<&'a str>,
    /// Whether this turn is the last one of the session.
    pub is_final: bool,
    /// Source of the names, `header:NAME` or `body:FIELD`.
    pub source: &'static str,
}

/// The session of a request, without names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamedSession {
    /// Key of the session.
    pub key: AgentSessionKey,
    /// Key of the session that started it; `None` for a root.
    pub parent: Option<AgentSessionKey>,
    /// Whether this turn is the last one of the session.
    pub is_final: bool,
    /// Source of the names, `header:NAME` or `body:FIELD`.
    pub source: &'static str,
}

impl Default for SessionRules {
    fn default() -> Self {
        Self::new(true, &[])
    }
}

impl SessionRules {
    /// Creates the rules with these headers after the built-in ones.
    #[must_use]
    pub fn new(is_enabled: bool, configured: &[SessionHeaders]) -> Self {
        Self {
            headers: sources::all(configured),
            is_enabled,
        }
    }

    /// Returns the names that a request with these `headers` and names in its body gives; `None` if
    /// no source names a session. Calls `refused` with each source whose name is out of bounds,
    /// which counts as absent.
    pub fn names<'a>(
        &self,
        headers: &'a HeaderMap,
        body: Option<&'a BodySessionNames>,
        mut refused: impl FnMut(&'static str),
    ) -> Option<SessionNames<'a>> {
        if !self.is_enabled {
            return None;
        }
        let mut sources = self.headers.iter();
        let named = sources.find_map(|source| source.names(headers, &mut refused));
        named.or_else(|| body?.names(&mut refused))
    }
}

impl SessionNames<'_> {
    /// Returns the session without its names, for a `user` in a cluster with this `hash_seed`.
    #[must_use]
    pub fn hashed(&self, hash_seed: u64, user: UserKey) -> NamedSession {
        let key = |name: &str| session_key(hash_seed, user, name.as_bytes());
        NamedSession {
            key: key(self.session),
            parent: self.parent.map(key),
            is_final: self.is_final,
            source: self.source,
        }
    }
}

impl Encode for NamedSession {
    fn encode<E: bincode::enc::Encoder>(
        &self,
        encoder: &mut E,
    ) -> Result<(), bincode::error::EncodeError> {
        let Self {
            key,
            parent,
            is_final,
            source,
        } = self;
        (key, parent, is_final, source).encode(encoder)
    }
}

impl<C> Decode<C> for NamedSession {
    fn decode<D: bincode::de::Decoder<Context = C>>(
        decoder: &mut D,
    ) -> Result<Self, bincode::error::DecodeError> {
        let (key, parent, is_final, source) = Decode::decode(decoder)?;
        let Label(source) = source;
        Ok(Self {
            key,
            parent,
            is_final,
            source,
        })
    }
}

bincode::impl_borrow_decode!(NamedSession);
