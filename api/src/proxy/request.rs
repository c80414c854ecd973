//! A request as it comes in: its body, and who sent it.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, EXPECT, HOST};
use http::{HeaderMap, Version};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use state::command::NAME_BYTES_MAX;
use tokio::time::{Instant, timeout, timeout_at};
use xxhash_rust::xxh3::xxh3_64;

use super::headers::{API_KEY, PRIORITY};
use super::settings::{IdentifyBy, ProxySettings, key_user_name};
use crate::error::Failure;
use crate::prompt::Parsed;

/// Who is charged when nobody can be told.
pub(crate) const ANONYMOUS: &str = "anonymous";
/// What is set aside for a body before its bytes come, at most: its announced length is only a
/// promise.
const FIRST_BUFFER_BYTES_MAX: u64 = 64 * 1024;

/// A body's bytes in the sum of all that are held; taken out when dropped.
pub(super) struct Held {
    all: Arc<AtomicU64>,
    bytes: u64,
    bytes_max: u64,
}

impl Held {
    pub(super) fn none(all: &Arc<AtomicU64>, bytes_max: u64) -> Self {
        Self {
            all: Arc::clone(all),
            bytes: 0,
            bytes_max,
        }
    }

    fn add(&mut self, bytes: usize) -> Result<(), Failure> {
        let bytes = bytes as u64;
        self.bytes += bytes;
        if self.all.fetch_add(bytes, Relaxed) + bytes > self.bytes_max {
            return Err(Failure::Overloaded);
        }
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Relaxed);
    }
}

/// A body on its way in.
pub(super) struct Upload<'a> {
    pub(super) settings: &'a ProxySettings,
    pub(super) headers: &'a HeaderMap,
    /// Whether many others are on their way: then it has less time.
    pub(super) is_crowded: &'a (dyn Fn() -> bool + Sync),
}

/// How often a body that does not come is asked whether it still has time.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Whole bodies get this part of their time while many are on their way.
const CROWDED_PART: u32 = 10;

impl Upload<'_> {
    /// Reads the body to its end, within the limits.
    pub(super) async fn read(
        &self,
        body: &mut Incoming,
        held: &mut Held,
    ) -> Result<Bytes, Failure> {
        if self
            .headers
            .get(CONTENT_ENCODING)
            .is_some_and(|coding| coding != "identity")
        {
            return Err(bad_request(
                "encoded bodies are not read: send it without content-encoding",
            ));
        }
        let bytes_max = self.settings.limits.body_bytes_max;
        let announced = content_length(self.headers);
        if announced.is_some_and(|length| length > bytes_max) {
            return Err(Failure::BodyTooLarge { bytes_max });
        }
        let began = Instant::now();
        let mut whole = BytesMut::new();
        let mut first = Bytes::new();
        while let Some(data) = self.piece(body, began).await? {
            held.add(data.len())?;
            let length = whole.len() + first.len() + data.len();
            if length as u64 > bytes_max {
                return Err(Failure::BodyTooLarge { bytes_max });
            }
            if length == data.len() {
                // Most bodies are one frame and need no copy.
                first = data;
                continue;
            }
            if whole.is_empty() {
                let likely = announced.unwrap_or(0).min(FIRST_BUFFER_BYTES_MAX);
                whole.reserve(length.max(usize::try_from(likely).unwrap_or(0)));
                whole.extend_from_slice(&std::mem::take(&mut first));
            }
            whole.extend_from_slice(&data);
        }
        Ok(if whole.is_empty() {
            first
        } else {
            whole.freeze()
        })
    }

    /// The next piece; `None` at the end.
    async fn piece(&self, body: &mut Incoming, began: Instant) -> Result<Option<Bytes>, Failure> {
        let waits_since = Instant::now();
        loop {
            let until = self.patience(began, waits_since);
            let frame = match timeout_at(until.min(Instant::now() + LOOK_EVERY), body.frame()).await
            {
                Ok(Some(frame)) => frame.map_err(|_| bad_request("the body ended early"))?,
                Ok(None) => return Ok(None),
                // Others may have come meanwhile.
                Err(_) if self.patience(began, waits_since) > Instant::now() => continue,
                Err(_) => return Err(Failure::BodyTimeout),
            };
            // Trailers are not passed on.
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
    }

    fn patience(&self, began: Instant, waits_since: Instant) -> Instant {
        let timeouts = &self.settings.timeouts;
        let (whole, idle) = match (self.is_crowded)() {
            false => (timeouts.body, timeouts.body_idle),
            true => (
                timeouts.body / CROWDED_PART,
                timeouts.body_idle_crowded.min(timeouts.body_idle),
            ),
        };
        (began + whole).min(waits_since + idle)
    }
}

/// Reads what is left of a body and throws it away, within bounds: closing a connection over unread
/// bytes resets it, and the answer would be lost on its way.
pub(super) async fn discard(settings: &ProxySettings, headers: &HeaderMap, mut body: Incoming) {
    let bytes_max = settings.limits.body_bytes_max.saturating_mul(2);
    let is_hopeless = content_length(headers).is_some_and(|length| length > bytes_max);
    if is_hopeless || headers.contains_key(EXPECT) {
        return;
    }
    let patience = settings.timeouts.refused_body;
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
    // Either way the answer is sent next.
    let _: Result<(), _> = timeout(patience, read).await;
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn bad_request(message: &str) -> Failure {
    Failure::BadRequest {
        message: message.to_owned(),
        param: None,
    }
}

/// The client's key, from `authorization: Bearer` or `x-api-key`.
fn api_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers
        .get(AUTHORIZATION)
        .map(http::HeaderValue::as_bytes)
        .and_then(|value| {
            let (scheme, key) = value.split_at_checked(7)?;
            scheme
                .eq_ignore_ascii_case(b"bearer ")
                .then(|| key.trim_ascii())
        });
    let key = bearer.or_else(|| headers.get(&API_KEY).map(http::HeaderValue::as_bytes));
    key.filter(|key| !key.is_empty())
}

/// Refuses heads that HTTP does not allow: one host is named (RFC 9112, 3.2), and nothing but
/// `100-continue` can be expected (RFC 9110, 10.1.1).
pub(super) fn check_head(head: &http::request::Parts) -> Result<(), Failure> {
    let hosts = head.headers.get_all(HOST).iter().count();
    if hosts > 1 {
        return Err(bad_request("more than one host header"));
    }
    if hosts == 0 && head.version == Version::HTTP_11 {
        return Err(bad_request("no host header: HTTP/1.1 requires one"));
    }
    let mut expected = head.headers.get_all(EXPECT).iter();
    if expected.all(|it| it.as_bytes().eq_ignore_ascii_case(b"100-continue")) {
        return Ok(());
    }
    Err(Failure::BadExpectation)
}

/// Refuses clients without a known key, where keys are required.
pub(super) fn check_key(settings: &ProxySettings, headers: &HeaderMap) -> Result<(), Failure> {
    match &settings.api_keys {
        None => Ok(()),
        Some(keys) => {
            let user = api_key(headers).and_then(|key| keys.user(key));
            user.map(drop).ok_or(Failure::BadKey)
        }
    }
}

/// The name of the user whom the request's tokens are charged to.
pub(super) fn identify<'a>(
    settings: &'a ProxySettings,
    headers: &'a HeaderMap,
    parsed: &'a Parsed,
) -> Cow<'a, str> {
    let found = settings.identify_by.iter().find_map(|place| match place {
        IdentifyBy::ApiKey => {
            let key = api_key(headers)?;
            let known = settings.api_keys.as_ref().and_then(|keys| keys.user(key));
            Some(known.map_or_else(|| key_user_name(key).into(), Cow::from))
        }
        IdentifyBy::Header(name) => {
            let value = std::str::from_utf8(headers.get(name)?.as_bytes()).ok()?;
            bounded(value.trim())
        }
        IdentifyBy::BodyUser => bounded(parsed.user.as_deref()?),
    });
    found.unwrap_or(Cow::Borrowed(ANONYMOUS))
}

/// The priority that a request asks for, as far as it may.
pub(super) fn priority(headers: &HeaderMap, priority_max: i16) -> Result<i16, Failure> {
    let Some(value) = headers.get(PRIORITY) else {
        return Ok(0);
    };
    let text = value.to_str().ok().map(str::trim);
    let asked: Option<i64> = text.and_then(|text| text.parse().ok());
    let asked = asked.ok_or_else(|| Failure::BadRequest {
        message: "the priority is no integer".to_owned(),
        param: Some(PRIORITY.to_string()),
    })?;
    let within = asked.clamp(i64::from(i16::MIN), i64::from(priority_max));
    Ok(i16::try_from(within).expect("it was clamped between two of them"))
}

/// A name that fits the state's limit: a longer one is replaced by its hash.
fn bounded(name: &str) -> Option<Cow<'_, str>> {
    if name.is_empty() {
        None
    } else if name.len() <= NAME_BYTES_MAX {
        Some(name.into())
    } else {
        Some(format!("long-{:016x}", xxh3_64(name.as_bytes())).into())
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use state::ids::ReplicaId;

    use super::super::settings::ApiKeys;
    use super::*;

    #[test]
    fn a_priority_is_an_integer_up_to_what_is_allowed() {
        let asked = |text: &str| priority(&headers(&[("x-quorate-priority", text)]), 3);
        assert_eq!(priority(&HeaderMap::new(), 3), Ok(0));
        assert_eq!(asked("2"), Ok(2));
        assert_eq!(asked(" 9000 "), Ok(3));
        assert_eq!(asked("-9000000"), Ok(i16::MIN));
        for text in ["", "high", "1.5", "99999999999999999999"] {
            assert!(asked(text).is_err(), "{text}");
        }
    }

    fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
        let field = |(name, value): &(&'static str, &str)| {
            (
                http::HeaderName::from_static(name),
                HeaderValue::from_str(value).unwrap(),
            )
        };
        fields.iter().map(field).collect()
    }

    #[test]
    fn the_user_is_found_in_the_order_of_the_settings() {
        let mut settings = ProxySettings::new(ReplicaId(1));
        let parsed = Parsed {
            user: Some("body".into()),
            ..Parsed::default()
        };
        let all = headers(&[("authorization", "bearer sk-1"), ("x-quorate-user", "head")]);
        assert_eq!(identify(&settings, &all, &parsed), key_user_name(b"sk-1"));
        assert_eq!(
            identify(&settings, &headers(&[("x-api-key", "k")]), &parsed),
            key_user_name(b"k")
        );
        assert_eq!(
            identify(
                &settings,
                &headers(&[("x-quorate-user", " head ")]),
                &parsed
            ),
            "head"
        );
        assert_eq!(identify(&settings, &HeaderMap::new(), &parsed), "body");
        assert_eq!(
            identify(&settings, &HeaderMap::new(), &Parsed::default()),
            "anonymous"
        );
        let basic = headers(&[("authorization", "Basic abc")]);
        assert_eq!(identify(&settings, &basic, &Parsed::default()), "anonymous");
        settings.identify_by = vec![IdentifyBy::BodyUser];
        assert_eq!(identify(&settings, &all, &parsed), "body");
        let long = Parsed {
            user: Some("x".repeat(NAME_BYTES_MAX + 1)),
            ..Parsed::default()
        };
        assert!(identify(&settings, &all, &long).starts_with("long-"));
    }

    #[test]
    fn where_keys_are_required_only_known_ones_pass() {
        let mut settings = ProxySettings::new(ReplicaId(1));
        assert_eq!(check_key(&settings, &HeaderMap::new()), Ok(()));
        let mut keys = ApiKeys::default();
        keys.add("sk-1", Some("ada".into()));
        settings.api_keys = Some(keys);
        let known = headers(&[("authorization", "Bearer sk-1")]);
        assert_eq!(check_key(&settings, &known), Ok(()));
        assert_eq!(identify(&settings, &known, &Parsed::default()), "ada");
        let unknown = headers(&[("authorization", "Bearer sk-2")]);
        assert_eq!(check_key(&settings, &unknown), Err(Failure::BadKey));
        assert_eq!(
            check_key(&settings, &HeaderMap::new()),
            Err(Failure::BadKey)
        );
    }
}
