//! Keys of `[admission]` and its tables.

use super::key::Absent::{Default as By, Unset};
use super::key::{COUNT, COUNT_OR_ZERO, Key, Kind, key};

const fn words(now: &'static [&'static str]) -> Kind {
    Kind::Choice { now, later: &[] }
}

/// In the order of the reference.
pub(super) const ADMISSION_KEYS: &[Key] = &[
    key(
        "admission.order",
        words(&[
            "vtc",
            "vtc-max-fair",
            "vtc-pred",
            "dlpm",
            "lcf",
            "rpm",
            "fcfs",
        ]),
        By("vtc"),
        "Order in which waiting requests of equal priority are served. Like all keys of `[admission]` except `codel_target` and `priority_max`, it is read when a cluster is created; later use `PUT /admin/v1/admission`.",
    ),
    key(
        "admission.concurrency",
        Kind::Concurrency,
        By("adaptive"),
        "Maximum number of concurrent requests per backend. `adaptive`: as many as its memory and `sla.inter_token` allow, as far as those are known.",
    ),
    key(
        "admission.max_queue",
        COUNT,
        By("4096"),
        "Maximum number of waiting requests per model and replica; further ones get a 503. Each takes about 64 KiB, connection included.",
    ),
    key(
        "admission.max_wait",
        Kind::Duration,
        By("10s"),
        "Maximum waiting time; after that a request gets a 503. A request that is predicted to wait longer gets it immediately.",
    ),
    key(
        "admission.codel_target",
        Kind::Duration,
        By("1s"),
        "Maximum waiting time in overload, that is when arrivals exceed service by half for more than a second. Set it to `max_wait` or more to switch overload handling off.",
    ),
    key(
        "admission.priority_max",
        Kind::Integer {
            min: 0,
            max: i16::MAX as i64,
        },
        By("0"),
        "Highest priority that `x-quorate-priority` can give; higher values are capped.",
    ),
    key(
        "admission.charge",
        words(&["uncached", "full", "discounted"]),
        By("uncached"),
        "Which prompt tokens are charged: the uncached ones, all, or all with cached ones at a tenth.",
    ),
    key(
        "admission.grants",
        words(&["gate", "log"]),
        By("gate"),
        "How replicas keep one order while requests wait: `gate` (each replica decides, bounded by what waits elsewhere) or `log` (exact, at one commit per dispatch).",
    ),
    key(
        "admission.gate_tokens",
        COUNT_OR_ZERO,
        By("0"),
        "Slack of the gate: how far above the lowest waiting user's counter another user may still be served, in priced tokens. 0: the largest request seen.",
    ),
    key(
        "admission.bins",
        Kind::Integer { min: 1, max: 64 },
        By("1"),
        "Number of bins by predicted output length; 1 means no bins.",
    ),
    key(
        "admission.bin_selection",
        words(&["round-robin", "longest-queue"]),
        By("round-robin"),
        "Which bin is served next.",
    ),
    key(
        "admission.bin_max_age",
        Kind::Duration,
        By("5s"),
        "A request that has waited this long is served before its bin's turn.",
    ),
    key(
        "admission.batching",
        words(&["continuous", "static"]),
        By("continuous"),
        "`continuous`: bins only order the queue. `static`: a batch of one bin goes to one backend together, for engines whose batches end together.",
    ),
    key(
        "admission.sla.inter_token",
        Kind::DurationOrZero,
        By("0s"),
        "Target for the time between output tokens that `adaptive` keeps. 0: limit by memory alone.",
    ),
    key(
        "admission.sla.tolerance",
        Kind::DurationOrZero,
        By("5ms"),
        "Tolerance around that target within which the limit stays unchanged.",
    ),
    key(
        "admission.sla.min_batch",
        COUNT,
        By("1"),
        "Lowest limit that `adaptive` sets.",
    ),
    key(
        "admission.sla.max_batch",
        COUNT,
        By("1024"),
        "Highest limit that `adaptive` sets.",
    ),
    key(
        "admission.sla.memory_z_milli",
        COUNT_OR_ZERO,
        By("1645"),
        "Safety margin of the memory limit, in thousandths of a standard deviation: with 1645 requests exceed the cache with a probability of 5 %.",
    ),
    key(
        "admission.user_limits.requests",
        COUNT,
        Unset,
        "Requests per window for users without limits of their own. Default: unlimited.",
    ),
    key(
        "admission.user_limits.tokens",
        COUNT,
        Unset,
        "Tokens per window, not counting cached ones. Default: unlimited.",
    ),
    key(
        "admission.user_limits.concurrent",
        COUNT,
        Unset,
        "Concurrent requests. Default: unlimited.",
    ),
    key(
        "admission.user_limits.window",
        Kind::Duration,
        Unset,
        "Length of the window. Default: one second.",
    ),
];
