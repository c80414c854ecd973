//! Converts the config to the options of `raft` and the data plane.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use api::base::clock::Clock;
use api::engines::backends::ProbeSettings;
use api::proxy::{AllowedOrigins, IpPrefix, ProxyLimits, ProxySettings};
use api::users::api_keys::{KeyRules, ListAge};
use http::StatusCode;
use raft::{Formation, Peers, Promotion, ReplicaOptions, Storage};
use state::admission::RetryAllowance;
use state::command::{Command, Envelope, Founding, Lane, Origin};
use state::ids::SessionId;
use state::prefix::HashSecret;
use state::users::FairnessSettings;

use super::ports::FIRST_COMMAND_SEQ;
use super::scaling;
use crate::config::{self, Config, RetryConfig};

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
        cluster_name: config.cluster.name.0.clone(),
        labels,
        formation,
        replaces_lost: config.cluster.replace_lost,
        promotion: config.cluster.auto_promote.then(|| Promotion {
            after: *config.cluster.promote_after,
            voters_max: config.cluster.voters_max.into(),
        }),
        heartbeat: *config.cluster.heartbeat,
        election_timeout: config.cluster.election_timeout.0.clone(),
        snapshot_every_entries: config.cluster.snapshot_every.into(),
        snapshot_every_bytes: *config.cluster.snapshot_every_bytes,
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
        admission: config.admission.clone(),
        user_defaults: config.user_defaults.clone(),
    })
}

/// Returns the settings of the probes.
#[must_use]
pub(super) fn probe_settings(config: &Config) -> ProbeSettings {
    let probes = &config.probes;
    ProbeSettings {
        interval: *probes.interval,
        timeout: *probes.timeout,
        models_interval: *probes.models_interval,
        health_path: probes.health_path.as_deref().cloned(),
        panic_threshold_percent: probes.panic_threshold_percent,
        keys: config.engine_keys.clone(),
        ..ProbeSettings::default()
    }
}

/// Returns the host names that the admin listener accepts besides addresses and `localhost`. An
/// attacker cannot make any of them resolve to it (DNS rebinding).
#[must_use]
pub(super) fn own_hosts(config: &Config) -> Vec<String> {
    let mut hosts = config::values(&config.admin.hosts);
    hosts.push(config.listen.host());
    // Outside Linux, the machine's name must be configured.
    hosts.extend(std::fs::read_to_string("/proc/sys/kernel/hostname").ok());
    hosts.iter().map(|host| host.trim().to_owned()).collect()
}

/// Returns the settings of the data plane.
#[must_use]
pub(super) fn proxy_settings(config: &Config) -> ProxySettings {
    let mut settings = ProxySettings::new(config.id);
    settings.limits = limits(&config.limits);
    settings.timeouts.body_idle = *config.timeouts.body_idle;
    settings.timeouts.first_byte = *config.timeouts.first_byte;
    settings.timeouts.answer_idle = *config.timeouts.idle;
    settings.timeouts.untaken = *config.timeouts.untaken;
    settings.timeouts.held_back = *config.timeouts.held_back;
    settings.pool.connect_timeout = *config.timeouts.connect;
    settings.expose = config.users.expose;
    settings.charges = config.users.charges;
    settings.identify_by = config::values(&config.users.identify_by);
    settings.trusted_proxies = config::values(&config.users.trusted_proxies);
    settings.api_keys.clone_from(&config.api_keys);
    let statuses = config.retry.statuses.iter();
    settings.retry_statuses = statuses
        .filter_map(|status| StatusCode::from_u16(**status).ok())
        .collect();
    settings.attempts_max = to_usize(config.retry.attempts);
    settings.retry_allowance = retry_allowance(&config.retry);
    settings.priority_max = config.priority_max;
    settings.usage_splice = config.usage.splice;
    settings.extra_paths.clone_from(&config.extra_paths);
    settings.when_unsalted = config.users.when_unsalted;
    settings.fields = config.fields.clone();
    settings.strip_headers = config.strip_headers.clone();
    settings.decisions_max = to_usize(config.admin.decisions);
    let origins = config::values(&config.cors.allow_origins);
    // Config parsing has checked the form of each origin.
    settings.cors = AllowedOrigins::new(&origins).unwrap_or_default();
    settings.logged_requests = config.log.access;
    settings
}

/// Returns the rules for the cluster's API keys. `list` returns the age of the replicated list.
#[must_use]
pub(super) fn key_rules(users: &config::UsersConfig, list: ListAge) -> KeyRules {
    KeyRules {
        is_required: users.require_key,
        when_stale: users.when_stale,
        stale_after: *users.stale_after,
        list: Arc::new(list),
    }
}

/// Logs a warning if clients on other hosts can choose their own user names.
pub(super) fn tell_of_names(config: &Config) {
    let is_unset = config::values(&config.users.trusted_proxies) == IpPrefix::LOOPBACK;
    let are_checked = config.api_keys.is_some() || config.users.require_key;
    if !are_checked && is_unset && !config.listen.data.ip().is_loopback() {
        tracing::warn!(
            "fairness and limits hold between names, and clients name themselves: no keys are checked \
             (users.require_key, users.api_keys_file) and no proxy is trusted but on this host (users.trusted_proxies)"
        );
    }
}

/// Returns the retry budget.
pub(super) fn retry_allowance(retry: &RetryConfig) -> RetryAllowance {
    RetryAllowance {
        percent: retry.budget_percent,
        concurrency_min: retry.min_concurrency,
    }
}

/// Returns the limits of the data plane.
pub(super) fn limits(limits: &config::LimitsConfig) -> ProxyLimits {
    let default = ProxyLimits::default();
    ProxyLimits {
        body_bytes_max: *limits.max_body,
        held_bytes_max: (limits.max_held_bodies.as_deref().copied())
            .unwrap_or(default.held_bytes_max),
        read_ahead_bytes_max: *limits.read_ahead,
        connections_max: to_usize(limits.max_connections),
        connections_per_address_max: to_usize(limits.connections_per_address_max()),
        requests_max: to_usize(limits.max_requests),
        reading_max: to_usize(limits.max_requests),
        requests_per_address_max: to_usize(limits.requests_per_address_max()),
        requests_per_user_max: to_usize(limits.requests_per_user_max()),
        streams_per_connection_max: limits.max_streams,
        ..default
    }
}

fn to_usize(number: u32) -> usize {
    usize::try_from(number).expect("usize has at least 32 bits on every supported target")
}
