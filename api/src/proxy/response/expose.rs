//! The `x-quorate-*` response headers for clients, as far as `users.expose` allows them.
//!
//! The number of matched blocks reveals, block by block, what other users sent. Therefore only
//! [`Expose::Full`], which is for trusted clients, shows a decision. Refusals never show one,
//! because that would be a free query (I61).

use bytes::{BufMut, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use state::ids::LogIndex;

use crate::model_names::ResolvedModel;
use crate::proxy::request::dialect::{ANTHROPIC_REQUEST_ID, Dialect};
use crate::proxy::request::headers::REQUEST_ID;
use crate::proxy::settings::Expose;
use crate::routing::{Decision, POLICY};

/// Header that names the replica that sent the response.
const REPLICA: HeaderName = HeaderName::from_static("x-quorate-replica");
const BACKEND: HeaderName = HeaderName::from_static("x-quorate-backend");
/// Header that names the backend that computed the prompt, if another one responds.
const PREFILL: HeaderName = HeaderName::from_static("x-quorate-prefill");
const PREFIX: HeaderName = HeaderName::from_static("x-quorate-prefix");
/// Header that names the model that serves the request, if the request gives it another name.
const MODEL: HeaderName = HeaderName::from_static("x-quorate-model");
const INDEX: HeaderName = HeaderName::from_static("x-quorate-index");
/// Header that lists the request headers that have no effect under the config.
const IGNORED: HeaderName = HeaderName::from_static("x-quorate-ignored");

impl Expose {
    /// Adds the decision to the headers of a backend's successful response, with [`Expose::Full`]
    /// only.
    pub(in crate::proxy) fn decision(
        self,
        headers: &mut HeaderMap,
        status: StatusCode,
        decision: &Decision,
    ) {
        if self != Self::Full || !status.is_success() {
            return;
        }
        if let Ok(name) = HeaderValue::from_str(&decision.name) {
            headers.insert(BACKEND, name);
        }
        headers.insert(POLICY, HeaderValue::from_static(decision.policy));
        let prefill = decision.prefill.as_ref();
        if let Some(Ok(name)) = prefill.map(|it| HeaderValue::from_str(&it.name)) {
            headers.insert(PREFILL, name);
        }
        let matched = prefill.map_or(decision.matched, |it| it.matched);
        headers.insert(PREFIX, prefix(matched, decision.total));
    }

    /// Adds the model to the headers of a backend's response, if the request gives it another name.
    pub(in crate::proxy) fn model(self, headers: &mut HeaderMap, resolved: Option<&ResolvedModel>) {
        let model = resolved.filter(|_| self != Self::None);
        if let Some(Ok(model)) = model.map(|it| HeaderValue::from_str(&it.model)) {
            headers.insert(MODEL, model);
        }
    }

    /// Adds the log index to the headers of a backend's successful response.
    pub(in crate::proxy) fn index(
        self,
        headers: &mut HeaderMap,
        status: StatusCode,
        index: LogIndex,
    ) {
        if self != Self::None && status.is_success() {
            headers.insert(INDEX, HeaderValue::from(index.0));
        }
    }

    /// Adds the replica and the request id to the headers of any response, or removes the request
    /// id with [`Expose::None`].
    pub(in crate::proxy) fn origin(
        self,
        headers: &mut HeaderMap,
        dialect: Dialect,
        id: HeaderValue,
        replica: &HeaderValue,
    ) {
        if self == Self::None {
            headers.remove(REQUEST_ID);
        } else {
            if dialect == Dialect::Anthropic {
                headers.insert(ANTHROPIC_REQUEST_ID, id.clone());
            }
            headers.insert(REQUEST_ID, id);
            headers.insert(REPLICA, replica.clone());
        }
    }

    /// Adds the list of ignored request headers, if any, to the headers of any response.
    pub(in crate::proxy) fn ignored(self, headers: &mut HeaderMap, ignored: Option<HeaderValue>) {
        if let Some(ignored) = ignored.filter(|_| self != Self::None) {
            headers.insert(IGNORED, ignored);
        }
    }
}

/// Returns `matched/total` as a header value.
fn prefix(matched: u32, total: u32) -> HeaderValue {
    let mut text = BytesMut::with_capacity(21);
    put_decimal(&mut text, matched);
    text.put_u8(b'/');
    put_decimal(&mut text, total);
    HeaderValue::from_maybe_shared(text.freeze()).expect("digits and a slash are visible ascii")
}

fn put_decimal(text: &mut BytesMut, mut number: u32) {
    let mut digits = [0; 10];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + u8::try_from(number % 10).expect("a remainder of 10 fits");
        number /= 10;
        if number == 0 {
            break;
        }
    }
    text.put_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_header_has_matched_and_total_blocks() {
        assert_eq!(prefix(0, u32::MAX), "0/4294967295");
        assert_eq!(prefix(120, 7), "120/7");
    }

    #[test]
    fn expose_none_removes_the_request_id() {
        let (id, replica) = (HeaderValue::from_static("r1"), HeaderValue::from(1));
        for (expose, count) in [(Expose::None, 0), (Expose::Basic, 2), (Expose::Full, 2)] {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_static("an engine's"));
            expose.origin(&mut headers, Dialect::OpenAi, id.clone(), &replica);
            assert_eq!(headers.len(), count, "{expose:?}");
        }
    }
}
