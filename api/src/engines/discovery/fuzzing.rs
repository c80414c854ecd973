//! Fuzz targets for reports of engine sources; see [`crate::fuzzing`].

use std::collections::BTreeMap;

use state::discovery::{KnownFleet, ListedEngine, SourcePlan, SourceRules};

use super::source_status::SourceReading;
use super::{EngineScheme, EngineTemplate, file, kubernetes};
use crate::engines::backends::EngineDialer;

/// Parses a list of engines, as JSON if the first byte is even, otherwise as TOML.
pub fn discovery_file(bytes: &[u8]) {
    let Some((kind, text)) = bytes.split_first() else {
        return;
    };
    let Ok(text) = std::str::from_utf8(text) else {
        return;
    };
    match file::fuzzed(text, kind % 2 == 0, &template(), &EngineDialer::default()) {
        Ok(reading) => check(&reading),
        Err(reason) => assert!(!reason.is_empty(), "refused without a reason"),
    }
}

/// Follows a watch of pods, with one line per event. Each accepted event leaves pods that are
/// engines or refused. The first rejected one ends the watch.
pub fn pod_events(bytes: &[u8]) {
    kubernetes::fuzzed(bytes, &template(), &EngineDialer::default(), check);
}

/// Checks that the leader's proposals are valid and that no engine occurs twice.
fn check(reading: &SourceReading) {
    for refused in &reading.refused {
        assert!(!refused.reason.is_empty(), "{refused:?}");
    }
    let rules = SourceRules {
        source: template().source,
        remove_after_ms: 1,
        lost_permille_max: 500,
    };
    let fleet = KnownFleet {
        backends: &[],
        discovered: &BTreeMap::new(),
    };
    let plan = SourcePlan::of(&rules, &reading.engines, &fleet, 1);
    let told: BTreeMap<_, &ListedEngine> = reading
        .engines
        .iter()
        .map(|engine| (&*engine.spec.id, engine))
        .collect();
    let found = plan.changes.iter().map(|change| {
        let proposed = state::discovery::Discovery {
            source: rules.source.clone(),
            change: change.clone(),
        };
        assert_eq!(proposed.validate(), Ok(()), "{change:?}");
        assert!(told.contains_key(change.backend()), "{change:?}");
        change.backend()
    });
    let found: Vec<_> = found.collect();
    assert!(found.is_sorted_by(|a, b| a < b), "each once: {found:?}");
}

fn template() -> EngineTemplate {
    EngineTemplate {
        source: "it".to_owned(),
        models: vec!["*".to_owned()],
        labels: BTreeMap::from([("rack".to_owned(), "a".to_owned())]),
        role: state::command::BackendRole::Both,
        scheme: EngineScheme::Http,
        kv_events_port: Some(5557),
        kv_replay_port: Some(5558),
    }
}

/// Returns seed inputs: lists as operators write them, in both formats.
#[must_use]
pub fn discovery_file_seeds() -> Vec<Vec<u8>> {
    let json = r#"[{"id": "gpu-1", "url": "http://10.0.0.1:8000", "capacity_blocks": 7},
{"url": "https://10.0.0.2:80/v", "models": ["m"], "role": "prefill", "labels": {"zone": "a"}},
{"id": "b", "url": "http://h", "kv_events": "tcp://h:5557", "kv_replay": "tcp://h:5558"},
{"id": "c", "url": "http://169.254.169.254"}]"#;
    let toml = "[[backends]]\nid = \"gpu-1\"\nurl = \"http://10.0.0.1:8000/\"\nmodels = [\"m\"]\nrole = \"decode\"\nlabels = { zone = \"a\" }\ncapacity_blocks = 7\n[[backends]]\nurl = \"https://[fd00::1]:80/v\"\nkv_events = \"tcp://[fd00::1]:5557\"\n";
    let seeds = [
        format!("0{json}"),
        format!("0{{\"backends\": {json}}}"),
        "0[]".to_owned(),
        format!("1{toml}"),
        "1".to_owned(),
    ];
    seeds.map(String::into_bytes).to_vec()
}

/// Returns seed inputs: watches as API servers send them, with changes of pods, a bookmark, an
/// expiry.
#[must_use]
pub fn pod_events_seeds() -> Vec<Vec<u8>> {
    let watch = concat!(
        r#"{"type":"ADDED","object":{"kind":"Pod","metadata":{"name":"vllm-0","resourceVersion":"7","labels":{"app":"vllm","quorate.role":"prefill"}},"status":{"podIP":"10.0.0.1","phase":"Running","conditions":[{"type":"Ready","status":"True"}]}}}"#,
        "\n",
        r#"{"type":"MODIFIED","object":{"metadata":{"name":"vllm-0","resourceVersion":"8","deletionTimestamp":"2026-11-23T14:00:00Z"},"status":{"podIP":"fd00::3","phase":"Failed"}}}"#,
        "\n",
        r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"9"}}}"#,
        "\n",
        r#"{"type":"DELETED","object":{"metadata":{"name":"vllm-0","resourceVersion":"10"}}}"#,
        "\n",
    );
    let refused = concat!(
        r#"{"type":"ADDED","object":{"metadata":{"name":"lo"},"status":{"podIP":"127.0.0.1"}}}"#,
        "\n",
        r#"{"type":"ERROR","object":{"code":410,"message":"too old resource version"}}"#,
        "\n",
    );
    [watch, refused].map(|it| it.as_bytes().to_vec()).to_vec()
}
