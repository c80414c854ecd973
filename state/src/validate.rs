//! Validation of operator input. The admin API uses it to answer early, and `apply` uses it again
//! because the log may carry anything.

use crate::bounds::NAME_BYTES_MAX;
use crate::reject::Rejection;

/// Whether `text` is a valid name: not empty and at most [`NAME_BYTES_MAX`] bytes.
pub(crate) fn is_name(text: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&text.len())
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
