//! Checks the head of a request and reads its body.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, EXPECT, HOST, UPGRADE};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Version};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout, timeout_at};

use super::encoding::{BodyDecoder, BodyEncoding, PART_BYTES};
use super::headers::{OBJECTIVE, PRIORITY};
use crate::error::ProxyError;
use crate::prompt::ReadError;
use crate::proxy::Proxy;
use crate::proxy::settings::ProxyTimeouts;
use crate::routing::PreferenceRejection;

/// Maximum capacity reserved for an announced body, as a multiple of what has arrived. A client may
/// announce more than it sends.
const RESERVED_MULTIPLE_MAX: usize = 16;

/// A body's share in the total of held bytes. Dropping it releases the bytes.
pub(in crate::proxy) struct HeldBodyBytes {
    all: Arc<AtomicU64>,
    bytes: u64,
    bytes_max: u64,
}

impl HeldBodyBytes {
    pub(in crate::proxy) fn none(all: &Arc<AtomicU64>, bytes_max: u64) -> Self {
        Self {
            all: Arc::clone(all),
            bytes: 0,
            bytes_max,
        }
    }

    pub(in crate::proxy) fn add(&mut self, bytes: usize) -> Result<(), ProxyError> {
        let bytes = bytes as u64;
        self.bytes += bytes;
        if self.all.fetch_add(bytes, Relaxed) + bytes > self.bytes_max {
            return Err(ProxyError::Overloaded);
        }
        Ok(())
    }

    /// Returns a further share in the total, which is empty.
    fn beside(&self) -> Self {
        Self::none(&self.all, self.bytes_max)
    }

    /// Adds what is missing to `bytes`.
    fn raise_to(&mut self, bytes: u64) -> Result<(), ProxyError> {
        let missing = bytes.saturating_sub(self.bytes);
        self.add(usize::try_from(missing).unwrap_or(usize::MAX))
    }

    /// Releases all bytes of the body.
    pub(in crate::proxy) fn release(&mut self) {
        self.all.fetch_sub(std::mem::take(&mut self.bytes), Relaxed);
    }
}

impl Drop for HeldBodyBytes {
    fn drop(&mut self) {
        self.release();
    }
}

/// Reader of a body that is arriving.
pub(in crate::proxy) struct BodyReader<'a> {
    pub(in crate::proxy) timeouts: &'a ProxyTimeouts,
    /// Maximum length of the body, in bytes.
    pub(in crate::proxy) bytes_max: u64,
    pub(in crate::proxy) headers: &'a HeaderMap,
    /// Whether many other bodies are arriving, which shortens the timeouts.
    pub(in crate::proxy) is_overloaded: &'a (dyn Fn() -> bool + Sync),
}

/// Interval for rechecking the timeouts of a body that stalls.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Divisor of the time for a whole body while many are arriving.
const CROWDED_PART: u32 = 10;

impl BodyReader<'_> {
    /// Reads the body to its end within the limits, and decodes it if it is compressed.
    pub(in crate::proxy) async fn read<B: Body<Data = Bytes> + Unpin>(
        &self,
        body: &mut B,
        held: &mut HeldBodyBytes,
    ) -> Result<Bytes, ProxyError> {
        let encoding = BodyEncoding::of(self.headers)?;
        let bytes_max = self.bytes_max;
        let announced = content_length(self.headers);
        if announced.is_some_and(|length| length > bytes_max) {
            return Err(ProxyError::BodyTooLarge { bytes_max });
        }
        let began = Instant::now();
        if let Some(decoder) = BodyDecoder::of(encoding, bytes_max) {
            return self
                .read_compressed(decoder, (body, announced), held, began)
                .await;
        }
        let mut whole = BytesMut::new();
        let mut first = Bytes::new();
        while let Some(data) = self.piece(body, began).await? {
            held.add(data.len())?;
            let length = whole.len() + first.len() + data.len();
            if length as u64 > bytes_max {
                return Err(ProxyError::BodyTooLarge { bytes_max });
            }
            if length == data.len() {
                // Most bodies are one frame and need no copy.
                first = data;
                continue;
            }
            if whole.capacity() < length {
                let announced = announced.and_then(|it| usize::try_from(it).ok());
                let likely = announced.unwrap_or(0).min(length * RESERVED_MULTIPLE_MAX);
                whole.reserve(likely.max(length) - whole.len());
            }
            whole.extend_from_slice(&std::mem::take(&mut first));
            whole.extend_from_slice(&data);
        }
        let whole = match whole.is_empty() {
            true => first,
            false => whole.freeze(),
        };
        check_announced(announced, whole.len() as u64)?;
        Ok(whole)
    }

    /// Reads a compressed body and decodes it as it arrives.
    async fn read_compressed<B: Body<Data = Bytes> + Unpin>(
        &self,
        mut decoder: BodyDecoder,
        (body, announced): (&mut B, Option<u64>),
        held: &mut HeldBodyBytes,
        began: Instant,
    ) -> Result<Bytes, ProxyError> {
        let bytes_max = self.bytes_max;
        let mut window = held.beside();
        let mut received = 0;
        while let Some(data) = self.piece(body, began).await? {
            received += data.len() as u64;
            if received > bytes_max {
                return Err(ProxyError::BodyTooLarge { bytes_max });
            }
            for part in data.chunks(PART_BYTES) {
                let mut decoded = decoder.push(part)?;
                while let Some(bytes) = decoded {
                    held.add(bytes)?;
                    window.raise_to(decoder.window())?;
                    yield_now().await;
                    decoded = decoder.advance()?;
                }
            }
        }
        check_announced(announced, received)?;
        decoder.end()
    }

    /// Returns the next piece; `None` at the end. Fails if it takes too long or the body breaks
    /// off.
    async fn piece<B: Body<Data = Bytes> + Unpin>(
        &self,
        body: &mut B,
        began: Instant,
    ) -> Result<Option<Bytes>, ProxyError> {
        let waits_since = Instant::now();
        loop {
            let until = self.patience(began, waits_since);
            let frame = match timeout_at(until.min(Instant::now() + LOOK_EVERY), body.frame()).await
            {
                Ok(Some(frame)) => frame.map_err(|_| bad_request("the body ended early"))?,
                Ok(None) => return Ok(None),
                // The timeouts change with the number of other bodies.
                Err(_) if self.patience(began, waits_since) > Instant::now() => continue,
                Err(_) => return Err(ProxyError::BodyTimeout),
            };
            // Trailers are not forwarded.
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
    }

    fn patience(&self, began: Instant, waits_since: Instant) -> Instant {
        let timeouts = self.timeouts;
        let (whole, idle) = match (self.is_overloaded)() {
            false => (timeouts.body, timeouts.body_idle),
            true => (
                timeouts.body / CROWDED_PART,
                timeouts.body_idle_crowded.min(timeouts.body_idle),
            ),
        };
        (began + whole).min(waits_since + idle)
    }
}

/// Reads and discards the rest of a refused request's body for a while, because clients that are
/// cut off while sending do not read the response. Over HTTP/1.1 this precedes the response, as
/// closing with unread bytes resets the connection. Over HTTP/2 it runs concurrently.
pub(in crate::proxy) async fn read_on(proxy: &Proxy, head: &Parts, body: Incoming) {
    if body.is_end_stream() || head.headers.contains_key(EXPECT) {
        return;
    }
    let bytes_max = proxy.limits.load().body_bytes_max.saturating_mul(2);
    let reading = discard(bytes_max, proxy.settings.timeouts.refused_body, body);
    if head.version > Version::HTTP_11 {
        // A stream that does not end in time gets a NO_ERROR reset, as its response is then
        // complete.
        proxy.tasks.spawn(reading);
    } else if content_length(&head.headers).is_none_or(|length| length <= bytes_max) {
        reading.await;
    }
}

/// Reads and discards a body within the bounds, and stops earlier if it stalls.
async fn discard(bytes_max: u64, patience: Duration, mut body: Incoming) {
    let read = async {
        let mut left = bytes_max;
        while let Ok(Some(Ok(frame))) = timeout(patience / 4, body.frame()).await {
            let length = frame.data_ref().map_or(0, |data| data.len() as u64);
            match left.checked_sub(length) {
                Some(rest) => left = rest,
                None => break,
            }
        }
    };
    let _: Result<(), _> = timeout(patience, read).await;
}

/// Fails if a body does not have the length that was announced. A gateway that repeats a request may
/// leave a part out.
fn check_announced(announced: Option<u64>, length: u64) -> Result<(), ProxyError> {
    match announced.filter(|announced| *announced != length) {
        None => Ok(()),
        Some(announced) => Err(bad_request(&format!(
            "the body has {length} bytes, but content-length is {announced}"
        ))),
    }
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

pub(in crate::proxy) fn bad_request(message: &str) -> ProxyError {
    ProxyError::BadRequest {
        message: message.to_owned(),
        param: None,
    }
}

impl From<ReadError> for ProxyError {
    fn from(why: ReadError) -> Self {
        match why {
            ReadError::Bad(bad) => Self::BadRequest {
                message: bad.message,
                param: bad.param,
            },
            ReadError::Stopping => Self::Overloaded,
        }
    }
}

impl From<PreferenceRejection> for ProxyError {
    fn from(why: PreferenceRejection) -> Self {
        Self::BadRequest {
            message: why.to_string(),
            param: Some(why.header().to_string()),
        }
    }
}

/// Rejects websocket upgrades. All other `upgrade` offers may be ignored. On the path that clients
/// try over a websocket first, the status makes them go on over HTTP at once.
pub(super) fn refuse_websocket(path: &str, headers: &HeaderMap) -> Result<(), ProxyError> {
    let upgrade = headers.get(UPGRADE).map(HeaderValue::as_bytes);
    let is_wanted = upgrade.is_some_and(|it| it.trim_ascii().eq_ignore_ascii_case(b"websocket"));
    match (is_wanted, path) {
        (false, _) => Ok(()),
        (true, "/v1/responses") => Err(ProxyError::HttpOnly),
        (true, _) => Err(ProxyError::NoWebsockets),
    }
}

/// Rejects heads that HTTP forbids. There must be one host (RFC 9112, 3.2), and only `100-continue`
/// may be expected (RFC 9110, 10.1.1).
pub(super) fn check_head(version: Version, headers: &HeaderMap) -> Result<(), ProxyError> {
    let hosts = headers.get_all(HOST).iter().count();
    if hosts > 1 {
        return Err(bad_request("more than one host header"));
    }
    if hosts == 0 && version == Version::HTTP_11 {
        return Err(bad_request("no host header: HTTP/1.1 requires one"));
    }
    let mut expected = headers.get_all(EXPECT).iter();
    if expected.all(|it| it.as_bytes().eq_ignore_ascii_case(b"100-continue")) {
        return Ok(());
    }
    Err(ProxyError::BadExpectation)
}

/// Returns the requested priority, capped at `priority_max`; 0 if none. Fails if it is no integer.
/// Without one, the objective counts if `has_objective`, and if it is an integer. The name of an
/// `InferenceObjective`, which Quorate does not read, does not.
pub(in crate::proxy) fn priority(
    headers: &HeaderMap,
    priority_max: i16,
    has_objective: bool,
) -> Result<i16, ProxyError> {
    let integer = |value: &HeaderValue| -> Option<i64> { value.to_str().ok()?.trim().parse().ok() };
    let asked = match headers.get(PRIORITY) {
        Some(value) => integer(value),
        None => {
            let objective = headers.get(OBJECTIVE).filter(|_| has_objective);
            Some(objective.and_then(integer).unwrap_or(0))
        }
    };
    let asked = asked.ok_or_else(|| ProxyError::BadRequest {
        message: "x-quorate-priority must be an integer".to_owned(),
        param: Some(PRIORITY.to_string()),
    })?;
    let within = asked.clamp(i64::from(i16::MIN), i64::from(priority_max));
    Ok(i16::try_from(within).expect("it was clamped between two of them"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_priority_is_an_integer_up_to_the_allowed_one() {
        let asked = |text: &str| priority(&headers(text), 3, false);
        assert_eq!(priority(&HeaderMap::new(), 3, true), Ok(0));
        assert_eq!(asked("2"), Ok(2));
        assert_eq!(asked(" 9000 "), Ok(3));
        assert_eq!(asked("-9000000"), Ok(i16::MIN));
        for text in ["", "high", "1.5", "99999999999999999999"] {
            assert!(asked(text).is_err(), "{text}");
        }
    }

    #[test]
    fn only_a_trusted_gateways_objective_is_a_priority() {
        let objective = |text: &'static str, is_trusted| {
            let mut headers = HeaderMap::new();
            headers.insert(OBJECTIVE, HeaderValue::from_static(text));
            priority(&headers, 3, is_trusted)
        };
        assert_eq!(objective("2", true), Ok(2));
        assert_eq!(objective("-1", true), Ok(-1));
        assert_eq!(objective("2", false), Ok(0));
        assert_eq!(objective("food-review", true), Ok(0));
        let mut both = headers("1");
        both.insert(OBJECTIVE, HeaderValue::from_static("2"));
        assert_eq!(priority(&both, 3, true), Ok(1));
    }

    fn headers(text: &str) -> HeaderMap {
        let value = HeaderValue::from_bytes(text.as_bytes()).unwrap();
        [(PRIORITY, value)].into_iter().collect()
    }
}
