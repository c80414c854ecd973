//! Finds the ends of server-sent events, and the payloads within them, in bytes that arrive in
//! pieces.

use std::borrow::Cow;
use std::ops::Range;

/// UTF-8's byte order mark, which a stream may begin with.
pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Progress of parsing the event at the start of a buffer.
#[derive(Debug, Clone, Default)]
pub(super) struct EventScan {
    /// Start of the incomplete line.
    line: usize,
    /// End of the bytes after `line` without a line end.
    searched: usize,
    /// Payload of the last `data` line; `None` before the first.
    data: Option<Range<usize>>,
    /// Whether there is more than one `data` line, which JSON never needs.
    has_many: bool,
    /// Whether the event is named `error`.
    is_error: bool,
}

impl EventScan {
    /// Returns the position after the event; `None` if it is incomplete.
    pub(super) fn event_end(&mut self, bytes: &[u8]) -> Option<usize> {
        loop {
            let Some(offset) = memchr::memchr2(b'\n', b'\r', &bytes[self.searched..]) else {
                self.searched = bytes.len();
                return None;
            };
            let end = self.searched + offset;
            let next = match (bytes[end], bytes.get(end + 1)) {
                (b'\r', Some(b'\n')) => end + 2,
                // A line feed may follow and belong to the same line end.
                (b'\r', None) => {
                    self.searched = end;
                    return None;
                }
                _ => end + 1,
            };
            let line = self.line..end;
            self.line = next;
            self.searched = next;
            if line.is_empty() {
                return Some(next);
            }
            if let Some(payload) = data_of(bytes, line.clone()) {
                self.has_many |= self.data.is_some();
                self.data = Some(payload);
            } else if let Some(name) = unmarked(&bytes[line]).strip_prefix(b"event:") {
                self.is_error = name.trim_ascii() == b"error";
            }
        }
    }

    /// Returns the payload of a complete event; `None` without one, and if it has several lines.
    pub(super) fn payload(&self) -> Option<Range<usize>> {
        self.data.clone().filter(|_| !self.has_many)
    }

    /// Returns the payload of a complete event at the start of `bytes`: its `data` lines, joined by
    /// line feeds. `None` without one.
    pub(super) fn text<'a>(&self, bytes: &'a [u8]) -> Option<Cow<'a, [u8]>> {
        if !self.has_many {
            return self.data.clone().map(|payload| bytes[payload].into());
        }
        let event = &bytes[..self.searched];
        let mut joined = Vec::with_capacity(event.len());
        for line in event.split(|byte| matches!(byte, b'\n' | b'\r')) {
            if let Some(payload) = data_of(line, 0..line.len()) {
                joined.extend_from_slice(&line[payload]);
                joined.push(b'\n');
            }
        }
        joined.pop();
        Some(joined.into())
    }

    /// Returns the beginning of the payload of an incomplete event in `bytes`, if that is all there
    /// is of it: nothing but the event's name precedes it.
    pub(super) fn open_payload(&self, bytes: &[u8]) -> Option<Range<usize>> {
        data_of(bytes, self.line..bytes.len()).filter(|_| self.data.is_none())
    }

    /// Whether a complete event has no data, so that clients see nothing of it.
    pub(super) fn is_comment(&self) -> bool {
        self.data.is_none()
    }

    /// Whether the incomplete event at the start of `bytes` has data already.
    pub(super) fn has_begun(&self, bytes: &[u8]) -> bool {
        self.data.is_some() || data_of(bytes, self.line..bytes.len()).is_some()
    }

    /// Whether the event is named `error`.
    pub(super) fn is_error(&self) -> bool {
        self.is_error
    }
}

/// Returns the payload of a `data` line; `None` for another field.
fn data_of(bytes: &[u8], line: Range<usize>) -> Option<Range<usize>> {
    let payload = unmarked(&bytes[line.clone()]).strip_prefix(b"data:")?;
    let payload = payload.strip_prefix(b" ").unwrap_or(payload);
    Some(line.end - payload.len()..line.end)
}

/// Returns `text` without its byte order mark.
pub(super) fn unmarked(text: &[u8]) -> &[u8] {
    text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text)
}

/// Search for the end of an event that is not buffered.
#[derive(Debug)]
pub(super) struct SkippedEvent {
    /// Whether the current line is empty so far.
    is_line_empty: bool,
    /// Whether the last byte was a carriage return, which a line feed may complete.
    is_after_return: bool,
}

impl SkippedEvent {
    pub(super) fn new() -> Self {
        Self {
            is_line_empty: true,
            is_after_return: false,
        }
    }

    /// Returns the position after the event if it ends in `bytes`.
    pub(super) fn event_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while at < bytes.len() {
            if std::mem::take(&mut self.is_after_return) && bytes[at] == b'\n' {
                at += 1;
                continue;
            }
            let Some(offset) = memchr::memchr2(b'\n', b'\r', &bytes[at..]) else {
                self.is_line_empty = false;
                return None;
            };
            let is_blank = self.is_line_empty && offset == 0;
            at += offset + 1;
            self.is_line_empty = true;
            self.is_after_return = bytes[at - 1] == b'\r';
            if is_blank {
                let has_feed = self.is_after_return && bytes.get(at) == Some(&b'\n');
                return Some(at + usize::from(has_feed));
            }
        }
        None
    }
}
