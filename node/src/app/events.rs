//! Writes cluster events to the program's log unless they are logged elsewhere: changes of the
//! registry, ownership, accuracy of predictions, policy, routing settings and quorum. The others,
//! such as roles, members and health, are logged where they are detected.

use api::cluster::events::{ClusterEvent, EventBus};
use serde::Serialize;
use serde_json::Value;
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

/// Logs the cluster's events until `stop`.
pub(super) async fn log(events: EventBus, stop: CancellationToken) {
    let mut events = events.subscribe();
    loop {
        let event = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            event = events.recv() => event,
        };
        match event {
            Ok(numbered) => tell(&numbered.event),
            Err(RecvError::Lagged(events)) => tracing::warn!(events, "dropped cluster events"),
            Err(RecvError::Closed) => return,
        }
    }
}

/// Logs an event, with its parts as fields, unless it is logged elsewhere.
fn tell(event: &ClusterEvent) {
    let name = event.name();
    match event {
        ClusterEvent::Backend { id, change } => {
            let change = plain(change);
            tracing::info!(event = name, backend = id, change, "cluster changed");
        }
        ClusterEvent::Ownership {
            id,
            mode,
            reason,
            reader,
        } => {
            let (mode, reason) = (plain(mode), reason.as_deref());
            let reader = reader.map(|reader| reader.0);
            tracing::info!(
                event = name,
                backend = id,
                mode,
                reason,
                reader,
                "cluster changed"
            );
        }
        ClusterEvent::BackendAccuracy {
            id,
            is_off,
            error_permille,
            correction_permille,
        } => tracing::info!(
            event = name,
            backend = id,
            is_off,
            error_permille,
            correction_permille,
            "cluster changed"
        ),
        ClusterEvent::Policy { config } => {
            let (policy, settings) = (config.name(), plain(config));
            tracing::info!(event = name, policy, settings, "cluster changed");
        }
        ClusterEvent::Routing { config } => {
            tracing::info!(event = name, settings = plain(config), "cluster changed");
        }
        ClusterEvent::Quorum { has_quorum } => {
            tracing::info!(event = name, has_quorum, "cluster changed");
        }
        ClusterEvent::Leader { .. }
        | ClusterEvent::Role { .. }
        | ClusterEvent::Member { .. }
        | ClusterEvent::Snapshot { .. }
        | ClusterEvent::Fault { .. }
        | ClusterEvent::BackendHealth { .. }
        | ClusterEvent::BackendCircuit { .. }
        | ClusterEvent::DigestMismatch { .. } => {}
    }
}

/// Formats a value as one text without quotes: settings as `name=value`, nested names joined by
/// dots.
fn plain(value: &impl Serialize) -> String {
    let mut parts = Vec::new();
    // Strings, numbers and maps with string keys always serialise.
    let value = serde_json::to_value(value).unwrap_or_default();
    add_plain("", &value, &mut parts);
    parts.join(" ")
}

fn add_plain(path: &str, value: &Value, parts: &mut Vec<String>) {
    if let Value::Object(fields) = value {
        let point = if path.is_empty() { "" } else { "." };
        for (name, value) in fields {
            add_plain(&format!("{path}{point}{name}"), value, parts);
        }
        return;
    }
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let equals = if path.is_empty() { "" } else { "=" };
    parts.push(format!("{path}{equals}{text}"));
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use api::cluster::events::BackendChange;
    use state::policy::{PolicyConfig, RoutingSettings};
    use tracing::subscriber::with_default;

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// Returns the log line of an event as JSON.
    fn line(event: &ClusterEvent) -> Value {
        let written = Written::default();
        let writer = written.clone();
        let lines = tracing_subscriber::fmt().json().flatten_event(true);
        let lines = lines.with_writer(move || writer.clone()).finish();
        with_default(lines, || tell(event));
        let written = written.0.lock().unwrap();
        serde_json::from_slice(&written).unwrap()
    }

    #[test]
    fn event_log_lines_have_fields_instead_of_embedded_json() {
        let policy = PolicyConfig::defaults()
            .into_iter()
            .find(|policy| policy.name() == "cost")
            .unwrap();
        let events = [
            ClusterEvent::Backend {
                id: "e1".to_owned(),
                change: BackendChange::Added,
            },
            ClusterEvent::Policy { config: policy },
            ClusterEvent::Routing {
                config: RoutingSettings::default(),
            },
            ClusterEvent::Quorum { has_quorum: false },
        ];
        for event in &events {
            let line = line(event);
            assert_eq!(line["message"], "cluster changed");
            assert_eq!(line["event"], event.name());
            assert!(!line.to_string().contains('\\'), "{line}");
        }
        assert_eq!(line(&events[0])["backend"], "e1");
        assert_eq!(line(&events[0])["change"], "added");
        assert_eq!(line(&events[1])["policy"], "cost");
        let settings = line(&events[2])["settings"].to_string();
        assert!(settings.contains("learn="), "{settings}");
        assert_eq!(line(&events[3])["has_quorum"], false);
    }
}
