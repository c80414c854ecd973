//! Relays server-sent events: reads usage and text from every event, and removes what the router's
//! own additions to the request caused, without touching any other byte.
//!
//! Frames of the connection and events of the stream do not align. An incomplete event is held back
//! until it is complete. An event larger than [`EVENT_BYTES_MAX`] passes as it arrives, and is only
//! scanned (`long_event.rs`).
//!
//! If a client requested only the final usage, running usage is removed. But some engines put the
//! final usage into the last chunk of a choice and send no separate one (llama.cpp's completions).
//! Such a chunk waits for the next event, which distinguishes the two cases.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::answer_usage::{AnswerDelta, inspect};
use super::edits::{Edit, edited};
use super::engine_error::EngineError;
use super::event_scan::EventScan;
use super::judged_event::{EventAction, EventLine, JudgedEvent, LastChunk};
use super::long_event::LongEvent;
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
    /// An event that is too long to be held back and passes as it arrives; `None` outside one.
    passing: Option<Box<LongEvent>>,
    /// Whether `[DONE]` or another last event has arrived.
    is_done: bool,
    /// Whether data has arrived since the last [`SseStream::take_progress`].
    has_progress: bool,
    /// Chunk that waits for the next event, if any.
    last_chunk: Option<LastChunk>,
    /// Whether server errors in the stream are held back, because it may go on elsewhere.
    holds_errors: bool,
    /// An error that is held back, with the rest of its frame.
    held_error: Option<Bytes>,
}

/// Position of a complete event's parts.
struct EventRange {
    payload: Range<usize>,
    /// Length of the event, in bytes.
    length: usize,
    /// Whether the event is named `error`.
    is_error: bool,
}

/// Extracts usage and output from an event's payload. An event named `error` reports one whatever
/// its payload.
fn inspect_event(json: &[u8], is_error: bool) -> AnswerDelta<'_> {
    let mut findings = inspect(json);
    if is_error && findings.error.is_none() {
        findings.error = EngineError::read(json, true).map(|error| error.status);
    }
    findings
}

impl SseStream {
    pub(in crate::proxy) fn new(wanted: WantedUsage) -> Self {
        Self {
            wanted,
            held: BytesMut::new(),
            scan: EventScan::default(),
            passing: None,
            is_done: false,
            has_progress: false,
            last_chunk: None,
            holds_errors: false,
            held_error: None,
        }
    }

    /// Holds server errors back from now on, or no longer.
    pub(super) fn hold_errors(&mut self, holds: bool) {
        self.holds_errors = holds;
    }

    /// Holds back the error at `start` with what follows, and returns the cut.
    fn hold_error(&mut self, bytes: &Bytes, start: usize) -> Edit {
        self.held_error = Some(bytes.slice(start..));
        Edit::cut(start..bytes.len())
    }

    /// Whether an error is held back.
    pub(super) fn holds_error(&self) -> bool {
        self.held_error.is_some()
    }

    /// Takes the error that was held back, with the rest of its frame.
    pub(super) fn take_error(&mut self) -> Option<Bytes> {
        self.held_error.take()
    }

    /// Whether the client has received the beginning of an event.
    pub(super) fn is_within_event(&self) -> bool {
        self.passing.is_some()
    }

    /// Whether data has arrived since the last call: more than comments, pings and empty events.
    pub(super) fn take_progress(&mut self) -> bool {
        std::mem::take(&mut self.has_progress)
    }

    /// Whether the stream has announced its end.
    pub(in crate::proxy) fn is_done(&self) -> bool {
        self.is_done
    }

    /// Accepts a frame and returns the bytes for the client, if any, including those held back
    /// before. Passes usage and output to `observe`.
    pub(in crate::proxy) fn push<L: EventLine>(
        &mut self,
        frame: Bytes,
        observe: &mut impl FnMut(&AnswerDelta<'_>) -> L,
    ) -> Option<Bytes> {
        let bytes = if self.held.is_empty() {
            frame
        } else {
            self.held.extend_from_slice(&frame);
            // Continue the search in an event of many small frames instead of restarting it.
            let is_complete = self.scan.event_end(&self.held).is_some();
            if !is_complete && self.held.len() <= EVENT_BYTES_MAX {
                self.has_progress |= self.scan.has_begun(&self.held);
                return None;
            }
            self.scan = EventScan::default();
            self.held.split().freeze()
        };
        self.pass(&bytes, observe)
    }

    fn pass<L: EventLine>(
        &mut self,
        bytes: &Bytes,
        observe: &mut impl FnMut(&AnswerDelta<'_>) -> L,
    ) -> Option<Bytes> {
        let mut edits = Vec::new();
        let mut start = 0;
        while start < bytes.len() {
            let rest = &bytes[start..];
            if let Some(passing) = &mut self.passing {
                self.has_progress = true;
                let Some(length) = passing.pass(start, rest, &mut edits) else {
                    break;
                };
                if let Some(findings) = passing.findings() {
                    let line = observe(&findings).line();
                    self.is_done |= findings.ends_stream;
                    // The event has begun to pass, so its line follows in an event without data.
                    let line = line.map(|line| [&line[..], b"\n"].concat());
                    edits.extend(line.map(|line| Edit::insert(start + length, line.into())));
                }
                self.passing = None;
                start += length;
                continue;
            }
            let mut scan = EventScan::default();
            match scan.event_end(rest) {
                Some(length) => {
                    if scan.payload().is_none() && !scan.is_comment() {
                        let line = self.read_joined(rest, &scan, observe);
                        edits.extend(line.map(|line| Edit::insert(start, line)));
                    } else if let Some(payload) = scan.payload() {
                        let event = EventRange {
                            payload,
                            length,
                            is_error: scan.is_error(),
                        };
                        let judged = self.judge(rest, &event, observe);
                        if let EventAction::Fails = judged.action {
                            edits.push(self.hold_error(bytes, start));
                            break;
                        }
                        let waits = judged.edit(bytes, start..start + length, &mut edits);
                        self.last_chunk = waits.or(self.last_chunk.take());
                    }
                    start += length;
                }
                None if rest.len() > EVENT_BYTES_MAX => {
                    edits.extend(self.take_waiting().map(|by| Edit::insert(start, by)));
                    let is_cut = !self.wanted.final_chunk;
                    self.passing = Some(Box::new(LongEvent::new(scan.open_payload(rest), is_cut)));
                }
                None => {
                    self.has_progress |= scan.has_begun(rest);
                    self.held.extend_from_slice(rest);
                    self.scan = scan;
                    edits.push(Edit::cut(start..bytes.len()));
                    break;
                }
            }
        }
        edited(bytes, &edits)
    }

    /// Reads the event at the start of `bytes`, whose data have several lines. It passes unchanged.
    fn read_joined<L: EventLine>(
        &mut self,
        bytes: &[u8],
        scan: &EventScan,
        observe: &mut impl FnMut(&AnswerDelta<'_>) -> L,
    ) -> Option<Bytes> {
        self.has_progress = true;
        let json = scan.text(bytes)?;
        let findings = inspect_event(&json, scan.is_error());
        let line = observe(&findings).line();
        self.is_done |= findings.ends_stream || findings.error.is_some();
        line
    }

    /// Returns what to do with the `event` at the start of `bytes`.
    fn judge<L: EventLine>(
        &mut self,
        bytes: &[u8],
        event: &EventRange,
        observe: &mut impl FnMut(&AnswerDelta<'_>) -> L,
    ) -> JudgedEvent {
        let json = &bytes[event.payload.clone()];
        if json.is_empty() {
            return JudgedEvent::new(EventAction::Kept, None);
        }
        if json == b"[DONE]" {
            (self.is_done, self.has_progress) = (true, true);
            let last_chunk = self.last_chunk.take();
            return JudgedEvent::new(EventAction::Kept, last_chunk.map(|chunk| chunk.event));
        }
        let findings = inspect_event(json, event.is_error);
        if findings.is_ping {
            return JudgedEvent::new(EventAction::Kept, None);
        }
        let line = observe(&findings).line();
        self.has_progress = true;
        if self.holds_errors && findings.error.is_some_and(|it| it.is_server_error()) {
            return JudgedEvent::new(EventAction::Fails, None);
        }
        self.is_done |= findings.ends_stream || findings.error.is_some();
        let before = self.last_chunk.take().map(|chunk| chunk.without_usage());
        let action = match findings.usage_member.clone() {
            Some(member) => self.action(&findings, member, event),
            None => EventAction::Kept,
        };
        JudgedEvent {
            action,
            before,
            line,
        }
    }

    /// Returns the action for an event with the member `usage`.
    fn action(
        &self,
        findings: &AnswerDelta<'_>,
        member: Range<usize>,
        event: &EventRange,
    ) -> EventAction {
        let start = event.payload.start;
        let member = start + member.start..start + member.end;
        let is_asked = self.wanted.final_chunk;
        if findings.has_no_choices && findings.usage.is_some() {
            return match (is_asked, findings.has_further_members) {
                (true, _) => EventAction::Kept,
                // Engines put other figures there too, such as llama.cpp's `timings`.
                (false, true) => EventAction::Cut(member),
                (false, false) => EventAction::Cut(0..event.length),
            };
        }
        if self.wanted.running || (is_asked && findings.is_usage_null) {
            EventAction::Kept
        } else if is_asked && findings.ends_choice && findings.usage.is_some() {
            EventAction::Waits(member)
        } else {
            EventAction::Cut(member)
        }
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
        if let Some(mut passing) = self.passing.take() {
            if let Some(findings) = passing.findings() {
                observe(&findings);
                self.is_done |= findings.ends_stream;
            }
            before = passing.finish();
        } else if let (Some(length), Some(payload)) = (scan.event_end(&ended), scan.payload()) {
            let event = EventRange {
                payload,
                length,
                is_error: scan.is_error(),
            };
            before = self.judge(&ended, &event, observe).before;
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

    /// Numbers the events of `stream` by the lines of an observer.
    fn numbered(stream: &str, running: bool) -> String {
        let mut events = SseStream::new(WantedUsage {
            final_chunk: true,
            running,
        });
        let mut number = 0;
        let mut passed = Vec::new();
        for frame in stream.as_bytes().chunks(EVENT_BYTES_MAX / 4) {
            let frame = Bytes::copy_from_slice(frame);
            let relayed = events.push(frame, &mut |_: &AnswerDelta<'_>| {
                number += 1;
                Some(Bytes::from(format!("id: {number}\n")))
            });
            passed.extend_from_slice(&relayed.unwrap_or_default());
        }
        let rest = events.finish(&mut |_: &AnswerDelta<'_>| ());
        passed.extend_from_slice(&rest.unwrap_or_default());
        String::from_utf8(passed).unwrap()
    }

    #[test]
    fn each_id_stands_before_its_event() {
        let usage = r#","usage":{"prompt_tokens":5,"completion_tokens":1}"#;
        let event = |text: &str, reason: &str, usage: &str| {
            format!(
                "data: {{\"choices\":[{{\"text\":\"{text}\",\"finish_reason\":{reason}}}]{usage}}}\n\n"
            )
        };
        let (first, last) = (event("a", "null", usage), event("b", "\"stop\"", usage));
        let joined = "data: {\"choices\":\ndata: []}\n\n";
        let stream = format!("\u{feff}{first}: hello\n\n{joined}{last}data: [DONE]\n\n");
        let (cut, done) = (event("a", "null", ""), "data: [DONE]\n\n");
        assert_eq!(
            numbered(&stream, false),
            format!("\u{feff}id: 1\n{cut}: hello\n\nid: 2\n{joined}id: 3\n{last}{done}")
        );
        assert_eq!(
            numbered(&stream, true),
            format!("\u{feff}id: 1\n{first}: hello\n\nid: 2\n{joined}id: 3\n{last}{done}")
        );
        let long = event(&"x".repeat(2 * EVENT_BYTES_MAX), "null", "");
        let found = numbered(&format!("{long}{last}"), true);
        let tail = found.strip_prefix(long.as_str());
        assert_eq!(tail, Some(&*format!("id: 1\n\nid: 2\n{last}")));
    }
}
