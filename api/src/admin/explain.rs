//! `POST /admin/v1/explain`: how a request would be routed, and why. The same code as the data
//! plane's decision, without its effects.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::Shared;
use super::answer::{Json, Params, ReadLevel, ReadQuery, at_level, invalid, json};
use crate::error::Problem;
use crate::prompt;
use crate::routing::{Ask, Explanation};

/// A request as a client would send it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WouldBe {
    /// `/v1/chat/completions` and the like.
    path: String,
    #[serde(default)]
    headers: BTreeMap<String, String>,
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
    let request_id = would_be
        .headers
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case("x-request-id"))
        .map_or("", |(_, value)| value.as_str());
    let explanation = admin.router.explain(&Ask {
        model: &parsed.model,
        identity: &identity,
        request_id,
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
