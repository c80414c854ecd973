//! An event that is too long to be held back: it passes as it arrives, and is scanned on the way.
//!
//! Engines repeat a whole response in `response.completed`. What such an event is charged by, its
//! `usage`, is read at any length. Of its payload, only the member that is arriving is held back,
//! until its key is known, so that an unrequested `usage` can be left out here too.

use std::ops::Range;

use bytes::Bytes;
use http::StatusCode;

use super::answer_usage::AnswerDelta;
use super::edits::Edit;
use super::event_scan::SkippedEvent;
use super::member_scanner::{MemberScanner, ObjectMark, VALUE_BYTES_MAX};

/// An event in transit.
#[derive(Debug)]
pub(super) struct LongEvent {
    end: SkippedEvent,
    /// Number of bytes before the payload that have not arrived yet.
    ahead: usize,
    /// Scanner of the payload; `None` if the event has none that can be read.
    scanner: Option<MemberScanner>,
    /// Whether the payload's line has ended.
    is_read: bool,
    usage: UsageCut,
}

/// Leaves the top-level `usage` out of an object in transit.
#[derive(Debug, Default)]
struct UsageCut {
    is_on: bool,
    /// Whether a member that began in an earlier frame is held back.
    is_holding: bool,
    /// Bytes of earlier frames that are held back.
    held: Vec<u8>,
    /// Position in the current frame from which bytes are held back; `None` if none are.
    from: Option<usize>,
    /// Whether what is held back belongs to the first member, which no comma precedes.
    is_first: bool,
    /// Whether the member that is held back is `usage`.
    is_usage: bool,
}

impl LongEvent {
    /// Begins an event whose payload begins at `payload`, if it can be read. With `is_cut`, its
    /// top-level `usage` is left out.
    pub(super) fn new(payload: Option<Range<usize>>, is_cut: bool) -> Self {
        Self {
            end: SkippedEvent::new(),
            ahead: payload.as_ref().map_or(0, |payload| payload.start),
            scanner: payload.map(|_| MemberScanner::default()),
            is_read: false,
            usage: UsageCut {
                is_on: is_cut,
                ..UsageCut::default()
            },
        }
    }

    /// Scans the next bytes, which begin at `start` of their frame, and adds changes of the frame to
    /// `edits`. Returns the length of the event's rest if it ends in `bytes`.
    pub(super) fn pass(
        &mut self,
        start: usize,
        bytes: &[u8],
        edits: &mut Vec<Edit>,
    ) -> Option<usize> {
        let length = self.end.event_end(bytes);
        let skipped = self.ahead.min(bytes.len());
        self.ahead -= skipped;
        if let Some(scanner) = self.scanner.as_mut().filter(|_| !self.is_read) {
            let line = &bytes[skipped..];
            let line_end = memchr::memchr2(b'\n', b'\r', line);
            let line = &line[..line_end.unwrap_or(line.len())];
            self.is_read = line_end.is_some() && self.ahead == 0;
            let first = start + skipped;
            self.usage.begin(first);
            scanner.scan(line, |at, mark| self.usage.mark(first + at, mark, edits));
            self.usage.end(first, line, self.is_read, edits);
        }
        length
    }

    /// Returns what the payload of the ended event reports; `None` if it could not be read.
    pub(super) fn findings(&self) -> Option<AnswerDelta<'static>> {
        let scanner = self.scanner.as_ref()?;
        let is_error = matches!(
            scanner.kind.as_slice(),
            br#""error""# | br#""response.failed""#
        );
        let unknown = is_error.then_some(StatusCode::INTERNAL_SERVER_ERROR);
        let usage = scanner.usage;
        Some(AnswerDelta::of_long_event(
            &scanner.kind,
            usage,
            scanner.error.or(unknown),
        ))
    }

    /// Returns what is held back of an event that has not ended, if anything.
    pub(super) fn finish(&mut self) -> Option<Bytes> {
        let held = std::mem::take(&mut self.usage.held);
        (!held.is_empty()).then(|| held.into())
    }
}

impl UsageCut {
    /// Continues in a frame whose part of the payload begins at `first`.
    fn begin(&mut self, first: usize) {
        self.from = self.is_holding.then_some(first);
    }

    fn mark(&mut self, at: usize, mark: ObjectMark, edits: &mut Vec<Edit>) {
        if !self.is_on {
            return;
        }
        match mark {
            ObjectMark::Open => (self.from, self.is_first) = (Some(at + 1), true),
            ObjectMark::Key(true) => self.is_usage = self.from.is_some(),
            ObjectMark::Key(false) => self.release(edits),
            ObjectMark::Comma if self.is_usage && self.is_first => {
                self.drop_until(at + 1, edits);
                self.from = Some(at + 1);
            }
            ObjectMark::Comma => {
                self.leave(at, edits);
                (self.from, self.is_first) = (Some(at), false);
            }
            ObjectMark::Close => self.leave(at, edits),
        }
    }

    /// Ends the member that is held back, if any, at `at`.
    fn leave(&mut self, at: usize, edits: &mut Vec<Edit>) {
        match self.is_usage {
            true => self.drop_until(at, edits),
            false => self.release(edits),
        }
    }

    /// Passes on what is held back.
    fn release(&mut self, edits: &mut Vec<Edit>) {
        let held = std::mem::take(&mut self.held);
        if let Some(from) = self.from.take().filter(|_| !held.is_empty()) {
            edits.push(Edit {
                range: from..from,
                by: held.into(),
            });
        }
        self.is_usage = false;
    }

    /// Drops what is held back, up to `at`.
    fn drop_until(&mut self, at: usize, edits: &mut Vec<Edit>) {
        self.held.clear();
        edits.extend(self.from.take().map(|from| Edit::cut(from..at)));
        self.is_usage = false;
    }

    /// Ends a frame whose part of the payload is `line` at `first`. `is_last` says that no more
    /// follows.
    fn end(&mut self, first: usize, line: &[u8], is_last: bool, edits: &mut Vec<Edit>) {
        self.is_holding = self.from.is_some() && !is_last;
        let Some(from) = self.from else { return };
        let is_long = self.held.len() + line.len() > VALUE_BYTES_MAX + (from - first);
        if is_last || is_long {
            self.release(edits);
            self.is_holding = false;
            return;
        }
        let end = first + line.len();
        if from < end {
            self.held.extend_from_slice(&line[from - first..]);
            edits.push(Edit::cut(from..end));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::proxy::response::edits::edited;

    const EVENT: &str = "event: x\ndata: ";

    /// Passes an event in pieces and returns what comes out, and the usage's output tokens.
    fn run(payload: &str, is_cut: bool, piece_bytes: usize) -> (String, Option<u64>) {
        let event = format!("{EVENT}{payload}\n\n");
        let start = EVENT.len();
        let mut long = LongEvent::new(Some(start..event.len()), is_cut);
        let (mut out, mut is_over) = (Vec::new(), false);
        for piece in event.as_bytes().chunks(piece_bytes) {
            let mut edits = Vec::new();
            is_over = long.pass(0, piece, &mut edits) == Some(piece.len());
            let passed = edited(&Bytes::copy_from_slice(piece), &edits);
            out.extend(passed.unwrap_or_default());
        }
        assert!(is_over);
        let out = String::from_utf8(out).unwrap();
        let out = out.strip_prefix(EVENT).unwrap().trim_end().to_owned();
        let usage = long.findings().unwrap().usage;
        (out, usage.map(|usage| usage.completion_tokens))
    }

    #[test]
    fn the_usage_of_a_long_event_is_read_and_left_out_if_unrequested() {
        let usage = r#""usage":{"completion_tokens":4,"x":{"y":"}"}}"#;
        for (payload, cut) in [
            (
                format!(r#"{{"a":"\"usage\":","b":[1,{{}}],{usage},"c":1}}"#),
                r#"{"a":"\"usage\":","b":[1,{}],"c":1}"#,
            ),
            (format!(r#"{{{usage},"c":1}}"#), r#"{"c":1}"#),
            (format!(r#"{{"c":1 , {usage}}}"#), r#"{"c":1 }"#),
            (format!("{{{usage}}}"), "{}"),
        ] {
            for piece_bytes in 1..payload.len() {
                assert_eq!(
                    run(&payload, true, piece_bytes),
                    (cut.to_owned(), Some(4)),
                    "{payload}"
                );
                assert_eq!(
                    run(&payload, false, piece_bytes),
                    (payload.clone(), Some(4))
                );
            }
        }
    }

    #[test]
    fn the_usage_of_a_whole_response_is_read() {
        let payload = r#"{"type":"response.completed","response":{"output":[{"usage":1}],"usage":{"input_tokens":3,"output_tokens":7}}}"#;
        for piece_bytes in 1..payload.len() {
            assert_eq!(
                run(payload, true, piece_bytes),
                (payload.to_owned(), Some(7))
            );
        }
    }

    #[test]
    fn an_endless_usage_is_not_held_back() {
        let payload = format!(
            r#"{{"a":1,"usage":{{"x":"{}"}}}}"#,
            "x".repeat(3 * VALUE_BYTES_MAX)
        );
        assert_eq!(run(&payload, true, 1000), (payload, None));
    }

    proptest! {
        #[test]
        fn arbitrary_payloads_pass_whole_without_a_cut(
            bytes in prop::collection::vec(prop::sample::select(b"{}[]\"usage:,\\1 ".to_vec()), 0..100),
            piece_bytes in 1_usize..20,
        ) {
            let payload = String::from_utf8(bytes).unwrap();
            let (out, _) = run(&payload, false, piece_bytes);
            prop_assert_eq!(out, payload.trim_end());
        }

        #[test]
        fn frame_boundaries_do_not_change_the_cut(
            bytes in prop::collection::vec(prop::sample::select(b"{}[]\"usage:,\\1 ".to_vec()), 0..100),
            piece_bytes in 1_usize..20,
        ) {
            let payload = String::from_utf8(bytes).unwrap();
            let whole = run(&payload, true, payload.len() + 100);
            prop_assert_eq!(run(&payload, true, piece_bytes), whole);
        }
    }
}
