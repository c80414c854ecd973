//! A client that writes raw bytes and reads responses, so that it can also misbehave.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    pub(crate) read: Vec<u8>,
}

/// A response as received.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// With names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    /// Without chunk framing.
    pub(crate) body: String,
    /// Whether the framing marks the response as complete.
    pub(crate) is_complete: bool,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Asserts that this is an OpenAI-shaped error with this status and code.
    #[track_caller]
    pub(crate) fn refuses(&self, status: u16, code: &str) {
        let told = (self.status, self.error_code());
        assert_eq!(told, (status, code.to_owned()), "{}", self.body);
    }

    /// Returns the `code` of an OpenAI-shaped error.
    pub(crate) fn error_code(&self) -> String {
        let body: serde_json::Value = serde_json::from_str(&self.body).expect(&self.body);
        let error = body["error"].as_object().expect("an error object");
        let fields: Vec<_> = error.keys().map(String::as_str).collect();
        assert_eq!(fields, ["message", "type", "param", "code"]);
        error["code"].as_str().expect("a code").to_owned()
    }
}

/// Returns a POST with a body and further header lines, each ended by `\r\n`.
pub(crate) fn post(path: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: router\r\n{headers}content-length: {length}\r\n\r\n{body}"
    )
}

/// Returns a chat request for the model `m`; `fields` follows the messages.
pub(crate) fn chat(fields: &str) -> String {
    let body =
        format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hello"}}]{fields}}}"#);
    post(
        "/v1/chat/completions",
        "content-type: application/json\r\n",
        &body,
    )
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self {
            stream: TcpStream::connect(address).await.unwrap(),
            read: Vec::new(),
        }
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Sends a request and reads one response.
    pub(crate) async fn ask(&mut self, request: impl AsRef<[u8]>) -> Answer {
        self.send(request).await;
        self.answer().await
    }

    /// Reads until `text` has arrived.
    pub(crate) async fn read_until(&mut self, text: &str) {
        while !String::from_utf8_lossy(&self.read).contains(text) {
            assert!(self.fill().await, "the connection ended before {text:?}");
        }
    }

    /// Reads one response, as much of it as arrives.
    pub(crate) async fn answer(&mut self) -> Answer {
        let mut answer = self.head().await;
        if answer.status == 0 {
            return answer;
        }
        if answer.header("transfer-encoding") == Some("chunked") {
            self.read_chunks(&mut answer).await;
        } else {
            let length = answer
                .header("content-length")
                .map_or(0, |text| text.parse().unwrap());
            while self.read.len() < length && self.fill().await {}
            answer.is_complete = self.read.len() >= length;
            let body: Vec<u8> = self.read.drain(..length.min(self.read.len())).collect();
            answer.body = String::from_utf8(body).unwrap();
        }
        answer
    }

    /// Reads the head of one response, which is all of a response to `HEAD`.
    pub(crate) async fn head(&mut self) -> Answer {
        let head_end = loop {
            if let Some(at) = find(&self.read, b"\r\n\r\n") {
                let head: Vec<u8> = self.read.drain(..at + 4).collect();
                let head = String::from_utf8(head).unwrap();
                if head.starts_with("HTTP/1.1 100") {
                    continue;
                }
                break head;
            }
            if !self.fill().await {
                return Answer::default();
            }
        };
        let mut lines = head_end.trim_end().split("\r\n");
        let status = lines
            .next()
            .unwrap()
            .split(' ')
            .nth(1)
            .unwrap()
            .parse()
            .unwrap();
        let headers: Vec<_> = lines
            .map(|line| line.split_once(": ").unwrap_or((line, "")))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        Answer {
            status,
            headers,
            ..Answer::default()
        }
    }

    async fn read_chunks(&mut self, answer: &mut Answer) {
        loop {
            let Some(line_end) = find(&self.read, b"\r\n") else {
                if self.fill().await {
                    continue;
                }
                return;
            };
            let size = String::from_utf8_lossy(&self.read[..line_end]).into_owned();
            let size = usize::from_str_radix(&size, 16).unwrap();
            while self.read.len() < line_end + 2 + size + 2 {
                if !self.fill().await {
                    return;
                }
            }
            let chunk: Vec<u8> = self.read.drain(..line_end + 2 + size + 2).collect();
            if size == 0 {
                answer.is_complete = true;
                return;
            }
            answer.body += std::str::from_utf8(&chunk[line_end + 2..][..size]).unwrap();
        }
    }

    /// Whether the connection is closed and nothing more arrived.
    pub(crate) async fn is_closed(&mut self) -> bool {
        !self.fill().await && self.read.is_empty()
    }

    pub(crate) async fn fill(&mut self) -> bool {
        let mut buffer = vec![0; 64 * 1024];
        match self.stream.read(&mut buffer).await {
            Ok(0) | Err(_) => false,
            Ok(length) => {
                self.read.extend_from_slice(&buffer[..length]);
                true
            }
        }
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}
