//! `POST /admin/v1/explain`: how a request would be routed, and why. Runs the same code as the data
//! plane's decision, without its effects.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::AdminState;
use super::answer::{Json, QueryParams, ReadLevel, ReadQuery, at_level, json};
use super::problem::invalid;
use crate::error::Problem;
use crate::prompt::{BlockUnit, ReadError, ReadRequest};
use crate::proxy::ANONYMOUS;
use crate::routing::{Explanation, RoutingRequest, UserName};

/// A request as a client would send it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ExplainBody {
    /// Path such as `/v1/chat/completions`.
    path: String,
    #[serde(default)]
    pub(super) headers: BTreeMap<String, String>,
    /// User to charge the tokens to; `anonymous` if missing.
    user: Option<String>,
    /// Body: JSON, or a string that contains it byte for byte.
    pub(super) body: Box<RawValue>,
    /// Whether to show the prompt's token ids.
    #[serde(default)]
    token_ids: bool,
}

/// Maximum number of token ids shown.
const SHOWN_IDS_MAX: usize = 4096;

#[derive(Serialize)]
struct ExplainResponse {
    read: &'static str,
    stream: bool,
    /// Tokenizer of the model's prompts.
    tokenizer: String,
    /// Unit of this prompt's blocks.
    unit: BlockUnit,
    /// First token ids, if requested; none if they are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(flatten)]
    explanation: Explanation,
}

pub(super) async fn explain(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
    Json(would_be): Json<ExplainBody>,
) -> Result<Response, Problem> {
    if !would_be.path.starts_with('/') {
        let found = format!("{:?}, expected a path", would_be.path);
        return Err(invalid("path", found));
    }
    let body = body_bytes(&would_be.body)?;
    at_level(&admin, query.read).await?;
    let read = admin.reader.read(&would_be.path, &body).await;
    let ReadRequest {
        parsed,
        identity,
        mut ids,
    } = read.map_err(refusal)?;
    ids.truncate(SHOWN_IDS_MAX);
    let headers = headers(&would_be.headers)?;
    let request_id = headers.get("x-request-id");
    let preferences = admin.decider.preferences(&headers);
    let preferences = preferences.map_err(|why| {
        let field = format!("headers.{}", why.header());
        invalid(&field, why.to_string())
    })?;
    let user = UserName::bounded(would_be.user.as_deref().unwrap_or(ANONYMOUS));
    let ask = RoutingRequest {
        model: &parsed.model,
        identity: &identity,
        request_id: request_id.map_or("", |id| id.to_str().unwrap_or_default()),
        user: &user,
        headers: Some(&headers),
        policy: preferences.policy.as_deref(),
        labels: &preferences.labels,
        excluded: &[],
    };
    let outbox = admin.outbox.status();
    let explanation = admin.decider.explain(&ask, outbox, Instant::now());
    Ok(json(&ExplainResponse {
        read: match query.read {
            ReadLevel::Local => "local",
            ReadLevel::Linearizable => "linearizable",
        },
        stream: parsed.stream,
        tokenizer: admin.reader.tokenizer_name(&parsed.model),
        unit: identity.unit,
        token_ids: would_be.token_ids.then_some(ids),
        explanation,
    }))
}

fn refusal(failure: ReadError) -> Problem {
    match failure {
        ReadError::Bad(bad) => {
            let field = match &bad.param {
                Some(param) => format!("body.{param}"),
                None => "body".to_owned(),
            };
            invalid(&field, bad.message)
        }
        ReadError::Stopping => Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "stopping",
            "the replica is stopping",
        ),
    }
}

pub(super) fn headers(given: &BTreeMap<String, String>) -> Result<HeaderMap, Problem> {
    let mut headers = HeaderMap::with_capacity(given.len());
    for (name, value) in given {
        let field = || format!("headers.{name}");
        let key = HeaderName::try_from(name)
            .map_err(|_| invalid(&field(), "expected a header's name".to_owned()))?;
        let value = HeaderValue::try_from(value)
            .map_err(|_| invalid(&field(), "expected a header's value".to_owned()))?;
        headers.append(key, value);
    }
    Ok(headers)
}

/// Returns the bytes that an engine would receive.
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
