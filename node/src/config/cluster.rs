//! Reads the cluster's name and secret.

use std::os::unix::fs::PermissionsExt;

use super::fault::Fault;
use super::layers::Values;
use super::read::{refuse, text};

/// The cluster's secret. Whoever can read the file can be a replica.
pub(super) fn secret(values: &Values, faults: &mut Vec<Fault>) -> Option<raft::Secret> {
    let path = "cluster.secret_file";
    let file = text(values, path)?;
    let read = || {
        let mode = std::fs::metadata(&file).map_err(|error| error.to_string())?;
        let mode = mode.permissions().mode() & 0o777;
        if mode & 0o007 != 0 {
            return Err(format!("everybody may use it (mode {mode:03o})"));
        }
        let content = std::fs::read(&file).map_err(|error| error.to_string())?;
        raft::Secret::new(&content)
    };
    match read() {
        Ok(secret) => Some(secret),
        Err(why) => {
            let message = format!("{path}: {file:?}: {why}");
            let expected = "a file of 32 bytes or more that others may not read (chmod 600)";
            refuse(values, path, message, expected, faults);
            None
        }
    }
}

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
