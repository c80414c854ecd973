//! Draws values of the config inside their documented ranges, so that no rule holds by default values
//! only. The keys come from the config's schema, so a new key is drawn as soon as it exists.

use lab::rng::Rng;
use node::config::{self, Origin};
use serde_json::Value;

/// Label of these draws, which separates them from others under the same seed.
const RNG_LABEL: u64 = 0x6b6e_6f62;
/// One of so many keys is drawn, so that each cluster has few values that are not usual.
const KEPT: u32 = 4;
/// Keys that are drawn, by their beginning: those that decide how requests are ordered, placed, limited
/// and charged. The plan draws the times of raft itself.
const DRAWN: &[&str] = &[
    "admission.",
    "circuit.",
    "probes.panic_threshold_percent",
    "retry.attempts",
    "routing.",
    "sessions.enabled",
    "users.defaults.",
];
/// Keys that would take the workload's own subject away: the policy is drawn by the plan, and its
/// clients use no header, and wait as long as it takes.
const LEFT: &[&str] = &["routing.policy", "routing.allow_override"];

/// Draws settings for `seed`, as flags of the form `section.key=value`. All of them fit each other.
pub(super) fn draw(seed: u64) -> Vec<String> {
    let mut rng = Rng::new(seed, RNG_LABEL);
    let mut keys = Vec::new();
    collect(&config::schema(), String::new(), &mut keys);
    let mut flags: Vec<String> = Vec::new();
    for (key, schema) in keys {
        let is_drawn = DRAWN.iter().any(|it| key.starts_with(it)) && !LEFT.contains(&&*key);
        if !is_drawn || rng.within(1, KEPT) > 1 {
            continue;
        }
        let values = values(&key, &schema);
        if values.is_empty() {
            continue;
        }
        let value = &values[rng.below(values.len() as u64) as usize];
        flags.push(format!("{key}={value}"));
        if config::load(&origin(&flags)).is_err() {
            // It contradicts another one.
            flags.pop();
        }
    }
    flags
}

/// Returns the origin of a config with these flags.
fn origin(flags: &[String]) -> Origin {
    let mut flags = flags.to_vec();
    flags.push("node.id=1".to_owned());
    Origin {
        flags,
        ..Origin::default()
    }
}

/// Collects the keys of a section and those below it, with their schemas.
fn collect(schema: &Value, path: String, keys: &mut Vec<(String, Value)>) {
    let Some(properties) = schema["properties"].as_object() else {
        keys.push((path, schema.clone()));
        return;
    };
    for (name, below) in properties {
        let dot = if path.is_empty() { "" } else { "." };
        collect(below, format!("{path}{dot}{name}"), keys);
    }
}

/// Returns values of a key: the ends of its range, the smallest that are not an end, and some around
/// its default.
fn values(key: &str, schema: &Value) -> Vec<String> {
    if key == "admission.concurrency" {
        return ["adaptive", "1", "2", "8"].map(str::to_owned).to_vec();
    }
    if let Some(names) = schema["enum"].as_array() {
        let names = names.iter().filter_map(Value::as_str);
        return names.map(str::to_owned).collect();
    }
    match schema["type"].as_str() {
        Some("boolean") => vec!["false".to_owned(), "true".to_owned()],
        Some("integer") => {
            let least = schema["minimum"].as_u64().unwrap_or(0);
            let most = schema["maximum"].as_u64().unwrap_or(u64::from(u32::MAX));
            let usual = schema["default"].as_u64();
            let usual = usual.map_or(vec![100, 10_000], |it| vec![it / 2, it.saturating_mul(2)]);
            let all = [vec![least, least + 1, least + 2], usual].concat();
            let fitting = all.into_iter().filter(|it| (least..=most).contains(it));
            fitting.map(|it| it.to_string()).collect()
        }
        _ => match schema["default"].as_str().map(humantime::parse_duration) {
            Some(Ok(usual)) if usual.is_zero() => vec!["50ms".to_owned()],
            Some(Ok(usual)) => [usual / 10, usual / 2, usual * 2]
                .map(|it| format!("{}ms", it.as_millis().max(1)))
                .to_vec(),
            _ => Vec::new(),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_key_is_drawn_and_every_draw_is_a_config() {
        let mut drawn = BTreeSet::new();
        for seed in 0..60 {
            let flags = draw(seed);
            config::load(&origin(&flags)).unwrap();
            drawn.extend(
                flags
                    .iter()
                    .map(|it| it.split('=').next().unwrap().to_owned()),
            );
        }
        for key in [
            "admission.max_queue",
            "admission.max_wait",
            "admission.order",
            "routing.cost.prefill_ns_per_token",
            "routing.chwbl.load_factor_milli",
            "users.defaults.limits.concurrent",
            "users.defaults.weight_milli",
        ] {
            assert!(drawn.contains(key), "{key}: {drawn:?}");
        }
    }
}
