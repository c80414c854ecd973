//! A scripted engine, down to single bytes on the wire.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use state::command::{BackendRole, BackendSpec};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};

/// Next action of the engine for a request.
#[derive(Clone)]
pub(crate) enum Step {
    /// Writes bytes.
    Send(Vec<u8>),
    /// Writes bytes one at a time.
    Trickle(Vec<u8>),
    /// Waits for a permit.
    Await(Arc<Semaphore>),
    /// Waits until the other side closes the connection, and counts it as abandoned.
    Hang,
    /// Closes the connection.
    Close,
    /// Waits until the next request arrives, and closes the connection without reading it.
    CloseUnread,
}

/// A running engine; stops with its runtime.
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
    seen: Arc<Seen>,
    /// Task that accepts connections; `None` if the engine does not run here.
    task: Option<AbortHandle>,
}

#[derive(Default)]
struct Seen {
    requests: Mutex<Vec<String>>,
    connections: AtomicUsize,
    abandoned: AtomicUsize,
}

type Script = Arc<dyn Fn(usize, &str) -> Vec<Step> + Send + Sync>;

impl Engine {
    /// Starts an engine; `script` returns the steps for the n-th request, counted from 0.
    pub(crate) async fn start(script: impl Fn(usize) -> Vec<Step> + Send + Sync + 'static) -> Self {
        Self::run(Arc::new(move |number, _| script(number))).await
    }

    /// Starts an engine; `script` returns the steps for a request, given headers and body.
    pub(crate) async fn answering(
        script: impl Fn(&str) -> Vec<Step> + Send + Sync + 'static,
    ) -> Self {
        Self::run(Arc::new(move |_, request| script(request))).await
    }

    async fn run(script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Seen::default());
        let noted = Arc::clone(&seen);
        let task = tokio::spawn(async move {
            // Dropped with this task, which closes the connections too.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                noted.connections.fetch_add(1, Ordering::SeqCst);
                connections.spawn(serve(stream, Arc::clone(&script), Arc::clone(&noted)));
            }
        });
        Self {
            address,
            seen,
            task: Some(task.abort_handle()),
        }
    }

    /// Closes open connections and refuses new ones.
    pub(crate) fn kill(&self) {
        self.task.iter().for_each(AbortHandle::abort);
    }

    /// Starts an engine that always runs the same steps.
    pub(crate) async fn always(steps: Vec<Step>) -> Self {
        Self::start(move |_| steps.clone()).await
    }

    /// Returns an engine whose address has no listener.
    pub(crate) async fn dead() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::at(listener.local_addr().unwrap())
    }

    /// Returns an engine that stands for whatever listens at `address`.
    pub(crate) fn at(address: SocketAddr) -> Self {
        Self {
            address,
            seen: Arc::default(),
            task: None,
        }
    }

    /// Returns the engine as a backend `e{number}` of the model `m`.
    pub(crate) fn spec(&self, number: usize) -> BackendSpec {
        BackendSpec {
            id: format!("e{number}"),
            url: format!("http://{}", self.address),
            models: vec!["m".to_owned()],
            labels: BTreeMap::new(),
            capacity_blocks: Some(100_000),
            kv_events: None,
            kv_replay: None,
            role: BackendRole::Both,
        }
    }

    /// Returns all requests so far, headers and body.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.seen.requests.lock().unwrap().clone()
    }

    pub(crate) fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::SeqCst)
    }

    /// Returns the number of connections that the other side closed during a [`Step::Hang`].
    pub(crate) fn abandoned(&self) -> usize {
        self.seen.abandoned.load(Ordering::SeqCst)
    }
}

async fn serve(mut stream: TcpStream, script: Script, seen: Arc<Seen>) {
    while let Some(request) = read_request(&mut stream).await {
        let number = {
            let mut requests = seen.requests.lock().unwrap();
            requests.push(request.clone());
            requests.len() - 1
        };
        for step in script(number, &request) {
            match step {
                Step::Send(bytes) => {
                    if stream.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
                Step::Trickle(bytes) => {
                    stream.set_nodelay(true).unwrap();
                    for byte in bytes {
                        if stream.write_all(&[byte]).await.is_err() {
                            return;
                        }
                        tokio::task::yield_now().await;
                    }
                }
                Step::Await(gate) => gate.acquire().await.unwrap().forget(),
                Step::Hang => {
                    while stream
                        .read(&mut [0; 1024])
                        .await
                        .is_ok_and(|length| length > 0)
                    {}
                    seen.abandoned.fetch_add(1, Ordering::SeqCst);
                    return;
                }
                Step::Close => return,
                Step::CloseUnread => {
                    stream.readable().await.unwrap();
                    return;
                }
            }
        }
    }
}

async fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        if let Some(head) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&bytes[..head]).to_ascii_lowercase();
            let length = text
                .split("\r\n")
                .find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.map_or(0, |length| length.parse().unwrap());
            if bytes.len() >= head + 4 + length {
                return Some(String::from_utf8_lossy(&bytes).into_owned());
            }
        }
        let length = stream
            .read(&mut buffer)
            .await
            .ok()
            .filter(|length| *length > 0)?;
        bytes.extend_from_slice(&buffer[..length]);
    }
}

/// Returns a complete response with a JSON body.
pub(crate) fn json(status: &str, body: &str) -> Step {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\n");
    Step::Send(format!("{head}content-length: {length}\r\n\r\n{body}").into_bytes())
}

/// Returns the headers of a chunked event stream.
pub(crate) fn stream_head() -> Step {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n";
    Step::Send(format!("{head}transfer-encoding: chunked\r\n\r\n").into_bytes())
}

/// Returns one chunk.
pub(crate) fn chunk(data: &str) -> Step {
    Step::Send(format!("{:x}\r\n{data}\r\n", data.len()).into_bytes())
}

/// Returns the last chunk.
pub(crate) fn last_chunk() -> Step {
    Step::Send(b"0\r\n\r\n".to_vec())
}

/// Returns a chat chunk with continuous usage, in an engine's format.
pub(crate) fn delta(text: &str, completion_tokens: u32) -> String {
    format!(
        "data: {{\"id\":\"c\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}],\
         \"usage\":{{\"prompt_tokens\":7,\"completion_tokens\":{completion_tokens}}}}}\n\n"
    )
}

/// Returns the usage-only chunk at the end of a stream.
pub(crate) fn usage_chunk() -> &'static str {
    "data: {\"id\":\"c\",\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\n\n"
}

pub(crate) const DONE: &str = "data: [DONE]\n\n";
