//! Bugs that can be planted in the product, each with a name.
//!
//! A test harness that finds nothing proves nothing unless it finds known bugs. `raft`, `api` and
//! `node` define bugs at typical places (`raft::planted` and so on). This module plants one at a
//! time on the current thread, for the lifetime of a [`PlantedGuard`].
//! docs/reports/2026-11-planted-bugs.md lists which test catches which bug.

use std::fmt;

/// A bug to plant, in one of the crates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlantedBug {
    /// A bug in the replication of the log.
    Raft(raft::planted::Bug),
    /// A bug in what a replica learns, proposes and responds.
    Api(api::planted::Bug),
    /// A bug in the assembly of a replica.
    Node(node::planted::Bug),
}

impl PlantedBug {
    /// Returns all bugs that can be planted.
    pub fn all() -> impl Iterator<Item = Self> {
        let raft = raft::planted::Bug::ALL.iter().copied().map(Self::Raft);
        let api = api::planted::Bug::ALL.iter().copied().map(Self::Api);
        let node = node::planted::Bug::ALL.iter().copied().map(Self::Node);
        raft.chain(api).chain(node)
    }

    /// Returns the bug with this name, as [`PlantedBug`] displays it.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|bug| bug.to_string() == name)
    }

    /// Plants the bug on this thread, in place of any other.
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
    /// Formats the bug as its crate and name, such as `raft.VoteNotKept`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raft(bug) => write!(f, "raft.{bug:?}"),
            Self::Api(bug) => write!(f, "api.{bug:?}"),
            Self::Node(bug) => write!(f, "node.{bug:?}"),
        }
    }
}

/// Guard of a planted bug, which removes the bug on drop. Drop it on the planting thread.
#[derive(Debug)]
pub struct PlantedGuard(PlantedBug);

impl PlantedGuard {
    /// Returns how often the product reached the bug. A bug that is never reached cannot be caught.
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
    fn planted_bugs_have_unique_names() {
        let names: std::collections::BTreeSet<_> =
            PlantedBug::all().map(|bug| bug.to_string()).collect();
        assert_eq!(names.len(), PlantedBug::all().count());
        assert!(PlantedBug::all().all(|bug| PlantedBug::named(&bug.to_string()) == Some(bug)));
        assert_eq!(PlantedBug::named("raft.Nothing"), None);
    }
}
