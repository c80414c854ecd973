//! Bounds of what operators write: checked at the edge to answer early, and in `apply` because the
//! log may carry anything.

use crate::bounds::NAME_BYTES_MAX;
use crate::reject::Rejection;

/// Whether `text` can name something: not empty, within [`NAME_BYTES_MAX`].
pub(crate) fn is_name(text: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&text.len())
}

/// Refuses `field` unless it `holds`.
pub(crate) fn ensure(holds: bool, field: &str, expected: &str) -> Result<(), Rejection> {
    if holds {
        return Ok(());
    }
    Err(Rejection::Invalid {
        field: field.to_owned(),
        expected: expected.to_owned(),
    })
}

/// Refuses a value below `least`.
pub(crate) fn at_least(field: &str, value: u32, least: u32) -> Result<(), Rejection> {
    ensure(value >= least, field, &format!("at least {least}"))
}

/// Refuses a value above `most`.
pub(crate) fn at_most(field: &str, value: u32, most: u32) -> Result<(), Rejection> {
    ensure(value <= most, field, &format!("at most {most}"))
}
