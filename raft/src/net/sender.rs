//! Which replica a connection speaks for.

use std::sync::{Arc, OnceLock};

use tonic::Status;

/// The replica at the other end of an incoming connection: the one that the handshake proved, or
/// else the first id named in a call.
#[derive(Debug, Clone, Default)]
pub(crate) struct PeerSender {
    id: Arc<OnceLock<u64>>,
    lacks_secret: bool,
}

impl PeerSender {
    /// The peer's handshake has proven this id.
    pub(super) fn proven(id: u64) -> Self {
        Self {
            id: Arc::new(OnceLock::from(id)),
            lacks_secret: false,
        }
    }

    /// The peer does not know the cluster's secret; every call is answered with that.
    pub(super) fn without_secret() -> Self {
        Self {
            lacks_secret: true,
            ..Self::default()
        }
    }

    /// Whether every call on this connection is refused.
    pub(super) fn lacks_secret(&self) -> bool {
        self.lacks_secret
    }

    /// Ties the connection to `id`; refuses a second id.
    pub(crate) fn bind(&self, id: u64) -> Result<(), Status> {
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
    fn a_connection_belongs_to_the_first_that_is_named_on_it() {
        let sender = PeerSender::default();
        assert!(sender.bind(2).is_ok());
        assert!(sender.clone().bind(2).is_ok());
        assert!(sender.clone().bind(3).is_err());
    }
}
