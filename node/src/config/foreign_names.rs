//! Names that others give to what Quorate has under another name: AIBrix, in the tables of
//! `others`, and the design of a cache-aware gateway for vLLM. Errors say what they are called here.

use super::others;

/// Policies that no table of `import` has, and what to set instead.
const POLICIES: [(&str, &str); 4] = [
    ("vllm_cache_aware", "\"vllm-cache-aware\""),
    (
        "vtc-fair",
        "admission.order = \"vtc\", which is fair with any policy; \"vtc-basic\" is the policy",
    ),
    (
        "vtc-max-fair",
        "admission.order = \"vtc-max-fair\", with any policy",
    ),
    (
        "vtc-pred",
        "admission.order = \"vtc-pred\", with any policy",
    ),
];

/// Keys, and what to set instead.
const KEYS: [(&str, &str); 6] = [
    ("routing.vllm_cache_aware", "[routing.vllm-cache-aware]"),
    (
        "routing.vllm-cache-aware.block_size",
        "nothing: engines tell it; [[models]] block_size overrides it",
    ),
    (
        "routing.vllm-cache-aware.max_blocks_per_backend",
        "[[backends]] capacity_blocks, for engines that do not tell their capacity",
    ),
    (
        "routing.vllm-cache-aware.eviction_interval_secs",
        "nothing: blocks are forgotten when there are more than the engine holds",
    ),
    (
        "routing.vllm-cache-aware.cache_threshold",
        "cache_threshold_permille, 300 for 0.3",
    ),
    (
        "routing.vllm-cache-aware.load_factor",
        "load_factor_milli, 1250 for 1.25",
    ),
];

/// Tables that others spell differently, and their paths here.
const TABLES: [(&str, &str); 1] = [("routing.vllm_cache_aware", "routing.vllm-cache-aware")];

/// Returns what to set instead of the policy `name`, if others have one of that name.
pub(super) fn policy(name: &str) -> Option<String> {
    let own = find(&POLICIES, name).map(str::to_owned);
    own.or_else(|| others::algorithm(name))
}

/// Returns what to set instead of the key `path`, if others have one of that name.
pub(super) fn key(path: &str) -> Option<&'static str> {
    find(&KEYS, path)
}

/// Returns the path here of the table `path`, if others spell it so.
pub(super) fn table(path: &str) -> Option<&'static str> {
    find(&TABLES, path)
}

fn find(names: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    let found = names.iter().find(|(other, _)| *other == name);
    found.map(|(_, ours)| *ours)
}
