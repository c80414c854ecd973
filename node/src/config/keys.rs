//! Every key a config file, an environment variable or `--set` can name: one table from which
//! reading, checking, `config print` and `config schema` all follow, so that none can disagree.

use super::admission_keys::ADMISSION_KEYS;
use super::listener_keys::LISTENER_KEYS;
use super::policy_keys::POLICY_KEYS;
use super::traffic_keys::TRAFFIC_KEYS;

/// What values a key takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A whole number within bounds, both included.
    Integer {
        /// Least value.
        min: i64,
        /// Greatest value.
        max: i64,
    },
    /// A whole number from 1, `"adaptive"` or `"unlimited"`.
    Concurrency,
    /// `true` or `false`.
    Flag,
    /// Any text that is not empty.
    Text,
    /// One of a few words.
    Choice {
        /// Words this version honours.
        now: &'static [&'static str],
        /// Words that are reserved; refused as not available.
        later: &'static [&'static str],
    },
    /// A time span such as `"20ms"` or `"1m 30s"`, from a millisecond to a day.
    Duration,
    /// A time span that may be zero, up to a day.
    DurationOrZero,
    /// Two time spans, the lesser first: `"150ms..300ms"`.
    DurationRange,
    /// A number of bytes: `65536`, `"32MiB"`, `"500kB"`.
    Size,
    /// IP address and port to listen on.
    Address,
    /// `host:port`.
    HostPort,
    /// A list of `host:port`.
    HostPorts,
    /// A list of `api_key`, `header:NAME`, `body:user`.
    Identities,
    /// A list of host names.
    Hosts,
    /// A list of IP addresses and prefixes of them.
    Prefixes,
    /// A list of names, maybe empty: visible ASCII without commas.
    Names,
    /// A list of paths without a query.
    Paths,
    /// A list of texts, none of them empty.
    Texts,
    /// A list of HTTP statuses.
    Statuses,
    /// `tokenizer` of a model.
    Tokenizer,
    /// `http://host:port`.
    Url,
    /// `/path` of a URL.
    UrlPath,
    /// A table of texts by name.
    Labels,
}

/// What stands for a key that is set nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absent {
    /// The key must be set.
    Required,
    /// The key has no value then; what follows from that is in its description.
    Unset,
    /// This value, written as in an environment variable.
    Default(&'static str),
}

/// One key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    /// With its section: `node.id`. Of an entry of a list of tables: the last part only.
    pub path: &'static str,
    /// What values it takes.
    pub kind: Kind,
    /// What stands for it when it is set nowhere.
    pub absent: Absent,
    /// One sentence for the schema and for people.
    pub about: &'static str,
}

pub(super) const fn key(
    path: &'static str,
    kind: Kind,
    absent: Absent,
    about: &'static str,
) -> Key {
    Key {
        path,
        kind,
        absent,
        about,
    }
}

pub(super) const COUNT: Kind = Kind::Integer {
    min: 1,
    max: u32::MAX as i64,
};
pub(super) const COUNT_OR_ZERO: Kind = Kind::Integer {
    min: 0,
    max: u32::MAX as i64,
};
const POLICIES: Kind = Kind::Choice {
    now: state::policy::POLICY_NAMES,
    later: &["dlpm"],
};
use Absent::{Default as By, Required, Unset};

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
        "This replica's number: unique in the cluster, never reused.",
    ),
    key(
        "node.data_dir",
        Kind::Text,
        By("/var/lib/quorate"),
        "Folder of the log, the vote and the snapshots.",
    ),
    key(
        "listen.data",
        Kind::Address,
        By("127.0.0.1:8080"),
        "Where clients are served.",
    ),
    key(
        "listen.admin",
        Kind::Address,
        By("127.0.0.1:8081"),
        "Where the admin API, metrics and probes are served.",
    ),
    key(
        "listen.peer",
        Kind::Address,
        By("127.0.0.1:8082"),
        "Where other replicas are served.",
    ),
    key(
        "listen.advertise",
        Kind::Text,
        Unset,
        "Host that peers and `status` are told, without a port; unset: the address of `listen.peer`.",
    ),
    key(
        "cluster.name",
        Kind::Text,
        By("quorate"),
        "What the cluster is called: replicas of other names have nothing to do with each other.",
    ),
    key(
        "cluster.peers",
        Kind::HostPorts,
        Unset,
        "Peer listeners of all replicas that form the cluster; unset, with no `peers_dns` and no `join`: this replica alone.",
    ),
    key(
        "cluster.peers_dns",
        Kind::HostPort,
        Unset,
        "A name that resolves to the peer listeners of all replicas, in place of `peers`.",
    ),
    key(
        "cluster.bootstrap_expect",
        Kind::Integer { min: 1, max: 255 },
        Unset,
        "First start: form a cluster when so many replicas answer, more than half of `peers`; unset: as many as `peers` names.",
    ),
    key(
        "cluster.join",
        Kind::HostPorts,
        Unset,
        "Join an existing cluster through any of these, in place of `peers`.",
    ),
    key(
        "cluster.secret_file",
        Kind::Text,
        Unset,
        "File with a secret of 32 bytes or more that all replicas share: they prove it to each other and encrypt what they say; unset: whoever reaches `listen.peer` is believed to be who it says.",
    ),
    key(
        "cluster.secret_optional",
        Kind::Flag,
        By("false"),
        "Whether replicas without the secret are spoken to as well: only while a running cluster is given one.",
    ),
    key(
        "cluster.flush_interval",
        Kind::Duration,
        By("20ms"),
        "Longest time a learnt fact waits before it is proposed.",
    ),
    key(
        "cluster.heartbeat",
        Kind::Duration,
        By("50ms"),
        "Interval of the leader's heartbeats.",
    ),
    key(
        "cluster.election_timeout",
        Kind::DurationRange,
        By("150ms..300ms"),
        "Range an election timeout is drawn from.",
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
        "Log bytes between snapshots, whichever comes first.",
    ),
    key(
        "routing.policy",
        POLICIES,
        By("cost"),
        "Routing policy of a new cluster; a running one changes it by `PUT /admin/v1/policy`.",
    ),
    key(
        "routing.allow_override",
        Kind::Flag,
        By("false"),
        "Whether a request may name another policy in `x-quorate-policy`; it decides with the settings below.",
    ),
    key(
        "routing.allow_select",
        Kind::Flag,
        By("false"),
        "Whether a request may ask for a backend's labels in `x-quorate-select: key=value,...`.",
    ),
    key(
        "routing.learn",
        Kind::Flag,
        By("true"),
        "Whether `cost` uses what it learnt of a backend in place of its settings, in a new cluster; a running one changes it by `PUT /admin/v1/routing`.",
    ),
    key(
        "routing.prediction_off_permille",
        Kind::Integer { min: 0, max: 1000 },
        By("200"),
        "A backend whose predicted cached tokens are off by more, in thousandths of the prompt tokens, is marked, and the capacity its engine told is corrected; for a new cluster, as above.",
    ),
];

/// Behind the tables of admission.
const AFTER_ADMISSION: &[Key] = &[
    key(
        "users.identify_by",
        Kind::Identities,
        By("api_key,header:x-quorate-user,body:user"),
        "Where a request's user is looked for, in this order; found nowhere: `anonymous`. What clients say of themselves is shown as `header:NAME` (not from `trusted_proxies`) and `body:NAME`, and counts only where no keys are checked.",
    ),
    key(
        "users.trusted_proxies",
        Kind::Prefixes,
        By("127.0.0.0/8,::1"),
        "Addresses that speak for many clients, such as load balancers: they name users by a header, and limits per client address do not hold for them.",
    ),
    key(
        "users.api_keys_file",
        Kind::Text,
        Unset,
        "File of accepted API keys, one a line, each with the user it stands for behind it if wanted; they do not reach engines. Read again when it changes. Unset: any key is accepted, and goes on to the engine, which may check it.",
    ),
    key(
        "users.expose",
        Kind::Choice {
            now: &["none", "basic", "full"],
            later: &[],
        },
        By("basic"),
        "Which headers clients see beside an answer: `none`, `basic` (`x-request-id`, `x-quorate-replica`) or `full` (and the decision: `x-quorate-backend`, `-policy`, `-prefix`, `-index`, with answers that are no refusals). `full` tells whoever asks what others asked: see docs/guide/security.md.",
    ),
    key(
        "users.forward_priority",
        Kind::Flag,
        By("false"),
        "Whether a client's `x-vllm-priority` header and `priority` field reach engines, whatever `requests` says: there it goes past every other request.",
    ),
];

/// Behind those of the traffic.
const LAST: &[Key] = &[
    key(
        "drain.dns_ttl",
        Kind::DurationOrZero,
        By("5s"),
        "On SIGTERM: how long new connections are still taken, until names no longer lead here.",
    ),
    key(
        "drain.deadline",
        Kind::DurationOrZero,
        By("30s"),
        "On SIGTERM: how long requests under way may then go on.",
    ),
    key(
        "log.format",
        Kind::Choice {
            now: &["human", "json"],
            later: &[],
        },
        By("human"),
        "Form of the log lines on stderr.",
    ),
    key(
        "log.level",
        Kind::Text,
        By("info"),
        "Which log lines are written: a level, or a filter such as `info,raft=debug`.",
    ),
];

/// Keys of a `[[models]]` entry.
pub(super) const MODEL_KEYS: &[Key] = &[
    key(
        "name",
        Kind::Text,
        Required,
        "A model id, or `*` for every other one; the first match counts.",
    ),
    key(
        "tokenizer",
        Kind::Tokenizer,
        By("character"),
        "What prompts are cut into tokens by: `character` (not at all), `tiktoken:cl100k_base`, `tiktoken:o200k_base`, `huggingface:FILE` with the path of a `tokenizer.json`, or `engine`, which asks the engine's `/tokenize`. See docs/guide/tokenizers.md.",
    ),
    key(
        "chat_template",
        Kind::Text,
        Unset,
        "With `huggingface`: file of the chat template; unset: `chat_template.jinja`, else `tokenizer_config.json`, beside the tokenizer.",
    ),
    key(
        "block_size",
        Kind::Integer {
            min: 1,
            max: 65_536,
        },
        Unset,
        "Tokens of one block, with `character` bytes; unset: 16, with `character` 128. With `kv_events` it must be the engine's own.",
    ),
    key(
        "policy",
        POLICIES,
        Unset,
        "Routing policy of this model in a new cluster, with the settings of its `[routing.NAME]` table; unset: `routing.policy`. A running cluster changes it by `PUT /admin/v1/policy?model=NAME`.",
    ),
    key(
        "select",
        Kind::Labels,
        Unset,
        "Labels that a backend must have to get requests for this model.",
    ),
];

/// Keys of a `[[backends]]` entry.
pub(super) const BACKEND_KEYS: &[Key] = &[
    key(
        "id",
        Kind::Text,
        Required,
        "The backend's id: letters, digits, `.`, `_`, `-`. One that is not registered is, at every start: what was deleted through the admin API must go from here too.",
    ),
    key(
        "url",
        Kind::Url,
        Required,
        "Where the engine listens: `http://host:port`.",
    ),
    key(
        "models",
        Kind::Texts,
        By("*"),
        "Model ids it serves; `*`: asked from the engine.",
    ),
    key("labels", Kind::Labels, Unset, "Free labels."),
    key(
        "api_key_file",
        Kind::Text,
        Unset,
        "File with the key that the engine wants, sent as `authorization: Bearer KEY` with probes and with requests, in place of the clients' own. It stays on this replica and goes to this `id` at this `url` only: not to a backend that was put through the admin API at another URL. Unset: see `probes.api_key_file` and `users.api_keys_file`.",
    ),
    key(
        "capacity_blocks",
        COUNT,
        Unset,
        "Blocks its cache holds; unset: asked from the engine.",
    ),
    key(
        "kv_events",
        Kind::Text,
        Unset,
        "Where its KV events are had: `tcp://host:port` or `ipc:///path` where the engine listens, `bind:tcp://address:port` where it dials, `auto`: asked from the engine; `?ranks=N` behind an endpoint for so many data-parallel ranks. Unset: ownership by leases.",
    ),
    key(
        "kv_replay",
        Kind::Text,
        Unset,
        "Where it repeats them: `tcp://host:port`. Without it every message that is missed ends exact ownership.",
    ),
];

/// Policies whose settings tables are reserved: `[routing.NAME]`.
#[must_use]
pub(super) fn is_later_policy(name: &str) -> bool {
    matches!(POLICIES, Kind::Choice { later, .. } if later.contains(&name))
}

impl Key {
    /// The environment variable that sets it: `QUORATE_NODE__ID`.
    #[must_use]
    pub(super) fn variable(&self) -> String {
        format!(
            "QUORATE_{}",
            self.path
                .replace('.', "__")
                .replace('-', "_")
                .to_uppercase()
        )
    }

    /// Section and last part of the path: `("routing.cost", "near_permille")`.
    #[must_use]
    pub(super) fn split(&self) -> (&'static str, &'static str) {
        self.path.rsplit_once('.').unwrap_or(("", self.path))
    }
}
