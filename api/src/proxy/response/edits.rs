//! Changes of bytes in transit that leave all others as they are.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

/// Replacement of a range of bytes.
pub(super) struct Edit {
    pub(super) range: Range<usize>,
    pub(super) by: Bytes,
}

impl Edit {
    pub(super) fn insert(at: usize, by: Bytes) -> Self {
        Self { range: at..at, by }
    }

    pub(super) fn cut(range: Range<usize>) -> Self {
        Self {
            range,
            by: Bytes::new(),
        }
    }
}

/// Applies `edits`, which are in order and do not overlap, to `bytes`; `None` if nothing is left.
pub(super) fn edited(bytes: &Bytes, edits: &[Edit]) -> Option<Bytes> {
    let cut_bytes: usize = edits.iter().map(|edit| edit.range.len()).sum();
    let added_bytes: usize = edits.iter().map(|edit| edit.by.len()).sum();
    let kept_bytes = bytes.len() - cut_bytes + added_bytes;
    match edits {
        _ if kept_bytes == 0 => None,
        [] => Some(bytes.clone()),
        [cut] if cut.range.end == bytes.len() && cut.by.is_empty() => {
            Some(bytes.slice(..cut.range.start))
        }
        _ => {
            let mut kept = BytesMut::with_capacity(kept_bytes);
            let mut from = 0;
            for Edit { range, by } in edits {
                kept.extend_from_slice(&bytes[from..range.start]);
                kept.extend_from_slice(by);
                from = range.end;
            }
            kept.extend_from_slice(&bytes[from..]);
            Some(kept.freeze())
        }
    }
}
