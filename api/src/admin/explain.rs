//! `POST /admin/v1/explain`: how a request would be routed, and why. The same code as the data
//! plane's decision, without its effects.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::Shared;
use super::answer::{Json, Params, ReadLevel, ReadQuery, at_level, invalid, json};
use crate::error::Problem;
use crate::prompt;
use crate::proxy::ANONYMOUS;
use crate::routing::{Ask, Explanation, POLICY};

/// A request as a client would send it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WouldBe {
    /// `/v1/chat/completions` and the like.
    path: String,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    /// Whom the tokens would be charged to; `anonymous` where it is missing.
    user: Option<String>,
    /// The body: JSON as it is, or a string that holds it byte for byte.
    body: Box<RawValue>,
}

#[derive(Serialize)]
struct Explained {
    read: &'static str,
    stream: bool,
    #[serde(flatten)]
    explanation: Explanation,
}

pub(super) async fn explain(
    State(admin): State<Shared>,
    Params(query): Params<ReadQuery>,
    Json(would_be): Json<WouldBe>,
) -> Result<Response, Problem> {
    if !would_be.path.starts_with('/') {
        let found = format!("{:?}, expected a path", would_be.path);
        return Err(invalid("path", found));
    }
    let body = body_bytes(&would_be.body)?;
    at_level(&admin, query.read).await?;
    let parsed = prompt::parse_routed(&would_be.path, &body).map_err(|bad| {
        let field = match &bad.param {
            Some(param) => format!("body.{param}"),
            None => "body".to_owned(),
        };
        invalid(&field, bad.message)
    })?;
    let identity = admin.router.identify(&parsed);
    let headers = headers(&would_be.headers)?;
    let request_id = headers.get("x-request-id");
    let policy = admin.router.asked_policy(&headers).map_err(|unknown| {
        let field = format!("headers.{POLICY}");
        invalid(&field, unknown.to_string())
    })?;
    let explanation = admin.router.explain(&Ask {
        model: &parsed.model,
        identity: &identity,
        request_id: request_id.map_or("", |id| id.to_str().unwrap_or_default()),
        user: would_be.user.as_deref().unwrap_or(ANONYMOUS),
        headers: Some(&headers),
        policy,
        excluded: &[],
    });
    Ok(json(&Explained {
        read: match query.read {
            ReadLevel::Local => "local",
            ReadLevel::Linearizable => "linearizable",
        },
        stream: parsed.stream,
        explanation,
    }))
}

fn headers(given: &BTreeMap<String, String>) -> Result<HeaderMap, Problem> {
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

/// The bytes an engine would get.
fn body_bytes(body: &RawValue) -> Result<Bytes, Problem> {
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
