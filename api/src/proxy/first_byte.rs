//! Waits for the first byte of an answer's body before its head goes to the client.
//!
//! Once the head is sent, a broken engine can only show as a cut connection, or as an event within
//! a 200. Before that, the client gets a 502. Most bodies begin with their head; the head of one
//! that does not is held back for [`HEAD_HELD_MAX`] and no longer, so that slow first tokens look
//! to clients as they always did. The first byte itself waits for nothing.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, Response};
use http_body::Body;
use tokio::time::{Instant, timeout_at};

use crate::backends::pool::{EngineBody, SendError};

/// How long a head waits for the first byte of its body.
const HEAD_HELD_MAX: Duration = Duration::from_secs(1);

/// Waits for the first byte of the body, or its end; it stays to be read. Also returns when neither
/// has come for a while, or by `first_byte_by`.
///
/// # Errors
/// [`SendError`], when the answer is broken off before.
pub(super) async fn begin(
    response: &mut Response<EngineBody>,
    first_byte_by: Instant,
) -> Result<(), SendError> {
    let must_begin = response.status().is_success() && !is_framed(response.headers());
    let body = response.body_mut();
    if body.is_end_stream() {
        return Ok(());
    }
    let began = match poll_fn(|cx| Poll::Ready(body.poll_first(cx))).await {
        Poll::Ready(began) => began,
        Poll::Pending => {
            let held_until = first_byte_by.min(Instant::now() + HEAD_HELD_MAX);
            let began = timeout_at(held_until, poll_fn(|cx| body.poll_first(cx)));
            began.await.unwrap_or(Ok(()))
        }
    };
    match began {
        Ok(()) if must_begin && body.is_end_stream() => Err(SendError::Ended),
        began => began,
    }
}

/// Whether a body's end shows that it is the end.
pub(super) fn is_framed(headers: &HeaderMap) -> bool {
    headers.contains_key(TRANSFER_ENCODING) || headers.contains_key(CONTENT_LENGTH)
}
