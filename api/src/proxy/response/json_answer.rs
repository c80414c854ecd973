//! A response that is one JSON document, inspected while it is relayed.
//!
//! A document of up to [`TAIL_BYTES_MAX`] is kept and parsed at its end. Of a longer one, only the
//! last bytes are kept, and all bytes are scanned for the top-level `usage` member, because engines
//! may write long members after it (`prompt_logprobs`). Memory is bounded by [`TAIL_BYTES_MAX`] and
//! one frame.

use std::collections::VecDeque;

use bytes::Bytes;

use super::answer_usage::{AnswerDelta, inspect};
use super::json_scan::is_whole;
use super::member_scanner::MemberScanner;

/// Length of the document's end that is kept, in bytes. Longer documents are only scanned.
const TAIL_BYTES_MAX: usize = 256 * 1024;

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
    passed: Option<MemberScanner>,
}

impl Document {
    /// Whether nothing but white space has arrived.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes == 0 && self.passed.is_none()
    }

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
