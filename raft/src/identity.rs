//! The identity of a replica, and the cluster that it belongs to.
//!
//! The store's random id is drawn when the store is created. A replica that lost its disk is a
//! different one, even under the same id, and is never mistaken for a voter that remembers its
//! votes.
//!
//! A replica is bound to the first cluster that claims it as a founder, adds it on request, or
//! sends it log entries. From then on it accepts no claims or log entries of other clusters. A mere
//! claim is released when it can no longer lead to a cluster, or when a cluster adds the replica.
//!
//! The store also records the cluster's name. A member whose config has another name does not start
//! on this store. Such a store more likely belongs to another cluster than to a renamed one:
//! renaming would need all members at once, since replicas of different names refuse each other.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::determinism::random;
use crate::error::StartError;
use crate::files::{self, Files, Layout, damaged, io_error};
use crate::locks::lock;
use crate::wire::{self, proto};

/// Identity of this replica: its store id, and the cluster that it is bound to.
#[derive(Debug)]
pub(crate) struct ReplicaIdentity {
    pub(crate) id: u64,
    pub(crate) store: u64,
    /// Name of the cluster in this replica's config.
    name: String,
    files: Arc<dyn Files>,
    path: PathBuf,
    binding: Mutex<ClusterBinding>,
}

/// Binding of a replica to a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClusterBinding {
    /// Binding to no cluster.
    Free,
    /// Claim by a replica, possibly itself, that wants to found a cluster.
    Claimed {
        /// Id of the future cluster.
        cluster: u128,
        /// Id of the replica that wants to found it.
        by: u64,
    },
    /// Membership in the cluster with this id.
    Member(u128),
}

impl ClusterBinding {
    /// Returns the binding recorded in an identity file.
    fn of(kept: &proto::Identity) -> Self {
        match wire::join_optional(kept.cluster_high, kept.cluster_low) {
            None => Self::Free,
            Some(cluster) if kept.claimant != 0 => Self::Claimed {
                cluster,
                by: kept.claimant,
            },
            Some(cluster) => Self::Member(cluster),
        }
    }

    /// Returns the id of the claimed or joined cluster; `None` if there is none.
    pub(crate) fn cluster(self) -> Option<u128> {
        match self {
            Self::Free => None,
            Self::Claimed { cluster, .. } | Self::Member(cluster) => Some(cluster),
        }
    }
}

impl ReplicaIdentity {
    /// Reads the identity below a data directory, or creates one for a cluster called `name`.
    pub(crate) fn open(layout: &Layout, id: u64, name: &str) -> Result<Self, StartError> {
        let (files, path) = (layout.files.clone(), layout.identity());
        let kept = files::load_message::<proto::Identity>(&*files, &path)?;
        let (store, binding) = match &kept {
            Some(kept) if kept.id != id => {
                return Err(StartError::WrongStore(format!(
                    "{} belongs to replica {}, this is replica {id}",
                    path.display(),
                    kept.id
                )));
            }
            Some(kept) => {
                let binding = ClusterBinding::of(kept);
                check_name(&path, (&kept.cluster_name, binding), name)?;
                (kept.store, binding)
            }
            None if files.exists(&layout.mark()) || files.exists(&layout.log()) => {
                return Err(damaged(&path, 0, "missing beside a log"));
            }
            None => (random::draw_id(), ClusterBinding::Free),
        };
        let identity = Self {
            id,
            store,
            name: name.to_owned(),
            files,
            path,
            binding: Mutex::new(binding),
        };
        if kept.is_none_or(|kept| kept.cluster_name != name) {
            let stored = identity.keep(binding);
            stored.map_err(|error| io_error(&identity.path, error))?;
        }
        Ok(identity)
    }

    /// Returns the current binding.
    pub(crate) fn binding(&self) -> ClusterBinding {
        *lock(&self.binding)
    }

    /// Returns the id of the cluster that calls to peers name: the claimed or joined one; `None` if
    /// there is none.
    pub(crate) fn cluster(&self) -> Option<u128> {
        self.binding().cluster()
    }

    /// Returns the cluster's id as two halves for the wire; zeros if there is none.
    pub(crate) fn cluster_halves(&self) -> (u64, u64) {
        wire::split(self.cluster().unwrap_or(0))
    }

    /// Accepts the claim of the founder `by`. Returns `false` if this replica is bound to another
    /// cluster.
    pub(crate) fn claim(&self, cluster: u128, by: u64) -> io::Result<bool> {
        self.change(|binding| match binding {
            ClusterBinding::Free => Some(ClusterBinding::Claimed { cluster, by }),
            ClusterBinding::Claimed { cluster: other, .. } if other == cluster => Some(binding),
            ClusterBinding::Claimed { .. } | ClusterBinding::Member(_) => None,
        })
    }

    /// Releases `claim` if this replica is still bound by it. Returns whether it was.
    pub(crate) fn give_up(&self, claim: ClusterBinding) -> io::Result<bool> {
        self.change(|binding| {
            (binding == claim && matches!(binding, ClusterBinding::Claimed { .. }))
                .then_some(ClusterBinding::Free)
        })
    }

    /// Becomes a member of `cluster`. Returns `false` if this replica is bound to another cluster.
    pub(crate) fn enter(&self, cluster: u128) -> io::Result<bool> {
        self.change(|binding| {
            binding
                .cluster()
                .is_none_or(|tied| tied == cluster)
                .then_some(ClusterBinding::Member(cluster))
        })
    }

    /// Becomes a member at its own request, despite any claim. Only a replica without votes and
    /// entries may do so: the founder that claimed it can then do without it. Returns `false` if
    /// this replica is a member of another cluster.
    pub(crate) fn join(&self, cluster: u128) -> io::Result<bool> {
        self.change(|binding| match binding {
            ClusterBinding::Free | ClusterBinding::Claimed { .. } => {
                Some(ClusterBinding::Member(cluster))
            }
            ClusterBinding::Member(member) => (member == cluster).then_some(binding),
        })
    }

    /// Builds the header of a call to the store `to_store` of replica `to`.
    pub(crate) fn header(&self, to: u64, to_store: u64) -> proto::Header {
        let (cluster_high, cluster_low) = self.cluster_halves();
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
        let mut binding = lock(&self.binding);
        let Some(next) = next(*binding) else {
            return Ok(false);
        };
        if next != *binding {
            self.keep(next)?;
            *binding = next;
        }
        Ok(true)
    }

    fn keep(&self, binding: ClusterBinding) -> io::Result<()> {
        let (cluster_high, cluster_low) = wire::split(binding.cluster().unwrap_or(0));
        let claimant = match binding {
            ClusterBinding::Claimed { by, .. } => by,
            ClusterBinding::Free | ClusterBinding::Member(_) => 0,
        };
        let identity = proto::Identity {
            id: self.id,
            store: self.store,
            cluster_high,
            cluster_low,
            claimant,
            cluster_name: self.name.clone(),
        };
        files::store_message(&*self.files, &self.path, &identity)
    }
}

/// Refuses a config that names a different cluster than the store. A store that is in no cluster
/// takes the new name.
fn check_name(
    path: &Path,
    (kept, binding): (&str, ClusterBinding),
    name: &str,
) -> Result<(), StartError> {
    let ClusterBinding::Member(cluster) = binding else {
        return Ok(());
    };
    if kept == name {
        return Ok(());
    }
    Err(StartError::WrongStore(format!(
        "{} belongs to cluster {kept:?} with the id {}, this config has cluster.name {name:?}: give \
         this replica a data_dir of its own, or set cluster.name to {kept:?}",
        path.display(),
        wire::shown_id(cluster)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(folder: &Path, id: u64) -> Result<ReplicaIdentity, StartError> {
        open_as(folder, id, "quorate")
    }

    fn open_as(folder: &Path, id: u64, name: &str) -> Result<ReplicaIdentity, StartError> {
        let layout = Layout::new(folder);
        layout.create().unwrap();
        ReplicaIdentity::open(&layout, id, name)
    }

    #[test]
    fn a_store_serves_only_the_cluster_it_names() {
        let folder = tempfile::tempdir().unwrap();
        let identity = open(folder.path(), 1).unwrap();
        assert!(identity.claim(7, 2).unwrap());
        // Not a member yet, so the name may change.
        let identity = open_as(folder.path(), 1, "staging").unwrap();
        assert!(identity.enter(7).unwrap());
        let Err(StartError::WrongStore(why)) = open(folder.path(), 1) else {
            panic!("another name starts");
        };
        for told in [
            "\"quorate\"",
            "\"staging\"",
            "00000000000000000000000000000007",
        ] {
            assert!(why.contains(told), "{why}");
        }
        open_as(folder.path(), 1, "staging").unwrap();
    }

    #[test]
    fn a_store_keeps_its_id_and_replica() {
        let folder = tempfile::tempdir().unwrap();
        let first = open(folder.path(), 1).unwrap();
        assert_eq!(open(folder.path(), 1).unwrap().store, first.store);
        assert!(matches!(
            open(folder.path(), 2),
            Err(StartError::WrongStore(_))
        ));
    }

    #[test]
    fn a_store_binds_to_one_cluster_only() {
        let folder = tempfile::tempdir().unwrap();
        let identity = open(folder.path(), 1).unwrap();
        assert!(identity.claim(7, 2).unwrap());
        assert!(identity.claim(7, 2).unwrap());
        assert!(!identity.claim(8, 3).unwrap(), "another founder waits");
        assert!(!identity.enter(8).unwrap());
        assert_eq!(
            open(folder.path(), 1).unwrap().binding(),
            ClusterBinding::Claimed { cluster: 7, by: 2 }
        );
        assert!(identity.enter(7).unwrap());
        assert!(
            !identity.give_up(ClusterBinding::Member(7)).unwrap(),
            "a member stays"
        );
        assert!(!identity.join(8).unwrap());
        assert_eq!(
            open(folder.path(), 1).unwrap().binding(),
            ClusterBinding::Member(7)
        );
    }

    #[test]
    fn a_founding_claim_can_be_dropped_to_join() {
        let folder = tempfile::tempdir().unwrap();
        let identity = open(folder.path(), 1).unwrap();
        assert!(identity.claim(7, 2).unwrap());
        assert!(identity.give_up(identity.binding()).unwrap());
        assert_eq!(identity.binding(), ClusterBinding::Free);
        assert!(identity.claim(8, 3).unwrap());
        assert!(identity.join(9).unwrap());
        assert_eq!(identity.binding(), ClusterBinding::Member(9));
    }
}
