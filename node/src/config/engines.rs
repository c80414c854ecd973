//! Checks of `[[backends]]` and `[probes]`: the engines and their API keys.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::engines::backends::{
    EngineAddressRules, EngineHeaders, EngineKeys, EnginePlace, EngineUrl, ProbeSettings,
};
use api::engines::kv_transport::endpoint;
use api::files::text::read_text;
use api::prompt::ModelSettings;
use http::HeaderValue;
use state::command::{BACKENDS_MAX, BackendSpec, Rejection};

use super::file::{BackendConfig, ConfigFile};
use super::form::show_duration;
use super::read::Settings;

/// Minimum interval of probes, because every replica probes every engine.
const PROBE_INTERVAL_MIN: Duration = Duration::from_millis(50);

/// Checks that the interval of probes is not too short.
pub(super) fn check_probes(probes: &ProbeSettings, found: &mut Settings) {
    if probes.interval < PROBE_INTERVAL_MIN {
        let path = "probes.interval";
        let message = format!("{path} is {}", show_duration(&probes.interval));
        found.refuse(path, message, "50ms or more");
    }
}

/// Reads the engines' API keys and headers. A backend with neither gets the key for probes, for
/// probes only.
pub(super) fn keys(file: &ConfigFile, found: &mut Settings) -> EngineKeys {
    let path = "probes.api_key_file";
    let of_probes = key(path, file.probes.api_key_file.as_deref(), found);
    let mut keys = EngineKeys::default();
    for (nth, backend) in file.backends.iter().enumerate() {
        let path = format!("backends[{nth}].api_key_file");
        let own = key(&path, backend.api_key_file.as_deref(), found);
        let (id, url) = (&backend.id, &backend.url);
        match (own, &of_probes, &backend.headers_file) {
            (own, _, Some(file)) => {
                let path = format!("backends[{nth}].headers_file");
                if own.is_some() {
                    let message = format!("{path} is set beside api_key_file");
                    found.refuse(&path, message, "one of the two");
                }
                if let Some(headers) = headers(&path, file, found) {
                    keys.add(id, url, headers);
                }
            }
            (Some(key), _, None) => keys.add(id, url, key),
            (None, Some(key), None) => keys.add_for_probes(id, url, key.clone()),
            (None, None, None) => {}
        }
    }
    keys
}

fn key(path: &str, file: Option<&Path>, found: &mut Settings) -> Option<HeaderValue> {
    match authorization(file?) {
        Ok(authorization) => Some(authorization),
        Err(why) => {
            let message = format!("{path}: {why}");
            found.refuse(path, message, "a file with one key and no more");
            None
        }
    }
}

fn headers(path: &str, file: &Path, found: &mut Settings) -> Option<EngineHeaders> {
    let text = read_text(file);
    let text = text.map_err(|error| format!("read {file:?}: {error}"));
    let read = text.and_then(|text| {
        let headers = EngineHeaders::read(&text);
        headers.map_err(|why| format!("{file:?}: {why}"))
    });
    match read {
        Ok(headers) => Some(headers),
        Err(why) => {
            found.refuse(
                path,
                format!("{path}: {why}"),
                "a file with a header a line",
            );
            None
        }
    }
}

/// Returns the rules for engines' addresses, and checks that they allow all backends of the config.
pub(super) fn check_addresses(file: &ConfigFile, found: &mut Settings) -> EngineAddressRules {
    let rules = EngineAddressRules::new(file.admin.backends_allow.clone());
    if !found.is_sound("admin.backends_allow") {
        return rules;
    }
    for (nth, backend) in file.backends.iter().enumerate() {
        let url = EngineUrl::parse(&backend.url);
        let url = url
            .iter()
            .map(|url| ("url", EnginePlace::Host(url.host().to_owned())));
        let (events, replay) = (backend.kv_events.as_deref(), backend.kv_replay.as_deref());
        for (key, place) in url.chain(endpoint::places(events, replay)) {
            let path = format!("backends[{nth}].{key}");
            if let Err(refused) = rules.check_place(&place)
                && found.is_sound(&path)
            {
                let expected = "an engine that admin.backends_allow has";
                found.refuse(&path, format!("{path}: {refused}"), expected);
            }
        }
    }
    rules
}

/// Returns the names that engines' certificates must be for, by URL, where the config sets one.
pub(super) fn server_names(file: &ConfigFile, found: &mut Settings) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    for (nth, backend) in file.backends.iter().enumerate() {
        let Some(name) = &backend.server_name else {
            continue;
        };
        if !backend.url.starts_with("https://") {
            let path = format!("backends[{nth}].server_name");
            let message = format!("{path} is set, and its url is {}", backend.url);
            found.refuse(&path, message, "a url that begins with https://");
        }
        let name = name.trim_start_matches('[').trim_end_matches(']');
        names.insert(backend.url.clone(), name.to_owned());
    }
    names
}

/// Returns all files with API keys of clients or engines.
pub(super) fn secret_files(file: &ConfigFile) -> Vec<PathBuf> {
    let of_replica = [&file.users.api_keys_file, &file.probes.api_key_file];
    let of_backends = file.backends.iter();
    let of_backends = of_backends.flat_map(|it| [&it.api_key_file, &it.headers_file]);
    let files = of_replica.into_iter().chain(of_backends);
    files.flatten().cloned().collect()
}

/// Returns the header with the key in `file`.
fn authorization(file: &Path) -> Result<HeaderValue, String> {
    let key = read_text(file).map_err(|error| format!("read {file:?}: {error}"))?;
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

/// Returns the backends to register at start.
pub(super) fn backends(
    file: &ConfigFile,
    models: &[ModelSettings],
    found: &mut Settings,
) -> Vec<BackendSpec> {
    let backends = &file.backends;
    found.unique(
        "backends",
        "id",
        backends.iter().map(|backend| &*backend.id),
    );
    found.unique(
        "backends",
        "url",
        backends.iter().map(|backend| &*backend.url),
    );
    if backends.len() > BACKENDS_MAX {
        let message = format!("{} backends", backends.len());
        let expected = format!("at most {BACKENDS_MAX}");
        found.refuse(&format!("backends[{BACKENDS_MAX}]"), message, &expected);
    }
    let has_tokens = models.iter().any(|model| !model.tokenizer.is_character());
    let specs = backends.iter().map(spec).collect::<Vec<_>>();
    for (nth, spec) in specs.iter().enumerate() {
        check_spec(&format!("backends[{nth}]"), spec, has_tokens, found);
    }
    specs
}

fn check_spec(path: &str, spec: &BackendSpec, has_tokens: bool, found: &mut Settings) {
    if !found.is_sound(path) {
        return;
    }
    // The same check as when a backend is registered.
    if let Err(Rejection::Invalid { field, expected }) = spec.validate() {
        let message = format!("{path}.{field} is out of bounds");
        let key = field.split(['.', '[']).next().unwrap_or(&field);
        found.refuse(&format!("{path}.{key}"), message, &expected);
    }
    let (events, replay) = (spec.kv_events.as_deref(), spec.kv_replay.as_deref());
    if let Err((key, expected)) = api::engines::kv_transport::endpoint::check(events, replay) {
        let message = format!("{path}.{key} is not a usable endpoint");
        // The rendered error adds `expected` itself.
        let expected = expected.trim_start_matches("expected ");
        found.refuse(&format!("{path}.{key}"), message, expected);
    }
    if events.is_some() && !has_tokens && found.is_sound("models") {
        let message = format!("{path}.kv_events without a tokenizer");
        let expected = "a [[models]] entry with another tokenizer than \"character\": KV events \
                        contain token ids";
        found.refuse(&format!("{path}.kv_events"), message, expected);
    }
}

fn spec(backend: &BackendConfig) -> BackendSpec {
    BackendSpec {
        id: backend.id.clone(),
        url: backend.url.clone(),
        models: backend.models.clone(),
        labels: backend.labels.clone(),
        capacity_blocks: backend.capacity_blocks,
        kv_events: backend.kv_events.clone(),
        kv_replay: backend.kv_replay.clone(),
        role: backend.role,
    }
}
