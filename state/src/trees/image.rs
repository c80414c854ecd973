//! Sessions and trees in snapshots. They are written from a frozen copy, and every bound is checked
//! when they are read back.

use std::collections::BTreeSet;

use super::map::{SessionMap, TreeMap};
use super::table::{Ending, Trees};
use super::{AgentSession, SessionTree};
use crate::encoding;
use crate::ids::AgentSessionKey;

/// Maximum number of sessions in one section of a snapshot.
const SESSIONS_PER_PIECE: usize = 4096;

/// Frozen copy of the table, from which snapshots are written.
pub(crate) struct TreesImage {
    sessions: SessionMap,
    trees: TreeMap,
    endings: BTreeSet<Ending>,
}

impl TreesImage {
    /// Encodes all trees in pieces of bounded size.
    pub(crate) fn trees(&self) -> impl Iterator<Item = Vec<u8>> {
        encoding::pieces(self.trees.iter(), SESSIONS_PER_PIECE)
    }

    /// Encodes which trees and users are being ended; `None` if none is.
    pub(crate) fn endings(&self) -> Option<Vec<u8>> {
        (!self.endings.is_empty()).then(|| encoding::to_bytes(&self.endings))
    }

    /// Encodes all sessions in pieces of bounded size.
    pub(crate) fn sessions(&self) -> impl Iterator<Item = Vec<u8>> {
        encoding::pieces(self.sessions.iter(), SESSIONS_PER_PIECE)
    }
}

fn piece<T: bincode::Decode<()>>(bytes: &[u8]) -> Result<Vec<(AgentSessionKey, T)>, String> {
    encoding::from_bytes::<_, { encoding::SECTION_BYTES_MAX }>(bytes)
}

impl Trees {
    pub(crate) fn freeze(&self) -> TreesImage {
        TreesImage {
            sessions: self.sessions.clone(),
            trees: self.trees.clone(),
            endings: self.endings.clone(),
        }
    }

    /// Adds which trees and users are being ended. An error describes the first fault.
    pub(crate) fn restore_endings(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Endings = BTreeSet<Ending>;
        for ending in encoding::from_bytes::<Endings, { encoding::SECTION_BYTES_MAX }>(bytes)? {
            self.set_ending(ending, true);
        }
        Ok(())
    }

    /// Adds the trees encoded in one piece. An error describes the first fault.
    pub(crate) fn restore_trees(&mut self, bytes: &[u8]) -> Result<(), String> {
        for (root, tree) in piece::<SessionTree>(bytes)? {
            if tree.sessions == 0 || self.trees.get(&root).is_some() {
                return Err(format!("tree {root} is empty or stands twice"));
            }
            self.add_tree(root, tree);
        }
        Ok(())
    }

    /// Adds the sessions encoded in one piece. An error describes the first fault.
    pub(crate) fn restore_sessions(&mut self, bytes: &[u8]) -> Result<(), String> {
        for (key, session) in piece::<AgentSession>(bytes)? {
            if !self.restore(key, session) {
                return Err(format!("session {key} has no place of its own"));
            }
        }
        Ok(())
    }

    /// Checks I165: trees count their sessions, and places, orders and digest match them.
    ///
    /// # Errors
    /// Describes the first broken rule.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut rebuilt = Self::default();
        let image = self.freeze();
        for piece in image.trees() {
            rebuilt.restore_trees(&piece)?;
        }
        for piece in image.sessions() {
            rebuilt.restore_sessions(&piece)?;
        }
        if let Some(endings) = image.endings() {
            rebuilt.restore_endings(&endings)?;
        }
        rebuilt.check_trees()?;
        let free_to = rebuilt.places.len();
        let same =
            rebuilt.digest() == self.digest() && rebuilt.indexes(free_to) == self.indexes(free_to);
        let fault = || "places, orders or digest of sessions differ from the sessions".to_owned();
        same.then_some(()).ok_or_else(fault)
    }

    /// Checks that each tree counts its sessions, and that no session lacks a tree.
    pub(crate) fn check_trees(&self) -> Result<(), String> {
        let mut counts = std::collections::BTreeMap::<AgentSessionKey, u32>::new();
        for (_, session) in self.sessions.iter() {
            *counts.entry(session.root).or_default() += 1;
        }
        let counted = counts.iter().map(|(root, count)| (*root, *count));
        let told = self.trees.iter().map(|(root, tree)| (*root, tree.sessions));
        let fault = || "a tree does not count its sessions".to_owned();
        counted.eq(told).then_some(()).ok_or_else(fault)
    }
}
