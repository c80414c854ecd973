//! Validation of operator input. The admin API uses it to answer early, and `apply` uses it again
//! because the log may carry anything.

use crate::bounds::NAME_BYTES_MAX;
use crate::reject::Rejection;

/// Whether `text` is a valid name: not empty and at most [`NAME_BYTES_MAX`] bytes.
pub(crate) fn is_name(text: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&text.len())
}

/// Whether `text` has only characters that ids of backends and of their sources may have.
pub(crate) fn is_plain(text: &str) -> bool {
    text.chars().all(is_id_char)
}

/// Whether ids of backends, and of their sources, may have this character.
#[must_use]
pub fn is_id_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || "._-".contains(c)
}

/// Maximum total length of a list of patterns, in bytes.
pub(crate) const PATTERNS_BYTES_MAX: usize = 1024;

/// Whether these can be the models that somebody may use.
pub(crate) fn are_models(patterns: &[String]) -> bool {
    let bytes: usize = patterns.iter().map(String::len).sum();
    patterns.iter().all(|it| is_name(it)) && bytes <= PATTERNS_BYTES_MAX
}

/// Whether `pattern` is `text`, or ends in `*` and is the beginning of it.
pub(crate) fn stands_for(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => text.starts_with(beginning),
        None => pattern == text,
    }
}

/// Rejects `field` unless `holds`.
pub(crate) fn ensure(holds: bool, field: &str, expected: &str) -> Result<(), Rejection> {
    if holds {
        return Ok(());
    }
    Err(Rejection::Invalid {
        field: field.to_owned(),
        expected: expected.to_owned(),
    })
}

/// Rejects a value below `least`.
pub(crate) fn at_least(field: &str, value: u32, least: u32) -> Result<(), Rejection> {
    ensure(value >= least, field, &format!("at least {least}"))
}

/// Rejects a value above `most`.
pub(crate) fn at_most(field: &str, value: u32, most: u32) -> Result<(), Rejection> {
    ensure(value <= most, field, &format!("at most {most}"))
}
