//! The kinds of clients in a soak.

use super::engine::{FAILING, FAT, POISON};
use crate::kinds::kinds;

/// When a client leaves before it has everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeavePoint {
    /// It does not.
    Never,
    /// After so many pieces of the body.
    AfterPieces(u32),
    /// So long after asking.
    AfterMs(u64),
    /// It does not, but hardly reads.
    Dawdles,
}

/// How a user asks.
#[derive(Debug, Clone, Copy)]
pub(super) struct UserBehaviour {
    /// How long it waits for an answer's end, milliseconds.
    pub(super) patience_ms: u64,
    /// How often it tries again.
    pub(super) retries: u32,
    pub(super) leaves: LeavePoint,
    /// Tokens it wants.
    pub(super) tokens: u64,
    pub(super) is_streamed: bool,
    pub(super) wants_logprobs: bool,
    pub(super) makes_up_names: bool,
    /// What stands in its prompts.
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

/// Tokens of a plain answer.
pub(super) const TOKENS: u64 = 20;

kinds! {
    /// One way to be a client, a neighbour or a stranger.
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
    /// Users of the kind: each has a key and a share of what the kind asks for.
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

    /// What the kind asks for, as a share of the capacity times the factor; honest users do not
    /// follow the factor.
    pub(super) fn share(self) -> f64 {
        match self {
            Self::Honest => 0.24,
            Self::Patient | Self::Impatient => 0.4,
            _ if self.manner().is_some() => 0.03,
            _ => 0.0,
        }
    }

    /// Whether to the token what engines compute for its users must be charged: whoever stays to
    /// the end is told, and so is the router.
    pub(super) fn is_exact(self) -> bool {
        matches!(self, Self::Honest | Self::Names | Self::Logprobs)
    }

    /// How its users ask; `None`: it does not ask for answers.
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
                mark: FAT,
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
