//! Keys of what clients may send and of how engines are asked: `[limits]` to `[retry]`.

use super::keys::Absent::{Default as By, Unset};
use super::keys::{COUNT, COUNT_OR_ZERO, Key, Kind, key};

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
        "Most client connections at a time; beyond, the longest idle ones are closed. Lowered at start when the process may not have descriptors enough (docs/adr/0024).",
    ),
    key(
        "limits.max_connections_per_address",
        COUNT,
        Unset,
        "Of these, most from one client address (IPv6: from one /64); unset: half of them. Not for `users.trusted_proxies`.",
    ),
    key(
        "limits.max_requests",
        COUNT,
        By("16384"),
        "Most requests under way at a time, from when their body is here; as many more may be on their way in. Lowered like `max_connections`.",
    ),
    key(
        "limits.max_requests_per_address",
        COUNT,
        Unset,
        "Of both, most from one client address (IPv6: from one /64); unset: half of `max_requests`. Not for `users.trusted_proxies`.",
    ),
    key(
        "limits.max_requests_per_user",
        COUNT,
        Unset,
        "Most requests of one user under way at this replica; unset: half of `max_requests`.",
    ),
    key(
        "limits.max_held_bodies",
        Kind::Size,
        Unset,
        "Most bytes of request bodies held at a time, from their first byte to the head of the answer; a body takes up to three times its length meanwhile. Unset: a quarter of the memory limit of the cgroup (container), at least `max_body`, at most 1 GiB.",
    ),
    key(
        "limits.read_ahead",
        Kind::Size,
        By("1MiB"),
        "How much of an answer is read ahead of a client that does not take it; counts among `max_held_bodies`.",
    ),
    key(
        "limits.max_streams",
        COUNT,
        By("100"),
        "Most requests at a time on one HTTP/2 connection.",
    ),
    key(
        "usage.splice",
        Kind::Choice {
            now: &["continuous", "final", "off"],
            later: &[],
        },
        By("continuous"),
        "Which usage reports are asked of engines for streams beyond what the client asks.",
    ),
    key(
        "timeouts.connect",
        Kind::Duration,
        By("2s"),
        "Longest time a connection to a backend takes to open.",
    ),
    key(
        "timeouts.body_idle",
        Kind::Duration,
        By("30s"),
        "Longest pause within a request's body; `1s` while more than half as many as may be are on their way in.",
    ),
    key(
        "timeouts.first_byte",
        Kind::Duration,
        By("10m"),
        "Longest time until a backend's answer begins.",
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
        "Longest time a client may take nothing of an answer that waits for it.",
    ),
    key(
        "timeouts.held_back",
        Kind::Duration,
        By("10s"),
        "Longest time a client may keep a backend waiting with an answer, over the whole answer.",
    ),
    key(
        "probes.interval",
        Kind::Duration,
        By("1s"),
        "Time from one health probe of a backend to the next; two failures in a row make it unhealthy, one success healthy.",
    ),
    key(
        "probes.timeout",
        Kind::Duration,
        By("2s"),
        "Longest time a probe takes.",
    ),
    key(
        "probes.models_interval",
        Kind::Duration,
        By("10s"),
        "Time from one question for a backend's models to the next.",
    ),
    key(
        "probes.health_path",
        Kind::UrlPath,
        Unset,
        "Path that is probed; unset: the first of `/ready`, `/health` and `/v1/models` that the engine knows.",
    ),
    key(
        "probes.panic_threshold_percent",
        Kind::Integer { min: 0, max: 100 },
        By("50"),
        "Least share of a model's backends that must be healthy for probes to be believed (Envoy's panic threshold); below it those that answered a request lately are used although probes of them time out or are answered badly. Where connections are refused a backend is gone and does not count. 0: never.",
    ),
    key(
        "probes.api_key_file",
        Kind::Text,
        Unset,
        "File with the key that engines want from probes, sent as `authorization: Bearer KEY` to the backends of this file without an `api_key_file` of their own; unset: none is sent.",
    ),
    key(
        "circuit.failures",
        COUNT_OR_ZERO,
        By("5"),
        "Failed ones (no connection, broken or timed out before the first byte, a 5xx) among the last 20 attempts at a backend from which on it is passed over; 0: never. One user's alone do not count while others are answered.",
    ),
    key(
        "circuit.failure_percent",
        Kind::Integer { min: 1, max: 100 },
        By("50"),
        "Least share of them in these attempts.",
    ),
    key(
        "circuit.max_ejection_percent",
        Kind::Integer { min: 0, max: 100 },
        By("50"),
        "Most of a model's backends that are passed over at a time for it; one may always be, all never.",
    ),
    key(
        "circuit.backoff",
        Kind::Duration,
        By("1s"),
        "How long it is, until single requests are let through; doubles with each that fails.",
    ),
    key(
        "circuit.max_backoff",
        Kind::Duration,
        By("30s"),
        "Longest such pause.",
    ),
    key(
        "retry.attempts",
        Kind::Integer { min: 1, max: 16 },
        By("3"),
        "Most backends one request is tried on.",
    ),
    key(
        "retry.budget_percent",
        Kind::Integer { min: 0, max: 100 },
        By("20"),
        "Of 100 requests under way for a model, how many may be on a further backend after a refusal.",
    ),
    key(
        "retry.min_concurrency",
        COUNT_OR_ZERO,
        By("3"),
        "So many may, however few are under way.",
    ),
    key(
        "retry.statuses",
        Kind::Statuses,
        By("503"),
        "Backend answers that send a request on to the next backend.",
    ),
];
