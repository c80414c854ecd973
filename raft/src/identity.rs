//! Identity of a replica, and of the cluster it belongs to.
//!
//! The store's random number is drawn with the store: a replica that lost its disk is another one,
//! even under the same id, and is never taken for a voter that remembers its votes.
//!
//! The cluster's number is fixed by the first of: being claimed as a founder, being let in by a
//! member that was asked, being sent log entries. From then on everything of another cluster is
//! refused. A claim alone is given up again when it cannot lead to a cluster any more.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use crate::determinism::random;
use crate::error::StartError;
use crate::files::{self, Files, Layout, damaged, io_error};
use crate::locks::lock;
use crate::wire::{self, proto};

/// See the module.
#[derive(Debug)]
pub(crate) struct ReplicaIdentity {
    pub(crate) id: u64,
    pub(crate) store: u64,
    files: Arc<dyn Files>,
    path: PathBuf,
    binding: Mutex<ClusterBinding>,
}

/// What ties a replica to a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClusterBinding {
    /// Nothing.
    Free,
    /// A claim by a replica that wants to found this cluster; may be itself.
    Claimed {
        /// The cluster to be.
        cluster: u128,
        /// Who wants to found it.
        by: u64,
    },
    /// It belongs there.
    Member(u128),
}

impl ClusterBinding {
    /// The cluster it stands for.
    pub(crate) fn cluster(self) -> Option<u128> {
        match self {
            Self::Free => None,
            Self::Claimed { cluster, .. } | Self::Member(cluster) => Some(cluster),
        }
    }
}

impl ReplicaIdentity {
    /// Reads the identity below a data directory, or makes one.
    pub(crate) fn open(layout: &Layout, id: u64) -> Result<Self, StartError> {
        let (files, path) = (layout.files.clone(), layout.identity());
        let kept = files::load_message::<proto::Identity>(&*files, &path)?;
        let identity = match kept {
            Some(kept) if kept.id != id => {
                return Err(StartError::WrongStore(format!(
                    "{} belongs to replica {}, this is replica {id}",
                    path.display(),
                    kept.id
                )));
            }
            Some(kept) => {
                let cluster = wire::join_optional(kept.cluster_high, kept.cluster_low);
                let bond = match cluster {
                    None => ClusterBinding::Free,
                    Some(cluster) if kept.claimant != 0 => ClusterBinding::Claimed {
                        cluster,
                        by: kept.claimant,
                    },
                    Some(cluster) => ClusterBinding::Member(cluster),
                };
                Self {
                    id,
                    store: kept.store,
                    files,
                    path,
                    binding: Mutex::new(bond),
                }
            }
            None if files.exists(&layout.mark()) || files.exists(&layout.log()) => {
                return Err(damaged(&path, 0, "missing beside a log"));
            }
            None => {
                let store = random::draw_id();
                let new = Self {
                    id,
                    store,
                    files,
                    path,
                    binding: Mutex::new(ClusterBinding::Free),
                };
                new.keep(ClusterBinding::Free)
                    .map_err(|error| io_error(&new.path, error))?;
                new
            }
        };
        Ok(identity)
    }

    /// What ties it to a cluster.
    pub(crate) fn bond(&self) -> ClusterBinding {
        *lock(&self.binding)
    }

    /// The cluster named in calls to peers.
    pub(crate) fn cluster(&self) -> Option<u128> {
        self.bond().cluster()
    }

    /// Takes a founder's claim, unless it is tied to another cluster.
    pub(crate) fn claim(&self, cluster: u128, by: u64) -> io::Result<bool> {
        self.change(|bond| match bond {
            ClusterBinding::Free => Some(ClusterBinding::Claimed { cluster, by }),
            ClusterBinding::Claimed { cluster: other, .. } if other == cluster => Some(bond),
            ClusterBinding::Claimed { .. } | ClusterBinding::Member(_) => None,
        })
    }

    /// Gives a claim up that can lead to nothing.
    pub(crate) fn give_up(&self, claim: ClusterBinding) -> io::Result<bool> {
        self.change(|bond| {
            (bond == claim && matches!(bond, ClusterBinding::Claimed { .. }))
                .then_some(ClusterBinding::Free)
        })
    }

    /// Becomes a member, unless it is tied to another cluster.
    pub(crate) fn enter(&self, cluster: u128) -> io::Result<bool> {
        self.change(|bond| {
            bond.cluster()
                .is_none_or(|tied| tied == cluster)
                .then_some(ClusterBinding::Member(cluster))
        })
    }

    /// Becomes a member by its own wish. Only a replica without votes and entries may: whatever
    /// it was claimed for can then do without it.
    pub(crate) fn join(&self, cluster: u128) -> io::Result<bool> {
        self.change(|bond| match bond {
            ClusterBinding::Free | ClusterBinding::Claimed { .. } => {
                Some(ClusterBinding::Member(cluster))
            }
            ClusterBinding::Member(member) => (member == cluster).then_some(bond),
        })
    }

    /// Leads a call to the store `to_store` of `to`.
    pub(crate) fn header(&self, to: u64, to_store: u64) -> proto::Header {
        let (cluster_high, cluster_low) = wire::split(self.cluster().unwrap_or(0));
        proto::Header {
            cluster_high,
            cluster_low,
            from: self.id,
            to,
            to_store,
            from_store: self.store,
        }
    }

    fn change(
        &self,
        next: impl FnOnce(ClusterBinding) -> Option<ClusterBinding>,
    ) -> io::Result<bool> {
        let mut bond = lock(&self.binding);
        let Some(next) = next(*bond) else {
            return Ok(false);
        };
        if next != *bond {
            self.keep(next)?;
            *bond = next;
        }
        Ok(true)
    }

    fn keep(&self, bond: ClusterBinding) -> io::Result<()> {
        let (cluster_high, cluster_low) = wire::split(bond.cluster().unwrap_or(0));
        let claimant = match bond {
            ClusterBinding::Claimed { by, .. } => by,
            ClusterBinding::Free | ClusterBinding::Member(_) => 0,
        };
        let identity = proto::Identity {
            id: self.id,
            store: self.store,
            cluster_high,
            cluster_low,
            claimant,
        };
        files::store_message(&*self.files, &self.path, &identity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(folder: &std::path::Path, id: u64) -> Result<ReplicaIdentity, StartError> {
        let layout = Layout::new(folder);
        layout.create().unwrap();
        ReplicaIdentity::open(&layout, id)
    }

    #[test]
    fn a_store_keeps_its_number_and_its_replica() {
        let folder = tempfile::tempdir().unwrap();
        let first = open(folder.path(), 1).unwrap();
        assert_eq!(open(folder.path(), 1).unwrap().store, first.store);
        assert!(matches!(
            open(folder.path(), 2),
            Err(StartError::WrongStore(_))
        ));
    }

    #[test]
    fn only_one_cluster_ever_counts() {
        let folder = tempfile::tempdir().unwrap();
        let identity = open(folder.path(), 1).unwrap();
        assert!(identity.claim(7, 2).unwrap());
        assert!(identity.claim(7, 2).unwrap());
        assert!(!identity.claim(8, 3).unwrap(), "another founder waits");
        assert!(!identity.enter(8).unwrap());
        assert_eq!(
            open(folder.path(), 1).unwrap().bond(),
            ClusterBinding::Claimed { cluster: 7, by: 2 }
        );
        assert!(identity.enter(7).unwrap());
        assert!(
            !identity.give_up(ClusterBinding::Member(7)).unwrap(),
            "a member stays"
        );
        assert!(!identity.join(8).unwrap());
        assert_eq!(
            open(folder.path(), 1).unwrap().bond(),
            ClusterBinding::Member(7)
        );
    }

    #[test]
    fn a_claim_is_given_up_for_a_wish_to_join() {
        let folder = tempfile::tempdir().unwrap();
        let identity = open(folder.path(), 1).unwrap();
        assert!(identity.claim(7, 2).unwrap());
        assert!(identity.give_up(identity.bond()).unwrap());
        assert_eq!(identity.bond(), ClusterBinding::Free);
        assert!(identity.claim(8, 3).unwrap());
        assert!(identity.join(9).unwrap());
        assert_eq!(identity.bond(), ClusterBinding::Member(9));
    }
}
