//! Settings tables of the routing policies: `[routing.NAME]`. A key is named as the field of the
//! policy's settings that it sets, which is how one becomes the other.

use super::key::Absent::{Default as By, Unset};
use super::key::{COUNT, COUNT_OR_ZERO, Key, Kind, key};

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
        "Nanoseconds to prefill one uncached prompt token.",
    ),
    key(
        "routing.cost.decode_ns_per_request",
        COUNT_OR_ZERO,
        By("1000000"),
        "Nanoseconds that each running request adds to the time to first token.",
    ),
    key(
        "routing.cost.waiting_ns_per_request",
        COUNT_OR_ZERO,
        By("50000000"),
        "Nanoseconds that each request waiting in the engine adds.",
    ),
    key(
        "routing.cost.kv_pressure_from_permille",
        PERMILLE,
        By("900"),
        "KV cache usage, in thousandths, above which pressure is added.",
    ),
    key(
        "routing.cost.kv_pressure_ns_per_permille",
        COUNT_OR_ZERO,
        By("5000000"),
        "Nanoseconds added per thousandth of KV cache usage above that.",
    ),
    key(
        "routing.cost.eviction_permille",
        Kind::Integer { min: 0, max: 1000 },
        By("300"),
        "Price of eviction: each block that a request would push out of a full cache costs this share, in thousandths, of recomputing it.",
    ),
    key(
        "routing.cost.near_permille",
        PERMILLE,
        By("20"),
        "Costs within this many thousandths of the lowest count as equal.",
    ),
    key(
        "routing.lmetric.base_tokens",
        COUNT_OR_ZERO,
        By("256"),
        "Tokens added to the prefill: the cost of a fully cached request.",
    ),
    key(
        "routing.lmetric.near_permille",
        PERMILLE,
        By("20"),
        "Scores within this many thousandths of the lowest count as equal.",
    ),
    key(
        "routing.prefix-cache.imbalance_abs_count",
        COUNT_OR_ZERO,
        By("16"),
        "Load is imbalanced, and prefixes are ignored, when the most and the least loaded backend differ by more running requests than this.",
    ),
    key(
        "routing.prefix-cache.standard_deviation_factor_milli",
        FACTOR_OR_ZERO,
        By("2000"),
        "How far above the mean a backend's running requests may be to be chosen for its prefix, in thousandths of a standard deviation.",
    ),
    key(
        "routing.prefix-cache.min_match_blocks",
        COUNT,
        By("2"),
        "Minimum number of leading blocks that count as a match; all blocks of a shorter prompt.",
    ),
    key(
        "routing.vllm-cache-aware.cache_threshold_permille",
        PERMILLE,
        By("300"),
        "A match counts if it covers more than this share of the prompt's blocks, in thousandths.",
    ),
    key(
        "routing.vllm-cache-aware.load_factor_milli",
        FACTOR,
        By("1250"),
        "Largest load of a backend that is chosen for its prefix, in thousandths of the average.",
    ),
    key(
        "routing.vllm-cache-aware.hashing",
        Kind::Choice {
            now: &["chained", "position"],
            later: &[],
        },
        By("chained"),
        "How matches are found: for all backends at once, or per backend by position.",
    ),
    key(
        "routing.vllm-cache-aware.touch",
        Kind::Choice {
            now: &["always", "sampled"],
            later: &[],
        },
        By("always"),
        "How often a match renews the age of its blocks: with every request, or with one in eight.",
    ),
    key(
        "routing.epp.prefix_weight",
        WEIGHT,
        By("3"),
        "Weight of the prefix score: the cached share of the prompt.",
    ),
    key(
        "routing.epp.queue_weight",
        WEIGHT,
        By("2"),
        "Weight of the queue score: the engine's queue relative to the longest and the shortest.",
    ),
    key(
        "routing.epp.kv_weight",
        WEIGHT,
        By("2"),
        "Weight of the KV cache score: the free share of the cache.",
    ),
    key(
        "routing.epp.min_match_tokens",
        COUNT_OR_ZERO,
        By("64"),
        "Minimum number of tokens that a match must save.",
    ),
    key(
        "routing.epp.min_match_permille",
        PERMILLE,
        By("0"),
        "Minimum share of the prompt's blocks that a match must cover, in thousandths.",
    ),
    key(
        "routing.epp.lora_waiting_max",
        COUNT_OR_ZERO,
        By("50"),
        "Longest engine queue at which an engine with the adapter loaded is preferred.",
    ),
    key(
        "routing.epp.near_permille",
        PERMILLE,
        By("10"),
        "Scores within this many thousandths of the sum of weights count as equal.",
    ),
    key(
        "routing.chwbl.prefix_blocks",
        COUNT,
        By("1"),
        "Number of leading blocks that make up the hash key; all blocks of a shorter prompt.",
    ),
    key(
        "routing.chwbl.virtual_nodes",
        Kind::Integer {
            min: 1,
            max: 65_536,
        },
        By("256"),
        "Virtual nodes of each backend on the hash ring.",
    ),
    key(
        "routing.chwbl.load_factor_milli",
        FACTOR,
        By("1250"),
        "Largest load of a backend, in thousandths of the average.",
    ),
    key(
        "routing.session.header",
        Kind::Text,
        By("x-quorate-session"),
        "Request header that names the session.",
    ),
    key(
        "routing.session.cookie",
        Kind::Text,
        Unset,
        "Cookie that names the session when the header is missing. Default: cookies are ignored.",
    ),
    key(
        "routing.least-kv.near_permille",
        PERMILLE,
        By("20"),
        "Usages within this many thousandths of the cache above the lowest count as equal.",
    ),
    key(
        "routing.vtc-basic.token_tracker_time_unit",
        Kind::Choice {
            now: &["minutes", "seconds", "milliseconds"],
            later: &[],
        },
        By("minutes"),
        "Time unit of the window.",
    ),
    key(
        "routing.vtc-basic.token_tracker_window_size",
        Kind::Integer {
            min: 1,
            max: 10_000,
        },
        By("5"),
        "Length of the window over which users' tokens are counted, in time units.",
    ),
    key(
        "routing.vtc-basic.token_tracker_min_tokens",
        COUNT,
        By("1000"),
        "Smallest bucket in tokens, and the assumed minimum when no user has used any.",
    ),
    key(
        "routing.vtc-basic.token_tracker_max_tokens",
        COUNT,
        By("8000"),
        "Assumed maximum of users' tokens when no user has used any; at least `token_tracker_min_tokens`.",
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
        "Number of running requests that counts as full utilisation.",
    ),
    key(
        "routing.vtc-basic.fairness_weight_milli",
        FACTOR_OR_ZERO,
        By("1000"),
        "Weight of fairness (distance from the user's place among the backends), in thousandths.",
    ),
    key(
        "routing.vtc-basic.utilization_weight_milli",
        FACTOR_OR_ZERO,
        By("1000"),
        "Weight of utilisation, in thousandths.",
    ),
    key(
        "routing.preble-e2.exploit_above_permille",
        PERMILLE,
        By("500"),
        "The longest match is exploited if it covers more than this share of the prompt's tokens, in thousandths.",
    ),
    key(
        "routing.preble-e2.imbalance_milli",
        FACTOR,
        By("2000"),
        "Largest load of an exploited backend, in thousandths of the lightest load.",
    ),
    key(
        "routing.preble-e2.evicted_reuse_permille",
        PERMILLE,
        By("500"),
        "Probability that an evicted block has to be recomputed, in thousandths.",
    ),
    key(
        "routing.preble-e2.prefill_ns_per_token",
        COUNT_OR_ZERO,
        By("100000"),
        "Nanoseconds to prefill one uncached prompt token.",
    ),
    key(
        "routing.preble-e2.decode_ns_per_request",
        COUNT_OR_ZERO,
        By("1000000"),
        "Nanoseconds of load that each running request counts as.",
    ),
    key(
        "routing.preble-e2.near_permille",
        PERMILLE,
        By("20"),
        "Costs within this many thousandths of the lowest count as equal.",
    ),
];
