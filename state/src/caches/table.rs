//! The table of cache scopes, which is frozen and published by cloning references.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128;

use super::CacheScope;
use crate::cow::CowMap;
use crate::encoding;
use crate::ids::UserKey;

/// Maximum number of scopes in one section of a snapshot.
const SCOPES_PER_PIECE: usize = 4096;

/// Map from users to their own scopes.
type ScopeMap = CowMap<UserKey, Arc<CacheScope>>;

/// Cache scopes of all users. Only configured users have one, which bounds their number.
pub(crate) struct CacheScopes {
    /// Scope of users without one of their own.
    default: CacheScope,
    of_users: ScopeMap,
    /// Wrapping sum of the entries' hashes.
    digest: u128,
    /// Whether a scope changed since the last [`CacheScopes::publish`].
    is_changed: bool,
}

/// Frozen copy of the cache scopes, for a snapshot.
pub(crate) struct CacheScopesImage {
    default: CacheScope,
    of_users: ScopeMap,
}

/// Immutable copy of the cache scopes, for readers on other threads.
#[derive(Debug, Clone)]
pub struct CacheScopesView {
    default: CacheScope,
    of_users: ScopeMap,
}

impl Default for CacheScopes {
    fn default() -> Self {
        Self {
            default: CacheScope::Shared,
            of_users: CowMap::new(),
            digest: 0,
            is_changed: false,
        }
    }
}

impl Default for CacheScopesView {
    fn default() -> Self {
        CacheScopes::default().view()
    }
}

impl CacheScopes {
    /// Whether no user has its own scope and the default is [`CacheScope::Shared`].
    pub(crate) fn is_empty(&self) -> bool {
        self.default == CacheScope::Shared && self.of_users.len() == 0
    }

    /// Appends the digest of the scopes to the digest input.
    pub(crate) fn append_digest(&self, bytes: &mut Vec<u8>) {
        encoding::append_bytes(&(&self.default, self.digest), bytes);
    }

    /// Returns the scope of users without one of their own.
    pub(crate) fn default_scope(&self) -> &CacheScope {
        &self.default
    }

    /// Sets the scope of users without one of their own.
    pub(crate) fn set_default(&mut self, scope: CacheScope) {
        self.is_changed = true;
        self.default = scope;
    }

    /// Sets the scope of `user`. `None` removes it, so that the default applies.
    pub(crate) fn set(&mut self, user: UserKey, scope: Option<CacheScope>) {
        self.is_changed = true;
        if let Some(former) = self.of_users.remove(&user) {
            self.digest = self.digest.wrapping_sub(hash(user, &former));
        }
        if let Some(scope) = scope {
            self.digest = self.digest.wrapping_add(hash(user, &scope));
            self.of_users.insert_new(user, Arc::new(scope));
        }
    }

    /// Iterates over the users with their own scope, in ascending order of keys.
    pub(crate) fn users(&self) -> impl Iterator<Item = UserKey> {
        self.of_users.iter().map(|(user, _)| *user)
    }

    /// Returns the scopes for readers on other threads.
    pub(crate) fn view(&self) -> CacheScopesView {
        CacheScopesView {
            default: self.default.clone(),
            of_users: self.of_users.clone(),
        }
    }

    /// Returns a view of the scopes if they changed since the last call.
    pub(crate) fn publish(&mut self) -> Option<CacheScopesView> {
        std::mem::take(&mut self.is_changed).then(|| self.view())
    }

    /// Marks the scopes as changed, so that the next command publishes them.
    pub(crate) fn replaced(&mut self) {
        self.is_changed = true;
    }

    pub(crate) fn freeze(&self) -> CacheScopesImage {
        CacheScopesImage {
            default: self.default.clone(),
            of_users: self.of_users.clone(),
        }
    }

    /// Adds the scopes of one section of a snapshot.
    ///
    /// # Errors
    /// Describes the fault of the section.
    pub(crate) fn restore_piece(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Piece = (CacheScope, Vec<(UserKey, CacheScope)>);
        let (default, scopes) =
            encoding::from_bytes::<Piece, { encoding::SECTION_BYTES_MAX }>(bytes)?;
        let fault = |reject| format!("cache scope: {reject}");
        default.validate().map_err(fault)?;
        self.set_default(default);
        for (user, scope) in scopes {
            scope.validate().map_err(fault)?;
            if self.of_users.get(&user).is_some() {
                return Err(format!("the cache scope of user {user} stands twice"));
            }
            self.set(user, Some(scope));
        }
        Ok(())
    }

    /// Checks the table's part of I110: the digest and the published `view` match the scopes.
    ///
    /// # Errors
    /// Describes the first violation.
    pub(crate) fn check(&self, view: &CacheScopesView) -> Result<(), String> {
        let hashes = self.of_users.iter().map(|(user, scope)| hash(*user, scope));
        if hashes.fold(0, u128::wrapping_add) != self.digest {
            return Err("the digest of cache scopes differs from them".to_owned());
        }
        let is_shown =
            self.default == view.default && self.of_users.iter().eq(view.of_users.iter());
        match is_shown {
            true => Ok(()),
            false => Err("the published cache scopes differ".to_owned()),
        }
    }
}

impl CacheScopesImage {
    /// Encodes all scopes in sections of bounded size. Yields none if the table is empty.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        let mut scopes = self.of_users.iter().peekable();
        let mut is_due = self.default != CacheScope::Shared;
        std::iter::from_fn(move || {
            if scopes.peek().is_none() && !is_due {
                return None;
            }
            is_due = false;
            let piece = scopes.by_ref().take(SCOPES_PER_PIECE);
            let piece: Vec<(&UserKey, &CacheScope)> =
                piece.map(|(user, scope)| (user, &**scope)).collect();
            Some(encoding::to_bytes(&(&self.default, piece)))
        })
    }
}

impl CacheScopesView {
    /// Returns the scope of `user`: its own, or the default.
    #[must_use]
    pub fn of(&self, user: UserKey) -> &CacheScope {
        self.own(user).unwrap_or(&self.default)
    }

    /// Returns the user's own scope; `None` if the default applies.
    #[must_use]
    pub fn own(&self, user: UserKey) -> Option<&CacheScope> {
        self.of_users.get(&user).map(|scope| &**scope)
    }

    /// Returns the scope of users without one of their own.
    #[must_use]
    pub fn default_scope(&self) -> &CacheScope {
        &self.default
    }

    /// Returns the number of users with their own scope.
    #[must_use]
    pub fn len(&self) -> usize {
        self.of_users.len()
    }

    /// Whether no user has its own scope and the default is [`CacheScope::Shared`].
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.default == CacheScope::Shared && self.len() == 0
    }
}

fn hash(user: UserKey, scope: &CacheScope) -> u128 {
    xxh3_128(&encoding::to_bytes(&(user, scope)))
}
