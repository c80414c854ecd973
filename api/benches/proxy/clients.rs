//! Clients and their requests.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use api::net::tls::ClientConfig;
use api::routing::UserName;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::tls::HOST;

/// Number of different prompts, so that decisions differ.
pub(super) const PROMPTS: usize = 64;

/// User who sends the requests.
pub(super) static ADA: LazyLock<UserName> = LazyLock::new(|| UserName::bounded("ada"));

/// Returns requests as bytes on the wire: a long shared prefix, different ends.
pub(super) fn requests(body_bytes: usize, is_streaming: bool) -> Vec<Vec<u8>> {
    let request = |number: usize| {
        let stream = if is_streaming { ",\"stream\":true" } else { "" };
        let frame = format!(
            "{{\"model\":\"m\"{stream},\"messages\":[{{\"role\":\"user\",\"content\":\"\"}}]}}"
        );
        let shared =
            "Answer with care, and say so when you do not know.\\n".repeat(body_bytes / 52 + 1);
        let text_bytes = body_bytes - frame.len();
        let text = &shared[..text_bytes * 3 / 4];
        let text = text.trim_end_matches('\\');
        let own = format!("question {number:>4} ").repeat(text_bytes / 14 + 1);
        let text = format!("{text}{}", &own[..text_bytes - text.len()]);
        let body = frame.replace("\"content\":\"\"", &format!("\"content\":\"{text}\""));
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: router:8080\r\nuser-agent: bench\r\n\
             accept: application/json\r\nauthorization: Bearer sk-{number}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes()
    };
    (0..PROMPTS).map(request).collect()
}

/// Connection handling of a client.
#[derive(Clone)]
pub(super) struct ClientKind {
    /// Whether the connection is reused for the next request.
    is_kept: bool,
    tls: Option<TlsConnector>,
}

impl ClientKind {
    /// Uses one connection for all requests.
    pub(super) fn kept() -> Self {
        Self {
            is_kept: true,
            tls: None,
        }
    }

    /// Opens a new connection for each request.
    pub(super) fn once() -> Self {
        Self {
            is_kept: false,
            tls: None,
        }
    }

    /// Uses TLS.
    pub(super) fn with_tls(self, config: &Arc<ClientConfig>) -> Self {
        Self {
            tls: Some(TlsConnector::from(Arc::clone(config))),
            ..self
        }
    }

    async fn connect(&self, address: SocketAddr) -> MaybeTls {
        let stream = TcpStream::connect(address)
            .await
            .expect("the proxy listens");
        stream.set_nodelay(true).expect("a socket option");
        match &self.tls {
            None => MaybeTls::Clear(stream),
            Some(tls) => {
                let name = ServerName::try_from(HOST).expect("a name");
                let stream = tls.connect(name, stream).await.expect("the proxy is known");
                MaybeTls::Tls(Box::new(stream))
            }
        }
    }
}

/// Connection of a client.
enum MaybeTls {
    Clear(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl MaybeTls {
    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Clear(stream) => stream.write_all(bytes).await,
            Self::Tls(stream) => stream.write_all(bytes).await,
        }
    }

    async fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Clear(stream) => stream.read(buffer).await,
            Self::Tls(stream) => stream.read(buffer).await,
        }
    }
}

/// Runs `connections` clients for `time`, each of which sends its next request after the response
/// to the last one. Returns the number of responses.
pub(super) fn drive(
    address: SocketAddr,
    kind: &ClientKind,
    requests: &Arc<Vec<Vec<u8>>>,
    connections: usize,
    time: Duration,
) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime starts").block_on(async {
        let until = Instant::now() + time;
        let clients: Vec<_> = (0..connections)
            .map(|number| {
                let (kind, requests) = (kind.clone(), Arc::clone(requests));
                tokio::spawn(client(address, kind, requests, number, until))
            })
            .collect();
        let mut done = 0;
        for client in clients {
            done += client.await.expect("clients do not panic");
        }
        done
    })
}

async fn client(
    address: SocketAddr,
    kind: ClientKind,
    requests: Arc<Vec<Vec<u8>>>,
    first: usize,
    until: Instant,
) -> usize {
    let mut stream = kind.connect(address).await;
    let mut buffer = vec![0; 64 * 1024];
    let mut done = 0;
    while Instant::now() < until {
        ask(
            &mut stream,
            &requests[(first + done) % requests.len()],
            &mut buffer,
        )
        .await;
        done += 1;
        if !kind.is_kept {
            stream = kind.connect(address).await;
        }
    }
    done
}

async fn ask(stream: &mut MaybeTls, request: &[u8], buffer: &mut [u8]) {
    stream.write(request).await.expect("the proxy reads");
    let mut got = 0;
    while !is_whole(&buffer[..got]) {
        let length = stream.read(&mut buffer[got..]).await;
        let length = length.expect("the proxy answers");
        assert!(
            length > 0,
            "cut off: {}",
            String::from_utf8_lossy(&buffer[..got])
        );
        got += length;
    }
    assert!(
        buffer.starts_with(b"HTTP/1.1 200"),
        "{}",
        String::from_utf8_lossy(&buffer[..got])
    );
}

/// Whether a response is complete, judged by the ends of the engine's JSON document and of a
/// chunked body.
fn is_whole(answer: &[u8]) -> bool {
    answer.ends_with(b"\"END\"}") || answer.ends_with(b"\r\n0\r\n\r\n")
}
