//! Relays server-sent events: reads usage and text from every event, and removes what the router's
//! own additions to the request caused, without touching any other byte.
//!
//! Frames of the connection and events of the stream do not align. An incomplete event is held back
//! until it is complete. An event larger than [`EVENT_BYTES_MAX`] passes through unread.
//!
//! If a client requested only the final usage, running usage is removed. But some engines put the
//! final usage into the last chunk of a choice and send no separate one (llama.cpp's completions).
//! Such a chunk waits for the next event, which distinguishes the two cases.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::answer_usage::{AnswerDelta, inspect};
use crate::proxy::request::usage_options::WantedUsage;

/// Maximum length of an event that is parsed, in bytes.
pub(super) const EVENT_BYTES_MAX: usize = 256 * 1024;

/// Parser of one stream of server-sent events.
#[derive(Debug)]
pub(in crate::proxy) struct SseStream {
    wanted: WantedUsage,
    /// Beginning of an incomplete event, or empty.
    held: BytesMut,
    scan: EventScan,
    /// Search for the end of an event that is too long and passes through unread; `None` outside
    /// one.
    passing: Option<SkippedEvent>,
    /// Whether `[DONE]` or another last event has arrived.
    is_done: bool,
    /// Chunk that waits for the next event, if any.
    last_chunk: Option<LastChunk>,
}

/// The last chunk of a choice. Its usage is the final one unless a separate usage chunk follows.
#[derive(Debug)]
struct LastChunk {
    event: Bytes,
    /// Position of the `usage` member in the event.
    usage: Range<usize>,
}

impl LastChunk {
    fn without_usage(&self) -> Bytes {
        let (before, after) = (
            &self.event[..self.usage.start],
            &self.event[self.usage.end..],
        );
        [before, after].concat().into()
    }
}

/// Action for an event.
enum EventAction {
    /// Relay the event unchanged.
    Kept,
    /// Remove these bytes of the event.
    Cut(Range<usize>),
    /// Hold the event back, see [`LastChunk`]. The range is the position of its `usage`.
    Waits(Range<usize>),
}

/// Replacement of a range of bytes.
struct Edit {
    range: Range<usize>,
    by: Bytes,
}

impl Edit {
    fn cut(range: Range<usize>) -> Self {
        Self {
            range,
            by: Bytes::new(),
        }
    }
}

/// Progress of parsing the event at the start of a buffer.
#[derive(Debug, Default)]
struct EventScan {
    /// Start of the incomplete line.
    line: usize,
    /// End of the bytes after `line` without a line end.
    searched: usize,
    /// Payload of the last `data` line; `None` before the first.
    data: Option<Range<usize>>,
    /// Whether there is more than one `data` line, which JSON never needs.
    has_many: bool,
}

impl EventScan {
    /// Returns the position after the event; `None` if it is incomplete.
    fn event_end(&mut self, bytes: &[u8]) -> Option<usize> {
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
            if let Some(payload) = bytes[line.clone()].strip_prefix(b"data:") {
                let space = usize::from(payload.first() == Some(&b' '));
                self.has_many |= self.data.is_some();
                self.data = Some(line.start + b"data:".len() + space..line.end);
            }
        }
    }

    fn payload(&self) -> Option<Range<usize>> {
        self.data.clone().filter(|_| !self.has_many)
    }
}

/// Search for the end of an event that is not buffered.
#[derive(Debug)]
struct SkippedEvent {
    /// Whether the current line is empty so far.
    is_line_empty: bool,
    /// Whether the last byte was a carriage return, which a line feed may complete.
    is_after_return: bool,
}

impl SkippedEvent {
    fn new() -> Self {
        Self {
            is_line_empty: true,
            is_after_return: false,
        }
    }

    /// Returns the position after the event if it ends in `bytes`.
    fn event_end(&mut self, bytes: &[u8]) -> Option<usize> {
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

impl SseStream {
    pub(in crate::proxy) fn new(wanted: WantedUsage) -> Self {
        Self {
            wanted,
            held: BytesMut::new(),
            scan: EventScan::default(),
            passing: None,
            is_done: false,
            last_chunk: None,
        }
    }

    /// Whether the stream has announced its end.
    pub(in crate::proxy) fn is_done(&self) -> bool {
        self.is_done
    }

    /// Accepts a frame and returns the bytes for the client, if any, including those held back
    /// before. Passes usage and output to `observe`.
    pub(in crate::proxy) fn push(
        &mut self,
        frame: Bytes,
        observe: &mut impl FnMut(&AnswerDelta<'_>),
    ) -> Option<Bytes> {
        let bytes = if self.held.is_empty() {
            frame
        } else {
            self.held.extend_from_slice(&frame);
            // Continue the search in an event of many small frames instead of restarting it.
            let is_complete = self.scan.event_end(&self.held).is_some();
            if !is_complete && self.held.len() <= EVENT_BYTES_MAX {
                return None;
            }
            self.scan = EventScan::default();
            self.held.split().freeze()
        };
        self.pass(&bytes, observe)
    }

    fn pass(&mut self, bytes: &Bytes, observe: &mut impl FnMut(&AnswerDelta<'_>)) -> Option<Bytes> {
        let mut edits = Vec::new();
        let mut start = 0;
        while start < bytes.len() {
            let rest = &bytes[start..];
            if let Some(passing) = &mut self.passing {
                let Some(length) = passing.event_end(rest) else {
                    break;
                };
                self.passing = None;
                start += length;
                continue;
            }
            let mut scan = EventScan::default();
            match scan.event_end(rest) {
                Some(length) => {
                    if let Some(payload) = scan.payload() {
                        let (judgement, before) =
                            self.judge(&rest[payload.clone()], payload, length, observe);
                        edits.extend(before.map(|by| Edit {
                            range: start..start,
                            by,
                        }));
                        match judgement {
                            EventAction::Kept => {}
                            EventAction::Cut(cut) => {
                                edits.push(Edit::cut(start + cut.start..start + cut.end));
                            }
                            EventAction::Waits(usage) => {
                                let event = start..start + length;
                                self.last_chunk = Some(LastChunk {
                                    event: bytes.slice(event.clone()),
                                    usage,
                                });
                                edits.push(Edit::cut(event));
                            }
                        }
                    }
                    start += length;
                }
                None if rest.len() > EVENT_BYTES_MAX => {
                    edits.extend(self.take_waiting().map(|by| Edit {
                        range: start..start,
                        by,
                    }));
                    self.passing = Some(SkippedEvent::new());
                }
                None => {
                    self.held.extend_from_slice(rest);
                    self.scan = scan;
                    edits.push(Edit::cut(start..bytes.len()));
                    break;
                }
            }
        }
        edited(bytes, &edits)
    }

    /// Returns the action for an event of `length` bytes, and the held chunk that precedes it.
    fn judge(
        &mut self,
        json: &[u8],
        payload: Range<usize>,
        length: usize,
        observe: &mut impl FnMut(&AnswerDelta<'_>),
    ) -> (EventAction, Option<Bytes>) {
        let last_chunk = self.last_chunk.take();
        if json == b"[DONE]" {
            self.is_done = true;
            return (EventAction::Kept, last_chunk.map(|chunk| chunk.event));
        }
        let findings = inspect(json);
        observe(&findings);
        self.is_done |= findings.ends_stream;
        let before = last_chunk.map(|chunk| chunk.without_usage());
        let Some(member) = findings.usage_member else {
            return (EventAction::Kept, before);
        };
        if findings.has_no_choices && findings.usage.is_some() {
            let judgement = match self.wanted.final_chunk {
                true => EventAction::Kept,
                false => EventAction::Cut(0..length),
            };
            return (judgement, before);
        }
        let member = payload.start + member.start..payload.start + member.end;
        let is_asked = self.wanted.final_chunk;
        let judgement = if self.wanted.running || (is_asked && findings.is_usage_null) {
            EventAction::Kept
        } else if is_asked && findings.ends_choice && findings.usage.is_some() {
            EventAction::Waits(member)
        } else {
            EventAction::Cut(member)
        };
        (judgement, before)
    }

    /// Ends the stream and returns what was held back, if anything. An event that lacks only its
    /// blank line is parsed.
    pub(in crate::proxy) fn finish(
        &mut self,
        observe: &mut impl FnMut(&AnswerDelta<'_>),
    ) -> Option<Bytes> {
        let rest = self.held.split().freeze();
        let mut ended = BytesMut::with_capacity(rest.len() + 2);
        ended.extend_from_slice(&rest);
        ended.extend_from_slice(b"\n\n");
        let mut scan = EventScan::default();
        let mut before = None;
        if let (Some(length), Some(payload)) = (scan.event_end(&ended), scan.payload()) {
            (_, before) = self.judge(&ended[payload.clone()], payload, length, observe);
        }
        let before = before.or_else(|| self.take_waiting());
        match before {
            Some(before) => Some([before, rest].concat().into()),
            None => (!rest.is_empty()).then_some(rest),
        }
    }

    /// Takes the held chunk with its usage, when no further event will come.
    pub(super) fn take_waiting(&mut self) -> Option<Bytes> {
        self.last_chunk.take().map(|chunk| chunk.event)
    }

    /// Discards an unfinished event of a broken stream. Returns whether the client has received a
    /// part of it, which must be ended first.
    pub(super) fn abandon(&mut self) -> bool {
        self.held.clear();
        self.passing.is_some()
    }
}

/// Applies `edits`, which are in order and do not overlap, to `bytes`; `None` if nothing is left.
fn edited(bytes: &Bytes, edits: &[Edit]) -> Option<Bytes> {
    let cut_bytes: usize = edits.iter().map(|edit| edit.range.len()).sum();
    let added_bytes: usize = edits.iter().map(|edit| edit.by.len()).sum();
    let kept_bytes = bytes.len() - cut_bytes + added_bytes;
    match edits {
        _ if kept_bytes == 0 => None,
        [] => Some(bytes.clone()),
        [cut] if cut.range.end == bytes.len() && cut.by.is_empty() => {
            Some(bytes.slice(..cut.range.start))
        }
        _ => {
            let mut kept = BytesMut::with_capacity(kept_bytes);
            let mut from = 0;
            for Edit { range, by } in edits {
                kept.extend_from_slice(&bytes[from..range.start]);
                kept.extend_from_slice(by);
                from = range.end;
            }
            kept.extend_from_slice(&bytes[from..]);
            Some(kept.freeze())
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::routing::Usage;

    const STREAM: &str = concat!(
        ": hello\n\n",
        "data: {\"id\":\"é\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":1}}\n\n",
        "event: x\r\ndata: {\"usage\":null,\"choices\":[{\"index\":0,\"delta\":{\"content\":\"b\"}}]}\r\n\r\n",
        "data: {\"id\":\"c\",\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\n",
        "data: [DONE]\n\n",
    );
    const NOTHING: WantedUsage = WantedUsage {
        final_chunk: false,
        running: false,
    };

    /// Relays `stream` in frames cut at `cuts`. Returns the output, the text and the usage.
    fn run(
        wanted: WantedUsage,
        stream: &[u8],
        frame_bytes: &[usize],
    ) -> (Vec<u8>, String, Usage, bool) {
        let mut events = SseStream::new(wanted);
        let (mut out, mut text, mut usage) = (Vec::new(), String::new(), Usage::default());
        let mut rest = stream;
        let mut lengths = frame_bytes.iter().copied().cycle();
        while !rest.is_empty() {
            let length = lengths.next().unwrap_or(rest.len()).clamp(1, rest.len());
            let frame = Bytes::copy_from_slice(&rest[..length]);
            rest = &rest[length..];
            let passed = events.push(frame, &mut |findings| {
                text.push_str(findings.text.as_deref().unwrap_or_default());
                usage = findings.usage.unwrap_or(usage);
            });
            out.extend_from_slice(&passed.unwrap_or_default());
        }
        let last = events.finish(&mut |findings| usage = findings.usage.unwrap_or(usage));
        out.extend_from_slice(&last.unwrap_or_default());
        let is_done = events.is_done();
        (out, text, usage, is_done)
    }

    #[test]
    fn only_unrequested_usage_is_removed() {
        let (out, text, usage, is_done) = run(NOTHING, STREAM.as_bytes(), &[]);
        let expected = concat!(
            ": hello\n\n",
            "data: {\"id\":\"é\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n",
            "event: x\r\ndata: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"b\"}}]}\r\n\r\n",
            "data: [DONE]\n\n",
        );
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        assert_eq!(text, "ab");
        assert_eq!(
            usage,
            Usage {
                prompt_tokens: 5,
                cached_tokens: None,
                completion_tokens: 2
            }
        );
        assert!(is_done);
    }

    #[test]
    fn a_requested_final_chunk_is_passed_with_nulls() {
        let wanted = WantedUsage {
            final_chunk: true,
            running: false,
        };
        let (out, ..) = run(wanted, STREAM.as_bytes(), &[]);
        let running = ",\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":1}";
        assert_eq!(String::from_utf8(out).unwrap(), STREAM.replace(running, ""));
    }

    /// The end of a stream of completions in llama.cpp.
    const USAGE_AT_THE_END: &str = concat!(
        "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\n",
        "data: [DONE]\n\n",
    );

    #[test]
    fn requested_usage_in_a_choices_last_chunk_is_passed() {
        let asked = WantedUsage {
            final_chunk: true,
            running: false,
        };
        let usage = ",\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}";
        let done = "data: [DONE]\n\n";
        let alone =
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\n";
        let cut = USAGE_AT_THE_END.strip_suffix(done).unwrap();
        let followed = USAGE_AT_THE_END.replace(done, &format!(": wait\n\n{alone}{done}"));
        for frame_bytes in [1, 7, 100, usize::MAX] {
            let out = |wanted, stream: &str| {
                let (out, ..) = run(wanted, stream.as_bytes(), &[frame_bytes]);
                String::from_utf8(out).unwrap()
            };
            assert_eq!(out(asked, USAGE_AT_THE_END), USAGE_AT_THE_END);
            assert_eq!(out(asked, cut), cut, "a stream without an end");
            assert_eq!(
                out(NOTHING, USAGE_AT_THE_END),
                USAGE_AT_THE_END.replace(usage, "")
            );
            // A separate usage follows, so the one before was running usage.
            let mut events = out(asked, &followed).replace(": wait\n\n", "");
            let expected = USAGE_AT_THE_END.replace(usage, "");
            assert!(events.ends_with(&format!("{alone}{done}")), "{events}");
            events = events.replace(alone, "");
            assert_eq!(events, expected);
        }
    }

    #[test]
    fn an_overlong_event_passes_unread_and_the_next_is_read() {
        let long = format!("data: {}\r\n\r\n", "x".repeat(2 * EVENT_BYTES_MAX));
        let stream = format!("{long}{STREAM}");
        for frame_bytes in [1000, 4096, EVENT_BYTES_MAX + 7, usize::MAX] {
            let (out, text, ..) = run(NOTHING, stream.as_bytes(), &[frame_bytes]);
            let (short, ..) = run(NOTHING, STREAM.as_bytes(), &[]);
            assert_eq!(out, [long.as_bytes(), &short].concat());
            assert_eq!(text, "ab");
        }
    }

    #[test]
    fn a_last_event_without_a_blank_line_is_read() {
        let (usage_chunk, done) = (STREAM.rfind("data: {").unwrap(), "data: [DONE]");
        let cut = STREAM[..STREAM.find(done).unwrap()].trim_end();
        assert!(cut.len() > usage_chunk);
        let (_, _, usage, is_done) = run(WantedUsage::ALL, cut.as_bytes(), &[]);
        assert_eq!((usage.completion_tokens, is_done), (2, false));
        for end in ["", "\n", "\r"] {
            let (.., is_done) = run(NOTHING, format!("{done}{end}").as_bytes(), &[]);
            assert!(is_done);
        }
    }

    #[test]
    fn final_events_of_responses_and_messages_end_a_stream() {
        for kind in [
            "response.created",
            "response.output_text.done",
            "message_delta",
        ] {
            let event = format!("event: {kind}\ndata: {{\"type\":\"{kind}\"}}\n\n");
            let (.., is_done) = run(NOTHING, event.as_bytes(), &[]);
            assert!(!is_done, "{kind}");
        }
        let done = "data: [DONE]\n\n";
        for kind in [
            "response.completed",
            "response.incomplete",
            "response.failed",
            "message_stop",
        ] {
            let event = format!("event: {kind}\ndata: {{\"type\":\"{kind}\"}}\n\n{done}");
            let (out, _, _, is_done) = run(NOTHING, event.as_bytes(), &[]);
            assert!(is_done && out.ends_with(done.as_bytes()), "{kind}");
        }
    }

    #[test]
    fn multiline_and_unfinished_events_pass_unchanged() {
        let stream = "data: {\"usage\":{},\ndata: \"a\":1}\n\ndata: {\"usage\":{}";
        let (out, ..) = run(NOTHING, stream.as_bytes(), &[]);
        assert_eq!(String::from_utf8(out).unwrap(), stream);
    }

    proptest! {
        #[test]
        fn frame_boundaries_do_not_change_the_output(
            frame_bytes in prop::collection::vec(1_usize..40, 1..20),
            carriage_returns in any::<bool>(),
        ) {
            let stream = if carriage_returns { STREAM.replace("\r\n", "\n").replace('\n', "\r") } else { STREAM.into() };
            let whole = run(NOTHING, stream.as_bytes(), &[]);
            prop_assert_eq!(run(NOTHING, stream.as_bytes(), &frame_bytes), whole);
            let untouched = run(WantedUsage::ALL, stream.as_bytes(), &frame_bytes);
            prop_assert_eq!(untouched.0, stream.as_bytes());
        }

        #[test]
        fn arbitrary_sse_bytes_pass(
            bytes in prop::collection::vec(prop::sample::select(b"data: {}[]\"usage,\\\n\r".to_vec()), 0..300),
            frame_bytes in prop::collection::vec(1_usize..20, 1..5),
        ) {
            prop_assert_eq!(run(WantedUsage::ALL, &bytes, &frame_bytes).0, bytes);
        }
    }
}
