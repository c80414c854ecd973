//! Waits for the beginning of a response body before the head goes to the client, and judges it.
//!
//! After the head is sent, a broken engine can only show as a cut connection, or as an event within
//! a 200. Before that, the client gets a 502, or the request goes to another engine. Therefore the
//! first event that is more than a comment decides like a status: if it is an error, the response
//! counts as one with the status that the error stands for. Engines may send events without output
//! before an error (SGLang's role chunk, `response.created`, `message_start`), so these are held
//! back too, up to [`HELD_BYTES_MAX`] and to the first event with output, which is never delayed.
//!
//! Most bodies arrive together with their head. Otherwise the head, and what is held back, waits for
//! at most [`HEAD_HELD_MAX`], so that a slow first token delays them no further. An error that comes
//! later is passed on within the stream.

use std::future::poll_fn;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderValue, Response};
use http_body::Body;
use tokio::time::{Instant, timeout_at};

use super::answer_usage::inspect;
use super::engine_error::EngineError;
use super::event_scan::EventScan;
use super::json_scan::is_whole;
use crate::engines::backends::pool::{EngineBody, SendError};

/// Maximum time for which a head waits for the beginning of its body.
const HEAD_HELD_MAX: Duration = Duration::from_secs(3);
/// Maximum length of a stream's beginning that is held back, in bytes. `response.created` repeats
/// the request's instructions and tools.
const HELD_BYTES_MAX: usize = 256 * 1024;
/// Maximum length of a document that may be an error, in bytes.
const ERROR_DOCUMENT_BYTES_MAX: usize = 64 * 1024;
/// Length of a document's beginning that shows whether it may be an error, in bytes.
const TELLING_BYTES: usize = 256;

/// Media type of a response body, as far as the router reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proxy) enum AnswerMedia {
    /// A stream of server-sent events.
    Events,
    /// A JSON document.
    Json,
    /// Anything else, and compressed bodies.
    Other,
}

impl AnswerMedia {
    pub(in crate::proxy) fn of(headers: &HeaderMap) -> Self {
        let is_encoded = headers
            .get(CONTENT_ENCODING)
            .is_some_and(|coding| coding != "identity");
        let media_type = headers
            .get(CONTENT_TYPE)
            .map_or(&b""[..], HeaderValue::as_bytes);
        if is_encoded {
            Self::Other
        } else if starts_with(media_type, b"text/event-stream") {
            Self::Events
        } else if starts_with(media_type, b"application/json") {
            Self::Json
        } else {
            Self::Other
        }
    }
}

fn starts_with(value: &[u8], prefix: &[u8]) -> bool {
    value
        .get(..prefix.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

/// Whether a response is a page or a note for people, which no engine sends in place of output.
pub(in crate::proxy) fn is_text(headers: &HeaderMap) -> bool {
    let media_type = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let is_text =
        |media: &[u8]| starts_with(media, b"text/html") || starts_with(media, b"text/plain");
    media_type.is_some_and(is_text)
}

/// What the beginning of a body shows.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::proxy) enum Opening {
    /// An answer, or nothing by the deadline.
    Answer,
    /// An error, and no output before it.
    Error(EngineError),
}

/// Waits for the beginning of the body, or its end, without consuming it. Also returns after
/// [`HEAD_HELD_MAX`] or at `first_byte_by`.
///
/// # Errors
/// Returns [`SendError`] if the response breaks off earlier, if a stream ends without any output, or
/// if a successful response without framing is empty.
pub(in crate::proxy) async fn begin(
    response: &mut Response<EngineBody>,
    first_byte_by: Instant,
) -> Result<Opening, SendError> {
    let is_success = response.status().is_success();
    let must_begin = is_success && !is_framed(response.headers());
    let media = match is_success {
        true => AnswerMedia::of(response.headers()),
        false => AnswerMedia::Other,
    };
    let mut reader = OpeningReader::new(media);
    let body = response.body_mut();
    if body.is_end_stream() {
        return match media {
            AnswerMedia::Events => Err(SendError::Ended),
            AnswerMedia::Json | AnswerMedia::Other => Ok(Opening::Answer),
        };
    }
    let began = match poll_fn(|cx| Poll::Ready(reader.poll(body, cx))).await {
        Poll::Ready(began) => began,
        Poll::Pending => {
            let held_until = first_byte_by.min(Instant::now() + HEAD_HELD_MAX);
            let began = timeout_at(held_until, poll_fn(|cx| reader.poll(body, cx)));
            began.await.unwrap_or(Ok(Opening::Answer))
        }
    };
    match began {
        Ok(Opening::Answer) if must_begin && body.is_end_stream() => Err(SendError::Ended),
        began => began,
    }
}

/// Whether the body's framing reveals where it ends.
pub(in crate::proxy) fn is_framed(headers: &HeaderMap) -> bool {
    headers.contains_key(TRANSFER_ENCODING) || headers.contains_key(CONTENT_LENGTH)
}

/// Reader of the beginning of a body.
struct OpeningReader {
    media: AnswerMedia,
    /// Incomplete event, or beginning of a document.
    held: BytesMut,
    scan: EventScan,
    /// Number of bytes read.
    bytes: usize,
}

impl OpeningReader {
    fn new(media: AnswerMedia) -> Self {
        Self {
            media,
            held: BytesMut::new(),
            scan: EventScan::default(),
            bytes: 0,
        }
    }

    fn poll(
        &mut self,
        body: &mut EngineBody,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Opening, SendError>> {
        loop {
            let Some(frame) = ready!(body.poll_ahead(cx))? else {
                return Poll::Ready(self.finish().ok_or(SendError::Ended));
            };
            if let Some(opening) = self.push(frame) {
                return Poll::Ready(Ok(opening));
            }
        }
    }

    /// Reads further bytes; `None` if they leave open what the response is.
    fn push(&mut self, frame: Bytes) -> Option<Opening> {
        self.bytes += frame.len();
        match self.media {
            AnswerMedia::Events => self.events(frame),
            AnswerMedia::Json => self.document(&frame),
            AnswerMedia::Other => Some(Opening::Answer),
        }
    }

    fn events(&mut self, frame: Bytes) -> Option<Opening> {
        let mut bytes = frame;
        if !self.held.is_empty() {
            self.held.extend_from_slice(&bytes);
            if self.scan.event_end(&self.held).is_none() && self.bytes <= HELD_BYTES_MAX {
                return None;
            }
            bytes = self.held.split().freeze();
        }
        let mut start = 0;
        while start < bytes.len() {
            self.scan = EventScan::default();
            let rest = &bytes[start..];
            let Some(length) = self.scan.event_end(rest) else {
                self.held.extend_from_slice(rest);
                break;
            };
            if let Some(opening) = judge(rest, &self.scan) {
                return Some(opening);
            }
            start += length;
        }
        (self.bytes > HELD_BYTES_MAX).then_some(Opening::Answer)
    }

    /// Judges a document by its beginning. An error is short, and whole before long.
    fn document(&mut self, frame: &[u8]) -> Option<Opening> {
        self.held
            .extend_from_slice(&frame[..frame.len().min(ERROR_DOCUMENT_BYTES_MAX)]);
        let is_told = self.bytes >= TELLING_BYTES;
        if self.bytes > ERROR_DOCUMENT_BYTES_MAX || is_told && !may_be_error(&self.held) {
            return Some(Opening::Answer);
        }
        is_whole(&self.held).then(|| document(&self.held))
    }

    /// Judges a body that has ended; `None` for a stream without output, which answers nothing.
    fn finish(&mut self) -> Option<Opening> {
        match self.media {
            AnswerMedia::Events => {
                self.held.extend_from_slice(b"\n\n");
                self.scan = EventScan::default();
                self.scan.event_end(&self.held);
                judge(&self.held, &self.scan)
            }
            AnswerMedia::Json => Some(document(&self.held)),
            AnswerMedia::Other => Some(Opening::Answer),
        }
    }
}

/// Whether a document may report an error, judging by its bytes.
pub(super) fn may_be_error(document: &[u8]) -> bool {
    let has = |name: &[u8]| memchr::memmem::find(document, name).is_some();
    has(b"\"error\"") || has(b"\"detail\"")
}

fn document(json: &[u8]) -> Opening {
    let error = may_be_error(json).then(|| EngineError::read(json, false));
    error.flatten().map_or(Opening::Answer, Opening::Error)
}

/// Judges the event at the start of `bytes`; `None` if it is a comment or has no output.
fn judge(bytes: &[u8], scan: &EventScan) -> Option<Opening> {
    let payload = scan.text(bytes)?;
    if matches!(payload.trim_ascii(), b"" | b"[DONE]") {
        return None;
    }
    let findings = inspect(&payload);
    if findings.error.is_some() || scan.is_error() {
        return EngineError::read(&payload, scan.is_error()).map(Opening::Error);
    }
    (!findings.is_structural).then_some(Opening::Answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ERROR: &str = "data: {\"error\":{\"message\":\"full\",\"code\":503}}\n\n";
    const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
    const TEXT: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";

    /// Returns what the beginning shows, if it is read in pieces: the status of an error, 200 for an
    /// answer, or `None` if it is open.
    fn status(media: AnswerMedia, body: &str, piece_bytes: usize) -> Option<u16> {
        let mut reader = OpeningReader::new(media);
        let mut pieces = body.as_bytes().chunks(piece_bytes);
        let opening = pieces.find_map(|piece| reader.push(Bytes::copy_from_slice(piece)))?;
        Some(match opening {
            Opening::Answer => 200,
            Opening::Error(error) => error.status.as_u16(),
        })
    }

    #[test]
    fn the_first_event_that_is_no_comment_decides() {
        let created = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"error\":null}}\n\n";
        let start = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":1,\"output_tokens\":1}}}\n\n";
        let overloaded = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n";
        let failed = "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\"}}}\n\n";
        let comment = ": keep-alive\n\n";
        for (stream, expected) in [
            (ERROR.to_owned(), Some(503)),
            (format!("{comment}{comment}{ERROR}"), Some(503)),
            (format!("{ROLE}{ERROR}"), Some(503)),
            (format!("{start}{overloaded}"), Some(503)),
            (format!("{created}{failed}"), Some(500)),
            ("event: error\ndata: no memory\n\n".to_owned(), Some(500)),
            (format!("{TEXT}{ERROR}"), Some(200)),
            ("data: [DONE]\n\n".to_owned(), None),
            (format!("\u{feff}{ERROR}"), Some(503)),
            (
                "data: {\"error\":\ndata: {\"code\":503}}\n\n".to_owned(),
                Some(503),
            ),
            ("data: nonsense\n\n".to_owned(), Some(200)),
            (format!("{comment}{ROLE}{start}{created}"), None),
        ] {
            for piece_bytes in [1, 7, 50, usize::MAX] {
                let found = status(AnswerMedia::Events, &stream, piece_bytes.min(stream.len()));
                assert_eq!(found, expected, "{stream}");
            }
        }
    }

    #[test]
    fn held_back_events_are_bounded() {
        let long = ROLE.repeat(HELD_BYTES_MAX / ROLE.len() + 2);
        assert_eq!(status(AnswerMedia::Events, &long, 4096), Some(200));
        let long = format!("data: {}", "x".repeat(HELD_BYTES_MAX));
        assert_eq!(status(AnswerMedia::Events, &long, 4096), Some(200));
    }

    #[test]
    fn a_document_is_an_error_only_as_a_whole() {
        let error = r#"{"error":{"message":"full","code":503}}"#;
        let flat = r#"{"object":"error","message":"no","type":"BadRequest","code":400}"#;
        let quoted = format!(r#"{{"choices":[{{"message":{{"content":{error:?}}}}}]}}"#);
        let long = format!(r#"{{"error":{{"message":"{}"}}}}"#, "x".repeat(70_000));
        let marked = format!("\u{feff}{error}");
        for (json, expected) in [
            (error, 503),
            (flat, 400),
            (&marked, 503),
            (r#"{"detail":"Internal Server Error"}"#, 500),
            (&quoted, 200),
            (&long, 200),
            ("{}", 200),
        ] {
            for piece_bytes in [1, 30, json.len()] {
                let found = status(AnswerMedia::Json, json, piece_bytes);
                assert_eq!(found, Some(expected), "{json:.60}");
            }
        }
        assert_eq!(status(AnswerMedia::Other, error, 10), Some(200));
    }

    #[test]
    fn an_ended_body_is_judged_without_its_last_line_end() {
        for (media, body) in [
            (AnswerMedia::Events, ERROR.trim_end()),
            (AnswerMedia::Json, r#"{"error":"x"}"#),
        ] {
            let mut reader = OpeningReader::new(media);
            reader.push(Bytes::from(body));
            assert!(matches!(reader.finish(), Some(Opening::Error(_))), "{body}");
        }
        for body in ["", ": keep-alive\n\n", "data: [DONE]\n\n", ROLE] {
            let mut reader = OpeningReader::new(AnswerMedia::Events);
            assert_eq!(reader.push(Bytes::from(body)), None, "{body}");
            assert_eq!(reader.finish(), None, "{body}");
        }
    }
}
