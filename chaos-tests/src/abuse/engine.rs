//! A fake engine that misbehaves as the request id demands, and records the heads of requests.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

/// Name of the model that the engine serves.
pub(super) const MODEL: &str = "abused";
/// Maximum number of bytes written of an endless response. The router must disconnect long before.
const ENDLESS_BYTES_MAX: usize = 64 << 20;
/// Maximum length of a request's head, in bytes.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Number of chunks in a response that is larger than all buffers on the way to its reader.
const FAT_PIECES: usize = 512;
const PIECE_BYTES: usize = 64 << 10;

const PLAIN: &str = r#"{"id":"1","object":"chat.completion","model":"abused","choices":[{"index":0,"message":{"role":"assistant","content":"word"},"finish_reason":"stop"}],"usage":{"prompt_tokens":4,"completion_tokens":1,"total_tokens":5}}"#;
/// Body of a response with impossible usage counts.
const ABSURD: &str = r#"{"id":"1","object":"chat.completion","model":"abused","choices":[{"index":0,"message":{"role":"assistant","content":"word"},"finish_reason":"stop"}],"usage":{"prompt_tokens":18446744073709551615,"completion_tokens":9223372036854775807,"total_tokens":-5,"prompt_tokens_details":{"cached_tokens":1e308}}}"#;
const EVENTS: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// Heads of the requests that reached this engine.
#[derive(Debug, Default)]
pub(super) struct SeenHeads(Mutex<Vec<String>>);

impl SeenHeads {
    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes and returns the heads that the engine has recorded.
    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.lock())
    }
}

/// A running fake engine, which stops when dropped.
#[derive(Debug)]
pub(super) struct AbuseEngine {
    pub(super) at: SocketAddr,
    pub(super) seen: Arc<SeenHeads>,
    _accepts: AbortOnDropHandle<()>,
}

impl AbuseEngine {
    /// Starts an engine on a free port.
    pub(super) async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let at = listener.local_addr()?;
        let seen = Arc::new(SeenHeads::default());
        let all = Arc::clone(&seen);
        let accepts = tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                // Ignores errors, because the other connections go on.
                let serving = serve(socket, Arc::clone(&all));
                tokio::spawn(async move { drop(serving.await) });
            }
        });
        Ok(Self {
            at,
            seen,
            _accepts: AbortOnDropHandle::new(accepts),
        })
    }
}

async fn serve(mut socket: TcpStream, seen: Arc<SeenHeads>) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let mut read = Vec::new();
    while let Some(head) = head(&mut socket, &mut read).await? {
        let line = head.lines().next().unwrap_or_default();
        let answer = match line.split(' ').nth(1) {
            Some("/health") => document(""),
            Some("/v1/models") => document(&format!(
                r#"{{"object":"list","data":[{{"id":"{MODEL}","object":"model"}}]}}"#
            )),
            _ if line.starts_with("POST ") => {
                let id = header(&head, "x-request-id").unwrap_or_default();
                let behaviour = id.split('.').next().unwrap_or_default().to_owned();
                let length = header(&head, "content-length");
                let length = length.and_then(|it| it.parse().ok()).unwrap_or(0);
                seen.lock().push(head);
                if behaviour == "early" {
                    // The body is not read.
                    return socket.write_all(document(PLAIN).as_bytes()).await;
                }
                body(&mut socket, &mut read, length).await?;
                if !respond_faulty(&behaviour, &mut socket).await? {
                    return Ok(());
                }
                continue;
            }
            _ => "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_owned(),
        };
        socket.write_all(answer.as_bytes()).await?;
    }
    Ok(())
}

/// Responds with the given behaviour. Returns whether the connection stays open.
async fn respond_faulty(behaviour: &str, socket: &mut TcpStream) -> io::Result<bool> {
    match behaviour {
        "endless-line" => {
            socket.write_all(EVENTS.as_bytes()).await?;
            socket.write_all(chunk(b"data: ").as_slice()).await?;
            endless(socket, &chunk(&[b'x'; PIECE_BYTES])).await?;
        }
        "endless-head" => {
            socket.write_all(b"HTTP/1.1 200 OK\r\n").await?;
            endless(socket, b"x-more: and more and more and more\r\n").await?;
        }
        "endless-continue" => endless(socket, b"HTTP/1.1 100 Continue\r\n\r\n").await?,
        "endless-document" => {
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                u64::MAX / 2
            );
            socket.write_all(head.as_bytes()).await?;
            endless(socket, &[b' '; PIECE_BYTES]).await?;
        }
        "absurd" => {
            socket.write_all(document(ABSURD).as_bytes()).await?;
            return Ok(true);
        }
        "redirect" => {
            let answer = "HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:1/\r\n\
                          content-length: 0\r\n\r\n";
            socket.write_all(answer.as_bytes()).await?;
            return Ok(true);
        }
        "fat" => {
            socket.write_all(EVENTS.as_bytes()).await?;
            let padding = "x".repeat(PIECE_BYTES);
            let event = format!("data: {{\"padding\":\"{padding}\"}}\n\n");
            for _ in 0..FAT_PIECES {
                socket.write_all(&chunk(event.as_bytes())).await?;
            }
            socket.write_all(&chunk(b"data: [DONE]\n\n")).await?;
            socket.write_all(b"0\r\n\r\n").await?;
            return Ok(true);
        }
        _ => {
            socket.write_all(document(PLAIN).as_bytes()).await?;
            return Ok(true);
        }
    }
    Ok(false)
}

async fn endless(socket: &mut TcpStream, piece: &[u8]) -> io::Result<()> {
    let mut written = 0;
    let many = piece.repeat(PIECE_BYTES.div_ceil(piece.len()));
    while written < ENDLESS_BYTES_MAX {
        socket.write_all(&many).await?;
        written += many.len();
    }
    Ok(())
}

fn chunk(bytes: &[u8]) -> Vec<u8> {
    let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
    chunk.extend_from_slice(bytes);
    chunk.extend_from_slice(b"\r\n");
    chunk
}

fn document(body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Returns the value of the header `name`, trimmed but otherwise as received.
fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = head.lines();
    lines.find_map(|line| {
        let (found, value) = line.split_once(':')?;
        found.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

async fn head(socket: &mut TcpStream, read: &mut Vec<u8>) -> io::Result<Option<String>> {
    loop {
        if let Some(at) = read.windows(4).position(|it| it == b"\r\n\r\n") {
            let head: Vec<u8> = read.drain(..at + 4).collect();
            return Ok(Some(String::from_utf8_lossy(&head).into_owned()));
        }
        let is_over = socket.read_buf(read).await? == 0;
        if is_over || read.len() > HEAD_BYTES_MAX {
            return Ok(None);
        }
    }
}

async fn body(socket: &mut TcpStream, read: &mut Vec<u8>, length: usize) -> io::Result<()> {
    let mut left = length;
    loop {
        let taken = left.min(read.len());
        read.drain(..taken);
        left -= taken;
        if left == 0 {
            return Ok(());
        }
        if socket.read_buf(read).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}
