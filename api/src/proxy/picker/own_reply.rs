//! Responses that a gateway makes itself: refusals of its filters, its own timeouts, and its own
//! errors. They pass unchanged, and no engine is blamed for one unless the gateway says that the
//! engine's connection failed.
//!
//! Envoy says who made a response in the attribute `response.code_details`, if its operator lists
//! it in `response_attributes`. Otherwise the head tells: Envoy gives its own 503 and 504 nothing
//! but a type and a length, and engines and the servers before them give a `date` or `server`.

use std::io;
use std::time::Duration;

use http::header::{CONTENT_TYPE, DATE, SERVER};
use http::{HeaderMap, HeaderName, StatusCode};
use tokio::time::timeout;
use tonic::Status;

use super::BodyMode;
use super::gateway_message::ToldPart;
use super::gateway_reply::GatewayReply;
use super::inbound::{GatewayMessages, StreamHalt, out_of_turn};
use super::outbound::{BodyOf, PickerMessages, answer_head, answer_trailers};
use super::relayed_answer::send_pieces;
use crate::engines::backends::pool::SendError;
use crate::proxy::forward::attempt::AttemptError;
use crate::routing::AttemptEnd;

/// Value of the attribute for an engine's response.
const VIA_UPSTREAM: &str = "via_upstream";
/// Beginning of the attribute's value if the connection to the engine failed.
const RESET: &str = "upstream_reset_before_response_started{";
/// Reasons of a reset that are the gateway's own: its limits, and what it cancelled itself.
const RESET_BY_GATEWAY: [&str; 3] = ["overflow", "overload", "local_"];
/// Reasons of a reset before the engine accepted the request.
const RESET_UNSENT: [&str; 3] = [
    "remote_connection_failure",
    "connection_timeout",
    "remote_refused_stream",
];
/// Header that Envoy adds to an engine's response.
const SERVICE_TIME: HeaderName = HeaderName::from_static("x-envoy-upstream-service-time");

/// Why the gateway responded after it got the endpoints for a request.
#[derive(Debug)]
pub(super) enum ReplyCause {
    /// It sent the request to no engine.
    NotSent,
    /// It gave up waiting for the engine, which may have been computing.
    GaveUp,
    /// The engine failed.
    Engine(AttemptError),
}

/// Lets the gateway's own response pass to its end in the gateway's `mode`. `idle` is the maximum silence of
/// the gateway.
pub(super) async fn let_pass(
    reply: &GatewayReply,
    (mode, idle, mut held_back): (BodyMode, Duration, Duration),
    inbound: &mut GatewayMessages,
    out: &PickerMessages,
) -> Result<(), StreamHalt> {
    out.send(answer_head(None)).await?;
    let mut is_over = reply.is_over;
    while !is_over {
        let Ok(message) = timeout(idle, inbound.next()).await else {
            let why = "the gateway's own response stopped";
            return Err(StreamHalt::Broken(Status::deadline_exceeded(why)));
        };
        match message?.told {
            ToldPart::ResponseBody(piece) => {
                is_over = piece.end_of_stream;
                match mode {
                    BodyMode::Duplex => {
                        send_pieces(piece.body, is_over, (out, &mut held_back)).await?;
                    }
                    BodyMode::Streamed | BodyMode::StreamedEarly | BodyMode::Buffered => {
                        let passes = BodyOf::Answer.passes();
                        out.send_within(passes, &mut held_back).await?;
                    }
                }
            }
            ToldPart::ResponseTrailers => return out.send(answer_trailers()).await,
            told => return Err(out_of_turn(&told, "within the gateway's own response")),
        }
    }
    Ok(())
}

impl ReplyCause {
    /// Judges a response by the gateway's reason, if known, or else by its head. Returns `None` if
    /// an engine made it.
    pub(super) fn of(
        status: StatusCode,
        headers: &HeaderMap,
        details: Option<&str>,
    ) -> Option<Self> {
        let Some(details) = details else {
            return is_bare(status, headers).then(|| Self::by_status(status));
        };
        if details.starts_with(VIA_UPSTREAM) {
            return None;
        }
        let Some(why) = details.strip_prefix(RESET) else {
            return Some(Self::by_status(status));
        };
        let begins = |reasons: &[&str]| reasons.iter().any(|it| why.starts_with(it));
        Some(if begins(&RESET_BY_GATEWAY) {
            Self::by_status(status)
        } else if begins(&RESET_UNSENT) {
            let why = io::Error::other(details.to_owned());
            Self::Engine(AttemptError::Unreachable(SendError::Connect(why)))
        } else {
            Self::Engine(AttemptError::Broke(SendError::Ended))
        })
    }

    fn by_status(status: StatusCode) -> Self {
        match status.is_server_error() && status != StatusCode::SERVICE_UNAVAILABLE {
            true => Self::GaveUp,
            false => Self::NotSent,
        }
    }

    /// Returns the end of the attempt, by which it is charged.
    pub(super) fn end(&self) -> AttemptEnd {
        match self {
            Self::NotSent => AttemptEnd::NotRun,
            Self::GaveUp => AttemptEnd::ClientLeft,
            Self::Engine(failure) => failure.end(),
        }
    }
}

/// Whether a 503 or 504 is the gateway's own by its head. Any other response counts as the engine's.
fn is_bare(status: StatusCode, headers: &HeaderMap) -> bool {
    let is_own = [StatusCode::SERVICE_UNAVAILABLE, StatusCode::GATEWAY_TIMEOUT];
    let of_servers = [SERVICE_TIME, DATE, SERVER];
    is_own.contains(&status)
        && headers
            .get(CONTENT_TYPE)
            .is_some_and(|it| it == "text/plain")
        && !of_servers.iter().any(|name| headers.contains_key(name))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    /// Headers of Envoy's own responses.
    const BARE: [(&str, &str); 2] = [("content-type", "text/plain"), ("content-length", "19")];

    /// Returns how the attempt ends after such a response; `None` if it is an engine's.
    fn end(status: u16, fields: &[(&'static str, &str)], told: Option<&str>) -> Option<AttemptEnd> {
        let field = |(name, value): &(&'static str, &str)| {
            let name = HeaderName::from_static(name);
            (name, HeaderValue::from_str(value).unwrap())
        };
        let headers = fields.iter().map(field).collect();
        let status = StatusCode::from_u16(status).unwrap();
        ReplyCause::of(status, &headers, told).map(|cause| cause.end())
    }

    #[test]
    fn envoys_reason_decides_whose_response_it_is() {
        use AttemptEnd::{ClientLeft, Failed, NotRun};
        for (status, details, expected) in [
            (200, "via_upstream", None),
            (503, "via_upstream", None),
            (504, "via_upstream", None),
            (504, "response_timeout", Some(ClientLeft)),
            (504, "upstream_per_try_timeout", Some(ClientLeft)),
            (500, "response_payload_too_large", Some(ClientLeft)),
            (503, "no_healthy_upstream", Some(NotRun)),
            (503, "cluster_not_found", Some(NotRun)),
            (404, "route_not_found", Some(NotRun)),
            (403, "rbac_access_denied_matched_policy[none]", Some(NotRun)),
            (200, "direct_response", Some(NotRun)),
            (
                503,
                "upstream_reset_before_response_started{overflow}",
                Some(NotRun),
            ),
            (
                503,
                "upstream_reset_before_response_started{local_connection_failure}",
                Some(NotRun),
            ),
            (
                503,
                "upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_111}",
                Some(NotRun),
            ),
            (
                503,
                "upstream_reset_before_response_started{connection_termination}",
                Some(Failed),
            ),
            (
                502,
                "upstream_reset_before_response_started{protocol_error}",
                Some(Failed),
            ),
            (
                503,
                "upstream_reset_before_response_started{remote_reset}",
                Some(Failed),
            ),
        ] {
            let told = end(status, &BARE, Some(details));
            assert_eq!(told, expected, "{status} {details}");
        }
    }

    #[test]
    fn without_a_reason_only_bare_heads_are_the_gateways() {
        assert_eq!(end(504, &BARE, None), Some(AttemptEnd::ClientLeft));
        assert_eq!(end(503, &BARE, None), Some(AttemptEnd::NotRun));
        for status in [200, 429, 500, 502] {
            assert_eq!(end(status, &BARE, None), None, "{status}");
        }
        for more in [
            ("date", "Sat, 28 Nov 2026 15:56:00 GMT"),
            ("server", "uvicorn"),
            ("x-envoy-upstream-service-time", "3"),
        ] {
            let [one, two] = BARE;
            assert_eq!(end(503, &[one, two, more], None), None, "{more:?}");
        }
        for kind in ["text/plain; charset=utf-8", "application/json", "text/html"] {
            assert_eq!(end(503, &[("content-type", kind)], None), None, "{kind}");
        }
        assert_eq!(end(503, &[], None), None);
    }
}
