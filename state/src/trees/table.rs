//! The table of sessions and trees: the changes that the log orders.

use std::collections::BTreeSet;

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_128;

use super::map::{SessionMap, TreeMap, root_of};
use super::orders::SessionOrders;
use super::published::TreesView;
use super::{
    AgentSession, NewSession, SESSION_IDLE_MS, SESSIONS_MAX, SessionPlace, SessionRef, SessionTree,
    SessionTurn, TurnUsage,
};
use crate::ids::{AgentSessionKey, BackendRef, UserKey};

/// Maximum number of idle sessions that one command ends, so that none takes long.
const IDLE_ENDS_PER_COMMAND: usize = 64;

/// Bounds of a table. Tests take small ones.
#[derive(Debug, Clone, Copy)]
pub(super) struct TreesBounds {
    /// Maximum number of sessions.
    pub(super) sessions: usize,
    /// Number of sessions from which on a user makes the room in a full table.
    pub(super) share: usize,
    /// Maximum number of sessions of an ended tree or deleted user that one command ends.
    pub(super) ends: usize,
}

impl TreesBounds {
    const PRODUCT: Self = Self {
        sessions: SESSIONS_MAX,
        share: SESSIONS_MAX / 16,
        ends: 256,
    };
}

/// A tree or user with more sessions to end than one command ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub(super) enum Ending {
    /// The tree with this root.
    Tree(AgentSessionKey),
    User(UserKey),
}

/// Table of all sessions and their trees.
pub(crate) struct Trees {
    pub(super) sessions: SessionMap,
    pub(super) trees: TreeMap,
    /// The session in each place.
    pub(super) places: Vec<Option<AgentSessionKey>>,
    /// Places without a session.
    free: BTreeSet<u32>,
    orders: SessionOrders,
    /// What the next commands go on to end.
    pub(super) endings: BTreeSet<Ending>,
    /// Wrapping sum of the hashes of all sessions, trees and endings.
    digest: u128,
    bounds: TreesBounds,
    is_changed: bool,
}

impl Default for Trees {
    fn default() -> Self {
        Self::with_bounds(TreesBounds::PRODUCT)
    }
}

impl Trees {
    pub(super) fn with_bounds(bounds: TreesBounds) -> Self {
        Self {
            sessions: SessionMap::new(),
            trees: TreeMap::new(),
            places: Vec::new(),
            free: BTreeSet::new(),
            orders: SessionOrders::default(),
            endings: BTreeSet::new(),
            digest: 0,
            bounds,
            is_changed: false,
        }
    }

    /// Begins a session, or moves it if another replica has begun it already.
    pub(crate) fn begin(&mut self, new: &NewSession, now_ms: u64) {
        if let Some(session) = self.sessions.get(&new.key) {
            let place = SessionRef::Place(session.place(new.key));
            self.relocate(place, new.home, now_ms);
            return;
        }
        let parent = new.parent.filter(|parent| *parent != new.key);
        // The parent may be the one that makes room.
        let root = root_of(&self.sessions, new.key, parent);
        let before = self.trees.get(&root).copied();
        if self.sessions.len() >= self.bounds.sessions
            && let Some(key) = self.makes_room()
        {
            self.end(key);
        }
        let session = AgentSession {
            place: self.take_place(),
            parent,
            root,
            user: new.user,
            model: new.model,
            home: new.home,
            begun_ms: now_ms,
            used_ms: now_ms,
            turns: 0,
            tokens: 0,
            usage: TurnUsage::default(),
        };
        self.insert(new.key, session);
        if self.change_tree(root, |tree| tree.sessions += 1) {
            return;
        }
        // A tree whose only session has made room goes on.
        let tree = before.unwrap_or(SessionTree {
            user: new.user,
            sessions: 1,
            begun_ms: now_ms,
            turns: 0,
            usage: TurnUsage::default(),
        });
        self.add_tree(
            root,
            SessionTree {
                sessions: 1,
                ..tree
            },
        );
    }

    /// Records that a turn of a session went to `home`. Returns whether the session exists.
    pub(crate) fn relocate(&mut self, session: SessionRef, home: BackendRef, now_ms: u64) -> bool {
        let moved = self.change(session, now_ms, |session| session.home = home);
        moved.is_some()
    }

    /// Records the end of a turn. If the turn has ended `before` with less usage, only the rest is
    /// added. Returns whether its session exists.
    pub(crate) fn turn(
        &mut self,
        turn: &SessionTurn,
        before: Option<TurnUsage>,
        now_ms: u64,
    ) -> bool {
        let usage = turn.usage.bounded();
        let rest = usage.without(&before.unwrap_or_default().bounded());
        let turns = u32::from(before.is_none());
        let changed = self.change(turn.session, now_ms, |session| {
            session.turns = session.turns.saturating_add(turns);
            session.tokens = usage.tokens();
            session.usage.add(&rest);
        });
        let Some(session) = changed else {
            return false;
        };
        self.change_tree(session.root, |tree| {
            tree.turns = tree.turns.saturating_add(turns.into());
            tree.usage.add(&rest);
        });
        true
    }

    /// Ends a session. Returns whether it existed.
    pub(crate) fn end_named(&mut self, session: SessionRef) -> bool {
        let key = self.key_of(session);
        key.is_some_and(|key| self.end(key))
    }

    /// Ends a tree: forgets its figures at once, and its sessions in this and the next commands.
    /// Returns whether it existed.
    pub(crate) fn end_tree(&mut self, root: AgentSessionKey) -> bool {
        let exists = self.change_tree(root, |tree| {
            tree.turns = 0;
            tree.usage = TurnUsage::default();
        });
        if exists {
            self.end_some(Ending::Tree(root), self.bounds.ends);
        }
        exists
    }

    /// Ends the sessions of a user that is deleted, in this and the next commands.
    pub(crate) fn forget_user(&mut self, user: UserKey) {
        self.end_some(Ending::User(user), self.bounds.ends);
    }

    /// Goes on to end trees and users, which share the bound on sessions that one command ends, and
    /// ends a bounded number of sessions that idled for too long.
    pub(crate) fn forget_some(&mut self, now_ms: u64) {
        if !self.endings.is_empty() {
            let most = self.bounds.ends;
            let endings: Vec<Ending> = self.endings.iter().copied().take(most).collect();
            let each = most / endings.len();
            for ending in endings {
                self.end_some(ending, each);
            }
        }
        for _ in 0..IDLE_ENDS_PER_COMMAND {
            match self.orders.idlest() {
                Some((until_ms, key)) if until_ms.saturating_add(SESSION_IDLE_MS) <= now_ms => {
                    self.end(key);
                }
                _ => return,
            }
        }
    }

    /// Ends at most `most` sessions of a tree or user, and notes whether there are more.
    fn end_some(&mut self, ending: Ending, most: usize) {
        let mut members: Vec<AgentSessionKey> = match ending {
            Ending::Tree(root) => self.orders.of_tree(root).take(most + 1).collect(),
            Ending::User(user) => self.orders.of_user(user).take(most + 1).collect(),
        };
        let has_more = members.len() > most;
        members.truncate(most);
        for key in members {
            self.end(key);
        }
        self.set_ending(ending, has_more);
    }

    /// Adds an ending, or removes it.
    pub(super) fn set_ending(&mut self, ending: Ending, is_there: bool) {
        let was_there = match is_there {
            true => !self.endings.insert(ending),
            false => self.endings.remove(&ending),
        };
        let hashed = |is_there: bool| is_there.then(|| ending_hash(&ending));
        self.rehash(hashed(was_there), hashed(is_there));
    }

    /// Returns the session that makes room for another one in a full table: the idlest of the user
    /// with the most sessions if that user holds a share of the table, else the idlest of all.
    fn makes_room(&self) -> Option<AgentSessionKey> {
        if let Some(user) = self.orders.holds_most(self.bounds.share) {
            return self.orders.of_user(user).next();
        }
        self.orders.idlest().map(|(_, key)| key)
    }

    /// Returns sessions and trees for readers on other threads, or `None` if nothing changed since
    /// the last call.
    pub(crate) fn publish(&mut self) -> Option<TreesView> {
        std::mem::take(&mut self.is_changed).then(|| self.published())
    }

    pub(crate) fn published(&self) -> TreesView {
        TreesView {
            sessions: self.sessions.clone(),
            trees: self.trees.clone(),
        }
    }

    /// Marks the table as changed, so that the next command publishes it.
    pub(crate) fn replaced(&mut self) {
        self.is_changed = true;
    }

    pub(crate) fn digest(&self) -> u128 {
        self.digest
    }

    /// Returns what follows from the sessions: their orders, and the free places among the first
    /// `places`. Free places behind all sessions make no difference.
    pub(super) fn indexes(&self, places: usize) -> (&SessionOrders, Vec<u32>) {
        let free = self.free.iter().copied();
        (
            &self.orders,
            free.take_while(|it| (*it as usize) < places).collect(),
        )
    }

    fn key_of(&self, session: SessionRef) -> Option<AgentSessionKey> {
        match session {
            SessionRef::Key(key) => Some(key),
            SessionRef::Place(named) => {
                let present = (*self.places.get(named.number() as usize)?)?;
                (SessionPlace::new(named.number(), present) == named).then_some(present)
            }
        }
    }

    /// Returns the lowest free place.
    fn take_place(&mut self) -> u32 {
        self.free.pop_first().unwrap_or_else(|| {
            self.places.push(None);
            u32::try_from(self.places.len() - 1).expect("SESSIONS_MAX is below 2^32")
        })
    }

    /// Adds a session at the place that it names. Returns `false` if the place is out of bounds or
    /// taken, or if the session is there already.
    pub(super) fn restore(&mut self, key: AgentSessionKey, session: AgentSession) -> bool {
        let place = session.place as usize;
        if place >= SESSIONS_MAX || self.sessions.get(&key).is_some() {
            return false;
        }
        while self.places.len() <= place {
            let number = u32::try_from(self.places.len()).expect("SESSIONS_MAX is below 2^32");
            self.places.push(None);
            self.free.insert(number);
        }
        let is_free = self.free.remove(&session.place);
        if is_free {
            self.insert(key, session);
        }
        is_free
    }

    fn insert(&mut self, key: AgentSessionKey, session: AgentSession) {
        self.places[session.place as usize] = Some(key);
        self.orders.insert(key, &session);
        self.rehash(None, Some(session_hash(key, &session)));
        self.sessions.insert_new(key, session);
        self.is_changed = true;
    }

    /// Changes a session that is used now, and returns it; `None` if it does not exist.
    fn change(
        &mut self,
        session: SessionRef,
        now_ms: u64,
        change: impl FnOnce(&mut AgentSession),
    ) -> Option<AgentSession> {
        let key = self.key_of(session)?;
        let session = self.sessions.get_mut(&key)?;
        let before = *session;
        change(session);
        session.used_ms = session.used_ms.max(now_ms);
        let after = *session;
        self.orders.replace(key, &before, &after);
        let hash = |it| Some(session_hash(key, it));
        self.rehash(hash(&before), hash(&after));
        self.is_changed = true;
        Some(after)
    }

    /// Changes a tree in place. Returns whether it exists.
    fn change_tree(
        &mut self,
        root: AgentSessionKey,
        change: impl FnOnce(&mut SessionTree),
    ) -> bool {
        let Some(tree) = self.trees.get_mut(&root) else {
            return false;
        };
        let before = tree_hash(root, tree);
        change(tree);
        let after = tree_hash(root, tree);
        self.rehash(Some(before), Some(after));
        self.is_changed = true;
        true
    }

    fn end(&mut self, key: AgentSessionKey) -> bool {
        let Some(session) = self.sessions.remove(&key) else {
            return false;
        };
        self.rehash(Some(session_hash(key, &session)), None);
        self.orders.remove(key, &session);
        self.places[session.place as usize] = None;
        self.free.insert(session.place);
        let mut left = 0;
        self.change_tree(session.root, |tree| {
            tree.sessions -= 1;
            left = tree.sessions;
        });
        if left == 0
            && let Some(tree) = self.trees.remove(&session.root)
        {
            self.rehash(Some(tree_hash(session.root, &tree)), None);
        }
        self.is_changed = true;
        true
    }

    /// Adds a tree that is not there.
    pub(super) fn add_tree(&mut self, root: AgentSessionKey, tree: SessionTree) {
        self.rehash(None, Some(tree_hash(root, &tree)));
        self.trees.insert_new(root, tree);
        self.is_changed = true;
    }

    /// Replaces a part in the digest by its hashes, which are `None` where it does not exist.
    fn rehash(&mut self, before: Option<u128>, after: Option<u128>) {
        let without = self.digest.wrapping_sub(before.unwrap_or_default());
        self.digest = without.wrapping_add(after.unwrap_or_default());
    }
}

/// Returns the hash of a session. Every turn takes two, so its fields are words, without a form that
/// takes longer.
fn session_hash(key: AgentSessionKey, session: &AgentSession) -> u128 {
    let AgentSession {
        place,
        parent,
        root,
        user,
        model,
        home,
        begun_ms,
        used_ms,
        turns,
        tokens,
        usage,
    } = session;
    // No session is its own parent.
    let parent_or_own = parent.unwrap_or(key);
    let [uncached, cached, output] = usage_words(usage);
    hash_words([
        key.0,
        u64::from(*place),
        parent_or_own.0,
        root.0,
        user.0,
        model.0,
        u64::from(home.slot.0),
        u64::from(home.incarnation.0),
        *begun_ms,
        *used_ms,
        u64::from(*turns),
        *tokens,
        uncached,
        cached,
        output,
    ])
}

fn tree_hash(root: AgentSessionKey, tree: &SessionTree) -> u128 {
    let SessionTree {
        user,
        sessions,
        begun_ms,
        turns,
        usage,
    } = tree;
    let [uncached, cached, output] = usage_words(usage);
    let sessions = u64::from(*sessions);
    let words = [
        root.0, user.0, sessions, *begun_ms, *turns, uncached, cached, output,
    ];
    hash_words(words)
}

fn ending_hash(ending: &Ending) -> u128 {
    hash_words(match ending {
        Ending::Tree(root) => [0, root.0],
        Ending::User(user) => [1, user.0],
    })
}

fn usage_words(usage: &TurnUsage) -> [u64; 3] {
    let TurnUsage {
        input_uncached,
        input_cached,
        output,
    } = usage;
    [*input_uncached, *input_cached, *output]
}

/// Returns the hash of a part. Parts of different kinds have different numbers of words.
fn hash_words<const WORDS: usize>(words: [u64; WORDS]) -> u128 {
    xxh3_128(words.map(u64::to_le_bytes).as_flattened())
}
