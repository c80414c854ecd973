//! Names of users within the log's bound: the one place that shortens them, so that traffic, `explain`
//! and the admin API mean the same user.

use std::borrow::Cow;

use state::command::NAME_BYTES_MAX;
use xxhash_rust::xxh3::xxh3_64;

/// What a shortened name ends with: `#` and a hash.
const HASH_BYTES: usize = 1 + 16;
/// A shortened name may be shorter than the bound by the rest of a character.
const CHARACTER_BYTES_MAX: usize = 4;

/// A user's name as the state keeps it. One above [`NAME_BYTES_MAX`] is cut, and told apart by its hash.
pub(crate) fn bounded(name: &str) -> Cow<'_, str> {
    if name.len() <= NAME_BYTES_MAX {
        return Cow::Borrowed(name);
    }
    let cut = name.floor_char_boundary(NAME_BYTES_MAX - HASH_BYTES);
    let hash = xxh3_64(name.as_bytes());
    Cow::Owned(format!("{}#{hash:016x}", &name[..cut]))
}

/// Whether a name looks like one that was shortened here.
pub(crate) fn looks_shortened(name: &str) -> bool {
    let is_as_long = name.len() + CHARACTER_BYTES_MAX > NAME_BYTES_MAX;
    let end = name.rsplit_once('#').map(|(_, end)| end);
    is_as_long && end.is_some_and(is_hash)
}

/// Whether a text is a hash as it stands in names.
pub(crate) fn is_hash(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|it| it.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_stay_apart_within_the_bound() {
        assert_eq!(bounded("ada"), "ada");
        assert!(!looks_shortened("ada#0123456789abcdef"));
        for first in ["", "e", "ee", "eee"] {
            let long = |end: &str| format!("{first}{}{end}", "é€".repeat(60));
            let names = [long("a"), long("b")].map(|name| bounded(&name).into_owned());
            assert!(names.iter().all(|name| name.len() <= NAME_BYTES_MAX));
            assert!(names.iter().all(|name| looks_shortened(name)), "{names:?}");
            assert_ne!(names[0], names[1]);
            assert_eq!(bounded(&names[0]), names[0], "it is short enough now");
        }
    }
}
