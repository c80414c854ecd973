//! Errors that engines report in the content of responses whose status is a success.
//!
//! SGLang with a full queue, vLLM with a failed core and others answer a stream with 200 and an
//! error event. Such an error counts like a response with the status that it stands for.
//! Forms: OpenAI's `{"error": {...}}`, whole or as an event; a text as `error`; the flat form of
//! SGLang and older vLLM (`"object": "error"`); FastAPI's lone `detail`; Anthropic's and the responses endpoint's event of
//! type `error`; `response.failed`; an event named `error` with any payload.

use bytes::{BufMut, Bytes, BytesMut};
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode, Version, response};
use serde::Serialize;

use super::json_scan::{members, string, value_of};
use crate::proxy::Proxy;
use crate::proxy::request::dialect::{Dialect, anthropic_type};
use crate::proxy::request::headers::clean_answer;
use crate::routing::AttemptEnd;

/// Maximum length of an error's text in a body that the router writes itself, in bytes.
const TEXT_BYTES_MAX: usize = 16 * 1024;

/// An error in the content of a successful response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proxy) struct EngineError {
    /// Status that the error stands for: 4xx or 5xx.
    pub(in crate::proxy) status: StatusCode,
    /// The engine's error object as written; `None` if it sent only a text.
    object: Option<Bytes>,
    message: String,
}

/// Whether this value of a member `error` reports an error. `null`, numbers and empty values do
/// not.
pub(super) fn is_reported(value: &[u8]) -> bool {
    match value {
        [b'"', b'"'] => false,
        [b'{', rest @ ..] => rest.trim_ascii() != b"}",
        [first, ..] => *first == b'"',
        [] => false,
    }
}

impl EngineError {
    /// Reads the error that `json` reports: an event's payload or a whole document. `is_named` says
    /// that the event is named `error`. `None` if there is no error.
    pub(in crate::proxy) fn read(json: &[u8], is_named: bool) -> Option<Self> {
        let member = |name| value_of(json, name).unwrap_or_default();
        let error = member("error");
        if is_reported(error) {
            return Some(Self::of(error, member("error_type")));
        }
        if member("type") == br#""response.failed""# {
            let error = value_of(member("response"), "error").unwrap_or_default();
            return Some(Self::of(error, b""));
        }
        let is_flat = member("type") == br#""error""# || member("object") == br#""error""#;
        if is_flat || is_named {
            return Some(Self::of(json, b""));
        }
        // FastAPI's form, which says nothing else.
        let detail = member("detail");
        (is_reported(detail) && members(json).count() == 1).then(|| Self::of(detail, b""))
    }

    /// Returns the error that `value` describes: an object, a string, or a text. `kind` names it
    /// otherwise.
    fn of(value: &[u8], kind: &[u8]) -> Self {
        let is_object = value.first() == Some(&b'{');
        let text = match is_object {
            true => value_of(value, "message").and_then(string),
            false => string(value).or_else(|| Some(String::from_utf8_lossy(value))),
        };
        let mut message = text.unwrap_or_default().into_owned();
        message.truncate(message.floor_char_boundary(TEXT_BYTES_MAX));
        Self {
            status: match is_object {
                true => status_of(value),
                false => status_of_word(kind).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            },
            object: is_object.then(|| Bytes::copy_from_slice(value)),
            message,
        }
    }

    /// Returns the error as a response with its status, in the format of `dialect`. `head` is that
    /// of the engine's response.
    pub(in crate::proxy) fn response(
        &self,
        mut head: response::Parts,
        dialect: Dialect,
    ) -> Response<Bytes> {
        clean_answer(&mut head.headers);
        head.headers.remove(CONTENT_LENGTH);
        head.headers.remove(CONTENT_ENCODING);
        let json = HeaderValue::from_static("application/json");
        head.headers.insert(CONTENT_TYPE, json);
        head.version = Version::default();
        head.status = self.status;
        Response::from_parts(head, self.body(dialect))
    }

    fn body(&self, dialect: Dialect) -> Bytes {
        let is_typed = |object: &&Bytes| value_of(object, "type").and_then(string).is_some();
        let (before, own) = match dialect {
            Dialect::OpenAi | Dialect::Responses => (&b"{\"error\":"[..], self.object.clone()),
            Dialect::Anthropic => (
                &b"{\"type\":\"error\",\"error\":"[..],
                self.object.as_ref().filter(is_typed).cloned(),
            ),
        };
        let object = own.unwrap_or_else(|| self.object(dialect));
        let mut body = BytesMut::with_capacity(before.len() + object.len() + 1);
        body.put_slice(before);
        body.put_slice(&object);
        body.put_u8(b'}');
        body.freeze()
    }

    /// Returns an error object with the engine's message.
    fn object(&self, dialect: Dialect) -> Bytes {
        #[derive(Serialize)]
        struct Object<'a> {
            #[serde(rename = "type")]
            type_: &'a str,
            message: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            code: Option<u16>,
        }
        let message = match self.message.as_str() {
            "" => "the backend reported an error",
            message => message,
        };
        let object = match dialect {
            Dialect::Anthropic => Object {
                type_: anthropic_type(self.status),
                message,
                code: None,
            },
            Dialect::OpenAi | Dialect::Responses => Object {
                type_: match self.status.is_client_error() {
                    true => "invalid_request_error",
                    false => "server_error",
                },
                message,
                code: Some(self.status.as_u16()),
            },
        };
        serde_json::to_vec(&object)
            .expect("strings serialise")
            .into()
    }
}

/// Returns the status that an error object stands for: that in its members, or else that of its
/// code or, if that says nothing, its type in words. Without either, the engine is at fault.
fn status_of(error: &[u8]) -> StatusCode {
    let (mut word, mut kind) = (None, None);
    for member in members(error) {
        let value = &error[member.value];
        match &error[member.key] {
            b"code" | b"status" | b"status_code" | b"http_status_code" => {
                let digits = value.trim_ascii().strip_prefix(b"\"").unwrap_or(value);
                let digits = digits.strip_suffix(b"\"").unwrap_or(digits);
                let number = StatusCode::from_bytes(digits).ok();
                if let Some(status) = number.filter(|it| it.as_u16() >= 400 && it.as_u16() < 600) {
                    return status;
                }
                word = word.or_else(|| status_of_word(value));
            }
            b"type" => kind = kind.or_else(|| status_of_word(value)),
            _ => {}
        }
    }
    word.or(kind).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// Returns the status of an error whose type or code is `word`; `None` if it says nothing.
fn status_of_word(word: &[u8]) -> Option<StatusCode> {
    /// Parts of names, as engines and the APIs that they imitate write them, without case and
    /// underscores. The first that occurs counts.
    const WORDS: [(&[u8], StatusCode); 13] = [
        (b"overload", StatusCode::SERVICE_UNAVAILABLE),
        (b"unavailable", StatusCode::SERVICE_UNAVAILABLE),
        (b"ratelimit", StatusCode::TOO_MANY_REQUESTS),
        (b"toomanyrequests", StatusCode::TOO_MANY_REQUESTS),
        (b"timeout", StatusCode::GATEWAY_TIMEOUT),
        (b"notfound", StatusCode::NOT_FOUND),
        (b"authentication", StatusCode::UNAUTHORIZED),
        (b"permission", StatusCode::FORBIDDEN),
        (b"toolarge", StatusCode::PAYLOAD_TOO_LARGE),
        (b"contextlength", StatusCode::BAD_REQUEST),
        (b"badrequest", StatusCode::BAD_REQUEST),
        (b"invalid", StatusCode::BAD_REQUEST),
        (b"validation", StatusCode::BAD_REQUEST),
    ];
    let letters: Vec<u8> = word
        .iter()
        .filter(|byte| byte.is_ascii_alphabetic())
        .map(u8::to_ascii_lowercase)
        .collect();
    let is_in = |part: &[u8]| memchr::memmem::find(&letters, part).is_some();
    let found = WORDS.iter().find(|(part, _)| is_in(part));
    found.map(|(_, status)| *status)
}

/// Returns how an attempt ends after a response with an unsuccessful status. The engine may have
/// computed before a server error, but not before a refusal.
pub(in crate::proxy) fn end_of_error(proxy: &Proxy, status: StatusCode) -> AttemptEnd {
    let is_refusal = proxy.settings.retry.takes(status)
        || status == StatusCode::NOT_IMPLEMENTED
        || status == StatusCode::SERVICE_UNAVAILABLE;
    if status.is_server_error() && !is_refusal {
        AttemptEnd::Failed
    } else {
        AttemptEnd::NotRun
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(json: &str) -> Option<u16> {
        EngineError::read(json.as_bytes(), false).map(|it| it.status.as_u16())
    }

    #[test]
    fn every_form_of_error_has_the_status_it_stands_for() {
        for (json, expected) in [
            (
                r#"{"error":{"message":"full","type":"SERVICE_UNAVAILABLE","code":503}}"#,
                503,
            ),
            (
                r#"{"error":{"message":"x","type":"BadRequestError","code":"400"}}"#,
                400,
            ),
            (r#"{"error":{"message":"x","code":429}}"#, 429),
            (
                r#"{"error":{"type":"invalid_request_error","code":"engine_overloaded"}}"#,
                503,
            ),
            (r#"{"detail":"Internal Server Error"}"#, 500),
            (
                r#"{"error":{"message":"x","type":"InternalServerError"}}"#,
                500,
            ),
            (
                r#"{"error":{"message":"x","code":200,"type":"rate_limit_error"}}"#,
                429,
            ),
            (
                r#"{"error":"Model is overloaded","error_type":"overloaded"}"#,
                503,
            ),
            (r#"{"error":"no more"}"#, 500),
            (
                r#"{"object":"error","message":"x","type":"BadRequest","code":400}"#,
                400,
            ),
            (
                r#"{"type":"error","error":{"type":"overloaded_error","message":"x"}}"#,
                503,
            ),
            (
                r#"{"type":"error","code":"server_error","message":"x"}"#,
                500,
            ),
            (
                r#"{"type":"error","code":"rate_limit_exceeded","message":"x"}"#,
                429,
            ),
            (
                r#"{"type":"response.failed","response":{"error":{"code":"server_error"}}}"#,
                500,
            ),
            (
                r#"{"type":"response.failed","response":{"error":null}}"#,
                500,
            ),
            (
                r#"{"object":"response","status":"failed","error":{"code":"server_error"}}"#,
                500,
            ),
        ] {
            assert_eq!(status(json), Some(expected), "{json}");
        }
    }

    #[test]
    fn an_answer_is_no_error() {
        for json in [
            r#"{"choices":[{"delta":{"content":"{\"error\":{\"code\":503}}"}}],"error":null}"#,
            r#"{"object":"response","error":null,"output":[]}"#,
            r#"{"error":{}}"#,
            r#"{"error":""}"#,
            r#"{"detail":"high","choices":[]}"#,
            r#"{"error":0.5}"#,
            r#"{"type":"response.completed","response":{"error":null}}"#,
            "[DONE]",
            "",
        ] {
            assert_eq!(status(json), None, "{json}");
        }
        let named = EngineError::read(b"out of memory", true).unwrap();
        assert_eq!(
            (named.status.as_u16(), named.message.as_str()),
            (500, "out of memory")
        );
    }

    #[test]
    fn an_error_keeps_the_engines_object_in_the_clients_format() {
        let body = |json: &str, dialect| {
            let error = EngineError::read(json.as_bytes(), false).unwrap();
            String::from_utf8(error.body(dialect).to_vec()).unwrap()
        };
        let nested = r#"{"error":{"message":"full","type":"x","code":503}}"#;
        assert_eq!(body(nested, Dialect::OpenAi), nested);
        let flat = r#"{"object":"error","message":"m","code":400}"#;
        assert_eq!(
            body(flat, Dialect::OpenAi),
            format!(r#"{{"error":{flat}}}"#)
        );
        let anthropic = r#"{"type":"error","error":{"type":"overloaded_error","message":"x"}}"#;
        assert_eq!(body(anthropic, Dialect::Anthropic), anthropic);
        let untyped = r#"{"error":{"message":"full","code":503}}"#;
        let expected = r#"{"type":"error","error":{"type":"overloaded_error","message":"full"}}"#;
        assert_eq!(body(untyped, Dialect::Anthropic), expected);
        let text = r#"{"error":"gone"}"#;
        let expected = r#"{"error":{"type":"server_error","message":"gone","code":500}}"#;
        assert_eq!(body(text, Dialect::Responses), expected);
    }
}
