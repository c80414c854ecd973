//! Bounds of a session's name.

use crate::users::user_name::has_hidden_character;

/// Maximum length of a session's name, in bytes.
pub const NAME_BYTES_MAX: usize = 256;

/// Returns the name in `text`; `None` without one, or if `text` is no name. Calls `refused` in the
/// latter case: it is no UTF-8, too long, or has control or format characters.
pub(super) fn bounded(text: &[u8], refused: impl FnOnce()) -> Option<&str> {
    let text = text.trim_ascii();
    if text.is_empty() {
        return None;
    }
    let name = str::from_utf8(text).ok();
    let name = name.filter(|name| name.len() <= NAME_BYTES_MAX && !has_hidden_character(name));
    if name.is_none() {
        refused();
    }
    name
}
