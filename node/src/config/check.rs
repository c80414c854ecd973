//! Makes a [`Config`] of a file whose values are valid one by one. Checks constraints between keys,
//! and reads the other files that the config names.

use admin::AdminTokens;
use api::proxy::ApiKeys;
use api::settings::{FileSettings, misfit};
use state::command::UserDefaults;
use state::ids::ReplicaId;

use super::file::{ConfigFile, ListenConfig, NodeConfig};
use super::identity::IdSource;
use super::read::Settings;
use super::traffic::{AdminConfig, UsersConfig};
use super::{
    Config, certificates, cluster, discovery, engines, identity, key_file, models, names, requests,
    routing, tokens_file,
};

/// Checks everything, adds errors to `found` and returns the config, which is only usable if there
/// are none.
pub(super) fn check(file: ConfigFile, found: &mut Settings) -> Config {
    listen(&file.listen, found);
    let id = replica_id(&file.node, found);
    let formation = cluster::formation(&file.cluster, found);
    let secret = cluster::secret(&file.cluster, found);
    cluster::statefulset(&file, found);
    certificates::check(&file, id, found);
    let api_keys = api_keys(&file.users, found);
    let admin_tokens = admin_tokens(&file.admin, found);
    exposure(&file, found);
    requests::check(&file.requests, found);
    requests::check_sessions(&file.sessions, found);
    engines::check_probes(&file.probes, found);
    let models = models::models(&file.models, found);
    found.unique("prices", "name", file.prices.iter().map(|it| &*it.name));
    let backends = engines::backends(&file, &models, found);
    let discovery = discovery::sources(&file.discovery, &models, found);
    let engine_keys = engines::keys(&file, found);
    let server_names = engines::server_names(&file, found);
    let engine_addresses = engines::check_addresses(&file, found);
    check_user_defaults(&file.users.defaults, found);
    let policies = file.routing.policies.clone().policies();
    routing::check_policies(&policies, found);
    Config {
        id: id.unwrap_or(ReplicaId(1)),
        formation,
        secret,
        models,
        names: names::names(&file, found),
        backends,
        discovery,
        engine_keys,
        server_names,
        engine_addresses,
        api_keys,
        admin_tokens,
        secret_files: engines::secret_files(&file),
        policy: routing::named(&policies, &file.routing.policy),
        routing: routing::settings(&file, &policies, found),
        select: routing::select(&file),
        policy_overrides: match file.routing.allow_override {
            true => policies,
            false => Vec::new(),
        },
        sections: file,
        file: FileSettings::default(),
    }
}

/// Returns the replica's id; `None` if it is invalid, which `found` then contains as an error.
fn replica_id(node: &NodeConfig, found: &mut Settings) -> Option<ReplicaId> {
    match node.id {
        IdSource::Number(id) => found.is_sound("node.id").then_some(id),
        IdSource::Hostname => {
            let host = identity::host();
            let id = identity::id_of_host(&host);
            if id.is_none() {
                let message = format!("node.id is \"from-hostname\", and this host is {host:?}");
                let expected = "a host name with a number from 0 to 254 behind its last `-`, such \
                                as \"quorate-0\" for id 1";
                found.refuse("node.id", message, expected);
            }
            id
        }
    }
}

fn listen(listen: &ListenConfig, found: &mut Settings) {
    if !found.is_sound("listen") {
        return;
    }
    let listeners = [
        ("listen.data", listen.data),
        ("listen.admin", listen.admin),
        ("listen.peer", listen.peer),
    ];
    let metrics = listen.metrics.map(|metrics| ("listen.metrics", metrics));
    let picker = listen.picker.map(|picker| ("listen.picker", picker));
    let scaler = listen.scaler.map(|scaler| ("listen.scaler", scaler));
    let optional = metrics.into_iter().chain(picker).chain(scaler);
    let listeners: Vec<_> = listeners.into_iter().chain(optional).collect();
    for (nth, &(path, mine)) in listeners.iter().enumerate() {
        for (other_path, other) in &listeners[..nth] {
            let is_same_host = other.ip() == mine.ip()
                || other.ip().is_unspecified()
                || mine.ip().is_unspecified();
            if is_same_host && other.port() == mine.port() && mine.port() != 0 {
                let message = format!("{path} is {mine}, which {other_path} has taken");
                found.refuse(path, message, "a different port for each listener");
            }
        }
    }
    let peer = listen.peer;
    if listen.advertise.is_none() && peer.ip().is_unspecified() {
        let message = format!("listen.peer is {peer} and listen.advertise is not set");
        let expected = "listen.advertise, the host under which other replicas reach this one";
        found.refuse("listen.peer", message, expected);
    }
}

fn api_keys(users: &UsersConfig, found: &mut Settings) -> Option<ApiKeys> {
    match key_file::read(users.api_keys_file.as_deref()?) {
        Ok(told) => {
            let keys = ApiKeys::default();
            keys.replace(told);
            Some(keys)
        }
        Err(why) => {
            let path = "users.api_keys_file";
            found.refuse(path, format!("{path}: {why}"), "a file with one key a line");
            None
        }
    }
}

fn admin_tokens(admin: &AdminConfig, found: &mut Settings) -> Option<AdminTokens> {
    match tokens_file::read(admin.tokens_file.as_deref()?) {
        Ok(entries) => {
            let tokens = AdminTokens::default();
            tokens.replace(entries);
            Some(tokens)
        }
        Err(why) => {
            let path = "admin.tokens_file";
            let expected = "a file with a token a line, as `quorate token create` prints it";
            found.refuse(path, format!("{path}: {why}"), expected);
            None
        }
    }
}

/// Rejects unprotected listeners that are not on loopback, unless `insecure` is set.
fn exposure(file: &ConfigFile, found: &mut Settings) {
    let admin = &file.tls.admin;
    let has_operators = file.admin.tokens_file.is_some() || admin.client_ca_file.is_some();
    let peer = &file.tls.peer;
    let is_optional = file.cluster.authentication_optional;
    let has_peers = match &file.cluster.secret_file {
        Some(_) => peer.cert_file.is_some() || !is_optional,
        None => peer.cert_file.is_some() && !is_optional,
    };
    for (path, address, is_protected, lacking, expected) in [
        (
            "listen.admin",
            file.listen.admin,
            has_operators,
            "admin.tokens_file is not set",
            "admin.tokens_file, tls.admin.client_ca_file, an address on loopback, or insecure = true",
        ),
        (
            "listen.admin",
            file.listen.admin,
            admin.is_encrypted(),
            "tls.admin.cert_file is not set",
            "[tls.admin], tls.admin.terminated_upstream = true where a proxy ends TLS, an address on \
             loopback, or insecure = true",
        ),
        (
            "listen.peer",
            file.listen.peer,
            has_peers,
            match is_optional {
                true => "cluster.authentication_optional is set",
                false => "neither tls.peer nor cluster.secret_file is set",
            },
            "[tls.peer], cluster.secret_file, an address on loopback, or insecure = true",
        ),
    ] {
        let is_reached = !address.ip().to_canonical().is_loopback();
        let is_sound = found.is_sound(path) && found.is_sound("insecure");
        if is_reached && !is_protected && !file.insecure && is_sound {
            let message = format!("{path} is {address}, which others can reach, and {lacking}");
            found.refuse(path, message, expected);
        }
    }
}

/// Checks the defaults of users in a new cluster.
fn check_user_defaults(defaults: &UserDefaults, found: &mut Settings) {
    if let Some(fault) = misfit(defaults, defaults.validate())
        && found.is_sound("users.defaults")
    {
        found.refuse_value(&format!("users.defaults.{}", fault.key), &fault.expected);
    }
}
