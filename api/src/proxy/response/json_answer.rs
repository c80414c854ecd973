//! A response that is one JSON document, inspected while it is relayed.
//!
//! A document of up to [`TAIL_BYTES_MAX`] is kept and parsed at its end. Of a longer one, only the
//! last bytes are kept, and all bytes are scanned for the top-level `usage` member, because engines
//! may write long members after it (`prompt_logprobs`). Memory is bounded by [`TAIL_BYTES_MAX`] and
//! one frame.

use std::collections::VecDeque;

use bytes::Bytes;

use super::answer_usage::{AnswerDelta, inspect, read_usage};
use super::json_scan::is_whole;
use crate::routing::Usage;

/// Length of the document's end that is kept, in bytes. Longer documents are only scanned.
const TAIL_BYTES_MAX: usize = 256 * 1024;
/// Maximum length of a `usage` member outside the kept part, in bytes.
const USAGE_BYTES_MAX: usize = 16 * 1024;

/// Completeness of a document and of its parsed output, determined at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proxy) struct DocumentEnd {
    /// Whether the document looks complete.
    pub(in crate::proxy) is_whole: bool,
    /// Whether all output was parsed, because the beginning was still kept.
    pub(super) is_all: bool,
}

/// A JSON document in transit, whose last [`TAIL_BYTES_MAX`] bytes are kept.
#[derive(Default)]
pub(in crate::proxy) struct Document {
    frames: VecDeque<Bytes>,
    bytes: usize,
    /// Scanner of the bytes before the kept ones; `None` while all are kept.
    passed: Option<UsageScanner>,
}

impl Document {
    pub(in crate::proxy) fn push(&mut self, frame: Bytes) {
        self.bytes += frame.len();
        self.frames.push_back(frame);
        while let Some(first) = self.frames.front()
            && self.bytes - first.len() >= TAIL_BYTES_MAX
        {
            self.bytes -= first.len();
            self.passed.get_or_insert_default().push(first);
            self.frames.pop_front();
        }
    }

    /// Passes usage and output of the ended document to `note`; only usage if not all bytes are
    /// kept.
    pub(in crate::proxy) fn read(&mut self, note: impl FnOnce(&AnswerDelta<'_>)) -> DocumentEnd {
        if let Some(scanner) = &mut self.passed {
            self.frames.iter().for_each(|frame| scanner.push(frame));
            note(&AnswerDelta {
                usage: scanner.usage,
                ..AnswerDelta::default()
            });
            return DocumentEnd {
                is_whole: scanner.is_whole(),
                is_all: false,
            };
        }
        let joined;
        let bytes: &[u8] = match (self.frames.front(), self.frames.len()) {
            (None, _) => &[],
            (Some(only), 1) => only,
            _ => {
                joined = join(&self.frames, self.bytes);
                &joined
            }
        };
        note(&inspect(bytes));
        DocumentEnd {
            is_whole: is_whole(bytes),
            is_all: true,
        }
    }
}

fn join(frames: &VecDeque<Bytes>, bytes: usize) -> Vec<u8> {
    let whole = Vec::with_capacity(bytes);
    frames.iter().fold(whole, |mut whole, frame| {
        whole.extend_from_slice(frame);
        whole
    })
}

/// Scanner for the top-level `usage` member of a document that arrives in pieces. It keeps no
/// piece.
#[derive(Debug, Default)]
struct UsageScanner {
    /// Number of objects and arrays around the current byte.
    depth: usize,
    /// Escape state within a string; `None` outside strings.
    string: Option<Escape>,
    /// First bytes of the last top-level string, which is a key if a colon follows.
    key: Vec<u8>,
    /// Bytes of a top-level `usage` value, as far as it has arrived; `None` outside one, and if it
    /// is too long.
    value: Option<Vec<u8>>,
    /// First usage that could be parsed; `None` before.
    usage: Option<Usage>,
    /// Whether the outermost bracket has closed.
    is_closed: bool,
    /// Whether anything but white space followed the outermost bracket.
    has_more: bool,
}

/// Whether the previous byte was a backslash that escapes this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Escape {
    No,
    Yes,
}

const USAGE: &[u8] = b"usage";

impl UsageScanner {
    fn push(&mut self, piece: &[u8]) {
        let mut at = 0;
        while let Some(byte) = piece.get(at) {
            // Skip string contents that are not kept.
            if self.string == Some(Escape::No) && self.value.is_none() && self.depth > 1 {
                match memchr::memchr2(b'"', b'\\', &piece[at..]) {
                    Some(0) => {}
                    Some(skipped) => {
                        at += skipped;
                        continue;
                    }
                    None => return,
                }
            }
            self.byte(*byte);
            at += 1;
        }
    }

    fn byte(&mut self, byte: u8) {
        let ends_value = self.depth == 1 && self.string.is_none() && matches!(byte, b',' | b'}');
        if ends_value {
            self.end_value();
        } else if let Some(value) = &mut self.value {
            value.push(byte);
            if value.len() > USAGE_BYTES_MAX {
                self.value = None;
            }
        }
        match self.string {
            Some(escape) => self.in_string(byte, escape),
            None => self.between_strings(byte),
        }
    }

    fn in_string(&mut self, byte: u8, escape: Escape) {
        self.string = match (escape, byte) {
            (Escape::No, b'"') => None,
            (Escape::No, b'\\') => Some(Escape::Yes),
            (Escape::No | Escape::Yes, _) => Some(Escape::No),
        };
        // One byte more than the wanted key distinguishes longer keys from it.
        if self.depth == 1 && self.string.is_some() && self.key.len() <= USAGE.len() {
            self.key.push(byte);
        }
    }

    fn between_strings(&mut self, byte: u8) {
        self.has_more |= self.is_closed && !byte.is_ascii_whitespace();
        match byte {
            b'"' => {
                self.string = Some(Escape::No);
                if self.depth == 1 {
                    self.key.clear();
                }
            }
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                self.is_closed |= self.depth == 0;
            }
            b':' if self.depth == 1 && self.key == USAGE => self.value = Some(Vec::new()),
            b',' if self.depth == 1 => self.key.clear(),
            _ => {}
        }
    }

    fn end_value(&mut self) {
        let value = self.value.take();
        let read = value.and_then(|value| read_usage(value.trim_ascii()));
        self.usage = self.usage.or(read);
    }

    fn is_whole(&self) -> bool {
        self.is_closed && !self.has_more
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scan(json: &[u8], piece_bytes: usize) -> UsageScanner {
        let mut scanner = UsageScanner::default();
        json.chunks(piece_bytes)
            .for_each(|piece| scanner.push(piece));
        scanner
    }

    fn completion_tokens(scanner: &UsageScanner) -> Option<u64> {
        scanner.usage.map(|usage| usage.completion_tokens)
    }

    #[test]
    fn only_a_top_level_member_is_usage() {
        for (json, expected) in [
            (r#"{"usage":{"completion_tokens":4}}"#, Some(4)),
            (
                r#" {"a":"\"usage\":", "usage" : {"completion_tokens":4} ,"b":[1]}"#,
                Some(4),
            ),
            (
                r#"{"usage":null,"usage":{"completion_tokens":5},"usage":{"completion_tokens":6}}"#,
                Some(5),
            ),
            (r#"{"x":{"usage":{"completion_tokens":4}}}"#, None),
            (r#"[{"usage":{"completion_tokens":4}}]"#, None),
            (r#"{"text":"\"usage\":{\"completion_tokens\":4}"}"#, None),
            (r#"{"usages":{"completion_tokens":4}}"#, None),
            (r#"{"x":"usage","y":{"completion_tokens":4}}"#, None),
            (r#"{"usage":{"completion_tokens":-1}}"#, None),
        ] {
            for piece_bytes in 1..json.len() {
                let scanner = scan(json.as_bytes(), piece_bytes);
                assert_eq!(completion_tokens(&scanner), expected, "{json}");
                assert!(scanner.is_whole(), "{json}");
            }
        }
    }

    #[test]
    fn truncated_and_trailing_documents_are_incomplete() {
        let whole = r#"{"a":["}"],"usage":{"completion_tokens":4}}"#;
        for end in 0..whole.len() {
            assert!(!scan(&whole.as_bytes()[..end], 3).is_whole());
        }
        assert!(scan(format!("{whole}\n").as_bytes(), 3).is_whole());
        assert!(!scan(format!("{whole}{{").as_bytes(), 3).is_whole());
    }

    #[test]
    fn an_unterminated_member_is_not_buffered() {
        let long = format!(r#"{{"usage":{{"x":"{}"#, "x".repeat(1 << 20));
        assert!(scan(long.as_bytes(), 1000).value.is_none());
    }

    #[test]
    fn usage_is_found_at_any_position() {
        let usage = r#""usage":{"prompt_tokens":9,"completion_tokens":4000}"#;
        let long = format!(
            r#""prompt_logprobs":[{}null]"#,
            r#"{"1":-0.5},"#.repeat(60_000)
        );
        assert!(long.len() > 2 * TAIL_BYTES_MAX);
        for json in [
            format!("{{{usage},{long}}}"),
            format!("{{{long},{usage}}}"),
            format!("{{{long},{usage},{long}}}"),
            format!("{{{usage}}}"),
        ] {
            let mut document = Document::default();
            for piece in json.as_bytes().chunks(16 * 1024) {
                document.push(Bytes::copy_from_slice(piece));
                assert!(document.bytes < TAIL_BYTES_MAX + 16 * 1024);
            }
            let mut found = None;
            let read = document.read(|findings| found = findings.usage);
            assert_eq!(found.map(|usage| usage.completion_tokens), Some(4000));
            assert!(read.is_whole);
            assert_eq!(read.is_all, json.len() < 1000);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_answer_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), piece in 1_usize..50) {
            let whole = scan(&bytes, bytes.len().max(1));
            let pieces = scan(&bytes, piece);
            prop_assert_eq!(whole.usage, pieces.usage);
            prop_assert_eq!(whole.is_whole(), pieces.is_whole());
        }
    }
}
