//! Introductions: what a replica announces about itself, and what it accepts from others.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::lookup_host;
use tonic::Status;

use super::ReplicaInner;
use super::peer_discovery::AskError;
use super::peers::check_store;
use crate::net::PeerClient;
use crate::options::{Formation, Peers};
use crate::status::PeerState;
use crate::types;
use crate::wire::{self, proto};

/// Timeout of a call that asks a peer about itself.
pub(super) const INFO_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of labels of a member. With the limits below, in bytes, all members together stay
/// far below the size limit of a snapshot's head.
const LABELS_MAX: usize = 32;
const LABEL_NAME_BYTES_MAX: usize = 64;
const LABEL_BYTES_MAX: usize = 512;
const ADDRESS_BYTES_MAX: usize = 262;
const _: () = {
    let label = LABEL_NAME_BYTES_MAX + LABEL_BYTES_MAX + 16;
    let member = LABELS_MAX * label + ADDRESS_BYTES_MAX + 64;
    assert!(255 * member < crate::snapshot::HEAD_BYTES_MAX);
};

/// Checks the address and the labels that a member announced. Returns what is wrong with them.
pub(super) fn check_told(address: &str, labels: &BTreeMap<String, String>) -> Result<(), String> {
    let port = address
        .rsplit_once(':')
        .map(|(_, port)| port.parse::<u16>());
    if address.len() > ADDRESS_BYTES_MAX || !matches!(port, Some(Ok(_))) {
        let shown: String = address.chars().take(80).collect();
        return Err(format!(
            "address {shown:?}: a host and port of at most {ADDRESS_BYTES_MAX} bytes expected"
        ));
    }
    if labels.len() > LABELS_MAX {
        let count = labels.len();
        return Err(format!("{count} labels, at most {LABELS_MAX} expected"));
    }
    for (name, value) in labels {
        if name.len() > LABEL_NAME_BYTES_MAX || value.len() > LABEL_BYTES_MAX {
            return Err(format!(
                "a label of {} and {} bytes, at most {LABEL_NAME_BYTES_MAX} and {LABEL_BYTES_MAX} \
                 expected",
                name.len(),
                value.len()
            ));
        }
    }
    Ok(())
}

impl ReplicaInner {
    /// Refuses a caller that is configured for another cluster.
    pub(crate) fn check_name(&self, told: &str) -> Result<(), Status> {
        let (theirs, ours) = (told, self.options.cluster_name.as_str());
        if theirs == ours {
            return Ok(());
        }
        let theirs: String = theirs.chars().take(80).collect();
        Err(Status::failed_precondition(format!(
            "meant for cluster {theirs:?}, this replica is configured for {ours:?}"
        )))
    }

    pub(super) fn info_request(&self) -> proto::InfoRequest {
        let (cluster_high, cluster_low) = self.links.identity.cluster_halves();
        proto::InfoRequest {
            cluster_name: self.options.cluster_name.clone(),
            cluster_high,
            cluster_low,
            from: self.links.identity.id,
            from_store: self.links.identity.store,
        }
    }

    /// Introduces this replica to `asker`. To replicas of other clusters, a member reveals only its
    /// id, that it is a member, and its cluster's name and the first half of the cluster's id. Its
    /// store and the full id of its cluster authenticate calls between members.
    pub(crate) fn introduce(&self, asker: &proto::InfoRequest) -> proto::InfoResponse {
        let theirs = wire::join_optional(asker.cluster_high, asker.cluster_low);
        let identity = &self.links.identity;
        let cluster = identity.cluster();
        let is_member = self.is_member();
        let (cluster_high, cluster_low) = identity.cluster_halves();
        let introduced = proto::InfoResponse {
            id: identity.id,
            is_member,
            cluster_name: self.options.cluster_name.clone(),
            cluster_first: cluster_high,
            ..proto::InfoResponse::default()
        };
        if is_member && theirs != cluster {
            return introduced;
        }
        let (membership_index, members) = self.membership((asker.from, asker.from_store));
        proto::InfoResponse {
            store: identity.store,
            cluster_high,
            cluster_low,
            address: self.options.advertise.clone(),
            labels: self.options.labels.clone().into_iter().collect(),
            members,
            membership_index,
            ..introduced
        }
    }

    /// Asks the replica at `address` to introduce itself.
    pub(super) async fn ask(&self, address: &str) -> Result<proto::InfoResponse, AskError> {
        let request = self.info_request();
        let call = async |mut client: PeerClient| client.info(request).await;
        let answer = self.links.call_once(address, INFO_TIMEOUT, call).await;
        let info = answer.map_err(AskError::from).inspect_err(|error| {
            // The peer runs but refuses this replica: an operator must check a config.
            if error.state == PeerState::OtherCluster && self.refusals.try_acquire() {
                tracing::warn!(address, why = error.why, "peer refused the call");
            }
        })?;
        let (theirs, ours) = (&*info.cluster_name, self.options.cluster_name.as_str());
        if theirs != ours {
            let theirs: String = theirs.chars().take(80).collect();
            return Err(AskError {
                state: PeerState::OtherCluster,
                why: format!("configured for cluster {theirs:?}, this replica for {ours:?}"),
            });
        }
        Ok(info)
    }

    /// Returns the number of founding voters in this replica's config (`expect`); `None` if the
    /// config names no founders, or not the replica at `address`.
    pub(super) async fn voters_wanted_with(&self, address: &str) -> Option<usize> {
        let Formation::Bootstrap { peers, expect, .. } = &self.options.formation else {
            return None;
        };
        let named = match peers {
            Peers::List(list) if list.iter().any(|peer| peer == address) => return Some(*expect),
            Peers::List(list) => list.clone(),
            Peers::Dns(name) => vec![name.clone()],
        };
        let asked = resolved(address).await;
        for peer in &named {
            if !asked.is_disjoint(&resolved(peer).await) {
                return Some(*expect);
            }
        }
        None
    }

    /// Returns the member `id` if it has this `store`, otherwise the reason for refusing it.
    pub(super) fn check_member(&self, id: u64, store: u64) -> Result<types::Node, String> {
        let node = self.node(id);
        let node = node.ok_or_else(|| format!("replica {id} is not a member"))?;
        check_store(id, &node, store).map_err(|status| status.message().to_owned())?;
        Ok(node)
    }
}

async fn resolved(address: &str) -> BTreeSet<SocketAddr> {
    match lookup_host(address).await {
        Ok(found) => found.collect(),
        Err(_) => BTreeSet::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_info_is_bounded() {
        let labels = |count: usize, bytes: usize| -> BTreeMap<String, String> {
            let label = |n| (format!("label-{n}"), "x".repeat(bytes));
            (0..count).map(label).collect()
        };
        assert_eq!(check_told("[::1]:80", &labels(LABELS_MAX, 9)), Ok(()));
        assert_eq!(check_told("host:80", &labels(1, LABEL_BYTES_MAX)), Ok(()));
        for (address, labels) in [
            ("", labels(0, 0)),
            ("host", labels(0, 0)),
            ("host:port", labels(0, 0)),
            ("host:80", labels(LABELS_MAX + 1, 1)),
            ("host:80", labels(1, LABEL_BYTES_MAX + 1)),
            (&format!("{}:80", "x".repeat(300)), labels(0, 0)),
        ] {
            assert!(check_told(address, &labels).is_err(), "{address}");
        }
    }
}
