//! Safe display of untrusted text on an operator's screen.
//!
//! Names of users, models and backends come from requests and engines. Characters that a terminal
//! would interpret or reorder are escaped in all output for people, and rejected in names that an
//! operator assigns.

use std::borrow::Cow;
use std::fmt::Write;

/// Whether a terminal may act on `c` instead of displaying it in its place: control characters (C0,
/// DEL, C1), line and paragraph separators, bidirectional controls and invisible characters.
#[must_use]
pub fn is_obeyed(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Escapes the characters in `text` that [`is_obeyed`] selects, for example as `\u{1b}`.
#[must_use]
pub fn escaped(text: &str) -> Cow<'_, str> {
    escaped_but(text, &[])
}

/// Escapes `text` like [`escaped`], but keeps line breaks and tabs.
#[must_use]
pub fn escaped_lines(text: &str) -> Cow<'_, str> {
    escaped_but(text, &['\n', '\t'])
}

fn escaped_but<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let is_out = |c: char| is_obeyed(c) && !kept.contains(&c);
    if !text.contains(is_out) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_out(c) {
            write!(out, "\\u{{{:x}}}", u32::from(c)).expect("writing to a string does not fail");
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        for (text, expected) in [
            ("ada", "ada"),
            ("Åsa 🦀 עברית", "Åsa 🦀 עברית"),
            ("a\x1b]0;x\x07", "a\\u{1b}]0;x\\u{7}"),
            ("a\u{9b}2J", "a\\u{9b}2J"),
            ("a\u{202e}b\u{2066}", "a\\u{202e}b\\u{2066}"),
            ("a\nb\r\t", "a\\u{a}b\\u{d}\\u{9}"),
            ("a\u{7f}\u{200b}\u{e0041}", "a\\u{7f}\\u{200b}\\u{e0041}"),
        ] {
            assert_eq!(escaped(text), expected);
        }
        assert_eq!(escaped_lines("a\n\tb\r"), "a\n\tb\\u{d}");
    }
}
