//! Sources on real sockets: a DNS server, and a stand-in for a Kubernetes API server with
//! handwritten responses that follow the API's documentation.

mod dns;
mod kubernetes;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use state::discovery::EngineCondition;

use super::source_status::{DiscoveryBoard, SourceReading};
use super::{EngineScheme, EngineTemplate, SourceKind, SourceSettings};
use crate::base::clock::Clock;
use crate::engines::backends::{EngineAddressRules, EngineDialer};

/// Timeout of every wait, within which a fault fails the test.
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns the template of a source with default settings.
pub(super) fn template(source: &str) -> EngineTemplate {
    EngineTemplate {
        source: source.to_owned(),
        models: vec!["*".to_owned()],
        labels: BTreeMap::new(),
        role: state::command::BackendRole::Both,
        scheme: EngineScheme::Http,
        kv_events_port: None,
        kv_replay_port: None,
    }
}

/// Creates a board with one source.
fn board(kind: SourceKind) -> Arc<DiscoveryBoard> {
    let settings = SourceSettings {
        rules: state::discovery::SourceRules {
            source: "it".to_owned(),
            remove_after_ms: 1,
            lost_permille_max: 500,
        },
        template: template("it"),
        kind,
    };
    Arc::new(DiscoveryBoard::new(&[settings], Clock::default()))
}

/// Returns a dialer that allows engines on loopback.
fn dialer() -> EngineDialer {
    let dialer = EngineDialer::default();
    let allowed = ["127.0.0.0/8", "10.0.0.0/8", "fd00::/8"];
    let allowed = allowed.map(|text| text.parse().unwrap());
    dialer.allow(EngineAddressRules::new(allowed.into()));
    dialer
}

/// Formats the engines of a report: ids without the source, with `?` if not ready and `!` if
/// leaving.
fn engines(reading: &SourceReading) -> String {
    let engines = reading.engines.iter().map(|engine| {
        let id = engine.spec.id.trim_start_matches("it-");
        match engine.condition {
            EngineCondition::Ready => id.to_owned(),
            EngineCondition::NotReady => format!("{id}?"),
            EngineCondition::Leaving => format!("{id}!"),
            EngineCondition::Unclear => format!("{id}~"),
        }
    });
    let mut engines: Vec<_> = engines.collect();
    engines.sort();
    engines.join(" ")
}

/// Waits until the source reports `expected`, and returns the report.
async fn says(board: &DiscoveryBoard, expected: &str) -> Arc<SourceReading> {
    let saying = async {
        loop {
            if let Some(reading) = board.reading("it")
                && engines(&reading) == expected
            {
                return reading;
            }
            board.changed().await;
        }
    };
    let said = tokio::time::timeout(PATIENCE, saying).await;
    said.unwrap_or_else(|_| panic!("expected {expected:?}, last {:?}", board.report()))
}

/// Waits until a query of the source fails, and returns why.
async fn fails(board: &DiscoveryBoard) -> String {
    let failing = async {
        loop {
            let report = serde_json::to_value(board.report()).unwrap();
            if let Some(error) = report[0]["error"].as_str() {
                return error.to_owned();
            }
            board.changed().await;
        }
    };
    tokio::time::timeout(PATIENCE, failing)
        .await
        .expect("it fails in time")
}
