//! The file of accepted API keys, read at start and whenever it changes.

use std::collections::BTreeMap;
use std::path::Path;

use api::proxy::KeyEntry;

/// Reads the keys, one per line, each optionally followed by white space and the user it belongs to.
///
/// # Errors
/// If the file cannot be read or contains no key (nobody would be served), or contains a key twice (one
/// user would be charged for another).
pub(crate) fn read(path: &Path) -> Result<Vec<KeyEntry>, String> {
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|error| format!("read {path:?}: {error}"))?;
    let lines = (1..).zip(text.lines().map(str::trim));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let mut first_lines = BTreeMap::new();
    let mut keys = Vec::new();
    for (number, line) in lines {
        let (key, user) = told(line);
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
    fn a_key_listed_twice_is_told_with_both_lines() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys");
        let read_of = |text: &str| {
            std::fs::write(&file, text).unwrap();
            read(&file)
        };
        let once = read_of("# team\nsk-1 ada\n\nsk-2\n").unwrap();
        assert_eq!(once[0], ("sk-1".to_owned(), Some("ada".to_owned())));
        assert_eq!(once[1], ("sk-2".to_owned(), None));
        let twice = read_of("# team\nsk-1 ada\n\nsk-2\n sk-1\tbo\n").unwrap_err();
        let lines = "lists the key of line 2 again in line 5";
        assert!(twice.ends_with(lines) && !twice.contains("sk-1"), "{twice}");
    }
}
