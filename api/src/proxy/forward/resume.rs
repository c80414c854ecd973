//! Goes on with a stream of another replica, which has failed or lost its client.
//!
//! The client brings the text back, so the stream goes on as after a failure of its engine
//! (`continuation.rs`). Before an engine is asked, this request takes the stream over in the log, which
//! says what is charged for it (ADR 0058).

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Response};

use super::continuation::{GoOnError, GoneOn, continuation, keep_body, respond_and_go_on, whole};
use super::request_context::ProxiedRequest;
use super::{AnswerParts, ForwardResult, Tries, excluded_at_first, give_up, prepare, relay_parts};
use crate::engines::backends::pool::Segments;
use crate::error::ProxyError;
use crate::proxy::Proxy;
use crate::proxy::record::broken_streams::{BreakLabels, BreakResult, StreamBreak};
use crate::proxy::record::metrics::RequestMetricsGuard;
use crate::proxy::request::headers::RESUMABLE;
use crate::proxy::response::answer_source::AnswerSource;
use crate::proxy::response::continuation::{
    COMPLETION_TOKENS, ContinueRejection, ContinuedBody, RelayedText, ResumeClaim, Seam,
    continued_body,
};
use crate::routing::ResumedStream;

/// Responds to a request that goes on behind what its client has received.
pub(super) async fn resume(
    proxy: &Arc<Proxy>,
    proxied: &Arc<ProxiedRequest>,
    claim: &ResumeClaim,
    request_metrics: &mut RequestMetricsGuard,
) -> Result<ForwardResult, ProxyError> {
    let resumed = match claim.id.answer.is_ended {
        true => complete(proxy, proxied, claim).await,
        false => carry_on(proxy, proxied, claim, request_metrics).await,
    };
    let (result, answer) = match resumed {
        Ok((result, answer)) => (result, Ok(answer)),
        Err(ResumeError::Obstacle(obstacle)) => {
            let result = BreakResult::from(&obstacle);
            let obstacle = obstacle.to_string();
            (result, Err(ProxyError::NotResumable { obstacle }))
        }
        Err(ResumeError::Other(why)) => {
            (BreakResult::from(&ContinueRejection::NoBackend), Err(why))
        }
    };
    let cause = StreamBreak::Router;
    proxy.metrics.stream_broke(&BreakLabels { cause, result });
    answer
}

/// Why a stream does not go on.
enum ResumeError {
    /// The answer cannot be continued.
    Obstacle(ContinueRejection),
    Other(ProxyError),
}

impl From<ContinueRejection> for ResumeError {
    fn from(obstacle: ContinueRejection) -> Self {
        Self::Obstacle(obstacle)
    }
}

impl From<ProxyError> for ResumeError {
    fn from(why: ProxyError) -> Self {
        Self::Other(why)
    }
}

impl From<GoOnError> for ResumeError {
    fn from(fault: GoOnError) -> Self {
        match fault {
            GoOnError::Obstacle(ContinueRejection::Refused(408 | 429 | 500..)) => {
                Self::Other(ProxyError::Refused)
            }
            GoOnError::Obstacle(obstacle) => Self::Obstacle(obstacle),
            GoOnError::NotAdmitted(why) => Self::Other(why),
            GoOnError::Failed(_) => Self::Other(ProxyError::Refused),
            GoOnError::Broke | GoOnError::Reported => Self::Other(ProxyError::EngineBroke),
            GoOnError::TimedOut => Self::Other(ProxyError::EngineTimeout),
        }
    }
}

type Resumed = Result<(BreakResult, ForwardResult), ResumeError>;

/// Sends the end of a stream that lacks nothing else.
async fn complete(proxy: &Arc<Proxy>, proxied: &ProxiedRequest, claim: &ResumeClaim) -> Resumed {
    // Charges what the log does not have yet.
    take_over(proxy, proxied, claim).await?;
    proxied.earlier.take_back();
    let wants_usage = proxied.parsed.include_usage == Some(true);
    let end = claim
        .id
        .end(is_chat(proxied), &proxied.parsed.model, wants_usage);
    let mut response = Response::new(end);
    let headers = response.headers_mut();
    let events = HeaderValue::from_static("text/event-stream");
    headers.insert(CONTENT_TYPE, events);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(RESUMABLE, HeaderValue::from_static("1"));
    Ok((BreakResult::COMPLETED, ForwardResult::Held(response)))
}

/// Lets an engine carry the stream on.
async fn carry_on(
    proxy: &Arc<Proxy>,
    proxied: &Arc<ProxiedRequest>,
    claim: &ResumeClaim,
    request_metrics: &mut RequestMetricsGuard,
) -> Resumed {
    let tokens_max = proxy.settings.streams.resume_max_tokens;
    let relayed = RelayedText::received(tokens_max, &claim.id.answer, &claim.text);
    let (mut sending, wanted) = prepare(proxy, proxied, request_metrics)?;
    let (path, body) = (proxied.head.uri.path(), whole(sending.body.clone()));
    let ContinuedBody {
        bytes,
        held_tokens_max,
    } = continued(path, &body, &relayed, claim)?;
    if !proxied.parsed.stream {
        return Err(ContinueRejection::Field("stream".to_owned()).into());
    }
    // Nothing that refuses the request may come after this one has taken the stream over.
    let kept = keep_body(proxy, proxied).ok_or(ProxyError::Overloaded)?;
    take_over(proxy, proxied, claim).await?;
    sending.body = Segments::from(bytes.clone());
    sending.continued = Some(bytes);
    let mut tries = Tries {
        excluded: excluded_at_first(proxy, proxied).await?,
        count: 0,
        is_move: false,
    };
    let seam = Seam::behind(&relayed, is_chat(proxied), held_tokens_max);
    let behind = (Some(&seam), &*claim.text);
    let gone_on = respond_and_go_on(
        proxy,
        proxied,
        &mut sending,
        &mut tries,
        request_metrics,
        behind,
    )
    .await;
    let GoneOn {
        head,
        decision,
        mut answer,
    } = match gone_on {
        Err(GoOnError::Failed(failure)) => {
            let result = BreakResult::from(&ContinueRejection::NoBackend);
            return Ok((result, give_up(failure)?));
        }
        gone_on => gone_on?,
    };
    let mut continuation = continuation(proxy, proxied, kept, (tries, answer.slot));
    if let Some(seam) = answer.seam.take() {
        continuation.follow(relayed, seam, answer.first);
    }
    let parts = AnswerParts {
        response: Response::from_parts(head, AnswerSource::Engine(answer.body)),
        attempt: answer.attempt,
        decision,
        continuation: Some(continuation),
    };
    let relayed = relay_parts(proxy, &sending, parts, wanted).await;
    Ok((BreakResult::CONTINUED, relayed))
}

/// Returns the body that continues what the client has received.
fn continued(
    path: &str,
    body: &Bytes,
    relayed: &RelayedText,
    claim: &ResumeClaim,
) -> Result<ContinuedBody, ContinueRejection> {
    let tokens_max = (!claim.id.is_endless).then_some(COMPLETION_TOKENS);
    continued_body(path, body, relayed, tokens_max)
}

/// Takes the stream over, so that the attempt which goes on begins with what is charged for it.
async fn take_over(
    proxy: &Proxy,
    proxied: &ProxiedRequest,
    claim: &ResumeClaim,
) -> Result<(), ProxyError> {
    let Some(carried) = proxied.carried else {
        return Ok(());
    };
    let stream = ResumedStream {
        user: proxied.user.clone(),
        model: proxied.parsed.model.clone(),
        session: proxied.session,
        carried,
        usage: claim.id.answer.usage(),
        estimated_prompt: proxied.identity.tokens.into(),
    };
    let taken = proxy.dispatcher.take_over(stream);
    let earlier = taken.await.ok_or(ProxyError::Unconfirmed)?;
    proxied.earlier.resume(earlier);
    Ok(())
}

fn is_chat(proxied: &ProxiedRequest) -> bool {
    proxied.head.uri.path() == "/v1/chat/completions"
}
