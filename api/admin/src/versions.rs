//! Versions of readable and writable objects: `ETag` of a response, `If-Match` of a write (ADR
//! 0095).
//!
//! A version is a hash of the part of the state that a write replaces. It excludes figures that
//! change without writes, so an edit fails only if another edit came first. All replicas compute
//! the same version for the same state, so a client can read at one and write at another.

use axum::extract::FromRequestParts;
use axum::response::{IntoResponse, Response};
use http::header::{ETAG, IF_MATCH};
use http::request::Parts;
use http::{HeaderValue, StatusCode};
use serde::Serialize;
use tokio::sync::MutexGuard;
use xxhash_rust::xxh3::xxh3_128;

use super::AdminState;
use super::answer::{Answer, ReadLevel, at_level};
use super::problem::invalid;
use api::cluster::divergence::hex;
use api::error::Problem;

/// Version of an object, as an entity tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Version(String);

impl Version {
    /// Returns the version of an object; `written` is the part of it that a write replaces.
    pub(super) fn of(written: &impl Serialize) -> Self {
        let bytes = serde_json::to_vec(written).expect("settings have string keys only");
        Self(format!("\"{}\"", hex(xxh3_128(&bytes))))
    }
}

/// Response to a read, with the version for a conditional write.
pub(super) struct Versioned<T> {
    pub(super) version: Version,
    pub(super) body: T,
}

impl<T: Serialize> IntoResponse for Versioned<T> {
    fn into_response(self) -> Response {
        let mut response = Answer(self.body).into_response();
        let version = HeaderValue::from_str(&self.version.0).expect("quoted hex digits");
        response.headers_mut().insert(ETAG, version);
        response
    }
}

/// Precondition of a write, from `If-Match`.
#[derive(Debug)]
pub(super) enum IfMatch {
    /// No condition, not even that the object exists.
    Anything,
    /// The object must exist, in any version.
    Existing,
    /// The object must have one of these versions.
    One(Vec<String>),
}

impl<S: Sync> FromRequestParts<S> for IfMatch {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let mut wanted = Vec::new();
        for value in parts.headers.get_all(IF_MATCH) {
            let value = value.to_str().map_err(|_| unreadable("no text"))?;
            wanted.extend(value.split(',').map(str::trim));
        }
        match wanted.as_slice() {
            [] => Ok(Self::Anything),
            ["*"] => Ok(Self::Existing),
            tags => match tags.iter().find(|tag| !is_tag(tag)) {
                Some(wrong) => Err(unreadable(&format!("{wrong:?}"))),
                None => Ok(Self::One(tags.iter().map(|&tag| tag.to_owned()).collect())),
            },
        }
    }
}

fn is_tag(text: &str) -> bool {
    let text = text.strip_prefix("W/").unwrap_or(text);
    let inner = text.strip_prefix('"').and_then(|it| it.strip_suffix('"'));
    inner.is_some_and(|inner| !inner.contains('"'))
}

fn unreadable(found: &str) -> Problem {
    let expected = "expected \"*\", or the ETag of a response, quotes included";
    invalid("if-match", format!("{found}, {expected}"))
}

impl IfMatch {
    /// Waits for this replica's write lock, then checks the current version, which `now` returns
    /// (`None` if the object does not exist).
    ///
    /// The caller keeps the returned guard until the write is committed.
    pub(super) async fn turn<'a>(
        &self,
        admin: &'a AdminState,
        now: impl FnOnce() -> Option<Version>,
    ) -> Result<MutexGuard<'a, ()>, Problem> {
        let turn = admin.writes.lock().await;
        if !matches!(self, Self::Anything) {
            at_level(admin, ReadLevel::Linearizable).await?;
            self.check(now())?;
        }
        Ok(turn)
    }

    /// Returns a problem if the precondition does not allow replacing `now`, the current version.
    pub(super) fn check(&self, now: Option<Version>) -> Result<(), Problem> {
        let is_meant = match (self, &now) {
            (Self::Anything, _) | (Self::Existing, Some(_)) => true,
            (Self::Existing | Self::One(_), None) => false,
            (Self::One(tags), Some(now)) => tags.contains(&now.0),
        };
        if is_meant {
            return Ok(());
        }
        let problem = Problem::new(
            StatusCode::PRECONDITION_FAILED,
            "changed",
            "it has changed since it was read",
        )
        .detail("if-match: not the current version; read it again")
        .member("outcome", "not-committed");
        Err(match now {
            Some(now) => problem.member("version", now.0),
            None => problem,
        })
    }
}
