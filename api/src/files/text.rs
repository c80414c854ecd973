//! Text files as people write them: some editors put a byte order mark first.

use std::io;
use std::path::Path;

/// Byte order mark in UTF-8.
const MARK: &[u8] = "\u{feff}".as_bytes();
/// Beginnings of files in UTF-16, which some shells write.
const UTF_16: [&[u8]; 2] = [b"\xff\xfe", b"\xfe\xff"];

/// Returns `bytes` without the byte order mark at their start, if there is one.
#[must_use]
pub fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(MARK).unwrap_or(bytes)
}

/// Reads a file in UTF-8, without a byte order mark.
///
/// # Errors
/// Returns the error of reading, or `InvalidData` for a file in another encoding.
pub fn read_text(path: &Path) -> io::Result<String> {
    let bytes = std::fs::read(path)?;
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    if UTF_16.iter().any(|mark| bytes.starts_with(mark)) {
        return Err(invalid("is in UTF-16, expected UTF-8"));
    }
    let text = std::str::from_utf8(without_mark(&bytes));
    text.map(str::to_owned)
        .map_err(|_| invalid("is not in UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_order_mark_is_no_part_of_a_text() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        let read = |bytes: &[u8]| {
            std::fs::write(&file, bytes).unwrap();
            read_text(&file).map_err(|error| error.to_string())
        };
        assert_eq!(read(b"\xef\xbb\xbfsk-1\n").unwrap(), "sk-1\n");
        assert_eq!(read(b"sk-1").unwrap(), "sk-1");
        assert_eq!(read(b"").unwrap(), "");
        let utf_16 = read(b"\xff\xfes\0k\0");
        assert_eq!(utf_16.unwrap_err(), "is in UTF-16, expected UTF-8");
        assert_eq!(read(b"\xff").unwrap_err(), "is not in UTF-8");
    }
}
