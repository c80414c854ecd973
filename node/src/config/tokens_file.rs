//! The file of admin tokens, read at start and whenever it changes.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use admin::{TokenEntry, read_tokens};
use api::files::text::read_text;

/// Reads the tokens, one per line, as `name:role:sha256-hex`.
///
/// # Errors
/// Fails if the file cannot be read, all users of the host can write it, or a line is invalid. The
/// error contains no hash.
pub(crate) fn read(path: &Path) -> Result<Vec<TokenEntry>, String> {
    let told = |error: std::io::Error| format!("read {path:?}: {error}");
    let mode = std::fs::metadata(path).map_err(told)?.permissions().mode();
    if mode & 0o002 != 0 {
        let mode = mode & 0o777;
        return Err(format!("{path:?}: anybody may write it (mode {mode:03o})"));
    }
    let text = read_text(path).map_err(told)?;
    read_tokens(&text).map_err(|why| format!("{path:?}: {why}"))
}
