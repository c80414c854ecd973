//! The file of accepted API keys, read at start and whenever it changes.

use std::collections::BTreeMap;
use std::path::Path;

use api::files::text::read_text;
use api::proxy::KeyEntry;
use api::users::api_keys::is_of_cluster;

/// Reads the keys, one per line, each optionally followed by white space and the user it belongs
/// to. Ignores empty lines and lines that begin with `#`.
///
/// # Errors
/// Fails if the file cannot be read, contains no key (nobody would be served), contains a key twice
/// (one user would be charged for another), or contains a key of the cluster, which this file
/// cannot accept.
pub(crate) fn read(path: &Path) -> Result<Vec<KeyEntry>, String> {
    let text = read_text(path);
    let text = text.map_err(|error| format!("read {path:?}: {error}"))?;
    let lines = (1..).zip(text.lines().map(str::trim));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let mut first_lines = BTreeMap::new();
    let mut keys = Vec::new();
    for (number, line) in lines {
        let (key, user) = told(line);
        if is_of_cluster(key.as_bytes()) {
            return Err(format!(
                "{path:?} has in line {number} a key of the form of the cluster's keys, which only \
                 the cluster judges: expected another form than `qk-` and 43 characters"
            ));
        }
        if let Some(first) = first_lines.insert(key.clone(), number) {
            return Err(format!(
                "{path:?} lists the key of line {first} again in line {number}"
            ));
        }
        keys.push((key, user));
    }
    match keys.is_empty() {
        true => Err(format!("{path:?} holds no key")),
        false => Ok(keys),
    }
}

fn told(line: &str) -> KeyEntry {
    match line.split_once(char::is_whitespace) {
        Some((key, user)) => (key.to_owned(), Some(user.trim_start().to_owned())),
        None => (line.to_owned(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_key_is_reported_with_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys");
        let random = "5a_-".repeat(11);
        std::fs::write(&file, format!("sk-1\nqk-{} ada\n", &random[..43])).unwrap();
        let why = read(&file).unwrap_err();
        assert!(
            why.contains("keys\" has in line 2") && !why.contains(&random[..43]),
            "{why}"
        );
    }

    #[test]
    fn a_duplicate_key_is_reported_with_both_lines() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys");
        let read_of = |text: &str| {
            std::fs::write(&file, text).unwrap();
            read(&file)
        };
        let marked = read_of("\u{feff}sk-1 ada\n").unwrap();
        assert_eq!(marked, [("sk-1".to_owned(), Some("ada".to_owned()))]);
        let once = read_of("# team\nsk-1 ada\n\nsk-2\n").unwrap();
        assert_eq!(once[0], ("sk-1".to_owned(), Some("ada".to_owned())));
        assert_eq!(once[1], ("sk-2".to_owned(), None));
        let twice = read_of("# team\nsk-1 ada\n\nsk-2\n sk-1\tbo\n").unwrap_err();
        let lines = "lists the key of line 2 again in line 5";
        assert!(twice.ends_with(lines) && !twice.contains("sk-1"), "{twice}");
    }
}
