//! The API that a request uses. It determines the format of errors, both within a stream and as a
//! whole response.

use bytes::{BufMut, Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Response, StatusCode};
use serde::Serialize;

use crate::error::{ProxyError, openai_body, openai_response, rescue};

/// Response header in which Anthropic's clients look for the request id.
pub(in crate::proxy) const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Format of an API's streams and errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proxy) enum Dialect {
    /// OpenAI's format, and the similar formats of engines.
    OpenAi,
    /// OpenAI's format on the responses endpoint, whose streams have named events.
    Responses,
    /// Anthropic's format.
    Anthropic,
}

impl Dialect {
    pub(in crate::proxy) fn of(path: &str) -> Self {
        match path {
            "/v1/messages" | "/v1/messages/count_tokens" => Self::Anthropic,
            "/v1/responses" => Self::Responses,
            _ => Self::OpenAi,
        }
    }

    /// Whether events of streams are named in this format. Without framing, such a stream counts as
    /// complete even if its last event is missing.
    pub(in crate::proxy) fn has_named_events(self) -> bool {
        match self {
            Self::OpenAi => false,
            Self::Responses | Self::Anthropic => true,
        }
    }

    /// Returns the response to a failed request.
    pub(in crate::proxy) fn response(self, failure: &ProxyError) -> Response<Bytes> {
        let mut response = openai_response(failure);
        if self == Self::Anthropic {
            *response.body_mut() = anthropic_body(failure);
            let json = HeaderValue::from_static("application/json");
            response.headers_mut().insert(CONTENT_TYPE, json);
        }
        response
    }

    /// Returns the event that ends a broken stream. With `is_within`, the client has already
    /// received the beginning of another event.
    pub(in crate::proxy) fn last_event(self, failure: &ProxyError, is_within: bool) -> Bytes {
        let body = match self {
            Self::OpenAi | Self::Responses => openai_body(failure),
            Self::Anthropic => anthropic_body(failure),
        };
        let mut event = BytesMut::with_capacity(body.len() + 64);
        if is_within {
            event.put_slice(b"\n\n");
        }
        match self {
            Self::OpenAi => event.put_slice(b"data: "),
            Self::Responses => {
                // Clients distinguish events by name and `type`.
                event.put_slice(b"event: error\ndata: {\"type\":\"error\",");
            }
            Self::Anthropic => event.put_slice(b"event: error\ndata: "),
        }
        match self {
            Self::Responses => event.put_slice(&body[1..]),
            Self::OpenAi | Self::Anthropic => event.put_slice(&body),
        }
        event.put_slice(b"\n\n");
        event.freeze()
    }
}

/// Returns the error object in Anthropic's format.
fn anthropic_body(failure: &ProxyError) -> Bytes {
    #[derive(Serialize)]
    struct Body {
        #[serde(rename = "type")]
        type_: &'static str,
        error: Error,
    }
    #[derive(Serialize)]
    struct Error {
        #[serde(rename = "type")]
        type_: &'static str,
        message: String,
    }
    let message = match failure {
        // Anthropic's clients look for this wording.
        ProxyError::ContextTooLong { tokens, tokens_max } => {
            format!("prompt is too long: {tokens} tokens > {tokens_max} maximum")
        }
        failure => failure.to_string(),
    };
    let body = Body {
        type_: "error",
        error: Error {
            type_: anthropic_type(rescue(failure).status),
            message,
        },
    };
    serde_json::to_vec(&body).expect("strings serialise").into()
}

/// Returns the error type that Anthropic's API uses for a status.
pub(in crate::proxy) fn anthropic_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(dialect: Dialect) -> String {
        let event = dialect.last_event(&ProxyError::EngineTimeout, false);
        String::from_utf8(event.to_vec()).unwrap()
    }

    #[test]
    fn a_failed_stream_ends_in_its_apis_format() {
        let openai = r#"{"error":{"message":"the backend did not respond in time","type":"server_error","param":null,"code":"backend_timeout"}}"#;
        assert_eq!(event(Dialect::OpenAi), format!("data: {openai}\n\n"));
        assert_eq!(
            event(Dialect::of("/v1/responses")),
            format!(
                "event: error\ndata: {{\"type\":\"error\",{}\n\n",
                &openai[1..]
            )
        );
        assert_eq!(
            event(Dialect::of("/v1/messages")),
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"timeout_error\",\"message\":\"the backend did not respond in time\"}}\n\n"
        );
    }
}
