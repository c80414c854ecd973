//! The only word for an attempt without a response: what the circuit breaker records, how the attempt
//! is charged, whether another backend may be tried, and what the client gets otherwise.

use bytes::Bytes;
use http::Response;
use state::ids::{BackendRef, UserKey};
use tokio::time::Instant;

use crate::engines::backends::pool::SendError;
use crate::error::ProxyError;
use crate::proxy::Proxy;
use crate::routing::{AttemptEnd, DecisionRecord};

/// Reason why an attempt yielded no response for the client.
#[derive(Debug)]
pub(in crate::proxy) enum AttemptError {
    /// The backend was removed or replaced after it was chosen.
    Gone,
    /// This replica had no descriptor or port for a connection.
    OutOfConnections(SendError),
    /// No connection could be made.
    Unreachable(SendError),
    /// The new connection broke before the request was sent.
    BrokeUnsent(SendError),
    /// The connection broke after the request was sent and before the response body began.
    Broke(SendError),
    /// The engine that computes the prompt for this backend failed before the response body began.
    WithoutPrompt,
    /// No connection was made by the deadline.
    TimedOutUnsent,
    /// The request was sent, but no response head arrived by the deadline.
    TimedOut,
    /// The backend responded with a redirect, which is not relayed: a client that followed it to the
    /// engine would not be counted.
    Redirected,
    /// The backend refused credentials that are not the client's.
    RefusedCredentials,
    /// The backend refused with this response. `None` if it was too long or too slow to pass on.
    Refused(Option<Box<Response<Bytes>>>),
    /// The backend reported an error in the content of a successful response, in place of output.
    /// The client receives this response with the status that the error stands for. The attempt
    /// ends as with that status.
    Reported(Box<Response<Bytes>>, AttemptEnd),
}

impl AttemptError {
    pub(in crate::proxy) fn of(error: SendError, is_sent: bool) -> Self {
        match error {
            SendError::Gone => Self::Gone,
            SendError::WithoutPrompt => Self::WithoutPrompt,
            error if error.is_local() => Self::OutOfConnections(error),
            SendError::Url(..) | SendError::Connect(_) | SendError::NotRepeated(_) => {
                Self::Unreachable(error)
            }
            SendError::Broke(_) | SendError::Ended | SendError::Informational if is_sent => {
                Self::Broke(error)
            }
            SendError::Broke(_) | SendError::Ended | SendError::Informational => {
                Self::BrokeUnsent(error)
            }
        }
    }

    /// Returns the name of the error in the admin API, metrics and traces.
    pub(in crate::proxy) fn label(&self) -> &'static str {
        match self {
            Self::Gone => "backend-removed",
            Self::OutOfConnections(_) => "out-of-connections",
            Self::Unreachable(_) => "unreachable",
            Self::BrokeUnsent(_) => "broke-unsent",
            Self::Broke(_) => "broke",
            Self::WithoutPrompt => "without-prompt",
            Self::TimedOutUnsent => "timed-out-unsent",
            Self::TimedOut => "timed-out",
            Self::Redirected => "redirected",
            Self::RefusedCredentials => "refused-credentials",
            Self::Refused(_) => "refused",
            Self::Reported(..) => "reported-error",
        }
    }

    /// Records the failure in the decision's record.
    pub(super) fn note(&self, record: &DecisionRecord) {
        match self {
            Self::OutOfConnections(error)
            | Self::Unreachable(error)
            | Self::BrokeUnsent(error)
            | Self::Broke(error) => record.failed_with(self.label(), error),
            Self::Gone
            | Self::WithoutPrompt
            | Self::TimedOutUnsent
            | Self::TimedOut
            | Self::Redirected
            | Self::RefusedCredentials
            | Self::Refused(_)
            | Self::Reported(..) => record.failed(self.label()),
        }
    }

    /// Reports the failure to the circuit breaker of `backend`. For a request that timed out after
    /// it was sent, the end of the attempt reports it; for a response, its status.
    pub(in crate::proxy) fn report(&self, proxy: &Proxy, backend: BackendRef, user: UserKey) {
        let (backends, now) = (&proxy.backends, Instant::now());
        match self {
            Self::Gone
            | Self::OutOfConnections(_)
            | Self::WithoutPrompt
            | Self::TimedOut
            | Self::RefusedCredentials
            | Self::Refused(_)
            | Self::Reported(..) => {}
            Self::Unreachable(_) | Self::TimedOutUnsent => {
                backends.report_no_answer(backend, None, now);
            }
            Self::BrokeUnsent(_) | Self::Broke(_) | Self::Redirected => {
                backends.report_no_answer(backend, Some(user), now);
            }
        }
    }

    /// Returns the end of the attempt, by which it is charged.
    pub(in crate::proxy) fn end(&self) -> AttemptEnd {
        match self {
            Self::Gone
            | Self::OutOfConnections(_)
            | Self::Unreachable(_)
            | Self::BrokeUnsent(_)
            | Self::WithoutPrompt
            | Self::TimedOutUnsent
            | Self::Redirected
            | Self::RefusedCredentials
            | Self::Refused(_) => AttemptEnd::NotRun,
            Self::Broke(_) => AttemptEnd::Failed,
            // The engine may have been computing until the timeout.
            Self::TimedOut => AttemptEnd::Broken,
            Self::Reported(_, end) => *end,
        }
    }

    /// Whether another backend may be tried.
    pub(super) fn may_retry(&self) -> bool {
        match self {
            // What ends an engine does not travel.
            Self::OutOfConnections(SendError::NotRepeated(_)) => false,
            Self::Gone
            | Self::OutOfConnections(_)
            | Self::Unreachable(_)
            | Self::WithoutPrompt
            | Self::Redirected
            | Self::RefusedCredentials
            | Self::Refused(_) => true,
            Self::BrokeUnsent(_)
            | Self::Broke(_)
            | Self::TimedOutUnsent
            | Self::TimedOut
            | Self::Reported(..) => false,
        }
    }

    /// Whether the backend may have run the request, and has certainly stopped.
    pub(super) fn may_have_begun(&self) -> bool {
        matches!(self, Self::Broke(_))
    }

    /// Whether the backend cannot be reached at all, so that a retry does not count against the
    /// retry budget.
    pub(super) fn is_unreachable(&self) -> bool {
        matches!(self, Self::Gone | Self::Unreachable(_))
    }

    /// Returns the refusal or the error that the client receives if no other backend is tried.
    pub(in crate::proxy) fn answer(self) -> Result<Response<Bytes>, ProxyError> {
        match self {
            Self::Gone | Self::Unreachable(_) => Err(ProxyError::Unreachable),
            Self::OutOfConnections(_) => Err(ProxyError::OutOfConnections),
            Self::BrokeUnsent(_) | Self::Broke(_) | Self::WithoutPrompt => {
                Err(ProxyError::EngineBroke)
            }
            Self::TimedOutUnsent | Self::TimedOut => Err(ProxyError::EngineTimeout),
            Self::Redirected => Err(ProxyError::Redirected),
            Self::RefusedCredentials => Err(ProxyError::RefusedCredentials),
            Self::Refused(refusal) => refusal.map(|it| *it).ok_or(ProxyError::Refused),
            Self::Reported(response, _) => Ok(*response),
        }
    }
}
