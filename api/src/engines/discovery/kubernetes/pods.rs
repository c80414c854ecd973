//! Selected pods as of a position in the server's stream of changes, and the engines in them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::Value;
use state::command::{BackendRole, BackendSpec};
use state::discovery::{EngineCondition, ListedEngine, RefusedEngine};

use super::PODS_MAX;
use super::client::ApiError;
use crate::engines::backends::EngineDialer;
use crate::engines::discovery::EngineTemplate;
use crate::engines::discovery::source_status::SourceReading;

/// Label with the role of a pod's engines, like `role` in the config.
const ROLE_LABEL: &str = "quorate.role";
/// Status code of an event by which the server reports that it no longer knows a position in the
/// stream.
const GONE: u64 = 410;

/// Effect of a watch event on the selected pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WatchEvent {
    /// Pods may have changed, and with them the engines.
    Changed,
    /// The pods have not changed, but the server is alive.
    Heard,
}

/// The part of a pod that matters for its engines.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pod {
    labels: BTreeMap<String, String>,
    ip: Option<IpAddr>,
    condition: EngineCondition,
}

impl Pod {
    fn read(object: &Value) -> Self {
        let (metadata, status) = (&object["metadata"], &object["status"]);
        let conditions = status["conditions"].as_array();
        let is_ready = conditions
            .into_iter()
            .flatten()
            .any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
        let is_ended = matches!(status["phase"].as_str(), Some("Succeeded" | "Failed"));
        let labels = metadata["labels"].as_object().into_iter().flatten();
        Self {
            labels: labels
                .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
                .collect(),
            ip: status["podIP"].as_str().and_then(|ip| ip.parse().ok()),
            condition: if is_ended || !metadata["deletionTimestamp"].is_null() {
                EngineCondition::Leaving
            } else if is_ready {
                EngineCondition::Ready
            } else {
                EngineCondition::NotReady
            },
        }
    }
}

/// Selected pods by name.
#[derive(Debug, Default)]
pub(super) struct PodTable {
    pods: BTreeMap<String, Pod>,
    version: String,
    /// Number of list pages and events received.
    pub(super) heard: u64,
}

impl PodTable {
    pub(super) fn len(&self) -> usize {
        self.pods.len()
    }

    /// Returns the position in the stream of changes.
    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// Records the position in the stream, from an object's metadata.
    pub(super) fn at(&mut self, metadata: &Value) {
        self.heard += 1;
        if let Some(version) = metadata["resourceVersion"].as_str() {
            version.clone_into(&mut self.version);
        }
    }

    /// Adds the pod `object`, or replaces the one with its name.
    pub(super) fn put(&mut self, object: &Value) {
        if let Some(name) = object["metadata"]["name"].as_str() {
            self.pods.insert(name.to_owned(), Pod::read(object));
        }
    }

    /// Applies an event of a watch, and returns its effect.
    pub(super) fn apply(&mut self, event: &Value) -> Result<WatchEvent, ApiError> {
        let object = &event["object"];
        let happened = match event["type"].as_str() {
            Some("ADDED" | "MODIFIED") => {
                self.put(object);
                if self.pods.len() > PODS_MAX {
                    // The next list reports the limit, and keeps none of the pods.
                    return Err(ApiError::Expired);
                }
                WatchEvent::Changed
            }
            Some("DELETED") => {
                if let Some(name) = object["metadata"]["name"].as_str() {
                    self.pods.remove(name);
                }
                WatchEvent::Changed
            }
            Some("BOOKMARK") => WatchEvent::Heard,
            Some("ERROR") if object["code"].as_u64() == Some(GONE) => {
                return Err(ApiError::Expired);
            }
            Some("ERROR") => {
                let message = object["message"].as_str().unwrap_or("no message");
                return Err(ApiError::Unexpected(format!("the watch ended: {message}")));
            }
            // Unknown kinds of events may be ignored.
            Some(_) | None => WatchEvent::Heard,
        };
        self.at(&object["metadata"]);
        Ok(happened)
    }

    /// Returns the engines of all pods, one per pod and port.
    pub(super) fn reading(
        &self,
        ports: &[u16],
        template: &EngineTemplate,
        dialer: &EngineDialer,
    ) -> SourceReading {
        let mut reading = SourceReading::default();
        let at_ports: Vec<_> = at_ports(ports, template).collect();
        for (name, pod) in &self.pods {
            let named = |at: &EngineAtPort| format!("{name}{}", at.suffix);
            let Some(ip) = pod.ip else {
                // The pod has not started or has ended. Its backend, if any, is treated as leaving.
                if pod.condition == EngineCondition::Leaving {
                    let leaving = |at: &EngineAtPort| {
                        at.template.nowhere(&named(at), EngineCondition::Leaving)
                    };
                    reading.engines.extend(at_ports.iter().map(leaving));
                }
                continue;
            };
            match dialer.check_told(ip) {
                Ok(()) => reading
                    .engines
                    .extend(at_ports.iter().map(|at| ListedEngine {
                        spec: spec(&named(at), (ip, at.port), pod, &at.template),
                        condition: pod.condition,
                    })),
                Err(refused) => reading.refused.push(RefusedEngine {
                    engine: name.clone(),
                    reason: refused.to_string(),
                }),
            }
        }
        reading
    }
}

/// Settings shared by the engines of all pods at one port.
struct EngineAtPort {
    port: u16,
    /// Suffix of engine names after the pod's name; empty if pods have one engine each.
    suffix: String,
    template: EngineTemplate,
}

/// Returns the settings for each of `ports`. Like ranks, a pod's successive engines publish their
/// KV events at successive ports.
fn at_ports(ports: &[u16], template: &EngineTemplate) -> impl Iterator<Item = EngineAtPort> {
    let is_alone = ports.len() == 1;
    ports.iter().zip(0..).map(move |(port, rank): (_, u16)| {
        let moved = |first: Option<u16>| first?.checked_add(rank);
        EngineAtPort {
            port: *port,
            suffix: match is_alone {
                true => String::new(),
                false => format!("-{port}"),
            },
            template: EngineTemplate {
                kv_events_port: moved(template.kv_events_port),
                kv_replay_port: moved(template.kv_replay_port),
                ..template.clone()
            },
        }
    })
}

fn spec(name: &str, place: (IpAddr, u16), pod: &Pod, template: &EngineTemplate) -> BackendSpec {
    let mut spec = template.at(Some(name), place, &pod.labels);
    let told = spec.labels.remove(ROLE_LABEL);
    let mut roles = BackendRole::ALL.into_iter();
    if let Some(role) = roles.find(|role| told.as_deref() == Some(role.label())) {
        spec.role = role;
    }
    spec
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::engines::discovery::tests::template;

    fn pod(name: &str, ip: &str, ready: &str) -> Value {
        json!({"metadata": {"name": name, "resourceVersion": "7", "labels": {"app": "vllm"}},
            "status": {"podIP": ip, "phase": "Running",
                "conditions": [{"type": "Ready", "status": ready}]}})
    }

    fn told(pods: &PodTable) -> Vec<String> {
        let dialer = EngineDialer::default();
        let reading = pods.reading(&[8000], &template("pods"), &dialer);
        let engines = reading.engines.iter().map(|engine| {
            format!(
                "{} {} {:?}",
                engine.spec.id, engine.spec.url, engine.condition
            )
        });
        let refused = reading
            .refused
            .iter()
            .map(|it| format!("{} refused", it.engine));
        engines.chain(refused).collect()
    }

    #[test]
    fn pods_are_ready_not_ready_or_leaving() {
        let mut pods = PodTable::default();
        pods.put(&pod("a", "10.0.0.1", "True"));
        pods.put(&pod("b", "10.0.0.2", "False"));
        let mut leaving = pod("c", "fd00::3", "True");
        leaving["metadata"]["deletionTimestamp"] = json!("2026-11-23T14:00:00Z");
        pods.put(&leaving);
        let mut failed = pod("d", "10.0.0.4", "False");
        failed["status"]["phase"] = json!("Failed");
        failed["status"].as_object_mut().unwrap().remove("podIP");
        pods.put(&failed);
        let mut pending = pod("e", "", "False");
        pending["status"] = json!({"phase": "Pending"});
        pods.put(&pending);
        pods.put(&pod("f", "127.0.0.1", "True"));
        assert_eq!(
            told(&pods),
            [
                "pods-a http://10.0.0.1:8000 Ready",
                "pods-b http://10.0.0.2:8000 NotReady",
                "pods-c http://[fd00::3]:8000 Leaving",
                "pods-d http://0.0.0.0:1 Leaving",
                "f refused",
            ]
        );
    }

    #[test]
    fn each_port_of_a_pod_is_an_engine_with_its_own_events() {
        let mut pods = PodTable::default();
        pods.put(&pod("a", "10.0.0.1", "True"));
        let mut failed = pod("b", "10.0.0.2", "False");
        failed["status"] = json!({"phase": "Failed"});
        pods.put(&failed);
        pods.put(&pod("c", "127.0.0.1", "True"));
        let template = EngineTemplate {
            kv_events_port: Some(5557),
            kv_replay_port: Some(u16::MAX),
            ..template("pods")
        };
        let reading = pods.reading(&[8000, 8010], &template, &EngineDialer::default());
        let told = reading.engines.iter().map(|engine| {
            let spec = &engine.spec;
            let ports = (spec.kv_events.as_deref(), spec.kv_replay.as_deref());
            (&*spec.id, &*spec.url, ports)
        });
        let nowhere = "http://0.0.0.0:1";
        assert_eq!(
            told.collect::<Vec<_>>()[..2],
            [
                (
                    "pods-a-8000",
                    "http://10.0.0.1:8000",
                    (Some("tcp://10.0.0.1:5557"), Some("tcp://10.0.0.1:65535"))
                ),
                (
                    "pods-a-8010",
                    "http://10.0.0.1:8010",
                    (Some("tcp://10.0.0.1:5558"), None)
                ),
            ]
        );
        let leaving = reading.engines[2..].iter();
        let leaving: Vec<_> = leaving.map(|it| (&*it.spec.id, &*it.spec.url)).collect();
        assert_eq!(
            leaving,
            [("pods-b-8000", nowhere), ("pods-b-8010", nowhere)]
        );
        let refused: Vec<_> = reading.refused.iter().map(|it| &*it.engine).collect();
        assert_eq!(refused, ["c"]);
    }

    #[test]
    fn pod_labels_become_backend_labels_and_one_the_role() {
        let mut object = pod("a", "10.0.0.1", "True");
        object["metadata"]["labels"][ROLE_LABEL] = json!("prefill");
        object["metadata"]["labels"]["zone"] = json!("pod's");
        let mut pods = PodTable::default();
        pods.put(&object);
        let mut template = template("pods");
        template.labels = BTreeMap::from([("zone".to_owned(), "config's".to_owned())]);
        let reading = pods.reading(&[1], &template, &EngineDialer::default());
        let spec = &reading.engines[0].spec;
        assert_eq!(spec.role, BackendRole::Prefill);
        let labels: Vec<_> = spec
            .labels
            .iter()
            .map(|(name, value)| (&**name, &**value))
            .collect();
        assert_eq!(labels, [("app", "vllm"), ("zone", "config's")]);
        assert_eq!(spec.validate(), Ok(()));
    }

    #[test]
    fn watch_events_update_the_pods() {
        let mut pods = PodTable::default();
        let event = |kind: &str, object: Value| json!({"type": kind, "object": object});
        let apply =
            |pods: &mut PodTable, event: Value| pods.apply(&event).map_err(|e| e.to_string());
        let added = event("ADDED", pod("a", "10.0.0.1", "True"));
        assert_eq!(apply(&mut pods, added), Ok(WatchEvent::Changed));
        assert_eq!(pods.version(), "7");
        let mark = event("BOOKMARK", json!({"metadata": {"resourceVersion": "9"}}));
        assert_eq!(apply(&mut pods, mark), Ok(WatchEvent::Heard));
        assert_eq!((pods.version(), pods.len()), ("9", 1));
        let deleted = event("DELETED", pod("a", "10.0.0.1", "True"));
        assert_eq!(apply(&mut pods, deleted), Ok(WatchEvent::Changed));
        assert_eq!(pods.len(), 0);
        for number in 0..PODS_MAX {
            let name = format!("p{number}");
            pods.apply(&event("ADDED", pod(&name, "10.0.0.1", "True")))
                .unwrap();
        }
        let beyond = event("ADDED", pod("beyond", "10.0.0.1", "True"));
        assert!(matches!(pods.apply(&beyond), Err(ApiError::Expired)));
        let gone = event("ERROR", json!({"code": 410, "message": "too old"}));
        assert!(matches!(pods.apply(&gone), Err(ApiError::Expired)));
        let other = event("ERROR", json!({"code": 500, "message": "etcd"}));
        assert!(apply(&mut pods, other).unwrap_err().contains("etcd"));
    }
}
