//! A request as it comes in: its body, and who sent it.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, EXPECT, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Version};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use state::prefix::BlockHasher;
use tokio::time::{Instant, timeout, timeout_at};

use super::headers::{API_KEY, PRIORITY};
use super::keys::{Holder, key_user_name};
use super::settings::{IdentifyBy, ProxySettings};
use crate::error::ProxyError;
use crate::prompt::{ParsedBody, ReadError};
use crate::routing::{PreferenceRejection, UserName};
use crate::user_name;

/// Who is charged when nobody can be told.
pub(crate) const ANONYMOUS: &str = "anonymous";
/// What is set aside for a body before its bytes come, at most: its announced length is only a
/// promise.
const FIRST_BUFFER_BYTES_MAX: u64 = 64 * 1024;

/// A body's bytes in the sum of all that are held; taken out when dropped.
pub(super) struct HeldBodyBytes {
    all: Arc<AtomicU64>,
    bytes: u64,
    bytes_max: u64,
}

impl HeldBodyBytes {
    pub(super) fn none(all: &Arc<AtomicU64>, bytes_max: u64) -> Self {
        Self {
            all: Arc::clone(all),
            bytes: 0,
            bytes_max,
        }
    }

    fn add(&mut self, bytes: usize) -> Result<(), ProxyError> {
        let bytes = bytes as u64;
        self.bytes += bytes;
        if self.all.fetch_add(bytes, Relaxed) + bytes > self.bytes_max {
            return Err(ProxyError::Overloaded);
        }
        Ok(())
    }
}

impl Drop for HeldBodyBytes {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Relaxed);
    }
}

/// A body on its way in.
pub(super) struct BodyReader<'a> {
    pub(super) settings: &'a ProxySettings,
    pub(super) headers: &'a HeaderMap,
    /// Whether many others are on their way: then it has less time.
    pub(super) is_crowded: &'a (dyn Fn() -> bool + Sync),
}

/// How often a body that does not come is asked whether it still has time.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Whole bodies get this part of their time while many are on their way.
const CROWDED_PART: u32 = 10;

impl BodyReader<'_> {
    /// Reads the body to its end, within the limits.
    pub(super) async fn read(
        &self,
        body: &mut Incoming,
        held: &mut HeldBodyBytes,
    ) -> Result<Bytes, ProxyError> {
        if self
            .headers
            .get(CONTENT_ENCODING)
            .is_some_and(|coding| coding != "identity")
        {
            return Err(bad_request(
                "compressed bodies are not supported; send the body without content-encoding",
            ));
        }
        let bytes_max = self.settings.limits.body_bytes_max;
        let announced = content_length(self.headers);
        if announced.is_some_and(|length| length > bytes_max) {
            return Err(ProxyError::BodyTooLarge { bytes_max });
        }
        let began = Instant::now();
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
    async fn piece(
        &self,
        body: &mut Incoming,
        began: Instant,
    ) -> Result<Option<Bytes>, ProxyError> {
        let waits_since = Instant::now();
        loop {
            let until = self.patience(began, waits_since);
            let frame = match timeout_at(until.min(Instant::now() + LOOK_EVERY), body.frame()).await
            {
                Ok(Some(frame)) => frame.map_err(|_| bad_request("the body ended early"))?,
                Ok(None) => return Ok(None),
                // Others may have come meanwhile.
                Err(_) if self.patience(began, waits_since) > Instant::now() => continue,
                Err(_) => return Err(ProxyError::BodyTimeout),
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

fn bad_request(message: &str) -> ProxyError {
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
pub(super) fn check_head(head: &http::request::Parts) -> Result<(), ProxyError> {
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
    Err(ProxyError::BadExpectation)
}

/// Whom the client's key stands for. Refuses clients without a known key, where keys are checked.
pub(super) fn check_key(
    settings: &ProxySettings,
    headers: &HeaderMap,
) -> Result<Holder, ProxyError> {
    match &settings.api_keys {
        None => Ok(Holder::Unchecked),
        Some(keys) => api_key(headers)
            .and_then(|key| keys.holder(key))
            .ok_or(ProxyError::BadKey),
    }
}

/// Who sends a request, before its body is looked at.
#[derive(Clone, Copy)]
pub(super) struct Client<'a> {
    /// As [`check_key`] found.
    pub(super) holder: &'a Holder,
    /// Address of the other end.
    pub(super) peer: &'a HeaderValue,
    pub(super) headers: &'a HeaderMap,
}

/// The name of the user whom the request's tokens are charged to.
///
/// A bare name is one that somebody vouched for: the keys file, or a proxy that is trusted. What
/// others say of themselves stands behind `header:` or `body:`, so that nobody takes another's
/// name, and counts only where no keys are checked.
pub(super) fn identify<'a>(
    settings: &ProxySettings,
    hashing: impl Fn() -> BlockHasher,
    client: &Client<'a>,
    parsed: &'a ParsedBody,
) -> Result<UserName, ProxyError> {
    let Client {
        holder,
        peer,
        headers,
    } = *client;
    let are_checked = *holder != Holder::Unchecked;
    let by_key = || match holder {
        Holder::Named(name) => Some(Cow::Borrowed(&**name)),
        Holder::Unnamed | Holder::Unchecked => {
            api_key(headers).map(|key| key_user_name(&hashing(), key).into())
        }
    };
    for place in &settings.identify_by {
        let found = match place {
            IdentifyBy::ApiKey => by_key(),
            IdentifyBy::Header(field) => match header_text(headers, field) {
                None => None,
                Some(name) if is_trusted(settings, peer) => Some(vouched(name, field.as_str())?),
                Some(_) if are_checked => None,
                Some(name) => Some(claimed(SAID_IN_HEADER, name, field.as_str())?),
            },
            IdentifyBy::BodyUser => match parsed.user.as_deref() {
                None | Some("") => None,
                Some(_) if are_checked => None,
                Some(name) => Some(claimed(SAID_IN_BODY, name, "user")?),
            },
        };
        if let Some(name) = found {
            return Ok(UserName::bounded(name));
        }
    }
    let by_checked_key = are_checked.then(by_key).flatten();
    let name = by_checked_key.unwrap_or(Cow::Borrowed(ANONYMOUS));
    Ok(UserName::bounded(name))
}

/// What stands before the names that clients give themselves.
const SAID_IN_HEADER: &str = "header:";
const SAID_IN_BODY: &str = "body:";

fn header_text<'a>(headers: &'a HeaderMap, field: &HeaderName) -> Option<&'a str> {
    let value = std::str::from_utf8(headers.get(field)?.as_bytes()).ok()?;
    Some(value.trim()).filter(|value| !value.is_empty())
}

/// Whether who is at the other end speaks for others.
fn is_trusted(settings: &ProxySettings, peer: &HeaderValue) -> bool {
    let address: Option<IpAddr> = peer.to_str().ok().and_then(|peer| peer.parse().ok());
    let mut trusted = settings.trusted_proxies.iter();
    address.is_some_and(|address| trusted.any(|prefix| prefix.contains(address)))
}

/// A name that a trusted proxy gives: not one that is made here.
fn vouched<'a>(name: &'a str, place: &str) -> Result<Cow<'a, str>, ProxyError> {
    let said = [SAID_IN_HEADER, SAID_IN_BODY];
    let is_of_key = name.strip_prefix("key-").is_some_and(user_name::is_hash);
    let is_made_here = is_of_key
        || user_name::looks_shortened(name)
        || said.iter().any(|prefix| name.starts_with(prefix));
    if is_made_here {
        return Err(bad_name("begins like one that is made here", place));
    }
    check_name(name, place)?;
    Ok(Cow::Borrowed(name))
}

/// A name that a client gives itself.
fn claimed(prefix: &str, name: &str, place: &str) -> Result<Cow<'static, str>, ProxyError> {
    check_name(name, place)?;
    Ok(Cow::Owned(format!("{prefix}{name}")))
}

/// Names are shown on terminals and in tables: what changes how the rest is shown is refused.
fn check_name(name: &str, place: &str) -> Result<(), ProxyError> {
    let is_format = |it: char| {
        matches!(
            it,
            '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}'
        )
    };
    if name.chars().any(|it| it.is_control() || is_format(it)) {
        return Err(bad_name("has a control character", place));
    }
    Ok(())
}

fn bad_name(what: &str, place: &str) -> ProxyError {
    ProxyError::BadRequest {
        message: format!("the user's name {what}"),
        param: Some(place.to_owned()),
    }
}

/// The priority that a request asks for, as far as it may.
pub(super) fn priority(headers: &HeaderMap, priority_max: i16) -> Result<i16, ProxyError> {
    let Some(value) = headers.get(PRIORITY) else {
        return Ok(0);
    };
    let text = value.to_str().ok().map(str::trim);
    let asked: Option<i64> = text.and_then(|text| text.parse().ok());
    let asked = asked.ok_or_else(|| ProxyError::BadRequest {
        message: "x-quorate-priority must be an integer".to_owned(),
        param: Some(PRIORITY.to_string()),
    })?;
    let within = asked.clamp(i64::from(i16::MIN), i64::from(priority_max));
    Ok(i16::try_from(within).expect("it was clamped between two of them"))
}

#[cfg(test)]
mod tests {
    use state::ids::ReplicaId;

    use super::super::keys::ApiKeys;
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
                HeaderValue::from_bytes(value.as_bytes()).unwrap(),
            )
        };
        fields.iter().map(field).collect()
    }

    /// Who asks from `peer`, with these fields and `"user":"body"`.
    fn named(settings: &ProxySettings, peer: &str, fields: &[(&'static str, &str)]) -> String {
        let parsed = ParsedBody {
            user: Some("body".into()),
            ..ParsedBody::default()
        };
        let peer = HeaderValue::from_str(peer).unwrap();
        let headers = headers(fields);
        let holder = check_key(settings, &headers).unwrap();
        let client = Client {
            holder: &holder,
            peer: &peer,
            headers: &headers,
        };
        match identify(settings, || 7.into(), &client, &parsed) {
            Ok(name) => name.as_str().to_owned(),
            Err(failure) => format!("{failure:?}"),
        }
    }

    const PROXY: &str = "127.0.0.1";
    const STRANGER: &str = "192.0.2.9";

    #[test]
    fn a_bare_name_is_one_that_somebody_vouched_for() {
        let mut settings = ProxySettings::new(ReplicaId(1));
        let head = [("x-quorate-user", " head ")];
        let key = [("authorization", "bearer sk-1"), ("x-quorate-user", "head")];
        let of_key = key_user_name(&7.into(), b"sk-1");
        assert_eq!(named(&settings, PROXY, &key), of_key);
        assert_eq!(named(&settings, STRANGER, &[("x-api-key", "sk-1")]), of_key);
        assert_eq!(named(&settings, PROXY, &head), "head");
        assert_eq!(named(&settings, STRANGER, &head), "header:head");
        assert_eq!(named(&settings, PROXY, &[]), "body:body");
        assert_eq!(
            named(&settings, PROXY, &[("authorization", "Basic x")]),
            "body:body"
        );
        settings.identify_by = Vec::new();
        assert_eq!(named(&settings, PROXY, &key), "anonymous");
    }

    #[test]
    fn where_keys_are_checked_only_they_and_trusted_proxies_name_users() {
        let mut settings = ProxySettings::new(ReplicaId(1));
        let mut keys = ApiKeys::default();
        keys.add("sk-1", Some("ada".to_owned()));
        settings.api_keys = Some(keys);
        settings.identify_by.rotate_left(1);
        let both = [("x-api-key", "sk-1"), ("x-quorate-user", "head")];
        assert_eq!(named(&settings, STRANGER, &both), "ada");
        assert_eq!(named(&settings, PROXY, &both), "head");
        settings.identify_by = vec![IdentifyBy::BodyUser];
        assert_eq!(named(&settings, STRANGER, &both), "ada");
    }

    #[test]
    fn where_keys_are_required_only_known_ones_pass() {
        let mut settings = ProxySettings::new(ReplicaId(1));
        let anyone = check_key(&settings, &HeaderMap::new());
        assert_eq!(anyone, Ok(Holder::Unchecked));
        let mut keys = ApiKeys::default();
        keys.add("sk-1", None);
        settings.api_keys = Some(keys);
        let known = headers(&[("authorization", "Bearer sk-1")]);
        assert_eq!(check_key(&settings, &known), Ok(Holder::Unnamed));
        for key in ["Bearer sk-2", "Bearer sk-", "Bearer "] {
            let unknown = headers(&[("authorization", key)]);
            assert_eq!(check_key(&settings, &unknown), Err(ProxyError::BadKey));
        }
        assert_eq!(
            check_key(&settings, &HeaderMap::new()),
            Err(ProxyError::BadKey)
        );
    }

    #[test]
    fn names_of_one_kind_are_not_taken_by_another() {
        let settings = ProxySettings::new(ReplicaId(1));
        for name in [
            "header:ada",
            "body:ada",
            "key-0123456789abcdef",
            "a\u{202e}b",
            "a\u{9b}b",
        ] {
            let failure = named(&settings, PROXY, &[("x-quorate-user", name)]);
            assert!(failure.starts_with("BadRequest"), "{name:?}: {failure}");
        }
        assert_eq!(
            named(&settings, PROXY, &[("x-quorate-user", "key-team")]),
            "key-team"
        );
    }

    #[test]
    fn an_over_long_name_means_whom_explain_means() {
        let settings = ProxySettings::new(ReplicaId(1));
        let long = "x".repeat(1000);
        let said = named(&settings, STRANGER, &[("x-quorate-user", &long)]);
        assert!(said.starts_with("header:xxx"), "{said}");
        assert_eq!(said, UserName::bounded(format!("header:{long}")).as_str());
        let vouched = named(&settings, PROXY, &[("x-quorate-user", &long)]);
        assert_eq!(vouched, UserName::bounded(&long).as_str());
        let again = named(&settings, PROXY, &[("x-quorate-user", &vouched)]);
        assert!(again.starts_with("BadRequest"), "{again}");
    }
}
