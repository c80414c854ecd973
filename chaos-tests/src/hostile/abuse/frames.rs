//! A minimal HTTP/2 client that sends frames that no library would send, and reads the responses.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, ReadHalf, WriteHalf, split};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::context::{AbuseContext, AbuseStream};

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const PRIORITY: u8 = 2;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const PING: u8 = 6;
const GOAWAY: u8 = 7;
pub(super) const WINDOW_UPDATE: u8 = 8;
pub(super) const CONTINUATION: u8 = 9;

pub(super) const END_STREAM: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;
const ACK: u8 = 1;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Payload of the ping at the end of a flood, which differs from the pings of the flood.
const LAST_PING: [u8; 8] = *b"the last";
/// Maximum wait of a flood for room to write. `END_PATIENCE` is the maximum wait for its end.
const WRITE_PATIENCE: Duration = Duration::from_secs(3);
const END_PATIENCE: Duration = Duration::from_secs(30);
/// Maximum length of a received frame, in bytes.
const FRAME_BYTES_MAX: usize = 1 << 20;

/// Encodes an HTTP/2 frame.
pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("frames are short");
    let mut bytes = length.to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// Encodes a header field in HPACK as a literal that is not indexed.
pub(super) fn field(name: &str, value: &str) -> Vec<u8> {
    let mut bytes = vec![0];
    for text in [name.as_bytes(), value.as_bytes()] {
        integer(&mut bytes, text.len());
        bytes.extend_from_slice(text);
    }
    bytes
}

/// Encodes a length as an HPACK integer with a prefix of seven bits.
fn integer(bytes: &mut Vec<u8>, value: usize) {
    let Some(mut rest) = value.checked_sub(127) else {
        return bytes.push(value as u8);
    };
    bytes.push(127);
    while rest >= 128 {
        bytes.push(rest as u8 | 128);
        rest >>= 7;
    }
    bytes.push(rest as u8);
}

/// Encodes the header fields of a chat request, followed by `more`.
pub(super) fn chat_fields(key: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let bearer = format!("Bearer {key}");
    let fields = [
        (":method", "POST"),
        (":scheme", "https"),
        (":authority", "router"),
        (":path", "/v1/chat/completions"),
        ("content-type", "application/json"),
        ("authorization", &bearer),
    ];
    let all = fields.iter().chain(more);
    all.flat_map(|(name, value)| field(name, value)).collect()
}

/// Event that ends the reading of a flood's responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FloodUntil {
    /// Reads until the ping after the flood is answered or the connection closes.
    Ping,
    /// Reads until the flood's only request is answered or reset, or the connection closes.
    Answer,
    /// Reads nothing.
    Unread,
}

/// Outcome of a flood at one replica.
#[derive(Debug, Default)]
pub(super) struct FloodEnd {
    /// Number of frames that were written.
    pub(super) sent: usize,
    /// Error code of the `GOAWAY` frame, if one arrived.
    pub(super) goaway: Option<u32>,
    /// Number of streams that the server reset, by error code.
    pub(super) resets: BTreeMap<u32, u64>,
    /// Number of response heads that arrived.
    pub(super) heads: u64,
    /// Whether the server answered the last ping.
    pub(super) is_open: bool,
    /// Whether the server stopped reading, so that a write timed out.
    pub(super) is_stalled: bool,
}

impl FloodEnd {
    /// Returns a short name for the outcome.
    pub(super) fn name(&self) -> String {
        match (self.goaway, self.is_open, self.is_stalled) {
            (_, true, _) => "taken to the end".to_owned(),
            (Some(reason), ..) => format!("given up for {}", reason_name(reason)),
            (None, _, true) => "not read any more".to_owned(),
            (None, ..) if self.heads > 0 => "answered".to_owned(),
            (None, ..) if !self.resets.is_empty() => "reset".to_owned(),
            (None, ..) => "closed".to_owned(),
        }
    }
}

fn reason_name(reason: u32) -> &'static str {
    match reason {
        0 => "NO_ERROR",
        1 => "PROTOCOL_ERROR",
        9 => "COMPRESSION_ERROR",
        11 => "ENHANCE_YOUR_CALM",
        _ => "another reason",
    }
}

/// Sends frames as fast as the replica takes them, and returns the outcome.
pub(super) async fn flood(
    context: &AbuseContext,
    replica: usize,
    until: FloodUntil,
    frames: impl Iterator<Item = Vec<u8>>,
) -> anyhow::Result<FloodEnd> {
    let stream = context.connect(replica, b"h2").await?;
    let (read, mut write) = split(stream);
    let reader = (until != FloodUntil::Unread)
        .then(|| AbortOnDropHandle::new(tokio::spawn(listen(read, until))));
    let mut end = FloodEnd::default();
    write_all(&mut write, &mut end, PREFACE).await;
    write_all(&mut write, &mut end, &frame(SETTINGS, 0, 0, &[])).await;
    end.sent = 0;
    for frame in frames {
        let is_over = reader.as_ref().is_some_and(AbortOnDropHandle::is_finished);
        if is_over || !write_all(&mut write, &mut end, &frame).await {
            break;
        }
    }
    if until == FloodUntil::Ping {
        write_all(&mut write, &mut end, &frame(PING, 0, 0, &LAST_PING)).await;
    }
    let Some(reader) = reader else {
        // The sockets are full, because nothing is read.
        return Ok(end);
    };
    let heard = timeout(END_PATIENCE, reader).await;
    let heard = heard.context("the connection neither ended nor went on")??;
    Ok(FloodEnd {
        sent: end.sent,
        is_stalled: end.is_stalled,
        ..heard
    })
}

/// Writes the bytes and counts a sent frame. Returns whether they were written.
async fn write_all(write: &mut WriteHalf<AbuseStream>, end: &mut FloodEnd, bytes: &[u8]) -> bool {
    if end.is_stalled {
        return false;
    }
    let written = timeout(WRITE_PATIENCE, async {
        write.write_all(bytes).await?;
        write.flush().await
    });
    match written.await {
        Ok(Ok(())) => {
            end.sent += 1;
            true
        }
        Ok(Err(_)) => false,
        Err(_) => {
            end.is_stalled = true;
            false
        }
    }
}

/// Reads frames until the event of `until`, or until the connection closes.
async fn listen(mut read: ReadHalf<AbuseStream>, until: FloodUntil) -> FloodEnd {
    let mut end = FloodEnd::default();
    loop {
        let mut head = [0; 9];
        if read.read_exact(&mut head).await.is_err() {
            return end;
        }
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let mut payload = vec![0; length.min(FRAME_BYTES_MAX)];
        if read.read_exact(&mut payload).await.is_err() {
            return end;
        }
        let number = |at: usize| {
            let bytes = payload.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_be_bytes(bytes))
        };
        match head[3] {
            HEADERS => end.heads += 1,
            RST_STREAM => *end.resets.entry(number(0).unwrap_or(0)).or_default() += 1,
            GOAWAY => end.goaway = number(4),
            PING if head[4] & ACK != 0 && payload == LAST_PING => {
                end.is_open = end.goaway.is_none();
                return end;
            }
            _ => {}
        }
        if until == FloodUntil::Answer && (end.heads > 0 || !end.resets.is_empty()) {
            return end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_and_fields_follow_the_standards() {
        let ping = frame(PING, ACK, 0, b"12345678");
        assert_eq!(ping[..9], [0, 0, 8, 6, 1, 0, 0, 0, 0]);
        assert_eq!(field("a", "bc"), [0, 1, b'a', 2, b'b', b'c']);
        let long = field("a", &"x".repeat(127 + 300));
        assert_eq!(long[3..6], [127, 0xac, 0x02], "RFC 7541, 5.1");
    }
}
