//! Names that others give to what Quorate has under another name: AIBrix, and the design of a
//! cache-aware gateway for vLLM. Errors say what they are called here.

/// Policies, and what to set instead.
const POLICIES: [(&str, &str); 7] = [
    ("vllm_cache_aware", "\"vllm-cache-aware\""),
    ("prefix-aware", "\"prefix-cache\""),
    ("prefix_cache", "\"prefix-cache\""),
    ("prefix-cache-preble", "\"preble-e2\""),
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

/// Environment variables of AIBrix's gateway, and the keys here.
const VARIABLES: [(&str, &str); 16] = [
    ("AIBRIX_ROUTING_ALGORITHM", "routing.policy"),
    ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "[[models]] tokenizer"),
    (
        "AIBRIX_PREFIX_CACHE_BLOCK_SIZE",
        "[[models]] block_size; engines tell it",
    ),
    (
        "AIBRIX_PREFIX_CACHE_BLOCK_NUMBER",
        "[[backends]] capacity_blocks, for engines that do not tell it",
    ),
    (
        "AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT",
        "routing.prefix-cache.imbalance_abs_count",
    ),
    (
        "AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR",
        "routing.prefix-cache.standard_deviation_factor_milli",
    ),
    (
        "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT",
        "routing.vtc-basic.token_tracker_time_unit",
    ),
    (
        "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE",
        "routing.vtc-basic.token_tracker_window_size",
    ),
    (
        "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS",
        "routing.vtc-basic.token_tracker_min_tokens",
    ),
    (
        "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MAX_TOKENS",
        "routing.vtc-basic.token_tracker_max_tokens",
    ),
    (
        "AIBRIX_ROUTER_VTC_BASIC_INPUT_TOKEN_WEIGHT",
        "routing.vtc-basic.input_token_weight_milli",
    ),
    (
        "AIBRIX_ROUTER_VTC_BASIC_OUTPUT_TOKEN_WEIGHT",
        "routing.vtc-basic.output_token_weight_milli",
    ),
    (
        "AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD",
        "routing.vtc-basic.max_pod_load",
    ),
    (
        "AIBRIX_ROUTER_VTC_BASIC_FAIRNESS_WEIGHT",
        "routing.vtc-basic.fairness_weight_milli",
    ),
    (
        "AIBRIX_ROUTER_VTC_BASIC_UTILIZATION_WEIGHT",
        "routing.vtc-basic.utilization_weight_milli",
    ),
    ("AIBRIX_", "no key here"),
];

/// Returns what to set instead of the policy `name`, if others have one of that name.
pub(super) fn policy(name: &str) -> Option<&'static str> {
    find(&POLICIES, name)
}

/// Returns what to set instead of the key `path`, if others have one of that name.
pub(super) fn key(path: &str) -> Option<&'static str> {
    find(&KEYS, path)
}

/// Returns the path here of the table `path`, if others spell it so.
pub(super) fn table(path: &str) -> Option<&'static str> {
    find(&TABLES, path)
}

/// Returns what takes the place of an environment variable of AIBrix; `None` if it is not one.
pub(super) fn variable(name: &str) -> Option<&'static str> {
    let found = VARIABLES.iter().find(|(other, _)| name.starts_with(other));
    found.map(|(_, ours)| *ours)
}

fn find(names: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    let found = names.iter().find(|(other, _)| *other == name);
    found.map(|(_, ours)| *ours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::schema;

    #[test]
    fn foreign_names_lead_to_existing_keys() {
        let keys = schema::keys();
        let is_key = |path: &str| keys.iter().any(|(key, _)| key == path);
        for (_, ours) in VARIABLES {
            let path = ours.split([';', ' ']).next().unwrap_or_default();
            let is_list = path.starts_with("[[") || path == "no";
            assert!(is_list || is_key(path), "{path}");
        }
        for (_, table) in TABLES {
            assert!(keys.iter().any(|(key, _)| key.starts_with(table)));
        }
        assert_eq!(variable("AIBRIX_ELSE"), Some("no key here"));
        assert_eq!(variable("HOME"), None);
    }
}
