//! Code shared by the admin handlers: extractors for requests, and types of responses and errors.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderValue, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use state::Registry;
use state::command::{Command, Committed, NAME_BYTES_MAX, Rejection, Reply};
use state::ids::LogIndex;

use super::calls::WriteIndex;
use super::origin::typed;
use super::problem::invalid;
use super::{Admin, BODY_BYTES_MAX, PAGE_ENTRIES_DEFAULT, PAGE_ENTRIES_MAX};
use api::base::printable::{escaped, is_obeyed};
use api::error::Problem;
use api::ports::{ChangeError, ProposeError};

/// Content type of JSON request bodies.
pub(super) const JSON: &str = "application/json";
/// Time within which a request body must arrive completely.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// State that a read answers from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum ReadLevel {
    /// The state as applied here.
    #[default]
    Local,
    /// A state that includes everything committed before the request.
    Linearizable,
}

/// Query parameters of a read without any others.
#[derive(Debug, Clone, Copy, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ReadQuery {
    /// State to answer from: `local`, as applied here, or `linearizable`, with everything that was
    /// committed before.
    pub(super) read: ReadLevel,
}

/// Query parameters of a list.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ListQuery {
    /// State to answer from: `local`, as applied here, or `linearizable`, with everything that was
    /// committed before.
    pub(super) read: ReadLevel,
    /// Maximum number of entries; 100 if absent.
    #[schemars(range(min = 1, max = PAGE_ENTRIES_MAX))]
    pub(super) limit: Option<usize>,
    /// `next_cursor` of the page before.
    pub(super) cursor: Option<String>,
}

impl ListQuery {
    /// Returns the maximum number of entries in the response, or a problem if `limit` is out of
    /// range.
    pub(super) fn limit(&self) -> Result<usize, Problem> {
        match self.limit {
            None => Ok(PAGE_ENTRIES_DEFAULT),
            Some(limit) if (1..=PAGE_ENTRIES_MAX).contains(&limit) => Ok(limit),
            Some(limit) => Err(invalid(
                "limit",
                format!("{limit}, expected 1 to {PAGE_ENTRIES_MAX}"),
            )),
        }
    }
}

/// Extractor of query parameters that reports faults as problems.
pub(super) struct QueryParams<T>(pub(super) T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let keys = form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes());
        let keys = serde_urlencoded::Deserializer::new(keys);
        let query = serde_path_to_error::deserialize(keys).map_err(|fault| {
            let field = match fault.path().to_string() {
                path if path.is_empty() || path == "." => "query".to_owned(),
                key => key,
            };
            invalid(&field, fault.into_inner().to_string())
        })?;
        Ok(Self(query))
    }
}

/// Extractor of the variable part of a path that reports faults as problems.
pub(super) struct PathParam<T>(pub(super) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathParam<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let part = Path::from_request_parts(parts, state).await;
        let Path(part) = part.map_err(|fault: PathRejection| invalid("path", fault.body_text()))?;
        Ok(Self(part))
    }
}

/// Extractor of an object's name from a path. Rejects names that [`name_of`] rejects.
pub(super) struct PathName(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for PathName {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let PathParam(name) = PathParam::<String>::from_request_parts(parts, state).await?;
        name_of("name", &name)?;
        Ok(Self(name))
    }
}

/// Rejects an invalid name.
pub(super) fn name_of(field: &str, name: &str) -> Result<(), Problem> {
    if !(1..=NAME_BYTES_MAX).contains(&name.len()) {
        let found = format!("{} bytes, expected 1 to {NAME_BYTES_MAX}", name.len());
        return Err(invalid(field, found));
    }
    if name.contains(is_obeyed) {
        let found = format!(
            "\"{}\", expected no control or invisible characters",
            escaped(name)
        );
        return Err(invalid(field, found));
    }
    Ok(())
}

/// Extractor of a JSON body that reports faults as problems and names the field.
pub(super) struct Json<T>(pub(super) T);

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        typed(request.headers(), JSON)?;
        Ok(Self(decode(&read_body(request.into_body()).await?)?))
    }
}

/// Extractor of an optional JSON body.
pub(super) struct MaybeJson<T>(pub(super) Option<T>);

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for MaybeJson<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let (head, body) = request.into_parts();
        let body = read_body(body).await?;
        if body.is_empty() {
            return Ok(Self(None));
        }
        typed(&head.headers, JSON)?;
        Ok(Self(Some(decode(&body)?)))
    }
}

/// Reads a request body of bounded length within [`BODY_TIMEOUT`].
pub(super) async fn read_body(body: Body) -> Result<Bytes, Problem> {
    let whole = Limited::new(body, BODY_BYTES_MAX).collect();
    match tokio::time::timeout(BODY_TIMEOUT, whole).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(fault)) if fault.is::<LengthLimitError>() => Err(Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "body-too-large",
            "the body is too large",
        )
        .detail(format!("expected at most {BODY_BYTES_MAX} bytes"))),
        Ok(Err(fault)) => Err(invalid("body", fault.to_string())),
        Err(_) => Err(Problem::new(
            StatusCode::REQUEST_TIMEOUT,
            "body-timeout",
            "the body did not arrive in time",
        )),
    }
}

/// Decodes JSON. A problem names the field at fault.
pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|fault| {
        // A syntax error has no field: its path ends in `?`, or is a single dot.
        let path = fault.path().to_string();
        let field = match path.trim_end_matches('?').trim_end_matches('.') {
            "" => "body".to_owned(),
            field => field.to_owned(),
        };
        invalid(&field, fault.into_inner().to_string())
    })?;
    json.end()
        .map_err(|fault| invalid("body", fault.to_string()))?;
    Ok(value)
}

/// Builds a JSON response.
fn json(body: &impl Serialize) -> Response {
    let body = serde_json::to_vec(body).expect("answers have string keys only");
    let content_type = HeaderValue::from_static("application/json");
    ([(CONTENT_TYPE, content_type)], body).into_response()
}

/// A response with a JSON body.
pub(super) struct Answer<T>(pub(super) T);

impl<T: Serialize> IntoResponse for Answer<T> {
    fn into_response(self) -> Response {
        json(&self.0)
    }
}

/// Waits until the state satisfies `level`.
pub(super) async fn at_level(admin: &Admin, level: ReadLevel) -> Result<(), Problem> {
    match level {
        ReadLevel::Local => Ok(()),
        ReadLevel::Linearizable => match admin.cluster.read_barrier().await {
            Ok(_) => Ok(()),
            Err(failure) => Err(match failure {
                ProposeError::Unavailable(why) => no_quorum(admin, &why),
                failure => unavailable(&failure.to_string()),
            }),
        },
    }
}

/// Returns the registry once the state satisfies `level`, and an index that it includes.
pub(super) async fn registry_at(
    admin: &Admin,
    level: ReadLevel,
) -> Result<(LogIndex, Arc<Registry>), Problem> {
    at_level(admin, level).await?;
    let index = admin.view.applied();
    Ok((index, admin.view.registry()))
}

/// Response to a committed write.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(example = serde_json::json!({ "index": 5121, "outcome": "committed" }))]
pub(super) struct WriteResponse {
    /// Log index at which the write was committed.
    index: LogIndex,
    /// Always `committed`.
    outcome: &'static str,
}

impl WriteResponse {
    fn at(index: LogIndex) -> Self {
        Self {
            index,
            outcome: "committed",
        }
    }
}

/// Response to a committed write, or to one that changed nothing.
#[derive(Debug)]
pub(super) struct Written(LogIndex);

impl IntoResponse for Written {
    fn into_response(self) -> Response {
        let Self(index) = self;
        let body = WriteResponse::at(index);
        WrittenWith { index, body }.into_response()
    }
}

/// Response to a committed write that contains more than the log index.
pub(super) struct WrittenWith<T> {
    pub(super) index: LogIndex,
    pub(super) body: T,
}

impl<T: Serialize> IntoResponse for WrittenWith<T> {
    fn into_response(self) -> Response {
        let mut response = json(&self.body);
        response.extensions_mut().insert(WriteIndex(self.index));
        response
    }
}

/// Response to a change of members or leadership, or to a snapshot. `index` is the log index of the
/// change, if it has one.
pub(super) struct Changed<T> {
    index: Option<LogIndex>,
    body: T,
}

impl<T> Changed<T> {
    /// Creates a response without a log index.
    pub(super) fn told(body: T) -> Self {
        Self { index: None, body }
    }
}

impl<T: Serialize> IntoResponse for Changed<T> {
    fn into_response(self) -> Response {
        let mut response = json(&self.body);
        if let Some(index) = self.index {
            response.extensions_mut().insert(WriteIndex(index));
        }
        response
    }
}

/// Returns the response to a write that would change nothing. Call after a read barrier.
pub(super) fn unchanged(admin: &Admin) -> Written {
    Written(admin.view.applied())
}

/// Proposes a command and returns the response to a successful write.
pub(super) async fn submit(admin: &Admin, command: Command) -> Result<Written, Problem> {
    commit(admin, command).await.map(Written)
}

/// Proposes a command and returns the index at which it took effect, or why it had no effect.
pub(super) async fn commit(admin: &Admin, command: Command) -> Result<LogIndex, Problem> {
    if !state::codec::fits(&command) {
        return Err(Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "too-large",
            "the write is too large for the log",
        )
        .detail(format!(
            "expected less than {} bytes",
            state::codec::ENVELOPE_BYTES_MAX
        ))
        .member("outcome", "not-committed"));
    }
    let fate = admin.cluster.submit(command).await;
    let Committed { index, reply } = fate.map_err(|failure| unsettled(admin, failure))?;
    match rejection(reply) {
        None => Ok(index),
        Some(reject) => Err(rejected(&reject).member("index", index.0)),
    }
}

/// Returns the problem for a write that is not known to be in the log.
pub(super) fn unsettled(admin: &Admin, failure: ProposeError) -> Problem {
    match failure {
        ProposeError::Unavailable(why) => no_quorum(admin, &why).member("outcome", "not-committed"),
        ProposeError::Stopping => {
            unavailable("this replica is stopping").member("outcome", "not-committed")
        }
        ProposeError::Unknown(why) => unknown(&why),
    }
}

/// Returns the response for the outcome of a membership change.
pub(super) fn changed(fate: Result<u64, ChangeError>) -> Result<Changed<WriteResponse>, Problem> {
    let index = LogIndex(fate.map_err(not_changed)?);
    Ok(Changed {
        index: Some(index),
        body: WriteResponse::at(index),
    })
}

/// Returns the problem for a membership change that failed or whose outcome is unknown.
pub(super) fn not_changed(failure: ChangeError) -> Problem {
    match failure {
        ChangeError::Refused(why) => Problem::new(
            StatusCode::CONFLICT,
            "refused",
            "the cluster cannot do this in its current state",
        )
        .detail(why)
        .member("outcome", "not-committed"),
        ChangeError::Unknown(why) => unknown(&why),
    }
}

fn unknown(why: &str) -> Problem {
    Problem::new(
        StatusCode::GATEWAY_TIMEOUT,
        "outcome-unknown",
        "the write may or may not take effect",
    )
    .detail(why)
    .member("outcome", "unknown")
}

/// Returns the problem for a call that the cluster cannot serve now, with the silent members.
fn no_quorum(admin: &Admin, why: &str) -> Problem {
    let status = admin.cluster.status();
    let why = [why.to_owned()].into_iter().chain(status.silent_members());
    unavailable(&why.collect::<Vec<_>>().join("; "))
}

fn unavailable(why: &str) -> Problem {
    Problem::new(
        StatusCode::SERVICE_UNAVAILABLE,
        "no-quorum",
        "the cluster has no quorum",
    )
    .detail(why)
}

fn rejection(reply: Reply) -> Option<Rejection> {
    match reply {
        Reply::Applied | Reply::Batch(_) => None,
        Reply::Repeated(first) => rejection(*first),
        Reply::Rejected(reject) => Some(reject),
    }
}

/// Returns the problem for a write that the state rejected.
pub(super) fn rejected(reject: &Rejection) -> Problem {
    let (status, name) = match reject {
        Rejection::NotInitialised => (StatusCode::CONFLICT, "not-initialised"),
        Rejection::AlreadyInitialised => (StatusCode::CONFLICT, "already-initialised"),
        Rejection::StaleSession { .. } => (StatusCode::CONFLICT, "stale-session"),
        Rejection::UnknownBackend { .. }
        | Rejection::UnknownUser { .. }
        | Rejection::UnknownKey { .. }
        | Rejection::UnknownSession { .. } => (StatusCode::NOT_FOUND, "not-found"),
        Rejection::KeyTaken { .. } => (StatusCode::CONFLICT, "key-taken"),
        Rejection::NotOfSource { .. } => (StatusCode::CONFLICT, "not-of-source"),
        Rejection::UserBusy { .. } => (StatusCode::CONFLICT, "user-busy"),
        Rejection::TooManyBackends | Rejection::TooManyUsers | Rejection::TooManyKeys => {
            (StatusCode::CONFLICT, "limit")
        }
        Rejection::Invalid { .. } => (StatusCode::BAD_REQUEST, "invalid"),
    };
    let problem = Problem::new(status, name, "the cluster rejected the write")
        .detail(reject.to_string())
        .member("outcome", "rejected");
    match reject {
        Rejection::Invalid { field, .. } => problem.member("field", field.as_str()),
        _ => problem,
    }
}
