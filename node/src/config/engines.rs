//! `[[backends]]` and `[probes]`: the engines, and the keys they want.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use api::backends::EngineKeys;
use http::HeaderValue;
use state::command::{BACKENDS_MAX, BackendSpec, Rejection};

use super::Probes;
use super::fault::{Fault, Place};
use super::layers::{Entry, Values};
use super::read::{count, duration, refuse, text, texts, unique};
use super::value::Value;

/// Shortest interval of probes: every replica asks every engine.
const PROBE_INTERVAL_MIN: Duration = Duration::from_millis(50);

/// How engines are probed.
pub(super) fn probes(values: &Values, faults: &mut Vec<Fault>) -> Option<Probes> {
    let interval = duration(values, "probes.interval");
    if let Some(interval) = interval.filter(|interval| *interval < PROBE_INTERVAL_MIN) {
        let shown = humantime::format_duration(interval);
        let message = format!("probes.interval is {shown}");
        refuse(values, "probes.interval", message, "50ms or more", faults);
    }
    Some(Probes {
        interval: interval?,
        timeout: duration(values, "probes.timeout")?,
        models_interval: duration(values, "probes.models_interval")?,
        health_path: text(values, "probes.health_path"),
        panic_threshold_percent: count(values, "probes.panic_threshold_percent")?,
    })
}

/// The keys that engines want: a backend's own, else that of all probes.
pub(super) fn keys(
    values: &Values,
    entries: &[Entry],
    faults: &mut Vec<Fault>,
) -> Option<EngineKeys> {
    let before = faults.len();
    let of_probes = key(values, "probes.api_key_file", "probes.api_key_file", faults);
    let mut keys = EngineKeys::default();
    for (nth, entry) in entries.iter().enumerate() {
        let shown = format!("backends[{nth}].api_key_file");
        let own = key(&entry.values, "api_key_file", &shown, faults);
        let (Some(id), Some(url)) = (text(&entry.values, "id"), text(&entry.values, "url")) else {
            continue;
        };
        match (own, &of_probes) {
            (Some(key), _) => keys.add(&id, &url, key),
            (None, Some(key)) => keys.add_for_probes(&id, &url, key.clone()),
            (None, None) => {}
        }
    }
    (faults.len() == before).then_some(keys)
}

/// All files that hold keys.
pub(super) fn secret_files(values: &Values, entries: &[Entry]) -> Vec<PathBuf> {
    let of_replica = ["users.api_keys_file", "probes.api_key_file"];
    let of_replica = of_replica.iter().filter_map(|path| text(values, path));
    let own = |entry: &Entry| text(&entry.values, "api_key_file");
    let of_backends = entries.iter().filter_map(own);
    of_replica.chain(of_backends).map(PathBuf::from).collect()
}

/// The header that carries the key in the file that `path` names, if it names one.
fn key(values: &Values, path: &str, shown: &str, faults: &mut Vec<Fault>) -> Option<HeaderValue> {
    match authorization(&text(values, path)?) {
        Ok(authorization) => Some(authorization),
        Err(why) => {
            let message = format!("{shown}: {why}");
            let expected = "a file with one key and no more";
            refuse(values, path, message, expected, faults);
            None
        }
    }
}

/// The header that carries the key in `file`.
fn authorization(file: &str) -> Result<HeaderValue, String> {
    let key = std::fs::read_to_string(file).map_err(|error| format!("read {file:?}: {error}"))?;
    let key = key.trim();
    let is_key = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
    let value = HeaderValue::from_str(&format!("Bearer {key}"));
    let mut value = value
        .ok()
        .filter(|_| is_key)
        .ok_or_else(|| format!("{file:?} holds no key, or more than one"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// The backends that are registered at start.
pub(super) fn backends(
    entries: &[Entry],
    has_tokens: bool,
    faults: &mut Vec<Fault>,
) -> Vec<BackendSpec> {
    unique("backends", "id", entries, faults);
    if entries.len() > BACKENDS_MAX {
        faults.push(Fault {
            message: format!("{} backends", entries.len()),
            expected: format!("at most {BACKENDS_MAX}"),
            place: Place::File(entries[BACKENDS_MAX].span.clone()),
        });
    }
    let backend = |(nth, entry): (usize, &Entry)| {
        let spec = backend(entry)?;
        // The cluster would refuse it.
        if let Err(Rejection::Invalid { field, expected }) = spec.validate() {
            let message = format!("backends[{nth}].{field} is out of bounds");
            let key = field.split(['.', '[']).next().unwrap_or(&field);
            refuse(&entry.values, key, message, &expected, faults);
        }
        let (events, replay) = (spec.kv_events.as_deref(), spec.kv_replay.as_deref());
        if let Err((key, expected)) = api::kv_events::endpoint::check(events, replay) {
            let message = format!("backends[{nth}].{key} is no endpoint that can be used");
            // The report says `expected` itself.
            let expected = expected.trim_start_matches("expected ");
            refuse(&entry.values, key, message, expected, faults);
        }
        if events.is_some() && !has_tokens {
            let message = format!("backends[{nth}].kv_events without a tokenizer");
            let expected = "a [[models]] entry with another tokenizer than \"character\": KV \
                            events tell token ids";
            refuse(&entry.values, "kv_events", message, expected, faults);
        }
        Some(spec)
    };
    entries.iter().enumerate().filter_map(backend).collect()
}

fn backend(entry: &Entry) -> Option<BackendSpec> {
    let labels = match entry.values.get("labels").map(|setting| &setting.value) {
        Some(Value::Labels(labels)) => labels.clone(),
        _ => BTreeMap::new(),
    };
    Some(BackendSpec {
        id: text(&entry.values, "id")?,
        url: text(&entry.values, "url")?.trim_end_matches('/').to_owned(),
        models: texts(&entry.values, "models")?,
        labels,
        capacity_blocks: count(&entry.values, "capacity_blocks"),
        kv_events: text(&entry.values, "kv_events"),
        kv_replay: text(&entry.values, "kv_replay"),
    })
}
