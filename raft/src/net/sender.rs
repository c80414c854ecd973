//! Identifies the replica on whose behalf a connection calls.

use std::sync::{Arc, OnceLock};

use tonic::Status;

/// Replica at the other end of an incoming connection: the one that the handshake proved, or else
/// the first id named in a call. If the peer showed a certificate, it must name that id.
#[derive(Debug, Clone, Default)]
pub(crate) struct PeerSender {
    id: Arc<OnceLock<u64>>,
    certified: Option<Arc<CertifiedIds>>,
    refusal: Option<Arc<Status>>,
}

/// Ids that a peer's certificate names.
#[derive(Debug)]
struct CertifiedIds {
    ids: Vec<u64>,
    cluster_name: String,
}

impl PeerSender {
    /// Creates a sender whose id the handshake has proven.
    pub(super) fn proven(id: u64) -> Self {
        Self {
            id: Arc::new(OnceLock::from(id)),
            ..Self::default()
        }
    }

    /// Creates a sender whose certificate names `ids`. The first call decides which of them it is.
    pub(super) fn certified(ids: Vec<u64>, cluster_name: &str) -> Self {
        let cluster_name = cluster_name.to_owned();
        Self {
            certified: Some(Arc::new(CertifiedIds { ids, cluster_name })),
            ..Self::default()
        }
    }

    /// Creates a sender that has not proven its identity. Every call is rejected with `why`.
    pub(super) fn refused(why: Status) -> Self {
        Self {
            refusal: Some(Arc::new(why)),
            ..Self::default()
        }
    }

    /// Returns why every call on this connection is rejected; `None` if calls are accepted.
    pub(super) fn refusal(&self) -> Option<&Status> {
        self.refusal.as_deref()
    }

    /// Ties the connection to `id`. Rejects a second id, or one that the certificate does not name.
    pub(crate) fn bind(&self, id: u64) -> Result<(), Status> {
        if let Some(certified) = &self.certified
            && !certified.ids.contains(&id)
        {
            let CertifiedIds { ids, cluster_name } = &**certified;
            return Err(Status::permission_denied(format!(
                "expected a certificate of replica {id} of cluster {cluster_name:?}, this one is \
                 of replica {ids:?}"
            )));
        }
        let bound = *self.id.get_or_init(|| id);
        if bound == id {
            return Ok(());
        }
        Err(Status::failed_precondition(format!(
            "replica {id} is named on a connection of replica {bound}"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_belongs_to_the_first_replica_named_on_it() {
        let sender = PeerSender::default();
        assert!(sender.bind(2).is_ok());
        assert!(sender.clone().bind(2).is_ok());
        assert!(sender.clone().bind(3).is_err());
    }

    #[test]
    fn a_certificate_authenticates_only_its_replica_ids() {
        let sender = PeerSender::certified(vec![2, 3], "prod");
        let refused = sender.bind(1).unwrap_err();
        assert!(
            refused
                .message()
                .contains("expected a certificate of replica 1")
        );
        assert!(sender.bind(3).is_ok(), "the refused call bound nothing");
        assert!(sender.bind(2).is_err(), "one id a connection");
    }
}
