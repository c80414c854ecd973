//! Keys of `[admission]` and its tables.

use super::keys::Absent::{Default as By, Unset};
use super::keys::{COUNT, COUNT_OR_ZERO, Key, Kind, key};

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
        "Who goes first among waiting requests of equal priority. This and what follows, but for \
         `codel_target` and `priority_max`, is for a new cluster; a running one changes it by `PUT \
         /admin/v1/admission`.",
    ),
    key(
        "admission.concurrency",
        Kind::Concurrency,
        By("adaptive"),
        "Most requests a backend is given at a time; `adaptive`: as many as its memory and \
         `sla.inter_token` allow, as far as they are known.",
    ),
    key(
        "admission.max_queue",
        COUNT,
        By("4096"),
        "Most requests that wait, per model and replica; further ones get 503. One takes about \
         64 KiB with its connection.",
    ),
    key(
        "admission.max_wait",
        Kind::Duration,
        By("10s"),
        "Longest time a request waits; then it gets 503. One that would wait longer gets it at once.",
    ),
    key(
        "admission.codel_target",
        Kind::Duration,
        By("1s"),
        "Longest time a request waits in overload, when for more than a second half as many more \
         come as can be served. At least `max_wait`: overload changes nothing.",
    ),
    key(
        "admission.priority_max",
        Kind::Integer {
            min: 0,
            max: i16::MAX as i64,
        },
        By("0"),
        "Highest priority that a request gets by `x-quorate-priority`; higher ones count as this.",
    ),
    key(
        "admission.charge",
        words(&["uncached", "full", "discounted"]),
        By("uncached"),
        "What of a prompt is charged when it is dispatched: tokens not believed cached, all, or \
         cached ones at a tenth.",
    ),
    key(
        "admission.grants",
        words(&["gate", "log"]),
        By("gate"),
        "Who decides the order over replicas while requests wait: each replica behind a gate, or \
         the log, at one commit per dispatch.",
    ),
    key(
        "admission.gate_tokens",
        COUNT_OR_ZERO,
        By("0"),
        "How far above the least waiting user's counter, in priced tokens, another user may still \
         be served; 0: the largest request seen.",
    ),
    key(
        "admission.bins",
        Kind::Integer { min: 1, max: 64 },
        By("1"),
        "Bins by predicted output length; 1: none.",
    ),
    key(
        "admission.bin_selection",
        words(&["round-robin", "longest-queue"]),
        By("round-robin"),
        "Which bin is next.",
    ),
    key(
        "admission.bin_max_age",
        Kind::Duration,
        By("5s"),
        "A request that has waited this long goes before its bin's turn.",
    ),
    key(
        "admission.batching",
        words(&["continuous", "static"]),
        By("continuous"),
        "What a bin is: a class within the order, or a batch that goes to one backend together, for \
         engines that batch with a barrier.",
    ),
    key(
        "admission.sla.inter_token",
        Kind::DurationOrZero,
        By("0s"),
        "Time between two tokens of an answer that `adaptive` keeps; 0: memory alone limits.",
    ),
    key(
        "admission.sla.tolerance",
        Kind::DurationOrZero,
        By("5ms"),
        "Half width of the band around it within which the limit stays.",
    ),
    key(
        "admission.sla.min_batch",
        COUNT,
        By("1"),
        "Least limit that `adaptive` sets.",
    ),
    key(
        "admission.sla.max_batch",
        COUNT,
        By("1024"),
        "Greatest limit that `adaptive` sets.",
    ),
    key(
        "admission.sla.memory_z_milli",
        COUNT_OR_ZERO,
        By("1645"),
        "Quantile, in thousandths of a standard deviation, of the memory that requests take \
         together: 1645 lets it overflow with a probability of 5 %.",
    ),
    key(
        "admission.user_limits.requests",
        COUNT,
        Unset,
        "Requests per window of a user without limits of their own; unset: unbounded.",
    ),
    key(
        "admission.user_limits.tokens",
        COUNT,
        Unset,
        "Tokens per window, cached ones not counted; unset: unbounded.",
    ),
    key(
        "admission.user_limits.concurrent",
        COUNT,
        Unset,
        "Requests in flight at once; unset: unbounded.",
    ),
    key(
        "admission.user_limits.window",
        Kind::Duration,
        Unset,
        "The window; unset: one second.",
    ),
];
