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
use crate::encoding;
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
    /// Buffer for hashing.
    scratch: Vec<u8>,
}

impl Default for Trees {
    fn default() -> Self {
        Self::with_bounds(TreesBounds::PRODUCT)
    }
}

/// Kinds of parts, which their hashes distinguish.
#[derive(Clone, Copy)]
enum Part {
    Session,
    Tree,
    Ending,
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
            scratch: Vec::new(),
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
        // A tree whose only session has made room goes on.
        let ended = before.map(|tree| SessionTree {
            sessions: 0,
            ..tree
        });
        let known = self.trees.get(&root).copied().or(ended);
        let tree = known.unwrap_or(SessionTree {
            user: new.user,
            sessions: 0,
            begun_ms: now_ms,
            turns: 0,
            usage: TurnUsage::default(),
        });
        let sessions = tree.sessions + 1;
        self.set_tree(root, Some(SessionTree { sessions, ..tree }));
    }

    /// Records that a turn of a session went to `home`. Returns whether the session exists.
    pub(crate) fn relocate(&mut self, session: SessionRef, home: BackendRef, now_ms: u64) -> bool {
        self.change(session, now_ms, |session| session.home = home)
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
        let mut root = None;
        self.change(turn.session, now_ms, |session| {
            session.turns = session.turns.saturating_add(turns);
            session.tokens = usage.tokens();
            session.usage.add(&rest);
            root = Some(session.root);
        });
        let Some((root, mut tree)) = root.and_then(|root| Some((root, *self.trees.get(&root)?)))
        else {
            return false;
        };
        tree.turns = tree.turns.saturating_add(turns.into());
        tree.usage.add(&rest);
        self.set_tree(root, Some(tree));
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
        let Some(tree) = self.trees.get(&root).copied() else {
            return false;
        };
        let forgotten = SessionTree {
            turns: 0,
            usage: TurnUsage::default(),
            ..tree
        };
        self.set_tree(root, Some(forgotten));
        self.end_some(Ending::Tree(root));
        true
    }

    /// Ends the sessions of a user that is deleted, in this and the next commands.
    pub(crate) fn forget_user(&mut self, user: UserKey) {
        self.end_some(Ending::User(user));
    }

    /// Goes on to end a tree or user, and ends sessions that idled for too long; a bounded number of
    /// each.
    pub(crate) fn forget_some(&mut self, now_ms: u64) {
        if let Some(ending) = self.endings.first().copied() {
            self.end_some(ending);
        }
        for _ in 0..IDLE_ENDS_PER_COMMAND {
            match self.orders.idlest() {
                Some((used_ms, key)) if used_ms.saturating_add(SESSION_IDLE_MS) <= now_ms => {
                    self.end(key);
                }
                _ => return,
            }
        }
    }

    /// Ends sessions of a tree or user, a bounded number, and notes whether there are more.
    fn end_some(&mut self, ending: Ending) {
        let most = self.bounds.ends;
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
        let hashed = |is_there: bool| is_there.then_some(&ending);
        self.rehash(Part::Ending, 0, hashed(was_there), hashed(is_there));
    }

    /// Returns the session that makes room for another one in a full table: the idlest of the user
    /// with the most sessions if that user holds a share of the table, else the idlest of all.
    fn makes_room(&self) -> Option<AgentSessionKey> {
        let (held, user) = self.orders.holds_most()?;
        if held >= self.bounds.share {
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
        self.rehash(Part::Session, key.0, None, Some(&session));
        self.sessions.insert_new(key, session);
        self.is_changed = true;
    }

    fn change(
        &mut self,
        session: SessionRef,
        now_ms: u64,
        change: impl FnOnce(&mut AgentSession),
    ) -> bool {
        let Some((key, before)) = self
            .key_of(session)
            .and_then(|key| Some((key, *self.sessions.get(&key)?)))
        else {
            return false;
        };
        let mut after = before;
        change(&mut after);
        after.used_ms = after.used_ms.max(now_ms);
        self.orders.replace(key, &before, &after);
        self.rehash(Part::Session, key.0, Some(&before), Some(&after));
        if let Some(session) = self.sessions.get_mut(&key) {
            *session = after;
        }
        self.is_changed = true;
        true
    }

    fn end(&mut self, key: AgentSessionKey) -> bool {
        let Some(session) = self.sessions.remove(&key) else {
            return false;
        };
        self.rehash(Part::Session, key.0, Some(&session), None);
        self.orders.remove(key, &session);
        self.places[session.place as usize] = None;
        self.free.insert(session.place);
        if let Some(tree) = self.trees.get(&session.root).copied() {
            let sessions = tree.sessions - 1;
            let left = (sessions > 0).then_some(SessionTree { sessions, ..tree });
            self.set_tree(session.root, left);
        }
        self.is_changed = true;
        true
    }

    /// Adds, replaces or removes a tree.
    pub(super) fn set_tree(&mut self, root: AgentSessionKey, tree: Option<SessionTree>) {
        let before = self.trees.remove(&root);
        self.rehash(Part::Tree, root.0, before.as_ref(), tree.as_ref());
        if let Some(tree) = tree {
            self.trees.insert_new(root, tree);
        }
        self.is_changed = true;
    }

    /// Replaces a part in the digest.
    fn rehash<T: bincode::Encode>(
        &mut self,
        part: Part,
        key: u64,
        before: Option<&T>,
        after: Option<&T>,
    ) {
        let mut hash = |value: &T| {
            self.scratch.clear();
            encoding::append_bytes(&(part as u8, key, value), &mut self.scratch);
            xxh3_128(&self.scratch)
        };
        let before = before.map_or(0, &mut hash);
        let after = after.map_or(0, &mut hash);
        self.digest = self.digest.wrapping_sub(before).wrapping_add(after);
    }
}
