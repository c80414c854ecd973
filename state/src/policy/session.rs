//! `session`: the backend of a session, found by rendezvous hashing of the session's name. If a
//! backend is removed, only its sessions move. A request without a session goes to the backend with
//! the fewest requests.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rank::{Affinity, Policy, PolicyInputs, Rank, Ranks, SessionNames, draw, requests};
use super::{Candidate, PolicyRequest, Reason};
use crate::reject::Rejection;
use crate::validate::{ensure, is_name};

/// Settings of the `session` policy.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SessionSettings {
    /// Request header that names the session.
    pub header: String,
    /// Cookie that names the session when the header is missing. Default: cookies are ignored.
    pub cookie: Option<String>,
    /// Whether the client's address names the session of a request that names none: the last address
    /// in `x-forwarded-for` if a trusted proxy sent the request.
    pub client_address: bool,
}

impl Default for SessionSettings {
    fn default() -> Self {
        Self {
            header: "x-quorate-session".to_owned(),
            cookie: None,
            client_address: false,
        }
    }
}

impl Policy for SessionSettings {
    fn validate(&self) -> Result<(), Rejection> {
        ensure(
            is_token(&self.header),
            "header",
            "a header's name of at most 256 bytes",
        )?;
        ensure(
            self.cookie.as_deref().is_none_or(is_token),
            "cookie",
            "a cookie's name of at most 256 bytes",
        )
    }

    fn needs(&self) -> PolicyInputs<'_> {
        PolicyInputs {
            session: Some(SessionNames {
                header: &self.header,
                cookie: self.cookie.as_deref(),
                client_address: self.client_address,
            }),
            affinity: Affinity::Pinned,
            ..PolicyInputs::default()
        }
    }

    fn ranks<'a>(&'a self, request: &'a PolicyRequest, _: &'a [Candidate]) -> impl Ranks + use<'a> {
        SessionRanks(request.session)
    }
}

/// Whether `text` is a token as RFC 9110 defines it, which header and cookie names must be.
fn is_token(text: &str) -> bool {
    let is_token_byte = |c: u8| c.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&c);
    is_name(text) && text.bytes().all(is_token_byte)
}

struct SessionRanks(Option<u64>);

impl Ranks for SessionRanks {
    fn rank(&self, _: usize, candidate: &Candidate) -> Rank {
        match self.0 {
            Some(session) => Rank::first(!draw(session, candidate.slot), Reason::Session),
            None => Rank::first(requests(candidate), Reason::LeastRequests),
        }
    }
}
