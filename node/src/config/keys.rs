//! Every key a config file, an environment variable or `--set` can name: one table from which
//! reading, checking, `config print` and `config schema` all follow, so that none can disagree.

use super::admission_keys::ADMISSION_KEYS;
use super::key::Absent::{Default as By, Required, Unset};
use super::key::{COUNT, Key, Kind, key};
use super::listener_keys::LISTENER_KEYS;
use super::policy_keys::POLICY_KEYS;
use super::traffic_keys::TRAFFIC_KEYS;

const POLICIES: Kind = Kind::Choice {
    now: state::policy::POLICY_NAMES,
    later: &["dlpm"],
};
/// All keys outside lists of tables, by section.
pub(super) const KEYS: &[Key] = &{
    const PARTS: [&[Key]; 7] = [
        BEFORE_POLICIES,
        POLICY_KEYS,
        ADMISSION_KEYS,
        LISTENER_KEYS,
        AFTER_ADMISSION,
        TRAFFIC_KEYS,
        LAST,
    ];
    const COUNT: usize = {
        let (mut count, mut part) = (0, 0);
        while part < PARTS.len() {
            count += PARTS[part].len();
            part += 1;
        }
        count
    };
    let mut keys = [BEFORE_POLICIES[0]; COUNT];
    let (mut part, mut from, mut at) = (0, 0, 0);
    while at < COUNT {
        if at - from == PARTS[part].len() {
            (part, from) = (part + 1, at);
        }
        keys[at] = PARTS[part][at - from];
        at += 1;
    }
    keys
};

/// Before the policies' tables.
const BEFORE_POLICIES: &[Key] = &[
    key(
        "node.id",
        Kind::Integer { min: 1, max: 255 },
        Required,
        "This replica's id: unique in the cluster, never reused.",
    ),
    key(
        "node.data_dir",
        Kind::Text,
        By("/var/lib/quorate"),
        "Directory of the log, the vote and the snapshots.",
    ),
    key(
        "listen.data",
        Kind::Address,
        By("127.0.0.1:8080"),
        "Listener for clients.",
    ),
    key(
        "listen.admin",
        Kind::Address,
        By("127.0.0.1:8081"),
        "Listener for the admin API, metrics and readiness checks.",
    ),
    key(
        "listen.peer",
        Kind::Address,
        By("127.0.0.1:8082"),
        "Listener for other replicas.",
    ),
    key(
        "listen.advertise",
        Kind::Text,
        Unset,
        "Host under which other replicas reach this one, without a port. Default: the address of `listen.peer`.",
    ),
    key(
        "cluster.name",
        Kind::Text,
        By("quorate"),
        "Name of the cluster. Replicas with different names refuse each other.",
    ),
    key(
        "cluster.peers",
        Kind::HostPorts,
        Unset,
        "Peer listeners of all replicas that form the cluster. Without `peers`, `peers_dns` and `join` this replica forms a cluster of one.",
    ),
    key(
        "cluster.peers_dns",
        Kind::HostPort,
        Unset,
        "DNS name that resolves to the peer listeners of all replicas; instead of `peers`.",
    ),
    key(
        "cluster.bootstrap_expect",
        Kind::Integer { min: 1, max: 255 },
        Unset,
        "Number of replicas that must answer before a new cluster is formed: more than half of `peers`. Default: all of `peers`.",
    ),
    key(
        "cluster.join",
        Kind::HostPorts,
        Unset,
        "Join an existing cluster through any of these; instead of `peers`.",
    ),
    key(
        "cluster.secret_file",
        Kind::Text,
        Unset,
        "File with a shared secret of at least 32 bytes. Replicas authenticate each other with it and encrypt their traffic. Without it, anybody who reaches `listen.peer` is trusted.",
    ),
    key(
        "cluster.secret_optional",
        Kind::Flag,
        By("false"),
        "Also talk to replicas that do not have the secret. Only for adding a secret to a running cluster.",
    ),
    key(
        "cluster.flush_interval",
        Kind::Duration,
        By("20ms"),
        "Interval at which learned facts are proposed to the log.",
    ),
    key(
        "cluster.heartbeat",
        Kind::Duration,
        By("50ms"),
        "Interval of the leader's heartbeats. Must exceed a round trip between replicas: an unanswered heartbeat is dropped after it.",
    ),
    key(
        "cluster.election_timeout",
        Kind::DurationRange,
        By("150ms..300ms"),
        "Range from which election timeouts are drawn.",
    ),
    key(
        "cluster.snapshot_every",
        COUNT,
        By("50000"),
        "Log entries between snapshots.",
    ),
    key(
        "cluster.snapshot_every_bytes",
        Kind::Size,
        By("256MiB"),
        "Log bytes between snapshots; whichever limit is reached first.",
    ),
    key(
        "routing.policy",
        POLICIES,
        By("cost"),
        "Routing policy of a new cluster. Later use `PUT /admin/v1/policy`.",
    ),
    key(
        "routing.allow_override",
        Kind::Flag,
        By("false"),
        "Let requests choose a policy with `x-quorate-policy`. It uses the settings below.",
    ),
    key(
        "routing.allow_select",
        Kind::Flag,
        By("false"),
        "Let requests select backends by label with `x-quorate-select: key=value,...`.",
    ),
    key(
        "routing.learn",
        Kind::Flag,
        By("true"),
        "Let `cost` use prices learned per backend instead of its settings. Read when a cluster is created; later use `PUT /admin/v1/routing`.",
    ),
    key(
        "routing.prediction_off_permille",
        Kind::Integer { min: 0, max: 1000 },
        By("200"),
        "Largest tolerated error of cache predictions, in thousandths of the prompt tokens. Beyond it a backend is marked and its reported cache capacity is corrected. Read when a cluster is created, as above.",
    ),
];

/// Behind the tables of admission.
const AFTER_ADMISSION: &[Key] = &[
    key(
        "users.identify_by",
        Kind::Identities,
        By("api_key,header:x-quorate-user,body:user"),
        "Where a request's user comes from, in this order; otherwise it is `anonymous`. Names that clients give themselves become `header:NAME` (unless sent by `trusted_proxies`) or `body:NAME`, and count only if no keys are checked.",
    ),
    key(
        "users.trusted_proxies",
        Kind::Prefixes,
        By("127.0.0.0/8,::1"),
        "Addresses of load balancers and other proxies. They may name users by a header, and limits per client address do not apply to them.",
    ),
    key(
        "users.api_keys_file",
        Kind::Text,
        Unset,
        "File with the accepted API keys, one per line, optionally followed by the user the key belongs to. Keys are not forwarded to engines. Reloaded when it changes. Without it any key is accepted and forwarded to the engine, which may check it.",
    ),
    key(
        "users.expose",
        Kind::Choice {
            now: &["none", "basic", "full"],
            later: &[],
        },
        By("basic"),
        "Which headers answers carry: `none`, `basic` (`x-request-id`, `x-quorate-replica`) or `full` (also the decision, unless the request was refused: `x-quorate-backend`, `-policy`, `-prefix`, `-index`). `full` lets clients learn what others asked (docs/guide/security.md).",
    ),
    key(
        "users.forward_priority",
        Kind::Flag,
        By("false"),
        "Forward a client's `x-vllm-priority` header and `priority` field to engines, whatever `requests` says. There it overtakes all other requests.",
    ),
];

/// Behind those of the traffic.
const LAST: &[Key] = &[
    key(
        "drain.dns_ttl",
        Kind::DurationOrZero,
        By("5s"),
        "After SIGTERM: how long new connections are still accepted, until DNS no longer leads here.",
    ),
    key(
        "drain.deadline",
        Kind::DurationOrZero,
        By("30s"),
        "After that: how long requests in flight may take to finish.",
    ),
    key(
        "log.format",
        Kind::Choice {
            now: &["human", "json"],
            later: &[],
        },
        By("human"),
        "Format of the log on stderr.",
    ),
    key(
        "log.level",
        Kind::Text,
        By("info"),
        "Log level, or a filter such as `info,raft=debug`.",
    ),
];

/// Keys of a `[[models]]` entry.
pub(super) const MODEL_KEYS: &[Key] = &[
    key(
        "name",
        Kind::Text,
        Required,
        "Model id, or `*` for any model; the first match is used.",
    ),
    key(
        "tokenizer",
        Kind::Tokenizer,
        By("character"),
        "How prompts are tokenized: `character` (not at all), `tiktoken:cl100k_base`, `tiktoken:o200k_base`, `huggingface:FILE` with the path of a `tokenizer.json`, or `engine` (by the engine's `/tokenize`). See docs/guide/tokenizers.md.",
    ),
    key(
        "chat_template",
        Kind::Text,
        Unset,
        "Chat template for `huggingface`. Default: `chat_template.jinja`, else `tokenizer_config.json`, in the tokenizer's directory.",
    ),
    key(
        "block_size",
        Kind::Integer {
            min: 1,
            max: 65_536,
        },
        Unset,
        "Block size in tokens, or in bytes for `character`. Default: 16, or 128 for `character`. Must equal the engine's when `kv_events` is used.",
    ),
    key(
        "policy",
        POLICIES,
        Unset,
        "Routing policy of this model, with the settings of its `[routing.NAME]` table. Default: `routing.policy`. Read when a cluster is created; later use `PUT /admin/v1/policy?model=NAME`.",
    ),
    key(
        "select",
        Kind::Labels,
        Unset,
        "Labels that a backend must have to serve this model.",
    ),
];

/// Keys of a `[[backends]]` entry.
pub(super) const BACKEND_KEYS: &[Key] = &[
    key(
        "id",
        Kind::Text,
        Required,
        "Id of the backend: letters, digits, `.`, `_`, `-`. Backends listed here that are missing are registered at every start: when you delete one through the admin API, delete it here too.",
    ),
    key(
        "url",
        Kind::Url,
        Required,
        "Address of the engine: `http://host:port`.",
    ),
    key(
        "models",
        Kind::Texts,
        By("*"),
        "Model ids it serves; `*`: those the engine lists.",
    ),
    key(
        "labels",
        Kind::Labels,
        Unset,
        "Labels, for `select` and `x-quorate-select`.",
    ),
    key(
        "api_key_file",
        Kind::Text,
        Unset,
        "File with the engine's API key, sent as `authorization: Bearer KEY` with probes and requests instead of the client's key. It stays on this replica and is sent only to this `id` at this `url`, never to a backend registered elsewhere through the admin API. Default: see `probes.api_key_file` and `users.api_keys_file`.",
    ),
    key(
        "capacity_blocks",
        COUNT,
        Unset,
        "Capacity of its cache in blocks. Default: reported by the engine.",
    ),
    key(
        "kv_events",
        Kind::Text,
        Unset,
        "Endpoint of its KV events: `tcp://host:port` or `ipc:///path` where the engine listens, `bind:tcp://address:port` where the engine connects to, or `auto` to ask the engine. Append `?ranks=N` for N data-parallel ranks. Default: none, ownership is tracked by leases.",
    ),
    key(
        "kv_replay",
        Kind::Text,
        Unset,
        "Replay endpoint of its KV events: `tcp://host:port`. Without it, any missed message ends exact ownership.",
    ),
];

/// Policies whose settings tables are reserved: `[routing.NAME]`.
#[must_use]
pub(super) fn is_later_policy(name: &str) -> bool {
    matches!(POLICIES, Kind::Choice { later, .. } if later.contains(&name))
}
