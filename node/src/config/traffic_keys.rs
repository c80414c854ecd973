//! Keys of what clients may send and of how engines are asked: `[limits]` to `[retry]`.

use super::key::Absent::{Default as By, Unset};
use super::key::{COUNT, COUNT_OR_ZERO, Key, Kind, key};

/// In the order of the reference.
pub(super) const TRAFFIC_KEYS: &[Key] = &[
    key(
        "limits.max_body",
        Kind::Size,
        By("32MiB"),
        "Largest request body.",
    ),
    key(
        "limits.max_connections",
        COUNT,
        By("16384"),
        "Maximum number of client connections; beyond it the longest idle ones are closed. Lowered at start if the process has too few file descriptors (docs/adr/0024).",
    ),
    key(
        "limits.max_connections_per_address",
        COUNT,
        Unset,
        "Maximum number of connections per client address (IPv6: per /64). Default: half of `max_connections`. Does not apply to `users.trusted_proxies`.",
    ),
    key(
        "limits.max_requests",
        COUNT,
        By("16384"),
        "Maximum number of requests in flight, counted once their body has been received; as many more may still be uploading. Lowered like `max_connections`.",
    ),
    key(
        "limits.max_requests_per_address",
        COUNT,
        Unset,
        "Maximum number of requests per client address (IPv6: per /64), uploads included. Default: half of `max_requests`. Does not apply to `users.trusted_proxies`.",
    ),
    key(
        "limits.max_requests_per_user",
        COUNT,
        Unset,
        "Maximum number of requests in flight per user at this replica. Default: half of `max_requests`.",
    ),
    key(
        "limits.max_held_bodies",
        Kind::Size,
        Unset,
        "Maximum total size of request bodies held in memory, from their first byte to the head of the answer; a body takes up to three times its length. Default: a quarter of the cgroup's (container's) memory limit, at least `max_body` and at most 1 GiB.",
    ),
    key(
        "limits.read_ahead",
        Kind::Size,
        By("1MiB"),
        "How much of an answer is buffered for a slow client; counts towards `max_held_bodies`.",
    ),
    key(
        "limits.max_streams",
        COUNT,
        By("100"),
        "Maximum number of concurrent streams per HTTP/2 connection.",
    ),
    key(
        "usage.splice",
        Kind::Choice {
            now: &["continuous", "final", "off"],
            later: &[],
        },
        By("continuous"),
        "Which usage reports to request from engines for streams, besides those the client requests.",
    ),
    key(
        "timeouts.connect",
        Kind::Duration,
        By("2s"),
        "Timeout for connecting to a backend.",
    ),
    key(
        "timeouts.body_idle",
        Kind::Duration,
        By("30s"),
        "Longest pause while receiving a request body; `1s` while more than half of the allowed uploads are in progress.",
    ),
    key(
        "timeouts.first_byte",
        Kind::Duration,
        By("10m"),
        "Timeout for the first byte of a backend's answer.",
    ),
    key(
        "timeouts.idle",
        Kind::Duration,
        By("5m"),
        "Longest pause within a backend's answer.",
    ),
    key(
        "timeouts.untaken",
        Kind::Duration,
        By("1m"),
        "Longest time a client may stop reading an answer.",
    ),
    key(
        "timeouts.held_back",
        Kind::Duration,
        By("10s"),
        "Longest time in total that a slow client may keep a backend waiting during one answer.",
    ),
    key(
        "probes.interval",
        Kind::Duration,
        By("1s"),
        "Interval between health probes of a backend. Two failures in a row make it unhealthy, one success makes it healthy.",
    ),
    key(
        "probes.timeout",
        Kind::Duration,
        By("2s"),
        "Timeout of a probe.",
    ),
    key(
        "probes.models_interval",
        Kind::Duration,
        By("10s"),
        "Interval at which a backend's model list is refreshed.",
    ),
    key(
        "probes.health_path",
        Kind::UrlPath,
        Unset,
        "Path to probe. Default: the first of `/ready`, `/health` and `/v1/models` that the engine serves.",
    ),
    key(
        "probes.panic_threshold_percent",
        Kind::Integer { min: 0, max: 100 },
        By("50"),
        "Panic threshold, as in Envoy: when fewer of a model's backends are healthy, in percent, those that answered a request lately are used although their probes time out or are answered badly. Backends that refuse connections are never used. 0 disables it.",
    ),
    key(
        "probes.api_key_file",
        Kind::Text,
        Unset,
        "File with an API key for probes, sent as `authorization: Bearer KEY` to the backends in this file that have no `api_key_file` of their own. Default: none is sent.",
    ),
    key(
        "circuit.failures",
        COUNT_OR_ZERO,
        By("5"),
        "Number of failures among the last 20 attempts (no connection, broken or timed out before the first byte, or a 5xx) that opens a backend's circuit; 0 disables it. Failures of a single user do not count while others are answered.",
    ),
    key(
        "circuit.failure_percent",
        Kind::Integer { min: 1, max: 100 },
        By("50"),
        "Minimum share of failures among these attempts, in percent.",
    ),
    key(
        "circuit.max_ejection_percent",
        Kind::Integer { min: 0, max: 100 },
        By("50"),
        "Maximum share of a model's backends whose open circuits are respected at a time, in percent. One always may, all never.",
    ),
    key(
        "circuit.backoff",
        Kind::Duration,
        By("1s"),
        "How long an open circuit rejects requests before a single trial request is allowed. Doubles on each failed trial.",
    ),
    key(
        "circuit.max_backoff",
        Kind::Duration,
        By("30s"),
        "Upper bound of that backoff.",
    ),
    key(
        "retry.attempts",
        Kind::Integer { min: 1, max: 16 },
        By("3"),
        "Maximum number of backends a request is tried on.",
    ),
    key(
        "retry.budget_percent",
        Kind::Integer { min: 0, max: 100 },
        By("20"),
        "Retry budget: percentage of a model's requests in flight that may be retries after a refusal.",
    ),
    key(
        "retry.min_concurrency",
        COUNT_OR_ZERO,
        By("3"),
        "Number of concurrent retries that are always allowed.",
    ),
    key(
        "retry.statuses",
        Kind::Statuses,
        By("503"),
        "Statuses of a backend on which a request is retried on the next one.",
    ),
];
