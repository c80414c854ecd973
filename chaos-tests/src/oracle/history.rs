//! The history of a run: operations of clients and their results.
//!
//! Administrative writes and reads are [`Operation`]s, inference requests are
//! [`InferenceRequest`]s. The history holds only what clients know: a write that timed out is
//! [`OperationResult::Unknown`] and may take effect once, at any later time, or never.

use state::command::{Command, Committed};
use state::ids::{BackendRef, LogIndex};

use super::observation::ReplicaRun;
use super::register::{RegisterKey, RegisterText};

/// Identifies an operation or a request in a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HistoryId(usize);

/// Everything that clients did, in the order of the calls.
#[derive(Debug, Default)]
pub struct History {
    /// Administrative writes and reads.
    pub operations: Vec<Operation>,
    /// Inference requests.
    pub requests: Vec<InferenceRequest>,
}

/// One administrative write or read.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// The client, which has one operation under way at a time.
    pub client: u32,
    /// The replica's run that was called.
    pub run: ReplicaRun,
    /// Time of the call.
    pub called_at_us: u64,
    /// Time of the response; `None` if none arrived or the replica crashed.
    pub returned_at_us: Option<u64>,
    /// The requested action.
    pub action: Action,
    /// The result; [`OperationResult::Unknown`] until there is one.
    pub outcome: OperationResult,
}

/// An action that a client requests.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Writes a command.
    Write(Command),
    /// Reads behind a barrier, and so sees everything committed before the call.
    Read(RegisterKey),
}

/// A client's knowledge of the result.
#[derive(Debug, Clone, PartialEq)]
pub enum OperationResult {
    /// The write was committed and acknowledged.
    Written(Committed),
    /// The read succeeded.
    Read {
        /// Applied index of the state that was read.
        index: LogIndex,
        /// The value.
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
    /// The run that serves the request.
    pub run: ReplicaRun,
    /// The user who is charged.
    pub user: String,
    /// Time of arrival.
    pub called_at_us: u64,
    /// Maximum charge of the user, whatever happens to the request.
    pub most: RequestTokens,
    /// Attempts, in order.
    pub dispatches: Vec<Dispatch>,
    /// Tokens that an engine computed; `None` if that is not known.
    pub computed: Option<RequestTokens>,
    /// End of the request; `None` if it is under way or its replica crashed.
    pub end: Option<RequestEnd>,
}

/// One attempt of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dispatch {
    /// Time of the dispatch.
    pub at_us: u64,
    /// The backend.
    pub backend: BackendRef,
    /// Applied index of the replica just before the decision and just after.
    pub seen: (LogIndex, LogIndex),
}

/// The end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestEnd {
    /// Time at which the attempt was given back.
    pub at_us: u64,
    /// Usage reported by the engine; `None` if it reported none, so that the router may charge an
    /// estimate.
    pub used: Option<RequestTokens>,
}

/// Tokens of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestTokens {
    /// Prompt tokens that the engine computed.
    pub input_uncached: u64,
    /// Prompt tokens found in the engine's cache.
    pub input_cached: u64,
    /// Output tokens.
    pub output: u64,
}

impl History {
    /// Records the call of an operation.
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

    /// Records the response to an operation.
    pub fn answer(&mut self, ticket: HistoryId, at_us: u64, outcome: OperationResult) {
        let operation = &mut self.operations[ticket.0];
        operation.returned_at_us = Some(at_us);
        operation.outcome = outcome;
    }

    /// Records the arrival of a request.
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
            end: None,
        });
        HistoryId(self.requests.len() - 1)
    }

    /// Records a dispatch of a request.
    pub fn dispatched(&mut self, ticket: HistoryId, dispatch: Dispatch) {
        self.requests[ticket.0].dispatches.push(dispatch);
    }

    /// Records what an engine computed for a request, reported or not.
    pub fn computed(&mut self, ticket: HistoryId, tokens: RequestTokens) {
        self.requests[ticket.0].computed = Some(tokens);
    }

    /// Records the end of a request.
    pub fn ended(&mut self, ticket: HistoryId, end: RequestEnd) {
        self.requests[ticket.0].end = Some(end);
    }
}
