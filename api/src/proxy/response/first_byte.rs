//! Waits for the first byte of a response body before the head goes to the client.
//!
//! After the head is sent, a broken engine can only show as a cut connection, or as an event within
//! a 200. Before that, the client gets a 502. Most bodies arrive together with their head.
//! Otherwise the head waits for at most [`HEAD_HELD_MAX`], so that a slow first token delays it no
//! further. The first byte itself is never delayed.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, Response};
use http_body::Body;
use tokio::time::{Instant, timeout_at};

use crate::engines::backends::pool::{EngineBody, SendError};

/// Maximum time for which a head waits for the first byte of its body.
const HEAD_HELD_MAX: Duration = Duration::from_secs(1);

/// Waits for the first byte of the body, or its end, without consuming it. Also returns after
/// [`HEAD_HELD_MAX`] or at `first_byte_by`.
///
/// # Errors
/// Returns [`SendError`] if the response breaks off earlier, or if a successful response without
/// framing is empty.
pub(in crate::proxy) async fn begin(
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

/// Whether the body's framing reveals where it ends.
pub(in crate::proxy) fn is_framed(headers: &HeaderMap) -> bool {
    headers.contains_key(TRANSFER_ENCODING) || headers.contains_key(CONTENT_LENGTH)
}
