//! Changing pods at a stand-in for an API server. It follows a script, in the format of a real one:
//! paged lists, watches with bookmarks, expired positions, broken connections.

use std::net::SocketAddr;
use std::sync::Mutex;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::*;
use crate::engines::backends::EngineUrl;
use crate::engines::discovery::kubernetes::follow;
use crate::engines::discovery::{KubernetesAccess, KubernetesSource, PodChoice};

/// Reaction of the server to a request.
enum ScriptStep {
    Answer(u16, Value),
    /// Sends events until the channel closes, then ends the watch.
    Watch(mpsc::UnboundedReceiver<String>),
    /// Closes the connection without a response.
    Silence,
}

/// A stand-in for an API server, and the task that follows its pods until dropped.
struct ApiStandIn {
    requests: Arc<Mutex<Vec<String>>>,
    script: mpsc::UnboundedSender<ScriptStep>,
    tasks: Vec<AbortHandle>,
    board: Arc<DiscoveryBoard>,
    _token: TempDir,
}

impl Drop for ApiStandIn {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl ApiStandIn {
    async fn start(pods: PodChoice) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let (script, steps) = mpsc::unbounded_channel();
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let serving = tokio::spawn(serve(listener, Arc::clone(&requests), steps));
        let dir = TempDir::new().unwrap();
        let token_file = dir.path().join("token");
        std::fs::write(&token_file, "secret\n").unwrap();
        let source = source(at, pods, token_file);
        let board = board(SourceKind::Kubernetes(source.clone()));
        let told = Arc::clone(&board);
        let following = tokio::spawn(async move {
            follow(&source, &template("it"), (&told, &dialer())).await;
        });
        Self {
            requests,
            script,
            tasks: vec![serving.abort_handle(), following.abort_handle()],
            board,
            _token: dir,
        }
    }

    fn then(&self, step: ScriptStep) {
        assert!(self.script.send(step).is_ok(), "the server runs");
    }

    /// Makes the server respond to the next request with a watch, whose events the test sends.
    fn then_watch(&self) -> mpsc::UnboundedSender<String> {
        let (events, watch) = mpsc::unbounded_channel();
        self.then(ScriptStep::Watch(watch));
        events
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

fn source(at: SocketAddr, pods: PodChoice, token_file: std::path::PathBuf) -> KubernetesSource {
    KubernetesSource {
        port: matches!(pods, PodChoice::Selector(_)).then_some(8000),
        pods,
        access: KubernetesAccess {
            namespace: Some("llm".to_owned()),
            api_server: Some(EngineUrl::parse(&format!("http://{at}")).unwrap()),
            token_file,
            ca_file: std::path::PathBuf::new(),
        },
    }
}

async fn serve(
    listener: TcpListener,
    requests: Arc<Mutex<Vec<String>>>,
    mut steps: mpsc::UnboundedReceiver<ScriptStep>,
) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        assert!(head.contains("authorization: Bearer secret\r\n"), "{head}");
        let path = head.split(' ').nth(1).unwrap().to_owned();
        requests.lock().unwrap().push(path);
        let Some(step) = steps.recv().await else {
            return;
        };
        match step {
            ScriptStep::Answer(status, body) => {
                let body = body.to_string();
                let length = body.len();
                let answer =
                    format!("HTTP/1.1 {status} It\r\ncontent-length: {length}\r\n\r\n{body}");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
            ScriptStep::Watch(events) => drop(tokio::spawn(watch(stream, events))),
            ScriptStep::Silence => drop(stream),
        }
    }
}

async fn watch(mut stream: TcpStream, mut events: mpsc::UnboundedReceiver<String>) {
    let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    while let Some(part) = events.recv().await {
        if part.is_empty() {
            // Like a server that dies: the body has no end.
            return;
        }
        let chunk = format!("{:x}\r\n{part}\r\n", part.len());
        stream.write_all(chunk.as_bytes()).await.unwrap();
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
}

fn pod(name: &str, host: u8, version: u32) -> Value {
    json!({
        "metadata": {"name": name, "resourceVersion": version.to_string(), "labels": {"app": "vllm"}},
        "status": {"phase": "Running", "podIP": format!("10.0.0.{host}"),
            "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"}]},
    })
}

fn list(version: u32, next: &str, pods: &[Value]) -> ScriptStep {
    let metadata = json!({"resourceVersion": version.to_string(), "continue": next});
    ScriptStep::Answer(
        200,
        json!({"kind": "PodList", "metadata": metadata, "items": pods}),
    )
}

fn event(kind: &str, object: &Value) -> String {
    format!("{}\n", json!({"type": kind, "object": object}))
}

fn bookmark(version: u32) -> String {
    let metadata = json!({"resourceVersion": version.to_string()});
    event("BOOKMARK", &json!({"kind": "Pod", "metadata": metadata}))
}

fn vllm() -> PodChoice {
    PodChoice::Selector("app=vllm".to_owned())
}

#[tokio::test]
async fn pods_are_listed_in_pages_and_watched() {
    let api = ApiStandIn::start(vllm()).await;
    api.then(list(5, "more/1", &[pod("a", 1, 3)]));
    api.then(list(5, "", &[pod("b", 2, 4)]));
    let events = api.then_watch();
    says(&api.board, "a b").await;
    assert_eq!(
        api.requests(),
        [
            "/api/v1/namespaces/llm/pods?labelSelector=app%3Dvllm&limit=500",
            "/api/v1/namespaces/llm/pods?labelSelector=app%3Dvllm&limit=500&continue=more%2F1",
            "/api/v1/namespaces/llm/pods?labelSelector=app%3Dvllm&watch=true\
             &allowWatchBookmarks=true&resourceVersion=5",
        ]
    );
    // An event may come in pieces, and several at once.
    let added = event("ADDED", &pod("c", 3, 6));
    let (first, rest) = added.split_at(40);
    events.send(first.to_owned()).unwrap();
    let mut unready = pod("a", 1, 7);
    unready["status"]["conditions"][1]["status"] = json!("False");
    events
        .send(format!("{rest}{}", event("MODIFIED", &unready)))
        .unwrap();
    says(&api.board, "a? b c").await;
    let mut leaving = pod("b", 2, 8);
    leaving["metadata"]["deletionTimestamp"] = json!("2026-11-23T14:00:00Z");
    events.send(event("MODIFIED", &leaving)).unwrap();
    says(&api.board, "a? b! c").await;
    events.send(event("DELETED", &leaving)).unwrap();
    says(&api.board, "a? c").await;
}

#[tokio::test]
async fn an_ended_watch_resumes_at_the_bookmark() {
    let api = ApiStandIn::start(vllm()).await;
    api.then(list(5, "", &[pod("a", 1, 3)]));
    let events = api.then_watch();
    says(&api.board, "a").await;
    events.send(bookmark(90)).unwrap();
    drop(events);
    let events = api.then_watch();
    events.send(event("ADDED", &pod("b", 2, 91))).unwrap();
    says(&api.board, "a b").await;
    let last = api.requests().pop().unwrap();
    assert!(last.ends_with("&resourceVersion=90"), "{last}");
    // A server dies in the middle of an event: the known pods remain, but are not acted upon.
    events
        .send(event("ADDED", &pod("c", 3, 92))[..30].to_owned())
        .unwrap();
    events.send(String::new()).unwrap();
    let why = fails(&api.board).await;
    assert!(why.starts_with("http: "), "{why}");
    assert!(api.board.reading("it").is_none());
    api.then(ScriptStep::Silence);
    let events = api.then_watch();
    events.send(event("ADDED", &pod("c", 3, 92))).unwrap();
    says(&api.board, "a b c").await;
    let last = api.requests().pop().unwrap();
    assert!(last.ends_with("&resourceVersion=91"), "{last}");
}

#[tokio::test]
async fn an_expired_resource_version_triggers_a_new_list() {
    let api = ApiStandIn::start(vllm()).await;
    api.then(list(5, "", &[pod("a", 1, 3), pod("b", 2, 4)]));
    let events = api.then_watch();
    says(&api.board, "a b").await;
    // In a stream it is an event, and changes made meanwhile are only in the list.
    let gone = json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"});
    events.send(event("ERROR", &gone)).unwrap();
    api.then(list(50, "", &[pod("b", 2, 4), pod("c", 3, 44)]));
    let events = api.then_watch();
    says(&api.board, "b c").await;
    // As a response it is a status.
    drop(events);
    api.then(ScriptStep::Answer(410, gone));
    api.then(list(70, "", &[pod("d", 4, 66)]));
    let _events = api.then_watch();
    says(&api.board, "d").await;
    let last = api.requests().pop().unwrap();
    assert!(last.ends_with("&resourceVersion=70"), "{last}");
}

#[tokio::test]
async fn an_api_server_error_is_quoted_and_retried() {
    let api = ApiStandIn::start(vllm()).await;
    let message = "pods is forbidden: User \"system:serviceaccount:llm:quorate\" cannot list";
    api.then(ScriptStep::Answer(
        403,
        json!({"kind": "Status", "message": message}),
    ));
    let why = fails(&api.board).await;
    assert!(why.contains("403") && why.contains(message), "{why}");
    api.then(ScriptStep::Answer(200, json!({"kind": "PodList"})));
    api.then(list(5, "", &[pod("a", 1, 3)]));
    let _events = api.then_watch();
    says(&api.board, "a").await;
}

#[tokio::test]
async fn an_inference_pool_is_followed_at_its_target_port() {
    let api = ApiStandIn::start(PodChoice::Pool("vllm-pool".to_owned())).await;
    let pool = json!({"spec": {"selector": {"matchLabels": {"app": "vllm"}},
        "targetPorts": [{"number": 9000}]}});
    api.then(ScriptStep::Answer(200, pool));
    api.then(list(5, "", &[pod("a", 1, 3)]));
    let _events = api.then_watch();
    let reading = says(&api.board, "a").await;
    assert_eq!(reading.engines[0].spec.url, "http://10.0.0.1:9000");
    assert_eq!(
        api.requests()[..2],
        [
            "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools/vllm-pool",
            "/api/v1/namespaces/llm/pods?labelSelector=app%3Dvllm&limit=500",
        ]
    );
}
