//! The history of a run: what clients did and what they were told.
//!
//! Administrative writes and reads are [`Operation`]s, requests for inference are
//! [`InferenceRequest`]s. What a client was not told, the history does not know: a write that timed
//! out is [`OperationResult::Unknown`] and may take effect once, at any later time, or never.

use state::command::{Command, Committed};
use state::ids::{BackendRef, LogIndex};

use super::observation::ReplicaRun;
use super::register::{RegisterKey, RegisterText};

/// Names an operation or a request of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HistoryId(usize);

/// Everything the clients did, in the order of the calls.
#[derive(Debug, Default)]
pub struct History {
    /// Administrative writes and reads.
    pub operations: Vec<Operation>,
    /// Requests for inference.
    pub requests: Vec<InferenceRequest>,
}

/// One administrative write or read.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// Who asked. A client has one operation under way at a time.
    pub client: u32,
    /// Whom.
    pub run: ReplicaRun,
    /// When it asked.
    pub called_at_us: u64,
    /// When it was answered; `None`: it was not, or its replica crashed.
    pub returned_at_us: Option<u64>,
    /// For what.
    pub action: Action,
    /// What it was told; [`OperationResult::Unknown`] until it is.
    pub outcome: OperationResult,
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// To write.
    Write(Command),
    /// To read behind a barrier: to see everything that was committed when it asked.
    Read(RegisterKey),
}

/// What a client knows of what it asked for.
#[derive(Debug, Clone, PartialEq)]
pub enum OperationResult {
    /// The write stands in the log, and was answered.
    Written(Committed),
    /// It was read.
    Read {
        /// Index up to which the state was applied that was looked at.
        index: LogIndex,
        /// What was there.
        value: RegisterText,
    },
    /// It did not happen and will not.
    Refused,
    /// It may have happened, may happen yet, once, or not at all.
    Unknown,
}

/// One request for inference, from its call to its end.
#[derive(Debug, Clone, PartialEq)]
pub struct InferenceRequest {
    /// Who serves it.
    pub run: ReplicaRun,
    /// Who pays.
    pub user: String,
    /// When it came.
    pub called_at_us: u64,
    /// The most that its user is to be charged, whatever becomes of it.
    pub most: RequestTokens,
    /// To which backends it went, one after the other.
    pub dispatches: Vec<Dispatch>,
    /// What an engine computed for it; `None`: that is not known.
    pub computed: Option<RequestTokens>,
    /// How it ended; `None`: not yet, or its replica crashed before.
    pub end: Option<RequestEnd>,
}

/// One attempt of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dispatch {
    /// When.
    pub at_us: u64,
    /// Which backend.
    pub backend: BackendRef,
    /// Applied index of the replica just before the decision and just after.
    pub seen: (LogIndex, LogIndex),
}

/// The end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestEnd {
    /// When the attempt was given back.
    pub at_us: u64,
    /// What the engine said it used; `None`: it said nothing, so that the router may charge what it
    /// estimates.
    pub used: Option<RequestTokens>,
}

/// Tokens of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestTokens {
    /// Prompt tokens that the engine computed.
    pub input_uncached: u64,
    /// Prompt tokens that it had cached.
    pub input_cached: u64,
    /// Output tokens.
    pub output: u64,
}

impl History {
    /// A client asks for something.
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

    /// It is answered.
    pub fn answer(&mut self, ticket: HistoryId, at_us: u64, outcome: OperationResult) {
        let operation = &mut self.operations[ticket.0];
        operation.returned_at_us = Some(at_us);
        operation.outcome = outcome;
    }

    /// A request comes.
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

    /// It goes to a backend.
    pub fn dispatched(&mut self, ticket: HistoryId, dispatch: Dispatch) {
        self.requests[ticket.0].dispatches.push(dispatch);
    }

    /// An engine has computed so much for it, whatever it told.
    pub fn computed(&mut self, ticket: HistoryId, tokens: RequestTokens) {
        self.requests[ticket.0].computed = Some(tokens);
    }

    /// It ends.
    pub fn ended(&mut self, ticket: HistoryId, end: RequestEnd) {
        self.requests[ticket.0].end = Some(end);
    }
}
