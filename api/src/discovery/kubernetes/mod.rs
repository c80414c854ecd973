//! `kind = "kubernetes"`: pods of a namespace, by labels or as an `InferencePool` selects them.
//!
//! Pods are listed once and then watched: the server tells every change, and with bookmarks how far
//! it is. When it says that it has forgotten where we are (410), or ends the watch, what is known
//! stays until a new list or watch tells better (ADR 0089).

mod client;
mod pods;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use self::client::{ApiClient, ApiError, WatchStream};
use self::pods::{PodTable, WatchEvent};
use super::board::{DiscoveryBoard, SourceReading};
use super::{EngineTemplate, KubernetesSource, PodChoice};
use crate::backends::EngineDialer;

/// First pause after a failure; each further one doubles.
const PAUSE_MIN: Duration = Duration::from_millis(200);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// How often a pool is read again.
const POOL_EVERY: Duration = Duration::from_secs(10);
/// Pods in one answer to a list.
const PAGE_PODS: u32 = 500;
/// Maximum number of pods that are looked at.
const PODS_MAX: usize = 16_384;
/// File in which a pod finds its namespace.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Which pods are engines, and at which port.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Selection {
    /// Label selector, as the API takes it.
    selector: String,
    port: u16,
}

/// Why following has to start over.
enum Ended {
    /// The place in the stream is forgotten: list again, at once.
    Expired,
    /// The pool selects other pods.
    OtherSelection,
    /// The watch ended, as it does now and then.
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

/// Tells the board of the pods, for as long as it is polled.
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
        let before = follower.heard_count();
        match follower.follow_once().await {
            Ended::Expired | Ended::OtherSelection => follower.followed = None,
            Ended::Quietly => {}
            Ended::Failed(error) => {
                // Another connection, and the token may be a newer one.
                follower.client = None;
                board.told(&template.source, Err(error.to_string()));
            }
        }
        pause = match follower.heard_count() > before {
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
    /// Pods as of a place in the stream; `None`: they are to be listed.
    followed: Option<(Selection, PodTable)>,
}

impl PodFollower<'_> {
    fn heard_count(&self) -> u64 {
        self.followed.as_ref().map_or(0, |(_, pods)| pods.heard)
    }

    /// Lists if needed, then watches until something ends that.
    async fn follow_once(&mut self) -> Ended {
        match self.watch().await {
            Ok(ended) => ended,
            Err(error) => error.into(),
        }
    }

    async fn watch(&mut self) -> Result<Ended, ApiError> {
        let client = match self.client.take() {
            Some(client) => client,
            None => ApiClient::new(self.source)?,
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
            Err(ApiError::Expired) => return Ok(Ended::Expired),
            Err(error) => {
                self.followed = Some((selection, pods));
                return Err(error);
            }
        };
        // Only now the server is known to answer.
        self.tell(&selection, &pods);
        let ended = self
            .read(&client, &mut stream, (&selection, &mut pods))
            .await;
        self.followed = Some((selection, pods));
        Ok(ended)
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
                        Ok(WatchEvent::Heard) => self.board.heard(&self.template.source),
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
        let reading: SourceReading = pods.reading(selection.port, self.template, self.dialer);
        self.board.told(&self.template.source, Ok(reading));
    }

    fn namespace(&self) -> Result<String, ApiError> {
        match &self.source.namespace {
            Some(namespace) => Ok(namespace.clone()),
            None => {
                let read = std::fs::read_to_string(NAMESPACE_FILE);
                let read = read.map_err(|error| {
                    ApiError::Setup(format!("read {NAMESPACE_FILE}: {error}; set namespace"))
                })?;
                Ok(read.trim().to_owned())
            }
        }
    }

    fn pods_path(&self) -> Result<String, ApiError> {
        Ok(format!("/api/v1/namespaces/{}/pods", self.namespace()?))
    }

    /// Returns which pods are engines.
    async fn selection(&self, client: &ApiClient) -> Result<Selection, ApiError> {
        let name = match &self.source.pods {
            PodChoice::Selector(selector) => {
                return Ok(Selection {
                    selector: selector.clone(),
                    port: self.source.port.unwrap_or_default(),
                });
            }
            PodChoice::Pool(name) => name,
        };
        let namespace = self.namespace()?;
        let path = format!(
            "/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools/{name}"
        );
        let pool = client.get(&path).await?;
        of_pool(&pool, self.source.port)
            .map_err(|what| ApiError::Unexpected(format!("the InferencePool {name} has {what}")))
    }
}

/// Reads an `InferencePool`; the error is what it lacks.
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
    let told = pool["spec"]["targetPorts"][0]["number"].as_u64();
    let port = port.or_else(|| u16::try_from(told?).ok());
    let terms: Vec<String> = labels
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    Ok(Selection {
        selector: terms.join(","),
        port: port.ok_or("no spec.targetPorts, and port is not set")?,
    })
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

/// Opens a watch from where the pods are known.
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
    fn a_pool_says_which_pods_and_which_port() {
        let pool = json!({"spec": {
            "selector": {"matchLabels": {"app": "vllm", "a/b": "c"}},
            "targetPorts": [{"number": 8000}],
        }});
        let selector = "a/b=c,app=vllm".to_owned();
        let selected = |port| Selection {
            selector: selector.clone(),
            port,
        };
        assert_eq!(of_pool(&pool, None), Ok(selected(8000)));
        assert_eq!(of_pool(&pool, Some(9)), Ok(selected(9)));
        for without in [
            json!({}),
            json!({"spec": {"selector": {"matchLabels": {}}}}),
            json!({"spec": {"selector": {"matchLabels": {"a": "b"}}}}),
        ] {
            assert!(of_pool(&without, None).is_err());
        }
    }
}
