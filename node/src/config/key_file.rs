//! The file of accepted API keys: read at start, and again when it changes.

use std::path::Path;

use api::proxy::ToldKey;

/// The keys in the file, one a line, each with the user it stands for behind white space if wanted.
///
/// # Errors
/// When it cannot be read or holds no key: nobody would be served.
pub(crate) fn read(path: &Path) -> Result<Vec<ToldKey>, String> {
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|error| format!("read {path:?}: {error}"))?;
    let keys: Vec<ToldKey> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(told)
        .collect();
    match keys.is_empty() {
        true => Err(format!("{path:?} holds no key")),
        false => Ok(keys),
    }
}

fn told(line: &str) -> ToldKey {
    match line.split_once(char::is_whitespace) {
        Some((key, user)) => (key.to_owned(), Some(user.trim_start().to_owned())),
        None => (line.to_owned(), None),
    }
}
