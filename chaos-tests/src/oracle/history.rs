//! The history of a run: operations of clients and their results.
//!
//! Administrative writes and reads are [`Operation`]s, inference requests are
//! [`InferenceRequest`]s. The history contains only the knowledge of clients: a write that timed
//! out is [`OperationResult::Unknown`] and may take effect once, at any later time, or never.

use state::command::{Command, Committed};
use state::ids::{AgentSessionKey, BackendRef, LogIndex};

use super::observation::ReplicaRun;
use super::register::{RegisterKey, RegisterText};

/// Identifier of an operation or a request in a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HistoryId(usize);

/// All operations and requests of clients, each in the order of the calls.
#[derive(Debug, Default)]
pub struct History {
    /// Administrative writes and reads.
    pub operations: Vec<Operation>,
    /// Inference requests.
    pub requests: Vec<InferenceRequest>,
}

/// One administrative write or read of a client.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// Client that called, which has one operation in flight at a time.
    pub client: u32,
    /// Run of the replica that the client called.
    pub run: ReplicaRun,
    /// Time of the call, in microseconds.
    pub called_at_us: u64,
    /// Time of the response, in microseconds; `None` if none arrived or the replica crashed.
    pub returned_at_us: Option<u64>,
    /// The requested action.
    pub action: Action,
    /// Result of the operation; [`OperationResult::Unknown`] until there is one.
    pub outcome: OperationResult,
}

/// An action that a client requests.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Administrative write that proposes this command.
    Write(Command),
    /// Read behind a barrier, which sees everything committed before the call.
    Read(RegisterKey),
}

/// Result of an operation, as far as its client knows it.
#[derive(Debug, Clone, PartialEq)]
pub enum OperationResult {
    /// The write was committed and acknowledged.
    Written(Committed),
    /// The read succeeded.
    Read {
        /// Applied index of the state that was read.
        index: LogIndex,
        /// Value that was read.
        value: RegisterText,
    },
    /// The action did not happen and never will.
    Refused,
    /// The action may have happened, or may happen later, at most once.
    Unknown,
}

/// One inference request, from its call to its end.
#[derive(Debug, Clone, PartialEq)]
pub struct InferenceRequest {
    /// Run of the replica that serves the request.
    pub run: ReplicaRun,
    /// User who is charged for the request.
    pub user: String,
    /// Time of arrival, in microseconds.
    pub called_at_us: u64,
    /// Maximum tokens that the user may be charged for, whatever happens to the request.
    pub most: RequestTokens,
    /// Attempts to serve the request, in order.
    pub dispatches: Vec<Dispatch>,
    /// Tokens that an engine computed for the request; `None` if that is not known.
    pub computed: Option<RequestTokens>,
    /// Turn of a session that no other request belongs to; `None` if the session has more turns, or
    /// the request has not ended.
    pub turn: Option<OnlyTurn>,
    /// End of the request; `None` if it is in flight or its replica crashed.
    pub end: Option<RequestEnd>,
}

/// The only turn of a session: one answer, however many engines generated it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnlyTurn {
    /// Session of the turn.
    pub session: AgentSessionKey,
    /// Whether an engine may have run the request, so that the turn counts.
    pub has_run: bool,
    /// Number of prompt tokens.
    pub input: u64,
    /// Number of output tokens; `None` if the router has to estimate it.
    pub output: Option<u64>,
}

/// One attempt to serve a request at a backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dispatch {
    /// Time of the dispatch, in microseconds.
    pub at_us: u64,
    /// Backend that the request was sent to.
    pub backend: BackendRef,
    /// Applied indices of the replica just before and just after the decision.
    pub seen: (LogIndex, LogIndex),
}

/// The end of a request, as its replica sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestEnd {
    /// Time at which the last attempt ended, in microseconds.
    pub at_us: u64,
    /// Usage reported by the engine; `None` if it reported none, so that the router may charge an
    /// estimate.
    pub used: Option<RequestTokens>,
}

/// Number of tokens of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestTokens {
    /// Number of prompt tokens that the engine computed.
    pub input_uncached: u64,
    /// Number of prompt tokens found in the engine's cache.
    pub input_cached: u64,
    /// Number of output tokens.
    pub output: u64,
}

impl History {
    /// Records that a client called an operation. Its result is unknown until [`History::answer`].
    pub fn call(&mut self, client: u32, run: ReplicaRun, at_us: u64, action: Action) -> HistoryId {
        self.operations.push(Operation {
            client,
            run,
            called_at_us: at_us,
            returned_at_us: None,
            action,
            outcome: OperationResult::Unknown,
        });
        HistoryId(self.operations.len() - 1)
    }

    /// Records the response to an operation, and its time.
    pub fn answer(&mut self, ticket: HistoryId, at_us: u64, outcome: OperationResult) {
        let operation = &mut self.operations[ticket.0];
        operation.returned_at_us = Some(at_us);
        operation.outcome = outcome;
    }

    /// Records the arrival of a request that may be charged for at most `most` tokens.
    pub fn request(
        &mut self,
        run: ReplicaRun,
        user: &str,
        at_us: u64,
        most: RequestTokens,
    ) -> HistoryId {
        self.requests.push(InferenceRequest {
            run,
            user: user.to_owned(),
            called_at_us: at_us,
            most,
            dispatches: Vec::new(),
            computed: None,
            turn: None,
            end: None,
        });
        HistoryId(self.requests.len() - 1)
    }

    /// Records an attempt to serve a request.
    pub fn dispatched(&mut self, ticket: HistoryId, dispatch: Dispatch) {
        self.requests[ticket.0].dispatches.push(dispatch);
    }

    /// Records the tokens that an engine computed for a request, whether it reported them or not.
    pub fn computed(&mut self, ticket: HistoryId, tokens: RequestTokens) {
        self.requests[ticket.0].computed = Some(tokens);
    }

    /// Records the only turn of a request's session.
    pub fn turned(&mut self, ticket: HistoryId, turn: OnlyTurn) {
        self.requests[ticket.0].turn = Some(turn);
    }

    /// Records the end of a request.
    pub fn ended(&mut self, ticket: HistoryId, end: RequestEnd) {
        self.requests[ticket.0].end = Some(end);
    }
}
