//! The bugs that can be planted in the product, each under one name.
//!
//! A harness that finds nothing proves nothing until it is known to find what it should. `raft`,
//! `api` and `node` list bugs at the places where people would make them (`raft::planted` and so
//! on). Here one at a time is planted on this thread, for as long as a [`PlantedGuard`] lives.
//! docs/internals/testing.md says what catches them.

use std::fmt;

/// One bug of one crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlantedBug {
    /// In the log.
    Raft(raft::planted::Bug),
    /// In what a replica learns, proposes and answers.
    Api(api::planted::Bug),
    /// In how a replica is put together.
    Node(node::planted::Bug),
}

impl PlantedBug {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        let raft = raft::planted::Bug::ALL.iter().copied().map(Self::Raft);
        let api = api::planted::Bug::ALL.iter().copied().map(Self::Api);
        let node = node::planted::Bug::ALL.iter().copied().map(Self::Node);
        raft.chain(api).chain(node)
    }

    /// The bug of this name, as [`PlantedBug`] displays it.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|bug| bug.to_string() == name)
    }

    /// Plants it on this thread, in place of any other.
    #[must_use]
    pub fn plant(self) -> PlantedGuard {
        let plot = PlantedGuard(self);
        clear();
        match self {
            Self::Raft(bug) => raft::planted::plant(Some(bug)),
            Self::Api(bug) => api::planted::plant(Some(bug)),
            Self::Node(bug) => node::planted::plant(Some(bug)),
        }
        plot
    }
}

impl fmt::Display for PlantedBug {
    /// `raft.VoteNotKept`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raft(bug) => write!(f, "raft.{bug:?}"),
            Self::Api(bug) => write!(f, "api.{bug:?}"),
            Self::Node(bug) => write!(f, "node.{bug:?}"),
        }
    }
}

/// A planted bug; taken out when this goes. To be dropped on the thread that planted it.
#[derive(Debug)]
pub struct PlantedGuard(PlantedBug);

impl PlantedGuard {
    /// How often the product came by it: a bug that is never met cannot be caught.
    #[must_use]
    pub fn met(&self) -> u64 {
        match self.0 {
            PlantedBug::Raft(_) => raft::planted::met(),
            PlantedBug::Api(_) => api::planted::met(),
            PlantedBug::Node(_) => node::planted::met(),
        }
    }
}

impl Drop for PlantedGuard {
    fn drop(&mut self) {
        clear();
    }
}

fn clear() {
    raft::planted::plant(None);
    api::planted::plant(None);
    node::planted::plant(None);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bug_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<_> =
            PlantedBug::all().map(|bug| bug.to_string()).collect();
        assert_eq!(names.len(), PlantedBug::all().count());
        assert!(PlantedBug::all().all(|bug| PlantedBug::named(&bug.to_string()) == Some(bug)));
        assert_eq!(PlantedBug::named("raft.Nothing"), None);
    }
}
