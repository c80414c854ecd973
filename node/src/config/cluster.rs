//! Checks of `[cluster]`: formation, secret and StatefulSet.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::file::{ClusterConfig, ConfigFile};
use super::form::show_duration;
use super::identity::IdSource;
use super::read::Settings;
use super::{Formation, identity};
use api::files::text::without_mark;

/// Reads the cluster's secret, if one is configured. Rejects a file that all users can access,
/// because anyone who can read it can act as a replica.
pub(super) fn secret(cluster: &ClusterConfig, found: &mut Settings) -> Option<raft::Secret> {
    let file = cluster.secret_file.as_deref()?;
    match read_secret(file) {
        Ok(secret) => Some(secret),
        Err(why) => {
            let path = "cluster.secret_file";
            let expected = "a file of 32 bytes or more that others may not read (chmod 600)";
            found.refuse(path, format!("{path}: {file:?}: {why}"), expected);
            None
        }
    }
}

fn read_secret(file: &Path) -> Result<raft::Secret, String> {
    let mode = std::fs::metadata(file).map_err(|error| error.to_string())?;
    let mode = mode.permissions().mode() & 0o777;
    if mode & 0o007 != 0 {
        return Err(format!("everybody may use it (mode {mode:03o})"));
    }
    let content = std::fs::read(file).map_err(|error| error.to_string())?;
    raft::Secret::new(without_mark(&content))
}

/// Checks the keys about timeouts and formation, and returns how the replica finds its cluster. The
/// result is only valid if there are no errors.
pub(super) fn formation(cluster: &ClusterConfig, found: &mut Settings) -> Formation {
    timeouts(cluster, found);
    let keys = ["peers", "peers_dns", "join", "bootstrap_expect"];
    if keys
        .iter()
        .all(|key| found.is_sound(&format!("cluster.{key}")))
    {
        two_ways(cluster, found);
        wrong_counts(cluster, found);
    }
    let (peers, join) = (cluster.peers.clone(), cluster.join.clone());
    let expect = cluster.bootstrap_expect.map(usize::from);
    match &cluster.peers_dns {
        Some(name) => Formation::Dns {
            name: name.clone(),
            expect: expect.unwrap_or(1),
        },
        None if !join.is_empty() => Formation::Join(join),
        None if peers.is_empty() => Formation::Alone,
        None => Formation::Peers {
            expect: expect.unwrap_or(peers.len()),
            peers,
        },
    }
}

/// Checks that the names of the StatefulSet are valid, and that this replica is one of its pods.
pub(super) fn statefulset(file: &ConfigFile, found: &mut Settings) {
    let (set, path) = (&file.cluster.statefulset, "cluster.statefulset.name");
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-.".contains(c);
    let Some(name) = &set.name else { return };
    if name.is_empty() || !name.chars().all(is_plain) {
        let message = format!("{path} is not a valid object name");
        found.refuse(path, message, "letters, digits, `-` and `.`");
        return;
    }
    if file.node.id != IdSource::Hostname {
        let message = format!("{path} is set, and node.id is {}", file.node.id.show());
        found.refuse(path, message, "node.id = \"from-hostname\" beside it");
        return;
    }
    let host = identity::host();
    let pod = host.split('.').next().unwrap_or_default();
    if pod.rsplit_once('-').is_none_or(|(set, _)| set != name)
        && identity::id_of_host(&host).is_some()
    {
        let message = format!("{path} is {name:?}, and this host is {host:?}");
        let expected = format!("a host that is one of its pods, such as \"{name}-0\"");
        found.refuse(path, message, &expected);
    }
}

fn timeouts(cluster: &ClusterConfig, found: &mut Settings) {
    let (heartbeat, timeout) = ("cluster.heartbeat", "cluster.election_timeout");
    let least = cluster.election_timeout.start;
    let is_sound = found.is_sound(heartbeat) && found.is_sound(timeout);
    if least >= cluster.heartbeat * 2 || !is_sound {
        return;
    }
    let message = format!(
        "{timeout} begins at {} with a {heartbeat} of {}",
        show_duration(&least),
        show_duration(&cluster.heartbeat)
    );
    let at = match found.places.contains_key(timeout) {
        true => timeout,
        false => heartbeat,
    };
    found.refuse(
        at,
        message,
        "a least election timeout of two heartbeats or more",
    );
}

fn two_ways(cluster: &ClusterConfig, found: &mut Settings) {
    let only_one = "only one of cluster.peers, cluster.peers_dns and cluster.join";
    let (has_peers, has_dns) = (!cluster.peers.is_empty(), cluster.peers_dns.is_some());
    if has_dns && has_peers {
        let message = "cluster.peers_dns is set beside cluster.peers";
        found.refuse("cluster.peers_dns", message.to_owned(), only_one);
    }
    if cluster.join.is_empty() {
        return;
    }
    if has_dns || has_peers {
        let message = "cluster.join is set beside the peers of a new cluster";
        found.refuse("cluster.join", message.to_owned(), only_one);
    }
    if cluster.bootstrap_expect.is_some() {
        let (path, message) = (
            "cluster.bootstrap_expect",
            "cluster.bootstrap_expect is set beside cluster.join",
        );
        let expected = "no bootstrap_expect where a running cluster is joined";
        found.refuse(path, message.to_owned(), expected);
    }
}

fn wrong_counts(cluster: &ClusterConfig, found: &mut Settings) {
    let peers = &cluster.peers;
    let mut rest = peers.iter().enumerate();
    if let Some((_, peer)) = rest.find(|(nth, peer)| peers[..*nth].contains(peer)) {
        let message = format!("cluster.peers names {peer} twice");
        found.refuse("cluster.peers", message, "each replica once");
    }
    let path = "cluster.bootstrap_expect";
    let Some(expect) = cluster.bootstrap_expect.map(usize::from) else {
        if cluster.peers_dns.is_some() {
            let message = format!("cluster.peers_dns is set, {path} is not");
            let expected =
                "bootstrap_expect, because a DNS name does not determine the number of replicas";
            found.refuse("cluster.peers_dns", message, expected);
        }
        return;
    };
    let names = format!("{path} is {expect}, cluster.peers names {}", peers.len());
    if peers.is_empty() {
        if expect > 1 && cluster.peers_dns.is_none() && cluster.join.is_empty() {
            let expected = "cluster.peers or cluster.peers_dns as well";
            found.refuse(path, format!("{path} is set without peers"), expected);
        }
    } else if expect * 2 <= peers.len() {
        let expected = "more than half of the peers, or two clusters could form";
        found.refuse(path, names, expected);
    } else if expect > peers.len() {
        found.refuse(path, names, "at most as many as there are peers");
    }
}
