//! `kind = "file"`: a list of engines, reloaded whenever the file changes.
//!
//! The list is `[[backends]]` in TOML; in JSON it is a list or `{"backends": [...]}`. Entries have
//! the keys of `[[backends]]` in a config. A file that cannot be read as a list changes nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Deserialize;
use serde_json::Value;
use state::command::{BackendRole, BackendSpec};
use state::discovery::{EngineCondition, ListedEngine, RefusedEngine};
use tokio_util::sync::CancellationToken;

use super::EngineTemplate;
use super::source_status::{DiscoveryBoard, SourceReading};
use crate::engines::backends::{EngineDialer, EnginePlace, EngineUrl};
use crate::engines::kv_transport::endpoint;
use crate::files::file_stamp::{FileStamp, look_regularly};
use crate::files::text::read_text;

/// Maximum length of a list, in bytes.
const FILE_BYTES_MAX: u64 = 8 << 20;
/// Maximum number of entries in a list.
const ENTRIES_MAX: usize = 16_384;

/// An engine's entry in the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEntry {
    /// Id of the engine; host and port of `url` if absent.
    id: Option<String>,
    url: String,
    models: Option<Vec<String>>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    capacity_blocks: Option<u32>,
    kv_events: Option<String>,
    kv_replay: Option<String>,
    role: Option<BackendRole>,
}

/// Reports the contents of the file to the board, initially and after each change, until `stop`.
pub(super) async fn follow(
    path: PathBuf,
    template: EngineTemplate,
    (board, dialer): (Arc<DiscoveryBoard>, EngineDialer),
    stop: CancellationToken,
) {
    let seen = Mutex::new(None);
    let look = move || {
        let stamp = FileStamp::of(&path);
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        if *seen != Some(stamp) {
            *seen = Some(stamp);
            board.record_report(&template.source, read(&path, &template, &dialer));
        }
    };
    look_regularly(look, stop).await;
}

fn read(
    path: &Path,
    template: &EngineTemplate,
    dialer: &EngineDialer,
) -> Result<SourceReading, String> {
    let shown = path.display();
    let length = path.metadata().map(|found| found.len());
    let length = length.map_err(|error| format!("read {shown}: {error}"))?;
    if length > FILE_BYTES_MAX {
        return Err(format!(
            "{shown} has {length} bytes, expected {FILE_BYTES_MAX} at most"
        ));
    }
    let text = read_text(path);
    let text = text.map_err(|error| format!("read {shown}: {error}"))?;
    let is_json = path.extension().is_some_and(|it| it == "json");
    let list = entries(&text, is_json).map_err(|why| format!("{shown}: {why}"))?;
    Ok(reading(list, template, dialer))
}

/// Reads a list from `text`, for the fuzz target.
#[cfg(feature = "fuzzing")]
pub(super) fn fuzzed(
    text: &str,
    is_json: bool,
    template: &EngineTemplate,
    dialer: &EngineDialer,
) -> Result<SourceReading, String> {
    let list = entries(text, is_json)?;
    let count = list.len();
    let reading = reading(list, template, dialer);
    assert!(reading.engines.len() <= count);
    Ok(reading)
}

/// Returns the entries of a list, which are not checked yet.
fn entries(text: &str, is_json: bool) -> Result<Vec<Value>, String> {
    let document: Value = match is_json {
        true => serde_json::from_str(text).map_err(|error| error.to_string())?,
        false => toml::from_str(text).map_err(|error| {
            let place = error.span().map_or(0, |span| span.start);
            let line = 1 + text[..place].matches('\n').count();
            format!("line {line}: {}", error.message())
        })?,
    };
    let list = match document {
        Value::Object(mut table) => {
            let list = table.remove("backends");
            if let Some(other) = table.keys().next() {
                return Err(format!("unknown key {other:?}, expected backends"));
            }
            list.unwrap_or_else(|| Value::Array(Vec::new()))
        }
        other => other,
    };
    match list {
        Value::Array(entries) => Ok(entries),
        _ => Err("expected a list of backends".to_owned()),
    }
}

fn reading(list: Vec<Value>, template: &EngineTemplate, dialer: &EngineDialer) -> SourceReading {
    let mut reading = SourceReading::default();
    let beyond = list.len().saturating_sub(ENTRIES_MAX);
    for (nth, entry) in list.into_iter().take(ENTRIES_MAX).enumerate() {
        match engine(entry, template, dialer) {
            Ok(spec) => reading.engines.push(ListedEngine {
                spec,
                condition: EngineCondition::Ready,
            }),
            Err((id, reason)) => {
                let engine = id.clone().unwrap_or_else(|| format!("entry {}", nth + 1));
                reading.refused.push(RefusedEngine { engine, reason });
                // An existing backend with that id stays unchanged.
                let unclear = id.map(|id| template.nowhere(&id, EngineCondition::Unclear));
                reading.engines.extend(unclear);
            }
        }
    }
    if beyond > 0 {
        reading.refused.push(RefusedEngine {
            engine: format!("{beyond} more"),
            reason: format!("the file has more than {ENTRIES_MAX} entries"),
        });
    }
    reading
}

fn engine(
    entry: Value,
    template: &EngineTemplate,
    dialer: &EngineDialer,
) -> Result<BackendSpec, (Option<String>, String)> {
    let named = entry["id"].as_str().map(str::to_owned);
    let entry: FileEntry =
        serde_json::from_value(entry).map_err(|error| (named.clone(), error.to_string()))?;
    let url = EngineUrl::parse(&entry.url)
        .map_err(|error| (named.clone(), format!("url is {:?}: {error}", entry.url)))?;
    let place = url
        .as_str()
        .split_once("://")
        .map_or("", |(_, place)| place);
    let name = entry.id.as_deref().unwrap_or(place);
    let refused = |why: String| (Some(name.to_owned()), why);
    let (events, replay) = (entry.kv_events.as_deref(), entry.kv_replay.as_deref());
    endpoint::check(events, replay).map_err(|(key, why)| refused(format!("{key}: {why}")))?;
    let host = EnginePlace::Host(url.host().to_owned());
    for place in [host].into_iter().chain(
        endpoint::places(events, replay)
            .into_iter()
            .map(|(_, place)| place),
    ) {
        // The author of the file controls this host, unlike the owners of names and pods, so the
        // file may list engines on loopback.
        let judged = dialer.check_place(&place);
        judged.map_err(|error| refused(error.to_string()))?;
    }
    let mut labels = entry.labels;
    labels.extend(template.labels.clone());
    Ok(BackendSpec {
        id: template.id(name),
        url: url.as_str().to_owned(),
        models: entry.models.unwrap_or_else(|| template.models.clone()),
        labels,
        capacity_blocks: entry.capacity_blocks,
        kv_events: entry.kv_events,
        kv_replay: entry.kv_replay,
        role: entry.role.unwrap_or(template.role),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::backends::EngineAddressRules;
    use crate::engines::discovery::tests::template;

    fn read_as(text: &str, is_json: bool) -> Result<Vec<String>, String> {
        let list = entries(text, is_json)?;
        let reading = reading(list, &template("rack"), &EngineDialer::default());
        let clear = |it: &ListedEngine| it.condition == EngineCondition::Ready;
        let engines = reading.engines.into_iter().filter(clear);
        let engines = engines.map(|it| format!("{} {}", it.spec.id, it.spec.url));
        let refused = reading.refused.into_iter();
        let refused = refused.map(|it| format!("{}: {}", it.engine, it.reason));
        Ok(engines.chain(refused).collect())
    }

    #[test]
    fn toml_and_json_lists_are_equivalent() {
        let expected = Ok(vec![
            "rack-gpu-1 http://10.0.0.1:8000".to_owned(),
            "rack-10.0.0.2-80-v https://10.0.0.2:80/v".to_owned(),
        ]);
        let toml = r#"
            [[backends]]
            id = "gpu-1"
            url = "http://10.0.0.1:8000/"
            models = ["m"]
            role = "prefill"
            [[backends]]
            url = "https://10.0.0.2:80/v"
        "#;
        assert_eq!(read_as(toml, false), expected);
        let list = r#"[{"id": "gpu-1", "url": "http://10.0.0.1:8000", "capacity_blocks": 7},
            {"url": "https://10.0.0.2:80/v"}]"#;
        assert_eq!(read_as(list, true), expected);
        assert_eq!(
            read_as(&format!(r#"{{"backends": {list}}}"#), true),
            expected
        );
        for nothing in [("", false), ("[]", true), ("{}", true)] {
            assert_eq!(read_as(nothing.0, nothing.1), Ok(Vec::new()));
        }
    }

    #[test]
    fn a_discovery_file_may_name_this_host_if_allowed() {
        let list = r#"[{"id": "a", "url": "http://127.0.0.1:8000"},
            {"id": "b", "url": "http://[::1]:8000"}]"#;
        let told = read_as(list, true).unwrap();
        assert_eq!(
            told,
            ["rack-a http://127.0.0.1:8000", "rack-b http://[::1]:8000"]
        );
        let dialer = EngineDialer::default();
        dialer.allow(EngineAddressRules::new(vec!["10.0.0.0/8".parse().unwrap()]));
        let list = entries(list, true).unwrap();
        let reading = reading(list, &template("rack"), &dialer);
        assert_eq!(reading.refused.len(), 2, "{:?}", reading.refused);
    }

    #[test]
    fn invalid_entries_are_refused_singly_and_broken_files_whole() {
        let list = r#"[{"id": "a", "url": "ftp://a"}, {"id": "b"}, 7,
            {"id": "c", "url": "http://169.254.169.254"},
            {"id": "d", "url": "http://d", "colour": "red"},
            {"id": "e", "url": "http://e", "kv_events": "udp://e"},
            {"id": "f", "url": "http://f"}]"#;
        let told = read_as(list, true).unwrap();
        assert_eq!(told[0], "rack-f http://f:80");
        let reasons: Vec<_> = told[1..]
            .iter()
            .map(|it| it.split(':').next().unwrap())
            .collect();
        assert_eq!(reasons, ["a", "b", "entry 3", "c", "d", "e"]);
        assert!(told[1].contains("expected http://host"), "{}", told[1]);
        assert!(told[4].contains("metadata service"), "{}", told[4]);
        for (text, is_json, why) in [
            ("[", true, "EOF"),
            ("7", true, "expected a list"),
            ("[[backends]]\nurl =", false, "line 2"),
            ("backends = 7", false, "expected a list"),
            ("[[backend]]", false, "unknown key \"backend\""),
        ] {
            let error = read_as(text, is_json).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn more_entries_than_the_bound_are_reported() {
        let entry = |number| format!(r#"{{"url": "http://h{number}:1"}}"#);
        let list = |count| {
            let entries: Vec<_> = (0..count).map(entry).collect();
            read_as(&format!("[{}]", entries.join(",")), true).unwrap()
        };
        assert_eq!(list(10_000).len(), 10_000);
        let many = list(ENTRIES_MAX + 5);
        assert_eq!(many.len(), ENTRIES_MAX + 1);
        assert!(many[ENTRIES_MAX].starts_with("5 more: "));
    }
}
