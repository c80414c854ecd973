//! How the body of a request came to a picker.

use bytes::Bytes;

use super::BodyMode;

/// Shape in which a request body arrived.
pub(super) struct UploadShape {
    pub(super) mode: BodyMode,
    /// Whether the gateway was asked to send it whole although it streams by default.
    pub(super) is_asked_whole: bool,
    pub(super) is_bodiless: bool,
    /// Whether the piece of a whole body did not end it: trailers follow, or it was cut.
    pub(super) is_cut: bool,
    pub(super) pieces: usize,
    pub(super) has_trailers: bool,
    /// The body as it arrived; `None` unless it arrived in one piece.
    pub(super) whole: Option<Bytes>,
}

impl UploadShape {
    /// Whether the supposedly whole body may be only its first piece.
    pub(super) fn may_go_on(&self) -> bool {
        self.is_asked_whole && self.is_cut
    }
}
