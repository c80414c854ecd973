//! User names within the log's bound. Only this module shortens them, so that traffic, `explain`
//! and the admin API refer to the same user.

use std::borrow::Cow;

use state::command::NAME_BYTES_MAX;
use state::ids::{ApiKeyId, UserKey};
use state::prefix::user_key;
use xxhash_rust::xxh3::xxh3_64;

/// Length of a shortened name's suffix, `#` and a hash, in bytes.
const HASH_BYTES: usize = 1 + 16;
/// Maximum length of a character in UTF-8, in bytes. Names are cut at a character boundary, so a
/// shortened name is below the bound by less than this.
const CHARACTER_BYTES_MAX: usize = 4;

/// A user's name in the state, within the log's bound, and the cluster's API key that names the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserName {
    name: String,
    api_key: Option<ApiKeyId>,
}

impl UserName {
    /// Creates a user name from `name`. A name longer than [`NAME_BYTES_MAX`] is cut and
    /// distinguished by its hash.
    #[must_use]
    pub fn bounded<'a>(name: impl Into<Cow<'a, str>>) -> Self {
        Self {
            name: bounded(name.into()),
            api_key: None,
        }
    }

    /// Returns the user as named by an API key of the cluster.
    #[must_use]
    pub fn of_key(self, api_key: ApiKeyId) -> Self {
        Self {
            api_key: Some(api_key),
            ..self
        }
    }

    /// Returns the API key of the cluster that names the user; `None` if none does.
    #[must_use]
    pub fn api_key(&self) -> Option<ApiKeyId> {
        self.api_key
    }

    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// Returns the user's key under the cluster's seed.
    pub fn key(&self, hash_seed: u64) -> UserKey {
        user_key(hash_seed, &self.name)
    }
}

/// Returns the name, shortened if it is too long.
fn bounded(name: Cow<'_, str>) -> String {
    if name.len() <= NAME_BYTES_MAX {
        return name.into_owned();
    }
    let cut = name.floor_char_boundary(NAME_BYTES_MAX - HASH_BYTES);
    let hash = xxh3_64(name.as_bytes());
    format!("{}#{hash:016x}", &name[..cut])
}

/// Whether a name has the form of one that [`UserName::bounded`] shortened.
pub(crate) fn looks_shortened(name: &str) -> bool {
    let is_as_long = name.len() + CHARACTER_BYTES_MAX > NAME_BYTES_MAX;
    let end = name.rsplit_once('#').map(|(_, end)| end);
    is_as_long && end.is_some_and(is_hash)
}

/// Whether a text has the form of the hash in a shortened name: 16 hex digits.
pub(crate) fn is_hash(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|it| it.is_ascii_hexdigit())
}

/// Whether a text has control or format characters, which would change how terminals display the
/// rest.
pub(crate) fn has_hidden_character(text: &str) -> bool {
    let is_format = |it: char| {
        matches!(
            it,
            '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}'
        )
    };
    text.chars().any(|it| it.is_control() || is_format(it))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_shortened_to_distinct_names() {
        let bounded = |name: &str| UserName::bounded(name).as_str().to_owned();
        assert_eq!(bounded("ada"), "ada");
        assert!(!looks_shortened("ada#0123456789abcdef"));
        for first in ["", "e", "ee", "eee"] {
            let long = |end: &str| format!("{first}{}{end}", "é€".repeat(60));
            let names = [long("a"), long("b")].map(|name| bounded(&name));
            assert!(names.iter().all(|name| name.len() <= NAME_BYTES_MAX));
            assert!(names.iter().all(|name| looks_shortened(name)), "{names:?}");
            assert_ne!(names[0], names[1]);
            assert_eq!(bounded(&names[0]), names[0], "it is short enough now");
        }
    }
}
