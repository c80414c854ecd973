//! Kinds of clients in a soak, with their users, shares and behaviours.

use crate::hostile::engine::{FAILING, LARGE_TOKENS, POISON};
use crate::kinds::kinds;

/// Point at which a client leaves before the end of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeavePoint {
    /// The client does not leave.
    Never,
    /// The client leaves after this many chunks of the body.
    AfterPieces(u32),
    /// The client leaves this many milliseconds after the request.
    AfterMs(u64),
    /// The client does not leave, but reads slowly.
    Dawdles,
}

/// Behaviour of a user who sends inference requests.
#[derive(Debug, Clone, Copy)]
pub(super) struct UserBehaviour {
    /// Maximum wait for the end of a response, in milliseconds.
    pub(super) patience_ms: u64,
    /// Maximum number of retries of a request.
    pub(super) retries: u32,
    pub(super) leaves: LeavePoint,
    /// Number of output tokens that a request asks for.
    pub(super) tokens: u64,
    pub(super) is_streamed: bool,
    pub(super) wants_logprobs: bool,
    pub(super) makes_up_names: bool,
    /// Text that the user's prompts contain.
    pub(super) mark: &'static str,
}

impl Default for UserBehaviour {
    fn default() -> Self {
        Self {
            patience_ms: 60_000,
            retries: 0,
            leaves: LeavePoint::Never,
            tokens: TOKENS,
            is_streamed: true,
            wants_logprobs: false,
            makes_up_names: false,
            mark: "",
        }
    }
}

/// Number of tokens in a plain response.
pub(super) const TOKENS: u64 = 20;

kinds! {
    /// Kind of client, neighbour or stranger.
    #[derive(serde::Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum ClientKind;
    Honest "honest" "users who ask for less than their share and read what they get";
    Patient "patient" "users who ask for many times the capacity and wait for a minute";
    Impatient "impatient" "users who do, give up after 3 s and try again as SDKs do";
    Leaving "leaving" "streams that are left in the middle";
    Unstreamed "unstreamed" "whole answers that are left before they come";
    Slow "slow" "streams of which little is read";
    Logprobs "logprobs" "answers with much behind their usage";
    Names "names" "another made-up user name with every request";
    Poison "poison" "prompts that break the connection to their engine";
    Failing "failing" "prompts that engines answer with 500";
    Idle "idle" "connections that say nothing, or only half of a head";
    Bodies "bodies" "HTTP/2 streams whose bodies never come";
    Keyless "keyless" "requests without a key or with a wrong one, tried again and again";
    Garbage "garbage" "bytes that are no HTTP, at all three ports";
    Peers "peers" "crafted calls at the peer port: commands that nobody knows, terms that leap";
    Browser "browser" "what other sites have a browser send to the admin port";
}

impl ClientKind {
    /// Returns the users of the kind, each with an API key and a share of the kind's requests.
    #[must_use]
    pub fn users(self) -> Vec<String> {
        let count = match self {
            Self::Honest => 6,
            Self::Patient | Self::Impatient => 2,
            _ if self.manner().is_some() => 1,
            _ => 0,
        };
        (1..=count)
            .map(|number| format!("{}-{number}", self.name()))
            .collect()
    }

    /// Returns the kind's load as a share of the capacity times the factor. The factor does not
    /// apply to honest users.
    pub(super) fn share(self) -> f64 {
        match self {
            Self::Honest => 0.24,
            Self::Patient | Self::Impatient => 0.4,
            _ if self.manner().is_some() => 0.03,
            _ => 0.0,
        }
    }

    /// Returns whether users of the kind must be charged exactly what engines computed. They stay
    /// to the end, so that the router receives the usage.
    pub(super) fn is_exact(self) -> bool {
        matches!(self, Self::Honest | Self::Names | Self::Logprobs)
    }

    /// Returns the behaviour of the kind's users; `None` if they send no inference requests.
    pub(super) fn manner(self) -> Option<UserBehaviour> {
        let plain = UserBehaviour::default();
        let manner = match self {
            Self::Honest => UserBehaviour {
                retries: 2,
                ..plain
            },
            Self::Patient => plain,
            Self::Impatient => UserBehaviour {
                patience_ms: 3000,
                retries: 2,
                ..plain
            },
            Self::Leaving => UserBehaviour {
                leaves: LeavePoint::AfterPieces(3),
                tokens: 200,
                ..plain
            },
            Self::Unstreamed => UserBehaviour {
                leaves: LeavePoint::AfterMs(1500),
                tokens: 400,
                is_streamed: false,
                ..plain
            },
            Self::Slow => UserBehaviour {
                leaves: LeavePoint::Dawdles,
                tokens: 100,
                mark: LARGE_TOKENS,
                ..plain
            },
            Self::Logprobs => UserBehaviour {
                is_streamed: false,
                wants_logprobs: true,
                ..plain
            },
            Self::Names => UserBehaviour {
                makes_up_names: true,
                ..plain
            },
            Self::Poison => UserBehaviour {
                mark: POISON,
                retries: 2,
                ..plain
            },
            Self::Failing => UserBehaviour {
                mark: FAILING,
                ..plain
            },
            Self::Idle
            | Self::Bodies
            | Self::Keyless
            | Self::Garbage
            | Self::Peers
            | Self::Browser => return None,
        };
        Some(manner)
    }
}
