//! Validation of operator input. The admin API uses it to answer early, and `apply` uses it again
//! because the log may carry anything.

use crate::bounds::NAME_BYTES_MAX;
use crate::reject::Rejection;

/// Whether `text` is a valid name: not empty and at most [`NAME_BYTES_MAX`] bytes.
pub(crate) fn is_name(text: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&text.len())
}

/// Whether all characters of `text` are allowed in ids of backends and sources.
pub(crate) fn is_plain(text: &str) -> bool {
    text.chars().all(is_id_char)
}

/// Whether `c` is allowed in ids of backends and sources.
#[must_use]
pub fn is_id_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || "._-".contains(c)
}

/// Maximum total length of a list of patterns, in bytes.
pub(crate) const PATTERNS_BYTES_MAX: usize = 1024;

/// Whether `patterns` is a valid list of models that a user may use.
pub(crate) fn are_models(patterns: &[String]) -> bool {
    let bytes: usize = patterns.iter().map(String::len).sum();
    patterns.iter().all(|it| is_name(it)) && bytes <= PATTERNS_BYTES_MAX
}

/// Whether `pattern` matches `text`. A trailing `*` matches any suffix.
pub(crate) fn stands_for(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => text.starts_with(beginning),
        None => pattern == text,
    }
}

/// Returns [`Rejection::Invalid`] for `field` unless `holds`. `expected` describes valid values.
pub(crate) fn ensure(holds: bool, field: &str, expected: &str) -> Result<(), Rejection> {
    if holds {
        return Ok(());
    }
    Err(Rejection::Invalid {
        field: field.to_owned(),
        expected: expected.to_owned(),
    })
}

/// Returns [`Rejection::Invalid`] for `field` if `value` is below `least`.
pub(crate) fn at_least(field: &str, value: u32, least: u32) -> Result<(), Rejection> {
    ensure(value >= least, field, &format!("at least {least}"))
}

/// Returns [`Rejection::Invalid`] for `field` if `value` is above `most`.
pub(crate) fn at_most(field: &str, value: u32, most: u32) -> Result<(), Rejection> {
    ensure(value <= most, field, &format!("at most {most}"))
}
