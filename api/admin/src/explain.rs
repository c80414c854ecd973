//! `POST /admin/v1/explain`: how a request would be routed, and why. The request is read by the
//! data plane's own code (I72) and goes through the same steps as its decision, without their
//! effects.

use std::collections::BTreeMap;
use std::net::IpAddr;

use axum::extract::State;
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::AdminState;
use super::answer::{Answer, Json, QueryParams, ReadLevel, ReadQuery, at_level, decode};
use super::problem::invalid;
use super::users::key_text;
use api::admission::{Admission, AdmissionPreview, AdmissionRequest as _};
use api::error::{Problem, ProxyError, rescue};
use api::model_names::ResolvedModel;
use api::prompt::BlockUnit;
use api::proxy::{RequestHead, RequestOrigin, RequestReader, UnsentRequest};
use api::routing::{Decider, Explanation, PermitCell, Router, SharedOutbox};
use api::sessions::{NamedSession, SessionNames};

/// A request as a client would send it.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(example = json!({
    "path": "/v1/chat/completions",
    "headers": { "x-quorate-user": "ann" },
    "body": { "model": "m", "messages": [{ "role": "user", "content": "Hello" }] },
}))]
pub(super) struct ExplainBody {
    /// Path such as `/v1/chat/completions`.
    #[schemars(regex(pattern = "^/"))]
    path: String,
    /// Headers, each with a value or a list of them.
    #[serde(default)]
    pub(super) headers: BTreeMap<String, HeaderValues>,
    /// Client address of the request. If absent, it counts as sent by a proxy that is trusted to
    /// name users.
    peer: Option<IpAddr>,
    /// User to explain for, by the name that the admin API shows, instead of the one that the
    /// request would be charged to; no key is needed then.
    user: Option<String>,
    /// Request body: JSON, or a string that contains the body byte for byte.
    #[schemars(with = "Value")]
    pub(super) body: Box<RawValue>,
    /// Whether to show the prompt's token ids.
    #[serde(default)]
    token_ids: bool,
}

/// The values of a header.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum HeaderValues {
    One(String),
    Many(Vec<String>),
}

impl HeaderValues {
    fn all(&self) -> &[String] {
        match self {
            Self::One(value) => std::slice::from_ref(value),
            Self::Many(values) => values,
        }
    }
}

/// Maximum number of token ids to show.
const SHOWN_IDS_MAX: usize = 4096;

#[derive(Serialize, JsonSchema)]
pub(super) struct ExplainResponse {
    read: &'static str,
    stream: bool,
    /// How the requested name became the model; absent: the name is the model's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    resolved: Option<ResolvedModel>,
    /// User that is charged.
    user: String,
    /// Hash of the name, 16 hex digits.
    user_key: String,
    /// How the user was identified: an entry of `users.identify_by`, `checked-key`, `nobody` or
    /// `given`.
    user_source: String,
    /// Session of an agent or chat of which the request is a turn; `null`: it names none.
    session: Option<ExplainedSession>,
    /// Sources whose name of a session or parent is out of bounds, and so counts as absent; absent:
    /// none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    session_names_refused: Vec<&'static str>,
    /// Assumed client address of the request; `null`: a trusted proxy.
    peer: Option<IpAddr>,
    /// Request id, which breaks ties; `null`: the data plane would generate one.
    request_id: Option<String>,
    /// Priority in the queue: higher ones are served first.
    priority: i16,
    /// How long the client is willing to wait, in milliseconds; `null`: it sets no deadline.
    deadline_ms: Option<u64>,
    /// Labels that the request selects backends by.
    labels: BTreeMap<String, String>,
    /// Tokenizer of the model's prompts.
    tokenizer: String,
    /// Unit of this prompt's blocks.
    unit: BlockUnit,
    /// First token ids of the prompt, if requested; none if they are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    /// What admission would do with the request.
    admission: AdmissionPreview,
    /// Error that the data plane would answer at once; `null`: it would send the request, or let it
    /// wait.
    refusal: Option<RefusalDetail>,
    #[serde(flatten)]
    explanation: Explanation,
}

/// A session as its client names it.
#[derive(Serialize, JsonSchema)]
struct ExplainedSession {
    /// Id of the session, 16 hex digits.
    id: String,
    /// Name that the client gave it.
    name: String,
    /// Id of the session that started it; `null`: it is a root.
    parent: Option<String>,
    /// Name that the client gave the parent.
    parent_name: Option<String>,
    /// Whether this turn is the last one of the session.
    #[serde(rename = "final")]
    is_final: bool,
    /// Where the names come from, `header:NAME` or `body:FIELD`.
    source: &'static str,
}

impl ExplainedSession {
    fn of(named: NamedSession, names: SessionNames<'_>) -> Self {
        Self {
            id: named.key.to_string(),
            name: names.session.to_owned(),
            parent: named.parent.map(|parent| parent.to_string()),
            parent_name: names.parent.map(ToOwned::to_owned),
            is_final: named.is_final,
            source: named.source,
        }
    }
}

/// The data plane's error, as clients get it.
#[derive(Serialize, JsonSchema)]
struct RefusalDetail {
    status: u16,
    code: &'static str,
    message: String,
    /// Value of `retry-after`, in seconds; `null`: none. The queue's has jitter by request id.
    retry_after_s: Option<u32>,
}

impl RefusalDetail {
    fn of(failure: &ProxyError) -> Self {
        let answer = rescue(failure);
        Self {
            status: answer.status.as_u16(),
            code: answer.code,
            message: failure.to_string(),
            retry_after_s: answer.retry_after_s,
        }
    }
}

/// The parts of a replica that explain a request.
struct Explainers<'a> {
    requests: &'a RequestReader,
    decider: &'a Decider,
    outbox: &'a SharedOutbox,
    admission: &'a Admission,
}

pub(super) async fn explain(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
    Json(would_be): Json<ExplainBody>,
) -> Result<Answer<ExplainResponse>, Problem> {
    let asked = HypotheticalRequest::of(would_be)?;
    at_level(&admin, query.read).await?;
    let by = Explainers {
        requests: &admin.requests,
        decider: &admin.decider,
        outbox: &admin.outbox,
        admission: &admin.admission,
    };
    let answer = asked.explained(&by).await?;
    Ok(Answer(ExplainResponse {
        read: match query.read {
            ReadLevel::Local => "local",
            ReadLevel::Linearizable => "linearizable",
        },
        ..answer
    }))
}

/// Explains the request in `body`, which has the form of a `POST /admin/v1/explain` body, with the
/// state of `router`, which need not be that of a running replica.
///
/// # Errors
/// Returns the problem with which the admin API would respond.
pub fn explain_offline<'a>(
    requests: &'a RequestReader,
    router: &'a Router,
    body: &'a [u8],
) -> BoxFuture<'a, Result<serde_json::Value, Problem>> {
    let explained = async move {
        let asked = HypotheticalRequest::of(decode(body)?)?;
        // Nothing waits.
        let admission = Admission::new(router);
        let by = Explainers {
            requests,
            decider: router.decider(),
            outbox: router.outbox(),
            admission: &admission,
        };
        let answer = asked.explained(&by).await?;
        Ok(serde_json::to_value(answer).expect("answers have string keys only"))
    };
    explained.boxed()
}

/// A request to be explained.
struct HypotheticalRequest {
    asked: ExplainBody,
    headers: HeaderMap,
    body: Bytes,
    peer: Option<HeaderValue>,
}

impl HypotheticalRequest {
    fn of(asked: ExplainBody) -> Result<Self, Problem> {
        if !asked.path.starts_with('/') {
            let found = format!("{:?}, expected a path", asked.path);
            return Err(invalid("path", found));
        }
        let peer = asked.peer.map(|peer| peer.to_canonical().to_string());
        Ok(Self {
            body: body_bytes(&asked.body)?,
            headers: headers(&asked.headers)?,
            peer: peer.map(|it| HeaderValue::try_from(it).expect("an address is visible ascii")),
            asked,
        })
    }

    /// Returns where the request appears to come from: a user, a client address or a trusted proxy.
    fn origin(&self) -> RequestOrigin<'_> {
        match (&self.asked.user, &self.peer) {
            (Some(name), _) => RequestOrigin::User(name),
            (None, Some(peer)) => RequestOrigin::Address(peer),
            (None, None) => RequestOrigin::TrustedProxy,
        }
    }

    async fn explained(&self, by: &Explainers<'_>) -> Result<ExplainResponse, Problem> {
        let requests = by.requests;
        // A client may add a query to any path.
        let path = self.asked.path.split('?').next().unwrap_or_default();
        let head = RequestHead {
            method: &Method::POST,
            path,
            // HTTP/2 names the host outside the headers.
            version: Version::HTTP_2,
            headers: &self.headers,
            origin: self.origin(),
            request_id: requests.told_id(&self.headers).unwrap_or_default(),
            is_resumed: false,
            endpoints: None,
        };
        let read = requests.would_read(&head, self.body.clone()).await;
        let (request, mut ids) = read.map_err(|why| refusal(&why, &self.headers))?;
        ids.truncate(SHOWN_IDS_MAX);
        let request_id = requests.told_id(&self.headers);
        let unsent = UnsentRequest {
            read: request,
            headers: self.headers.clone(),
            id: request_id.unwrap_or_default().to_owned(),
            permit: PermitCell::new(),
        };
        let now = Instant::now();
        let mut explanation = by
            .decider
            .explain(&unsent.ask(&[]), by.outbox.status(), now);
        let (admission, refusal) = by.admission.preview(&unsent, &explanation, now);
        let request = &unsent.read;
        let refusal = refusal.map(|why| requests.refusal(why, request, unsent.id.as_bytes()));
        if refusal.is_some() {
            explanation.refused();
        }
        let hash_seed = requests.hash_seed();
        let deadline = request.deadline.map(|it| it.as_millis());
        let (names, refused) = requests.session_names(&unsent.headers, &request.parsed);
        let session = request.session.zip(names);
        Ok(ExplainResponse {
            read: "local",
            stream: request.parsed.stream,
            resolved: request.resolved.as_deref().cloned(),
            user: request.user.as_str().to_owned(),
            user_key: key_text(request.user.key(hash_seed)),
            user_source: request.user_source.text(),
            session: session.map(|(named, names)| ExplainedSession::of(named, names)),
            session_names_refused: refused,
            peer: self.asked.peer,
            request_id: request_id.map(ToOwned::to_owned),
            priority: request.priority,
            deadline_ms: deadline.map(|ms| u64::try_from(ms).unwrap_or(u64::MAX)),
            labels: request.preferences.labels.iter().cloned().collect(),
            tokenizer: requests.prompts().tokenizer_name(&request.parsed.model),
            unit: request.identity.unit,
            token_ids: self.asked.token_ids.then_some(ids),
            admission,
            refusal: refusal.as_ref().map(RefusalDetail::of),
            explanation,
        })
    }
}

/// Returns the data plane's rejection of the request as a problem.
fn refusal(failure: &ProxyError, headers: &HeaderMap) -> Problem {
    let answer = rescue(failure);
    if *failure == ProxyError::Overloaded {
        return Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "stopping",
            "the replica is stopping",
        );
    }
    let field = match failure {
        ProxyError::BadRequest {
            param: Some(param), ..
        } if headers.contains_key(param) => format!("headers.{param}"),
        ProxyError::BadRequest {
            param: Some(param), ..
        } => format!("body.{param}"),
        ProxyError::BadRequest { param: None, .. } => "body".to_owned(),
        ProxyError::BadKey => "headers.authorization".to_owned(),
        ProxyError::UnknownRoute { .. }
        | ProxyError::KeepsNothing { .. }
        | ProxyError::WrongMethod { .. } => "path".to_owned(),
        _ => "headers".to_owned(),
    };
    invalid(&field, failure.to_string())
        .member("data_plane_status", answer.status.as_u16())
        .member("data_plane_code", answer.code)
}

pub(super) fn headers(given: &BTreeMap<String, HeaderValues>) -> Result<HeaderMap, Problem> {
    let mut headers = HeaderMap::with_capacity(given.len());
    for (name, values) in given {
        let field = || format!("headers.{name}");
        let key = HeaderName::try_from(name)
            .map_err(|_| invalid(&field(), "expected a header's name".to_owned()))?;
        for value in values.all() {
            // Whitespace around a value is not part of it (RFC 9110, section 5.5).
            let value = value.trim_matches([' ', '\t']);
            let value = HeaderValue::from_bytes(value.as_bytes())
                .map_err(|_| invalid(&field(), "expected a header's value".to_owned()))?;
            headers.append(key.clone(), value);
        }
    }
    Ok(headers)
}

/// Returns the body's bytes as an engine would receive them.
pub(super) fn body_bytes(body: &RawValue) -> Result<Bytes, Problem> {
    let text = body.get();
    if !text.starts_with('"') {
        return Ok(Bytes::copy_from_slice(text.as_bytes()));
    }
    let text: String = serde_json::from_str(text).map_err(|fault| {
        Problem::new(
            StatusCode::BAD_REQUEST,
            "invalid",
            "the request is not valid",
        )
        .detail(format!("body: {fault}"))
        .member("field", "body")
    })?;
    Ok(Bytes::from(text))
}
