//! The options of `raft`, the data plane and the admin API that a config results in. Sections that
//! are settings themselves, such as `[limits]`, are passed on as they are.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use api::base::clock::Clock;
use api::files::ring::RingSettings;
use api::proxy::{AllowedOrigins, FieldRules, HeaderRules, IpPrefix, ProxySettings};
use api::sessions::{SessionHeaders, SessionRules};
use api::users::api_keys::{KeyRules, ListAge};
use raft::{Formation, Peers, Promotion, ReplicaOptions, Storage};
use state::command::{Command, Envelope, Founding, Lane, Origin};
use state::ids::SessionId;
use state::prefix::HashSecret;
use state::users::FairnessSettings;

use super::ports::FIRST_COMMAND_SEQ;
use super::scaling;
use crate::config::{self, Config};

/// Returns the options of a Raft replica that peers reach at `peer` and that forms a cluster with
/// the command `first`.
#[must_use]
pub(super) fn raft_options(
    config: &Config,
    peer: SocketAddr,
    storage: Storage,
    first: &[u8],
) -> ReplicaOptions {
    let at = |port: u16| format!("{}:{port}", config.listen.host());
    let advertise = at(peer.port());
    let url = |port: u16, has_tls: bool| match has_tls {
        true => format!("https://{}", at(port)),
        false => format!("http://{}", at(port)),
    };
    let (data, admin) = (&config.tls.data.cert_file, &config.tls.admin.cert_file);
    let set = config.cluster.statefulset.name.as_ref();
    let set = set.map(|name| (scaling::LABEL.to_owned(), name.clone()));
    let labels = [
        (
            "data".to_owned(),
            url(config.listen.data.port(), data.is_some()),
        ),
        (
            "admin".to_owned(),
            url(config.listen.admin.port(), admin.is_some()),
        ),
        ("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
    ];
    let labels: BTreeMap<_, _> = labels.into_iter().chain(set).collect();
    let formation = match &config.formation {
        config::Formation::Alone => Formation::Bootstrap {
            peers: Peers::List(vec![advertise.clone()]),
            expect: 1,
            first_command: first.to_vec(),
        },
        config::Formation::Peers { peers, expect } => Formation::Bootstrap {
            peers: Peers::List(peers.clone()),
            expect: *expect,
            first_command: first.to_vec(),
        },
        config::Formation::Dns { name, expect } => Formation::Bootstrap {
            peers: Peers::Dns(name.clone()),
            expect: *expect,
            first_command: first.to_vec(),
        },
        config::Formation::Join(members) => Formation::Join(Peers::List(members.clone())),
    };
    ReplicaOptions {
        id: config.id.0,
        data_dir: config.node.data_dir.clone(),
        advertise,
        cluster_name: config.cluster.name.clone(),
        labels,
        formation,
        replaces_lost: config.cluster.replace_lost,
        promotion: config.cluster.auto_promote.then(|| Promotion {
            after: config.cluster.promote_after,
            voters_max: config.cluster.voters_max.into(),
        }),
        heartbeat: config.cluster.heartbeat,
        election_timeout: config.cluster.election_timeout.clone(),
        snapshot_every_entries: config.cluster.snapshot_every.into(),
        snapshot_every_bytes: config.cluster.snapshot_every_bytes,
        storage,
    }
}

/// Returns the encoded command that forms a cluster.
pub(super) fn first_command(
    config: &Config,
    session: SessionId,
    hashing: (u64, HashSecret),
    clock: &Clock,
) -> Vec<u8> {
    state::codec::encode_envelope(&Envelope {
        origin: Origin {
            replica: config.id,
            session,
            lane: Lane::Admin,
            seq: FIRST_COMMAND_SEQ,
        },
        proposed_at_ms: clock.unix_ms(),
        command: founding(config, hashing),
    })
}

/// Returns the command that founds a cluster. It contains every replicated setting of the config
/// except backends, so that no config that is read later can set one first.
fn founding(config: &Config, (hash_seed, hash_secret): (u64, HashSecret)) -> Command {
    Command::from(Founding {
        hash_seed,
        hash_secret,
        policy: config.policy.clone(),
        fairness: FairnessSettings::default(),
        routing: config.routing.clone(),
        admission: config.admission.founding.clone(),
        user_defaults: config.users.defaults.clone(),
    })
}

/// Returns the host names that the admin listener accepts besides addresses and `localhost`. An
/// attacker cannot make any of them resolve to it (DNS rebinding).
#[must_use]
pub(super) fn own_hosts(config: &Config) -> Vec<String> {
    let mut hosts = config.admin.hosts.clone();
    hosts.push(config.listen.host());
    // Outside Linux, the machine's name must be configured.
    hosts.extend(std::fs::read_to_string("/proc/sys/kernel/hostname").ok());
    hosts.iter().map(|host| host.trim().to_owned()).collect()
}

/// Returns the settings of the data plane. Config parsing has checked the form of each value.
#[must_use]
pub(super) fn proxy_settings(config: &Config) -> ProxySettings {
    let (requests, users) = (&config.requests, &config.users);
    ProxySettings {
        limits: config.limits,
        timeouts: config.timeouts,
        streams: config.streams,
        retry: config.retry.clone(),
        expose: users.expose,
        charges: users.charges,
        min_index_wait: config.sections.routing.min_index_wait,
        identify_by: users.identify_by.clone(),
        sessions: session_rules(&config.sessions),
        names: config.names.clone(),
        trusted_proxies: users.trusted_proxies.clone(),
        api_keys: config.api_keys.clone(),
        priority_max: config.admission.priority_max,
        usage_splice: config.usage.splice,
        extra_paths: requests.extra_paths.clone(),
        fields: FieldRules::new(
            requests.refuse_fields.clone(),
            requests.strip_fields.clone(),
        ),
        strip_headers: HeaderRules::new(&requests.strip_headers).unwrap_or_default(),
        archive: (config.decisions.disk_max > 0).then(|| RingSettings {
            folder: config.node.data_dir.join("decisions"),
            bytes_max: config.decisions.disk_max,
        }),
        decisions_max: config.admin.decisions as usize,
        cors: AllowedOrigins::new(&config.cors.allow_origins).unwrap_or_default(),
        logged_requests: config.log.access,
        ..ProxySettings::new(config.id)
    }
}

/// Returns the rules by which requests name their sessions. Config parsing has checked the names.
fn session_rules(sessions: &config::SessionsConfig) -> SessionRules {
    let headers = sessions.headers.iter().filter_map(|it| {
        let parent = it.parent.as_deref().map(str::parse).transpose();
        Some(SessionHeaders {
            session: it.session.parse().ok()?,
            parent: parent.ok()?,
        })
    });
    SessionRules::new(sessions.enabled, &headers.collect::<Vec<_>>())
}

/// Returns the rules for the cluster's API keys. `list` returns the age of the replicated list.
#[must_use]
pub(super) fn key_rules(users: &config::UsersConfig, list: ListAge) -> KeyRules {
    let after = users.refuse_stale_keys_after;
    KeyRules {
        is_required: users.require_key,
        refuse_stale_after: (after > Duration::ZERO).then_some(after),
        list: Arc::new(list),
    }
}

/// Logs a warning if clients on other hosts can choose their own user names.
pub(super) fn tell_of_names(config: &Config) {
    let is_unset = config.users.trusted_proxies == IpPrefix::LOOPBACK;
    let are_checked = config.api_keys.is_some() || config.users.require_key;
    if !are_checked && is_unset && !config.listen.data.ip().is_loopback() {
        tracing::warn!(
            "fairness and limits hold between names, and clients name themselves: no keys are checked \
             (users.require_key, users.api_keys_file) and no proxy is trusted but on this host (users.trusted_proxies)"
        );
    }
}
