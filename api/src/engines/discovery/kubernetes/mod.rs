//! `kind = "kubernetes"`: pods of a namespace, selected by labels or by an `InferencePool`.
//!
//! Pods are listed once and then watched: the server sends every change, and bookmarks of its
//! position. If it no longer knows our position (410), or ends the watch, the known pods remain
//! until a new list or watch replaces them (ADR 0042).

mod client;
mod pods;
mod statefulset;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use self::client::{ApiClient, ApiError, WatchStream};
use self::pods::{PodTable, WatchEvent};
pub use self::statefulset::StatefulSetScale;
use super::source_status::{DiscoveryBoard, SourceReading};
use super::{EngineTemplate, KubernetesAccess, KubernetesSource, PodChoice};
use crate::engines::backends::EngineDialer;

/// Pause after a watch that brought something or lasted. Doubles with each watch that did neither.
const PAUSE_MIN: Duration = Duration::from_millis(200);
/// Maximum pause after a failure.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Interval at which an `InferencePool` is read again.
const POOL_EVERY: Duration = Duration::from_secs(10);
/// Number of pods per page of a list.
const PAGE_PODS: u32 = 500;
/// Maximum number of pods to follow.
const PODS_MAX: usize = 16_384;
/// File that contains a pod's namespace.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Maximum number of engines per pod: the maximum number of a pool's target ports.
const PORTS_MAX: usize = 8;

/// Selects the pods that are engines, and their ports.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Selection {
    /// Label selector in the syntax of the API.
    selector: String,
    /// Ports of each pod; each one is a separate engine.
    ports: Vec<u16>,
}

/// Reason why a watch has ended or must end.
enum Ended {
    /// The server no longer knows the position in the stream, so the pods must be listed again.
    Expired,
    /// The pool selects other pods than before.
    OtherSelection,
    /// The server ended the watch, as it does from time to time.
    Quietly,
    Failed(ApiError),
}

impl From<ApiError> for Ended {
    fn from(error: ApiError) -> Self {
        match error {
            ApiError::Expired => Self::Expired,
            error => Self::Failed(error),
        }
    }
}

/// Reports the engines in the selected pods to `board` for as long as it is polled.
pub(super) async fn follow(
    source: &KubernetesSource,
    template: &EngineTemplate,
    (board, dialer): (&DiscoveryBoard, &EngineDialer),
) {
    let mut pause = PAUSE_MIN;
    let mut follower = PodFollower {
        source,
        template,
        board,
        dialer,
        client: None,
        followed: None,
    };
    loop {
        let began = Instant::now();
        let watched = follower.watch().await;
        let (ended, has_heard) = watched.unwrap_or_else(|error| (error.into(), false));
        let has_worked = has_heard || began.elapsed() > PAUSE_MAX;
        match ended {
            Ended::Expired | Ended::OtherSelection => follower.followed = None,
            Ended::Quietly => {}
            Ended::Failed(error) => {
                // Use another connection; the token may have been replaced.
                follower.client = None;
                board.record_report(&template.source, Err(error.to_string()));
            }
        }
        pause = match has_worked {
            true => PAUSE_MIN,
            false => (pause * 2).min(PAUSE_MAX),
        };
        tokio::time::sleep(pause).await;
    }
}

struct PodFollower<'a> {
    source: &'a KubernetesSource,
    template: &'a EngineTemplate,
    board: &'a DiscoveryBoard,
    dialer: &'a EngineDialer,
    client: Option<ApiClient>,
    /// Selected pods as of a position in the stream; `None` if they must be listed.
    followed: Option<(Selection, PodTable)>,
}

impl PodFollower<'_> {
    /// Lists the pods if needed, then follows a watch until it ends. Returns why it ended and whether
    /// it brought anything. A list does not count: the next one costs the server as much.
    async fn watch(&mut self) -> Result<(Ended, bool), ApiError> {
        let client = match self.client.take() {
            Some(client) => client,
            None => ApiClient::new(&self.source.access)?,
        };
        let client = self.client.insert(client).clone();
        let pods_path = self.pods_path()?;
        let selection = self.selection(&client).await?;
        let (selection, mut pods) = match self.followed.take() {
            Some((known, pods)) if known == selection => (known, pods),
            Some(_) | None => {
                let pods = list(&client, &pods_path, &selection).await?;
                (selection, pods)
            }
        };
        let opened = open(&client, &pods_path, (&selection, &pods)).await;
        let mut stream = match opened {
            Ok(stream) => stream,
            Err(error) => {
                self.followed = Some((selection, pods));
                return Err(error);
            }
        };
        // Only now is the server known to respond.
        self.tell(&selection, &pods);
        let heard_before = pods.heard;
        let ended = self
            .read(&client, &mut stream, (&selection, &mut pods))
            .await;
        let has_heard = pods.heard > heard_before;
        self.followed = Some((selection, pods));
        Ok((ended, has_heard))
    }

    /// Reads a watch to its end.
    async fn read(
        &self,
        client: &ApiClient,
        stream: &mut WatchStream,
        (selection, pods): (&Selection, &mut PodTable),
    ) -> Ended {
        let mut looks = tokio::time::interval(POOL_EVERY);
        looks.tick().await;
        loop {
            tokio::select! {
                biased;
                event = stream.next() => match event {
                    Ok(Some(event)) => match pods.apply(&event) {
                        Ok(WatchEvent::Changed) => self.tell(selection, pods),
                        Ok(WatchEvent::Heard) => self.board.record_contact(&self.template.source),
                        Err(error) => return error.into(),
                    },
                    Ok(None) => return Ended::Quietly,
                    Err(error) => return error.into(),
                },
                _ = looks.tick() => match self.selection(client).await {
                    Ok(now) if now == *selection => {}
                    Ok(_) => return Ended::OtherSelection,
                    Err(error) => return error.into(),
                },
            }
        }
    }

    fn tell(&self, selection: &Selection, pods: &PodTable) {
        let reading: SourceReading = pods.reading(&selection.ports, self.template, self.dialer);
        self.board.record_report(&self.template.source, Ok(reading));
    }

    fn pods_path(&self) -> Result<String, ApiError> {
        let namespace = namespace(&self.source.access)?;
        Ok(format!("/api/v1/namespaces/{namespace}/pods"))
    }

    /// Returns which pods are engines, according to the config or the pool.
    async fn selection(&self, client: &ApiClient) -> Result<Selection, ApiError> {
        let name = match &self.source.pods {
            PodChoice::Selector(selector) => {
                return Ok(Selection {
                    selector: selector.clone(),
                    ports: vec![self.source.port.unwrap_or_default()],
                });
            }
            PodChoice::Pool(name) => name,
        };
        let namespace = namespace(&self.source.access)?;
        let path = format!(
            "/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools/{name}"
        );
        let pool = client.get(&path).await?;
        of_pool(&pool, self.source.port)
            .map_err(|what| ApiError::Unexpected(format!("the InferencePool {name} has {what}")))
    }
}

/// Follows a watch of `lines` without a server, for the fuzz target. Calls `check` after each
/// event.
#[cfg(feature = "fuzzing")]
pub(super) fn fuzzed(
    lines: &[u8],
    template: &EngineTemplate,
    dialer: &EngineDialer,
    check: impl Fn(&SourceReading),
) {
    let mut pods = PodTable::default();
    for line in lines.split(|byte| *byte == b'\n') {
        let Ok(event) = serde_json::from_slice(line) else {
            return;
        };
        if pods.apply(&event).is_err() {
            return;
        }
        let reading = pods.reading(&[8000], template, dialer);
        let told = reading.engines.len() + reading.refused.len();
        assert!(told <= pods.len(), "{told} of {} pods", pods.len());
        check(&reading);
    }
}

/// Returns the configured namespace, or that of this pod.
fn namespace(access: &KubernetesAccess) -> Result<String, ApiError> {
    if let Some(namespace) = &access.namespace {
        return Ok(namespace.clone());
    }
    let read = std::fs::read_to_string(NAMESPACE_FILE);
    let read = read.map_err(|error| {
        ApiError::Setup(format!("read {NAMESPACE_FILE}: {error}; set namespace"))
    })?;
    Ok(read.trim().to_owned())
}

/// Parses an `InferencePool`. The error names what the pool lacks.
fn of_pool(pool: &Value, port: Option<u16>) -> Result<Selection, &'static str> {
    let labels = pool["spec"]["selector"]["matchLabels"].as_object();
    let labels = labels.ok_or("no spec.selector.matchLabels")?;
    let labels: BTreeMap<&str, &str> = labels
        .iter()
        .filter_map(|(name, value)| Some((&**name, value.as_str()?)))
        .collect();
    if labels.is_empty() {
        return Err("no labels in spec.selector.matchLabels");
    }
    let ports = match port {
        Some(port) => vec![port],
        None => target_ports(&pool["spec"]["targetPorts"])?,
    };
    let terms: Vec<String> = labels
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    Ok(Selection {
        selector: terms.join(","),
        ports,
    })
}

/// Parses the target ports of a pool, in the pool's order.
fn target_ports(told: &Value) -> Result<Vec<u16>, &'static str> {
    let told = told.as_array().filter(|told| !told.is_empty());
    let told = told.ok_or("no spec.targetPorts, and port is not set")?;
    let mut ports = Vec::new();
    for port in told {
        let number = port["number"].as_u64();
        let number = number.and_then(|number| u16::try_from(number).ok());
        let number = number.filter(|number| *number > 0);
        let number = number.ok_or("a port in spec.targetPorts that is none")?;
        if !ports.contains(&number) {
            ports.push(number);
        }
    }
    match ports.len() <= PORTS_MAX {
        true => Ok(ports),
        false => Err("more than 8 spec.targetPorts"),
    }
}

/// Lists all pods, page by page.
async fn list(
    client: &ApiClient,
    pods_path: &str,
    selection: &Selection,
) -> Result<PodTable, ApiError> {
    let selector = client::encoded(&selection.selector);
    let mut pods = PodTable::default();
    let mut next = String::new();
    loop {
        let path = format!("{pods_path}?labelSelector={selector}&limit={PAGE_PODS}{next}");
        let page = client.get(&path).await?;
        let items = page["items"].as_array();
        let items = items.ok_or_else(|| ApiError::Unexpected("a list without items".to_owned()))?;
        for item in items {
            pods.put(item);
        }
        if pods.len() > PODS_MAX {
            let found = format!("more than {PODS_MAX} pods");
            return Err(ApiError::Unexpected(found));
        }
        pods.at(&page["metadata"]);
        match page["metadata"]["continue"].as_str() {
            Some(token) if !token.is_empty() => {
                next = format!("&continue={}", client::encoded(token));
            }
            Some(_) | None => return Ok(pods),
        }
    }
}

/// Opens a watch from the position of the listed pods.
async fn open(
    client: &ApiClient,
    pods_path: &str,
    (selection, pods): (&Selection, &PodTable),
) -> Result<WatchStream, ApiError> {
    let selector = client::encoded(&selection.selector);
    let version = client::encoded(pods.version());
    let path = format!(
        "{pods_path}?labelSelector={selector}&watch=true&allowWatchBookmarks=true\
         &resourceVersion={version}"
    );
    client.watch(&path).await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_inference_pool_selects_pods_and_ports() {
        let pool = |ports: Value| {
            json!({"spec": {
                "selector": {"matchLabels": {"app": "vllm", "a/b": "c"}},
                "targetPorts": ports,
            }})
        };
        let selected = |ports: &[u16]| Selection {
            selector: "a/b=c,app=vllm".to_owned(),
            ports: ports.to_vec(),
        };
        let two = pool(json!([{"number": 8001}, {"number": 8000}, {"number": 8001}]));
        assert_eq!(of_pool(&two, None), Ok(selected(&[8001, 8000])));
        assert_eq!(of_pool(&two, Some(9)), Ok(selected(&[9])));
        let nine: Vec<_> = (1..=9).map(|number| json!({"number": number})).collect();
        for without in [
            pool(json!([])),
            pool(json!([{"number": 0}])),
            pool(json!([{"number": 8000}, {"number": 65536}])),
            pool(nine.into()),
            json!({}),
            json!({"spec": {"selector": {"matchLabels": {}}}}),
            json!({"spec": {"selector": {"matchLabels": {"a": "b"}}}}),
        ] {
            assert!(of_pool(&without, None).is_err());
        }
    }
}
