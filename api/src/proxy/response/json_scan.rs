//! Finds members of JSON objects by position, without building values or changing a byte.
//!
//! Made for the output of engines: it accepts every valid document and some invalid ones, and
//! reports only positions. Where the bytes make no sense, it returns `None` instead of guessing.
//! All positions are relative to the slice that was passed in.

use std::ops::Range;

use super::event_scan::BYTE_ORDER_MARK;

/// A member of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proxy) struct JsonMember {
    /// The key as written, without its quotes. Escapes are not decoded.
    pub(in crate::proxy) key: Range<usize>,
    /// The value as written.
    pub(in crate::proxy) value: Range<usize>,
}

/// Iterator over the members of an object, in order.
pub(in crate::proxy) struct JsonMembers<'a> {
    json: &'a [u8],
    /// Position of the next member's key or the object's end; `None` after the end.
    at: Option<usize>,
}

/// Returns the members of the object at the start of `json`, or none for other values.
pub(in crate::proxy) fn members(json: &[u8]) -> JsonMembers<'_> {
    let start = skip_space(json, 0);
    let at = (json.get(start) == Some(&b'{')).then_some(start + 1);
    JsonMembers { json, at }
}

impl Iterator for JsonMembers<'_> {
    type Item = JsonMember;

    fn next(&mut self) -> Option<JsonMember> {
        let json = self.json;
        let start = skip_space(json, self.at.take()?);
        if json.get(start) != Some(&b'"') {
            return None;
        }
        let key_end = skip_string(json, start)?;
        let colon = skip_space(json, key_end);
        if json.get(colon) != Some(&b':') {
            return None;
        }
        let value_start = skip_space(json, colon + 1);
        let value_end = skip_value(json, value_start)?;
        let comma = skip_space(json, value_end);
        if json.get(comma) == Some(&b',') {
            self.at = Some(comma + 1);
        }
        Some(JsonMember {
            key: start + 1..key_end - 1,
            value: value_start..value_end,
        })
    }
}

/// Returns the bytes of the value of the member `key`; `None` if the object lacks it.
pub(in crate::proxy) fn value_of<'a>(json: &'a [u8], key: &str) -> Option<&'a [u8]> {
    let member = members(json).find(|member| &json[member.key.clone()] == key.as_bytes())?;
    Some(&json[member.value])
}

/// Iterator over the elements of an array, in order.
pub(super) struct JsonElements<'a> {
    json: &'a [u8],
    /// Position of the next element or the array's end; `None` after the end.
    at: Option<usize>,
}

/// Returns the elements of the array at the start of `json`, or none for other values.
pub(super) fn elements(json: &[u8]) -> JsonElements<'_> {
    let start = skip_space(json, 0);
    let at = (json.get(start) == Some(&b'[')).then_some(start + 1);
    JsonElements { json, at }
}

impl<'a> Iterator for JsonElements<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let json = self.json;
        let start = skip_space(json, self.at.take()?);
        let end = skip_value(json, start)?;
        if end == start {
            return None;
        }
        let comma = skip_space(json, end);
        if json.get(comma) == Some(&b',') {
            self.at = Some(comma + 1);
        }
        Some(&json[start..end])
    }
}

/// Whether `json` is exactly one object or array, judging by brackets and quotes.
pub(in crate::proxy) fn is_whole(json: &[u8]) -> bool {
    let start = skip_space(json, 0);
    matches!(json.get(start), Some(b'{' | b'['))
        && skip_nested(json, start).is_some_and(|end| skip_space(json, end) == json.len())
}

/// Decodes a string literal, given with its quotes; `None` if it is not one.
pub(in crate::proxy) fn string(literal: &[u8]) -> Option<std::borrow::Cow<'_, str>> {
    let inner = literal.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    if memchr::memchr(b'\\', inner).is_none() {
        return std::str::from_utf8(inner).ok().map(Into::into);
    }
    serde_json::from_slice::<String>(literal)
        .ok()
        .map(Into::into)
}

fn skip_space(json: &[u8], from: usize) -> usize {
    // A byte order mark is no part of the text.
    let is_marked = from == 0 && json.starts_with(BYTE_ORDER_MARK);
    let from = if is_marked {
        BYTE_ORDER_MARK.len()
    } else {
        from
    };
    let rest = json.get(from..).unwrap_or_default();
    let space = rest
        .iter()
        .take_while(|byte| matches!(byte, b' ' | b'\n' | b'\r' | b'\t'));
    from + space.count()
}

/// Returns the position after the string that begins at `from`; `None` if `json` ends within it.
fn skip_string(json: &[u8], from: usize) -> Option<usize> {
    let mut at = from + 1;
    loop {
        at += memchr::memchr2(b'"', b'\\', json.get(at..)?)?;
        if json[at] == b'"' {
            return Some(at + 1);
        }
        at += 2;
    }
}

/// Returns the position after the value that begins at `from`, which is `from` if none begins
/// there; `None` if `json` ends before it, or within a string, object or array.
fn skip_value(json: &[u8], from: usize) -> Option<usize> {
    match json.get(from)? {
        b'"' => skip_string(json, from),
        b'{' | b'[' => skip_nested(json, from),
        _ => {
            let scalar = json[from..].iter().take_while(|byte| {
                !matches!(byte, b',' | b'}' | b']' | b' ' | b'\n' | b'\r' | b'\t')
            });
            Some(from + scalar.count())
        }
    }
}

/// Returns the position after the object or array that begins at `from`; `None` if `json` ends
/// within it. Counts brackets instead of recursing, so deep nesting is harmless.
fn skip_nested(json: &[u8], from: usize) -> Option<usize> {
    let mut depth = 0_usize;
    let mut at = from;
    loop {
        match json.get(at)? {
            b'"' => {
                at = skip_string(json, at)?;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Vec<(&str, &str)> {
        members(json.as_bytes())
            .map(|m| (&json[m.key], &json[m.value]))
            .collect()
    }

    #[test]
    fn json_members_keep_their_bytes() {
        assert_eq!(
            read(r#" {"a": 1 , "b\"}":"x\\","c":{"d":["}"]},"e":null}"#),
            [
                ("a", "1"),
                (r#"b\"}"#, r#""x\\""#),
                ("c", r#"{"d":["}"]}"#),
                ("e", "null")
            ]
        );
        assert_eq!(read("{}"), []);
        assert_eq!(read("[1]"), []);
    }

    #[test]
    fn truncated_documents_end_early_and_never_panic() {
        let whole = r#"{"a":{"b":"\"}"},"c":[1,2,"x"],"d":"\u00e9"}"#;
        for end in 0..whole.len() {
            let _ = members(&whole.as_bytes()[..end]).count();
            assert!(!is_whole(&whole.as_bytes()[..end]));
            let _ = elements(&whole.as_bytes()[..end]).count();
            let array = value_of(whole.as_bytes(), "c").unwrap();
            let _ = elements(&array[..end.min(array.len())]).count();
        }
    }

    #[test]
    fn strings_are_decoded_only_if_escaped() {
        assert_eq!(string(br#""abc""#).as_deref(), Some("abc"));
        assert_eq!(string(br#""a\n\u00e9""#).as_deref(), Some("a\né"));
        assert_eq!(string(b"1"), None);
    }

    #[test]
    fn a_complete_document_is_recognised() {
        assert!(is_whole(b" {\"a\":[\"}\"]}\n") && is_whole(b"[]"));
        assert!(!is_whole(b"") && !is_whole(b"{}{") && !is_whole(b"1"));
    }

    #[test]
    fn json_elements_keep_their_bytes() {
        let read = |json: &'static str| -> Vec<&[u8]> { elements(json.as_bytes()).collect() };
        assert!(read(" [ ]").is_empty() && read("{}").is_empty() && read("").is_empty());
        assert_eq!(
            read(r#"[{"a":[1,2]}, 2 ,"],"]"#),
            [&br#"{"a":[1,2]}"#[..], b"2", br#""],""#]
        );
    }
}
