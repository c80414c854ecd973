//! Builds a [`Config`] from checked values: everything that depends on more than one key, or on a
//! file.

use std::path::PathBuf;

use api::proxy::{ApiKeys, Expose, UsageRequest};
use state::ids::ReplicaId;
use tracing_subscriber::EnvFilter;

use super::fault::{Fault, Place};
use super::layers::{Settings, Values};
use super::read::{
    address, count, duration, flag, integer, place, range, refuse, size, text, texts,
};
use super::value::{Value, is_host};
use super::{AdminListener, Cluster, Config, Drain, Formation, Listen, Log, Node, Retry, Users};
use super::{admission, cluster, engines, key_file, models, policy, requests, routing, traffic};

/// Checks everything together; what is wrong joins `settings.faults`. `None` when a value that the
/// config needs is missing or unfit, which is then among the faults.
pub(super) fn check(settings: &mut Settings) -> Option<Config> {
    let mut faults = Vec::new();
    let values = &settings.values;
    let listen = listen(values, &mut faults);
    let cluster = cluster(values, &mut faults);
    let users = users(values, &mut faults);
    let log = log(values, &mut faults);
    let requests = requests::requests(values, &mut faults);
    let probes = engines::probes(values, &mut faults);
    let models = models::models(&settings.models, &mut faults);
    let has_tokens = models.iter().any(|model| !model.tokenizer.is_character());
    let backends = engines::backends(&settings.backends, has_tokens, &mut faults);
    let engine_keys = engines::keys(values, &settings.backends, &mut faults);
    let admission = admission::settings(values, &mut faults);
    let policies = policy::policies(values, &mut faults);
    let entries = &settings.models;
    let routing = routing::settings(values, entries, &policies, &mut faults);
    let circuit = routing::circuit(values, &mut faults);
    let config = (|| {
        Some(Config {
            node: Node {
                id: ReplicaId(u8::try_from(integer(values, "node.id")?).ok()?),
                data_dir: PathBuf::from(text(values, "node.data_dir")?),
            },
            listen: listen?,
            cluster: cluster?,
            admin: AdminListener {
                hosts: texts(values, "admin.hosts").unwrap_or_default(),
            },
            models,
            backends,
            engine_keys: engine_keys?,
            secret_files: engines::secret_files(values, &settings.backends),
            policy: policy::named(&policies, &text(values, "routing.policy")?)?,
            policy_overrides: if flag(values, "routing.allow_override")? {
                policies
            } else {
                Vec::new()
            },
            routing: routing?,
            select: routing::select(values, entries)?,
            circuit: circuit?,
            requests: requests?,
            admission: admission?,
            codel_target: duration(values, "admission.codel_target")?,
            priority_max: i16::try_from(integer(values, "admission.priority_max")?).ok()?,
            users: users?,
            limits: traffic::limits(values)?,
            usage_splice: match text(values, "usage.splice")?.as_str() {
                "continuous" => UsageRequest::Continuous,
                "final" => UsageRequest::Final,
                _ => UsageRequest::Off,
            },
            timeouts: traffic::timeouts(values)?,
            probes: probes?,
            retry: Retry {
                attempts: count(values, "retry.attempts")?,
                budget_percent: count(values, "retry.budget_percent")?,
                concurrency_min: count(values, "retry.min_concurrency")?,
                statuses: match &values.get("retry.statuses")?.value {
                    Value::Statuses(statuses) => statuses.clone(),
                    _ => return None,
                },
            },
            drain: drain(values)?,
            log: log?,
        })
    })();
    settings.faults.append(&mut faults);
    config
}

fn listen(values: &Values, faults: &mut Vec<Fault>) -> Option<Listen> {
    let names = ["listen.data", "listen.admin", "listen.peer"];
    let addresses = names.map(|name| address(values, name));
    for (nth, name) in names.iter().enumerate() {
        let Some(mine) = addresses[nth] else { continue };
        for (other, other_name) in addresses[..nth].iter().zip(names) {
            let Some(other) = other else { continue };
            let is_same_host = other.ip() == mine.ip()
                || other.ip().is_unspecified()
                || mine.ip().is_unspecified();
            if is_same_host && other.port() == mine.port() && mine.port() != 0 {
                let message = format!("{name} is {mine}, which {other_name} has taken");
                refuse(
                    values,
                    name,
                    message,
                    "a port of its own for each listener",
                    faults,
                );
            }
        }
    }
    let [data, admin, peer] = addresses;
    let peer = peer?;
    let advertise = match text(values, "listen.advertise") {
        Some(host) if is_host(&host) => host,
        Some(host) => {
            let message = format!("listen.advertise is {host:?}");
            let expected = "a host name or IP address without a port, IPv6 in brackets";
            refuse(values, "listen.advertise", message, expected, faults);
            return None;
        }
        None if peer.ip().is_unspecified() => {
            let message = format!("listen.peer is {peer} and listen.advertise is not set");
            let expected = "listen.advertise, the host that other replicas reach this one at";
            refuse(values, "listen.peer", message, expected, faults);
            return None;
        }
        None if peer.is_ipv6() => format!("[{}]", peer.ip()),
        None => peer.ip().to_string(),
    };
    Some(Listen {
        data: data?,
        admin: admin?,
        peer,
        advertise,
    })
}

fn cluster(values: &Values, faults: &mut Vec<Fault>) -> Option<Cluster> {
    let formation = formation(values, faults);
    let heartbeat = duration(values, "cluster.heartbeat");
    let election_timeout = range(values, "cluster.election_timeout");
    if let (Some(heartbeat), Some(timeout)) = (heartbeat, &election_timeout)
        && timeout.start < heartbeat * 2
    {
        let message = format!(
            "cluster.election_timeout begins at {} with a cluster.heartbeat of {}",
            humantime::format_duration(timeout.start),
            humantime::format_duration(heartbeat)
        );
        let expected = "a least election timeout of two heartbeats or more";
        let is_timeout_set = place(values.get("cluster.election_timeout")) != Place::Nowhere;
        let at = if is_timeout_set {
            "cluster.election_timeout"
        } else {
            "cluster.heartbeat"
        };
        refuse(values, at, message, expected, faults);
    }
    Some(Cluster {
        name: cluster::name(values, faults)?,
        secret: cluster::secret(values, faults),
        is_secret_optional: flag(values, "cluster.secret_optional")?,
        formation: formation?,
        flush_interval: duration(values, "cluster.flush_interval")?,
        heartbeat: heartbeat?,
        election_timeout: election_timeout?,
        snapshot_every_entries: u64::from(count(values, "cluster.snapshot_every")?),
        snapshot_every_bytes: size(values, "cluster.snapshot_every_bytes")?,
    })
}

/// How the cluster is found, as far as each key by itself is right.
struct Finding {
    peers: Vec<String>,
    join: Vec<String>,
    dns: Option<String>,
    expect: Option<usize>,
}

fn formation(values: &Values, faults: &mut Vec<Fault>) -> Option<Formation> {
    let expect = integer(values, "cluster.bootstrap_expect");
    let found = Finding {
        peers: texts(values, "cluster.peers").unwrap_or_default(),
        join: texts(values, "cluster.join").unwrap_or_default(),
        dns: text(values, "cluster.peers_dns"),
        expect: expect.and_then(|expect| usize::try_from(expect).ok()),
    };
    let before = faults.len();
    found.refuse_two_ways(values, faults);
    found.refuse_wrong_counts(values, faults);
    if faults.len() > before {
        return None;
    }
    Some(match found {
        Finding {
            dns: Some(name),
            expect,
            ..
        } => Formation::Dns {
            name,
            expect: expect?,
        },
        Finding { join, .. } if !join.is_empty() => Formation::Join(join),
        Finding { peers, .. } if peers.is_empty() => Formation::Alone,
        Finding { peers, expect, .. } => Formation::Peers {
            expect: expect.unwrap_or(peers.len()),
            peers,
        },
    })
}

impl Finding {
    fn refuse_two_ways(&self, values: &Values, faults: &mut Vec<Fault>) {
        let only_one = "only one of cluster.peers, cluster.peers_dns and cluster.join";
        if self.dns.is_some() && !self.peers.is_empty() {
            let message = "cluster.peers_dns is set beside cluster.peers".to_owned();
            refuse(values, "cluster.peers_dns", message, only_one, faults);
        }
        if !self.join.is_empty() && (self.dns.is_some() || !self.peers.is_empty()) {
            let message = "cluster.join is set beside the peers of a new cluster".to_owned();
            refuse(values, "cluster.join", message, only_one, faults);
        }
        if !self.join.is_empty() && self.expect.is_some() {
            let message = "cluster.bootstrap_expect is set beside cluster.join".to_owned();
            let expected = "no bootstrap_expect where a running cluster is joined";
            refuse(
                values,
                "cluster.bootstrap_expect",
                message,
                expected,
                faults,
            );
        }
    }

    fn refuse_wrong_counts(&self, values: &Values, faults: &mut Vec<Fault>) {
        let peers = &self.peers;
        let twice = peers
            .iter()
            .enumerate()
            .find(|(nth, peer)| peers[..*nth].contains(peer));
        if let Some((_, peer)) = twice {
            let message = format!("cluster.peers names {peer} twice");
            refuse(
                values,
                "cluster.peers",
                message,
                "each replica once",
                faults,
            );
        }
        let path = "cluster.bootstrap_expect";
        match self.expect {
            Some(expect) if !peers.is_empty() && expect * 2 <= peers.len() => {
                let message = format!("{path} is {expect}, cluster.peers names {}", peers.len());
                let expected = "more than half of the peers, or two clusters could form";
                refuse(values, path, message, expected, faults);
            }
            Some(expect) if !peers.is_empty() && expect > peers.len() => {
                let message = format!("{path} is {expect}, cluster.peers names {}", peers.len());
                refuse(
                    values,
                    path,
                    message,
                    "at most as many as there are peers",
                    faults,
                );
            }
            Some(2..) if self.dns.is_none() && self.join.is_empty() && peers.is_empty() => {
                let message = format!("{path} is set without peers");
                refuse(
                    values,
                    path,
                    message,
                    "cluster.peers or cluster.peers_dns as well",
                    faults,
                );
            }
            None if self.dns.is_some() => {
                let message = format!("cluster.peers_dns is set, {path} is not");
                let expected = "bootstrap_expect, as a name does not say how many there are";
                refuse(values, "cluster.peers_dns", message, expected, faults);
            }
            Some(_) | None => {}
        }
    }
}

fn users(values: &Values, faults: &mut Vec<Fault>) -> Option<Users> {
    let identify_by = texts(values, "users.identify_by")?
        .iter()
        .map(|way| way.parse().ok())
        .collect::<Option<Vec<_>>>()?;
    let trusted_proxies = texts(values, "users.trusted_proxies")?
        .iter()
        .map(|prefix| prefix.parse().ok())
        .collect::<Option<Vec<_>>>()?;
    let expose = match text(values, "users.expose")?.as_str() {
        "none" => Expose::None,
        "basic" => Expose::Basic,
        _ => Expose::Full,
    };
    let file = text(values, "users.api_keys_file").map(PathBuf::from);
    let api_keys = match file.as_deref().map(key_file::read) {
        None => None,
        Some(Ok(told)) => {
            let keys = ApiKeys::default();
            keys.replace(told);
            Some(keys)
        }
        Some(Err(why)) => {
            let path = "users.api_keys_file";
            let expected = "a file with one key a line";
            refuse(values, path, format!("{path}: {why}"), expected, faults);
            return None;
        }
    };
    Some(Users {
        identify_by,
        trusted_proxies,
        api_keys,
        api_keys_file: file,
        expose,
    })
}

fn drain(values: &Values) -> Option<Drain> {
    Some(Drain {
        dns_ttl: duration(values, "drain.dns_ttl")?,
        deadline: duration(values, "drain.deadline")?,
    })
}

fn log(values: &Values, faults: &mut Vec<Fault>) -> Option<Log> {
    let filter = text(values, "log.level")?;
    if EnvFilter::builder().parse(&filter).is_err() {
        let message = format!("log.level is {filter:?}");
        let expected = "error, warn, info, debug, trace, or a filter such as \"info,raft=debug\"";
        refuse(values, "log.level", message, expected, faults);
    }
    Some(Log {
        is_json: text(values, "log.format")? == "json",
        filter,
    })
}
