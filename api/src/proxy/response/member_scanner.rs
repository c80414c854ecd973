//! Reads a few members of a JSON object that arrives in pieces, without keeping the pieces: what a
//! long response or event is charged by.
//!
//! Wanted are `usage`, `type` and `error` of the object itself and, of the object in its member
//! `response` or `message`, `usage` and `error`. The values are bounded; longer ones are ignored.

use http::StatusCode;

use super::answer_usage::read_usage;
use super::engine_error::EngineError;
use crate::routing::Usage;

/// Maximum length of a value that is read, in bytes.
pub(super) const VALUE_BYTES_MAX: usize = 16 * 1024;
/// Number of bytes of a key that are kept: more than the longest wanted key has, so that longer keys
/// differ from it.
const KEY_BYTES_MAX: usize = 9;

/// Scanner of one object.
#[derive(Debug, Default)]
pub(super) struct MemberScanner {
    /// Number of objects and arrays around the current byte.
    depth: usize,
    /// Escape state within a string; `None` outside strings.
    string: Option<Escape>,
    /// First bytes of the last string among the members that are looked at, which is a key if a
    /// colon follows.
    key: Vec<u8>,
    /// Whether the object at depth 2 is the member `response` or `message`.
    is_nested: bool,
    /// Wanted value that is arriving; `None` outside one, and if it is too long.
    value: Option<WantedValue>,
    /// First usage that could be parsed; `None` before.
    pub(super) usage: Option<Usage>,
    /// Value of `type` as written; empty before.
    pub(super) kind: Vec<u8>,
    /// Status that the error stands for; `None` without one.
    pub(super) error: Option<StatusCode>,
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

#[derive(Debug)]
struct WantedValue {
    member: WantedMember,
    /// Depth of the member.
    depth: usize,
    bytes: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WantedMember {
    Usage,
    Kind,
    Error,
}

/// Byte that structures the outermost object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ObjectMark {
    /// The bracket that opens it.
    Open,
    /// The colon after a key, and whether the key is `usage`.
    Key(bool),
    /// The comma after a member.
    Comma,
    /// The bracket that closes it.
    Close,
}

impl MemberScanner {
    /// Reads the next bytes.
    pub(super) fn push(&mut self, piece: &[u8]) {
        self.scan(piece, |_, _| {});
    }

    /// Reads the next bytes and passes the position of each mark to `marks`.
    pub(super) fn scan(&mut self, piece: &[u8], mut marks: impl FnMut(usize, ObjectMark)) {
        let mut at = 0;
        while let Some(byte) = piece.get(at) {
            // Skip string contents that are not kept.
            if self.string == Some(Escape::No) && self.value.is_none() && !self.keeps_key() {
                match memchr::memchr2(b'"', b'\\', &piece[at..]) {
                    Some(0) => {}
                    Some(skipped) => {
                        at += skipped;
                        continue;
                    }
                    None => return,
                }
            }
            if let Some(mark) = self.byte(*byte) {
                marks(at, mark);
            }
            at += 1;
        }
    }

    /// Whether the members at the current depth are looked at.
    fn is_looking(&self) -> bool {
        self.depth == 1 || (self.depth == 2 && self.is_nested)
    }

    fn keeps_key(&self) -> bool {
        self.is_looking() && self.key.len() < KEY_BYTES_MAX
    }

    fn byte(&mut self, byte: u8) -> Option<ObjectMark> {
        self.keep(byte);
        match self.string {
            Some(escape) => {
                self.in_string(byte, escape);
                None
            }
            None => self.between_strings(byte),
        }
    }

    /// Adds a byte to the value that is arriving, or ends the value.
    fn keep(&mut self, byte: u8) {
        let Some(value) = &mut self.value else {
            return;
        };
        let is_end = self.string.is_none() && matches!(byte, b',' | b'}');
        if is_end && value.depth == self.depth {
            self.end_value();
        } else {
            value.bytes.push(byte);
            if value.bytes.len() > VALUE_BYTES_MAX {
                self.value = None;
            }
        }
    }

    fn in_string(&mut self, byte: u8, escape: Escape) {
        self.string = match (escape, byte) {
            (Escape::No, b'"') => None,
            (Escape::No, b'\\') => Some(Escape::Yes),
            (Escape::No | Escape::Yes, _) => Some(Escape::No),
        };
        if self.string.is_some() && self.keeps_key() {
            self.key.push(byte);
        }
    }

    fn between_strings(&mut self, byte: u8) -> Option<ObjectMark> {
        self.has_more |= self.is_closed && !byte.is_ascii_whitespace();
        let is_top = self.depth == 1;
        match byte {
            b'"' => {
                self.string = Some(Escape::No);
                if self.is_looking() {
                    self.key.clear();
                }
                None
            }
            b'{' | b'[' => {
                let is_wanted = matches!(self.key.as_slice(), b"response" | b"message");
                self.is_nested |= is_top && byte == b'{' && is_wanted;
                self.depth += 1;
                self.key.clear();
                (self.depth == 1 && byte == b'{').then_some(ObjectMark::Open)
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                self.is_nested &= self.depth >= 2;
                self.is_closed |= self.depth == 0;
                is_top.then_some(ObjectMark::Close)
            }
            b':' if self.is_looking() => {
                self.begin_value();
                is_top.then_some(ObjectMark::Key(self.key == b"usage"))
            }
            b',' if self.is_looking() => {
                self.key.clear();
                is_top.then_some(ObjectMark::Comma)
            }
            _ => None,
        }
    }

    fn begin_value(&mut self) {
        let member = match self.key.as_slice() {
            b"usage" => WantedMember::Usage,
            b"error" => WantedMember::Error,
            b"type" if self.depth == 1 => WantedMember::Kind,
            _ => return,
        };
        self.value = Some(WantedValue {
            member,
            depth: self.depth,
            bytes: Vec::new(),
        });
    }

    fn end_value(&mut self) {
        let Some(value) = self.value.take() else {
            return;
        };
        let bytes = value.bytes.trim_ascii();
        match value.member {
            WantedMember::Usage => self.usage = self.usage.or_else(|| read_usage(bytes)),
            WantedMember::Kind => self.kind = bytes.to_vec(),
            WantedMember::Error => {
                let document = [b"{\"error\":", bytes, b"}"].concat();
                let error = EngineError::read(&document, false);
                self.error = self.error.or(error.map(|error| error.status));
            }
        }
    }

    /// Whether exactly one object or array has arrived.
    pub(super) fn is_whole(&self) -> bool {
        self.is_closed && !self.has_more
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scan(json: &[u8], piece_bytes: usize) -> MemberScanner {
        let mut scanner = MemberScanner::default();
        json.chunks(piece_bytes)
            .for_each(|piece| scanner.push(piece));
        scanner
    }

    fn completion_tokens(scanner: &MemberScanner) -> Option<u64> {
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
