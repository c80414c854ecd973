//! Who belongs to the cluster.

use super::checks::{refuse, text};
use super::fault::Fault;
use super::layers::Values;

/// The cluster's name.
pub(super) fn name(values: &Values, faults: &mut Vec<Fault>) -> Option<String> {
    let path = "cluster.name";
    let name = text(values, path)?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.len() <= raft::NAME_BYTES_MAX && name.chars().all(is_plain) {
        return Some(name);
    }
    let message = format!("{path} is {name:?}");
    let expected = "letters, digits, `-`, `_` and `.`, at most 64 of them";
    refuse(values, path, message, expected, faults);
    None
}
