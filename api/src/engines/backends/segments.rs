//! Body of a request to an engine, which consists of the client's bytes with insertions.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// Maximum number of buffers in a [`Segments`] body.
const SEGMENTS_MAX: usize = 7;

/// A request body of up to seven buffers, which are sent one after another without being joined.
#[derive(Debug, Clone, Default)]
pub struct Segments {
    parts: [Bytes; SEGMENTS_MAX],
}

impl Segments {
    /// Creates a body of `parts`, in order. Empty ones are skipped.
    #[must_use]
    pub fn new<const COUNT: usize>(parts: [Bytes; COUNT]) -> Self {
        const { assert!(COUNT + 4 <= SEGMENTS_MAX) };
        let mut all = Self::default();
        all.parts
            .iter_mut()
            .zip(parts)
            .for_each(|(to, part)| *to = part);
        all
    }

    /// Inserts `part` at byte `at` of the first buffer. A body built by [`Segments::new`] has room
    /// for two insertions.
    #[must_use]
    pub fn with_inserted(self, at: usize, part: Bytes) -> Self {
        let [first, second, third, fourth, fifth, ..] = self.parts;
        let at = at.min(first.len());
        let (before, behind) = (first.slice(..at), first.slice(at..));
        Self {
            parts: [before, part, behind, second, third, fourth, fifth],
        }
    }

    /// Returns the remaining length, in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }

    /// Whether nothing is left to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.iter().all(Bytes::is_empty)
    }
}

impl From<Bytes> for Segments {
    fn from(body: Bytes) -> Self {
        Self::new([body])
    }
}

impl Body for Segments {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let part = self.parts.iter_mut().find(|part| !part.is_empty());
        Poll::Ready(part.map(|part| Ok(Frame::data(std::mem::take(part)))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.len())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use http_body_util::{BodyExt, Collected};

    use super::*;

    #[test]
    fn inserted_parts_keep_their_order_and_all_bytes() {
        let text = |segments: Segments| {
            let length = segments.len();
            let bytes = segments.collect().now_or_never().unwrap();
            let bytes = bytes.map(Collected::to_bytes).unwrap();
            assert_eq!(bytes.len() as u64, length);
            String::from_utf8(bytes.to_vec()).unwrap()
        };
        let parts = ["{ab", "cd", "e}"].map(|part| Bytes::from_static(part.as_bytes()));
        let body = Segments::new(parts);
        let once = body.with_inserted(1, Bytes::from_static(b"1,"));
        assert_eq!(text(once.clone()), "{1,abcde}");
        let twice = once.with_inserted(1, Bytes::from_static(b"2,"));
        assert_eq!(text(twice), "{2,1,abcde}");
    }
}
