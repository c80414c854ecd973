//! The head of a response to a request that a gateway sent to an engine: which endpoint made it, and
//! what that means for the attempt.

use std::net::SocketAddr;

use http::{HeaderMap, StatusCode};
use tokio::time::Instant;

use super::Picker;
use super::gateway_reply::GatewayReply;
use super::inbound::StreamHalt;
use super::metrics::ServedBy;
use super::offer::EndpointOffer;
use super::own_reply::ReplyCause;
use crate::error::ProxyError;
use crate::proxy::forward::attempt::{AttemptError, OutgoingRequest, fail};
use crate::proxy::forward::blame::{refuses_router, report_status};
use crate::proxy::forward::request_context::ProxiedRequest;
use crate::proxy::record::metrics::RequestMetricsGuard;
use crate::proxy::record::outcome::RequestOutcome;
use crate::routing::{Attempt, AttemptEnd, Decision};

/// Head of a response, as the gateway reports it.
pub(super) struct AnswerHead {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    /// Whether no body follows.
    pub(super) is_over: bool,
    /// Endpoint that responded; `None` if the gateway does not report it.
    pub(super) served: Option<SocketAddr>,
    /// The gateway's reason for the response; `None` if it sends none.
    pub(super) details: Option<String>,
}

/// An offer that was sent to a gateway.
pub(super) struct SentOffer {
    pub(super) offer: EndpointOffer,
    pub(super) sent_at: Instant,
}

impl SentOffer {
    /// Returns the decision and attempt for the engine that responded. Ends the attempt if the
    /// gateway responded itself, or the engine's response is not relayed.
    pub(super) fn judge(
        &self,
        picker: &Picker,
        (decision, attempt): (Decision, Attempt),
        (sending, head): (&OutgoingRequest<'_>, &AnswerHead),
        request_metrics: &mut Option<RequestMetricsGuard>,
    ) -> Result<(Decision, Attempt), StreamHalt> {
        let proxy = &picker.proxy;
        let details = head.details.as_deref();
        let cause = ReplyCause::of(head.status, &head.headers, details);
        let (by, further) = self.served(head);
        let by = cause.as_ref().map_or(by, |_| ServedBy::Gateway);
        picker.metrics.served(by);
        let dispatched = (decision, attempt);
        let (decision, attempt) = match further {
            // Nothing was sent to it.
            Some(_) if matches!(cause, Some(ReplyCause::NotSent)) => dispatched,
            Some(further) => self.redispatched(picker, dispatched, (further, sending.proxied)),
            None => dispatched,
        };
        if let Some(cause) = cause {
            let end = cause.end();
            let outcome = match cause {
                ReplyCause::Engine(failure) => {
                    failure.report(proxy, decision.backend, attempt.user());
                    fail(proxy, sending, &decision, attempt, failure);
                    RequestOutcome::Failed
                }
                ReplyCause::NotSent | ReplyCause::GaveUp => {
                    attempt.end(end, Instant::now());
                    RequestOutcome::GatewayReply
                }
            };
            let reply = GatewayReply {
                status: Some(head.status),
                is_over: head.is_over,
                details: head.details.clone(),
            };
            if let Some(request_metrics) = request_metrics.take() {
                reply.account(request_metrics, outcome);
            }
            return Err(StreamHalt::Replied(reply));
        }
        let failure = if head.status.is_redirection() {
            AttemptError::Redirected
        } else if refuses_router(proxy, sending.proxied, decision.backend, head.status) {
            let to = (decision.backend, attempt.user());
            report_status(proxy, to, head.status, true);
            AttemptError::RefusedCredentials
        } else {
            return Ok((decision, attempt));
        };
        failure.report(proxy, decision.backend, attempt.user());
        let failure = fail(proxy, sending, &decision, attempt, failure);
        let failure = failure.answer().err();
        Err(failure.unwrap_or(ProxyError::EngineBroke).into())
    }

    /// Returns which endpoint responded, and the decision for it if it is a further one.
    fn served(&self, head: &AnswerHead) -> (ServedBy, Option<Decision>) {
        match head.served {
            None => (ServedBy::Untold, None),
            Some(served) if served == self.offer.first => (ServedBy::First, None),
            Some(served) => {
                let mut further = self.offer.further.iter();
                match further.find(|(endpoint, _)| *endpoint == served) {
                    Some((_, further)) => (ServedBy::Further, Some(further.clone())),
                    None => (ServedBy::Other, None),
                }
            }
        }
    }

    /// Moves the attempt to a further backend, because the gateway reports that it used this one.
    /// The dispatched one was unreachable.
    fn redispatched(
        &self,
        picker: &Picker,
        (decision, mut attempt): (Decision, Attempt),
        (further, proxied): (Decision, &ProxiedRequest),
    ) -> (Decision, Attempt) {
        let proxy = &picker.proxy;
        if let Some(trace) = attempt.trace() {
            trace.failed("unreachable");
        }
        attempt.end(AttemptEnd::NotRun, Instant::now());
        let now = Instant::now();
        proxy.backends.report_no_answer(decision.backend, None, now);
        proxy.metrics.retries.inc();
        if let Some(record) = &proxied.record {
            let waited = std::time::Duration::ZERO;
            proxy.decisions.decided(record, &further, waited);
        }
        let admission = &proxy.admission;
        let mut attempt = admission.redispatch(&further, proxied, self.sent_at);
        attempt.traces(proxied.attempts(&further.name, "answer"));
        (further, attempt)
    }
}
