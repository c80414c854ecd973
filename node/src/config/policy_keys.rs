//! Settings tables of the routing policies: `[routing.NAME]`. A key is named as the field of the
//! policy's settings that it sets, which is how one becomes the other.

use super::keys::Absent::{Default as By, Unset};
use super::keys::{COUNT, COUNT_OR_ZERO, Key, Kind, key};

const PERMILLE: Kind = Kind::Integer { min: 0, max: 1000 };
const WEIGHT: Kind = Kind::Integer { min: 0, max: 1000 };
const FACTOR: Kind = Kind::Integer {
    min: 1000,
    max: 1_000_000,
};
const FACTOR_OR_ZERO: Kind = Kind::Integer {
    min: 0,
    max: 1_000_000,
};

/// By policy, in the order of their names' list.
pub(super) const POLICY_KEYS: &[Key] = &[
    key(
        "routing.cost.prefill_ns_per_token",
        COUNT_OR_ZERO,
        By("100000"),
        "Nanoseconds an engine computes on one uncached prompt token.",
    ),
    key(
        "routing.cost.decode_ns_per_request",
        COUNT_OR_ZERO,
        By("1000000"),
        "Nanoseconds each running request adds to a new one's first token.",
    ),
    key(
        "routing.cost.waiting_ns_per_request",
        COUNT_OR_ZERO,
        By("50000000"),
        "Nanoseconds each request waiting in the engine adds.",
    ),
    key(
        "routing.cost.kv_pressure_from_permille",
        PERMILLE,
        By("900"),
        "KV usage, in thousandths, above which pressure counts.",
    ),
    key(
        "routing.cost.kv_pressure_ns_per_permille",
        COUNT_OR_ZERO,
        By("5000000"),
        "Nanoseconds one thousandth of KV usage above that adds.",
    ),
    key(
        "routing.cost.eviction_permille",
        Kind::Integer { min: 0, max: 1000 },
        By("300"),
        "Share, in thousandths, of the price of computing them again that blocks count with which a \
         request would evict from a full cache.",
    ),
    key(
        "routing.cost.near_permille",
        PERMILLE,
        By("20"),
        "Costs within so many thousandths of the least count as equal.",
    ),
    key(
        "routing.lmetric.base_tokens",
        COUNT_OR_ZERO,
        By("256"),
        "Tokens added to the prefill: what a wholly cached request still costs.",
    ),
    key(
        "routing.lmetric.near_permille",
        PERMILLE,
        By("20"),
        "Scores within so many thousandths of the least count as equal.",
    ),
    key(
        "routing.prefix-cache.imbalance_abs_count",
        COUNT_OR_ZERO,
        By("16"),
        "Most and fewest running requests further apart than this: imbalanced, the prefix is ignored.",
    ),
    key(
        "routing.prefix-cache.standard_deviation_factor_milli",
        FACTOR_OR_ZERO,
        By("2000"),
        "Standard deviations above the mean that a holder's running requests may be, in thousandths.",
    ),
    key(
        "routing.prefix-cache.min_match_blocks",
        COUNT,
        By("2"),
        "Fewest leading blocks that count as a match; of a shorter prompt all.",
    ),
    key(
        "routing.vllm-cache-aware.cache_threshold_permille",
        PERMILLE,
        By("300"),
        "Share of the prompt's blocks, in thousandths, above which a match counts.",
    ),
    key(
        "routing.vllm-cache-aware.load_factor_milli",
        FACTOR,
        By("1250"),
        "How far above the average a holder's load may be, in thousandths.",
    ),
    key(
        "routing.vllm-cache-aware.hashing",
        Kind::Choice {
            now: &["chained", "position"],
            later: &[],
        },
        By("chained"),
        "How leading blocks are found: for all backends at once, or per backend by position.",
    ),
    key(
        "routing.vllm-cache-aware.touch",
        Kind::Choice {
            now: &["always", "sampled"],
            later: &[],
        },
        By("always"),
        "When a match renews a block's age: with every request, or with one in eight.",
    ),
    key(
        "routing.epp.prefix_weight",
        WEIGHT,
        By("3"),
        "Weight of the share of the prompt that is held.",
    ),
    key(
        "routing.epp.queue_weight",
        WEIGHT,
        By("2"),
        "Weight of the engine's queue against the longest and shortest.",
    ),
    key(
        "routing.epp.kv_weight",
        WEIGHT,
        By("2"),
        "Weight of what is free of the KV cache.",
    ),
    key(
        "routing.epp.min_match_tokens",
        COUNT_OR_ZERO,
        By("64"),
        "Fewest tokens a match must save to count.",
    ),
    key(
        "routing.epp.min_match_permille",
        PERMILLE,
        By("0"),
        "Least share of the prompt's blocks, in thousandths, that a match must have to count.",
    ),
    key(
        "routing.epp.lora_waiting_max",
        COUNT_OR_ZERO,
        By("50"),
        "Longest queue with which an engine that lists the adapter goes first.",
    ),
    key(
        "routing.epp.near_permille",
        PERMILLE,
        By("10"),
        "Sums within so many thousandths of the weights' sum count as equal.",
    ),
    key(
        "routing.chwbl.prefix_blocks",
        COUNT,
        By("1"),
        "Leading blocks of the prompt that make the key; of a shorter prompt all.",
    ),
    key(
        "routing.chwbl.virtual_nodes",
        Kind::Integer {
            min: 1,
            max: 65_536,
        },
        By("256"),
        "Places of each backend on the ring.",
    ),
    key(
        "routing.chwbl.load_factor_milli",
        FACTOR,
        By("1250"),
        "How far above the average a backend's load may be, in thousandths.",
    ),
    key(
        "routing.session.header",
        Kind::Text,
        By("x-quorate-session"),
        "Request header whose value names the session.",
    ),
    key(
        "routing.session.cookie",
        Kind::Text,
        Unset,
        "Cookie whose value names it when the header is missing; unset: cookies are not looked at.",
    ),
    key(
        "routing.least-kv.near_permille",
        PERMILLE,
        By("20"),
        "Usages at most so many thousandths of the cache above the least count as equal.",
    ),
    key(
        "routing.vtc-basic.token_tracker_time_unit",
        Kind::Choice {
            now: &["minutes", "seconds", "milliseconds"],
            later: &[],
        },
        By("minutes"),
        "Unit of the window's length.",
    ),
    key(
        "routing.vtc-basic.token_tracker_window_size",
        Kind::Integer {
            min: 1,
            max: 10_000,
        },
        By("5"),
        "Length of the window in which users' tokens count, in units.",
    ),
    key(
        "routing.vtc-basic.token_tracker_min_tokens",
        COUNT,
        By("1000"),
        "Least bucket, in tokens; the least user's tokens when nobody used any.",
    ),
    key(
        "routing.vtc-basic.token_tracker_max_tokens",
        COUNT,
        By("8000"),
        "The greatest user's tokens when nobody used any; at least `token_tracker_min_tokens`.",
    ),
    key(
        "routing.vtc-basic.input_token_weight_milli",
        FACTOR_OR_ZERO,
        By("1000"),
        "Weight of a prompt token, in thousandths.",
    ),
    key(
        "routing.vtc-basic.output_token_weight_milli",
        FACTOR_OR_ZERO,
        By("2000"),
        "Weight of an output token, in thousandths.",
    ),
    key(
        "routing.vtc-basic.max_pod_load",
        COUNT,
        By("100"),
        "Running requests that count as full utilisation.",
    ),
    key(
        "routing.vtc-basic.fairness_weight_milli",
        FACTOR_OR_ZERO,
        By("1000"),
        "Weight of the distance from the user's place, in thousandths.",
    ),
    key(
        "routing.vtc-basic.utilization_weight_milli",
        FACTOR_OR_ZERO,
        By("1000"),
        "Weight of the utilisation, in thousandths.",
    ),
    key(
        "routing.preble-e2.exploit_above_permille",
        PERMILLE,
        By("500"),
        "Share of the prompt's tokens, in thousandths, above which the longest match is exploited.",
    ),
    key(
        "routing.preble-e2.imbalance_milli",
        FACTOR,
        By("2000"),
        "How many times the lightest load, in thousandths, a holder's may be.",
    ),
    key(
        "routing.preble-e2.evicted_reuse_permille",
        PERMILLE,
        By("500"),
        "Probability, in thousandths, that an evicted block has to be computed again.",
    ),
    key(
        "routing.preble-e2.prefill_ns_per_token",
        COUNT_OR_ZERO,
        By("100000"),
        "Nanoseconds an engine computes on one uncached prompt token.",
    ),
    key(
        "routing.preble-e2.decode_ns_per_request",
        COUNT_OR_ZERO,
        By("1000000"),
        "Nanoseconds each running request counts as load.",
    ),
    key(
        "routing.preble-e2.near_permille",
        PERMILLE,
        By("20"),
        "Costs within so many thousandths of the least count as equal.",
    ),
];
