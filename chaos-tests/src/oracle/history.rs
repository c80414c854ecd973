//! The history of a run: what clients did and what they were told.
//!
//! Administrative writes and reads are [`Operation`]s, requests for inference are [`Request`]s. What
//! a client was not told, the history does not know: a write that timed out is [`Outcome::Unknown`] and
//! may take effect once, at any later time, or never.

use state::command::{Command, Committed};
use state::ids::{BackendRef, LogIndex};

use super::observation::Run;
use super::register::{Key, Value};

/// Names an operation or a request of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(usize);

/// Everything the clients did, in the order of the calls.
#[derive(Debug, Default)]
pub struct History {
    /// Administrative writes and reads.
    pub operations: Vec<Operation>,
    /// Requests for inference.
    pub requests: Vec<Request>,
}

/// One administrative write or read.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// Who asked. A client has one operation under way at a time.
    pub client: u32,
    /// Whom.
    pub run: Run,
    /// When it asked.
    pub called_at_us: u64,
    /// When it was answered; `None`: it was not, or its replica crashed.
    pub returned_at_us: Option<u64>,
    /// For what.
    pub action: Action,
    /// What it was told; [`Outcome::Unknown`] until it is.
    pub outcome: Outcome,
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// To write.
    Write(Command),
    /// To read behind a barrier: to see everything that was committed when it asked.
    Read(Key),
}

/// What a client knows of what it asked for.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The write stands in the log, and was answered.
    Written(Committed),
    /// It was read.
    Read {
        /// Index up to which the state was applied that was looked at.
        index: LogIndex,
        /// What was there.
        value: Value,
    },
    /// It did not happen and will not.
    Refused,
    /// It may have happened, may happen yet, once, or not at all.
    Unknown,
}

/// One request for inference, from its call to its end.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Who serves it.
    pub run: Run,
    /// Who pays.
    pub user: String,
    /// When it came.
    pub called_at_us: u64,
    /// The most that its user is to be charged, whatever becomes of it.
    pub most: Tokens,
    /// To which backends it went, one after the other.
    pub dispatches: Vec<Dispatch>,
    /// What an engine computed for it; `None`: that is not known.
    pub computed: Option<Tokens>,
    /// How it ended; `None`: not yet, or its replica crashed before.
    pub end: Option<End>,
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
pub struct End {
    /// When the attempt was given back.
    pub at_us: u64,
    /// What the engine said it used; `None`: it said nothing, so that the router may charge what it
    /// estimates.
    pub used: Option<Tokens>,
}

/// Tokens of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tokens {
    /// Prompt tokens that the engine computed.
    pub input_uncached: u64,
    /// Prompt tokens that it had cached.
    pub input_cached: u64,
    /// Output tokens.
    pub output: u64,
}

impl History {
    /// A client asks for something.
    pub fn call(&mut self, client: u32, run: Run, at_us: u64, action: Action) -> Ticket {
        self.operations.push(Operation {
            client,
            run,
            called_at_us: at_us,
            returned_at_us: None,
            action,
            outcome: Outcome::Unknown,
        });
        Ticket(self.operations.len() - 1)
    }

    /// It is answered.
    pub fn answer(&mut self, ticket: Ticket, at_us: u64, outcome: Outcome) {
        let operation = &mut self.operations[ticket.0];
        operation.returned_at_us = Some(at_us);
        operation.outcome = outcome;
    }

    /// A request comes.
    pub fn request(&mut self, run: Run, user: &str, at_us: u64, most: Tokens) -> Ticket {
        self.requests.push(Request {
            run,
            user: user.to_owned(),
            called_at_us: at_us,
            most,
            dispatches: Vec::new(),
            computed: None,
            end: None,
        });
        Ticket(self.requests.len() - 1)
    }

    /// It goes to a backend.
    pub fn dispatched(&mut self, ticket: Ticket, dispatch: Dispatch) {
        self.requests[ticket.0].dispatches.push(dispatch);
    }

    /// An engine has computed so much for it, whatever it told.
    pub fn computed(&mut self, ticket: Ticket, tokens: Tokens) {
        self.requests[ticket.0].computed = Some(tokens);
    }

    /// It ends.
    pub fn ended(&mut self, ticket: Ticket, end: End) {
        self.requests[ticket.0].end = Some(end);
    }
}
