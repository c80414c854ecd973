//! HTTP client for an engine. Each request has its own connection, so that closing it is a
//! disconnect.

use std::time::Duration;

use anyhow::{Context as _, anyhow};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use lab::connector::ReplicaConnector;
use serde_json::Value;

use super::EngineCheckOptions;

use crate::json_client::{JsonAnswer, NoConnectionError, no_answer};

/// A client of the engine that is checked.
pub(super) struct EngineClient {
    http: Client<ReplicaConnector, Full<Bytes>>,
    pub(super) url: String,
    authorization: Option<HeaderValue>,
    pub(super) patience: Duration,
}

impl EngineClient {
    pub(super) fn new(options: &EngineCheckOptions) -> Self {
        Self {
            http: ReplicaConnector::new(None).client(),
            url: options.url.clone(),
            authorization: options.authorization.clone(),
            patience: options.patience,
        }
    }

    pub(super) async fn get(&self, path: &str) -> anyhow::Result<JsonAnswer> {
        self.whole(Method::GET, path, None).await
    }

    pub(super) async fn post(&self, path: &str, body: &Value) -> anyhow::Result<JsonAnswer> {
        self.whole(Method::POST, path, Some(body)).await
    }

    /// Sends a request, with or without a body, and returns the response head. Dropping the
    /// response closes the connection.
    pub(super) async fn open(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Response<Incoming>> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url))
            .header(CONTENT_TYPE, "application/json");
        let mut request =
            request.body(Full::from(body.map(Value::to_string).unwrap_or_default()))?;
        if let Some(authorization) = &self.authorization {
            let headers = request.headers_mut();
            headers.insert(AUTHORIZATION, authorization.clone());
        }
        let sent = tokio::time::timeout(self.patience, self.http.request(request)).await;
        let sent = sent.map_err(|_| anyhow!("no response within {:?}", self.patience))?;
        sent.map_err(|error| {
            let error = no_answer(&error);
            match error.downcast_ref::<NoConnectionError>() {
                // The hints of `error` are about admin listeners.
                Some(none) => anyhow!("cannot connect: {}", none.cause),
                None => error,
            }
        })
    }

    async fn whole(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<JsonAnswer> {
        let answer = async {
            let response = self.open(method.clone(), path, body).await?;
            JsonAnswer::read(response).await
        };
        let answer = tokio::time::timeout(self.patience, answer).await;
        let answer = answer.map_err(|_| anyhow!("no response within {:?}", self.patience));
        answer.flatten().with_context(|| format!("{method} {path}"))
    }
}

/// Describes an unsuccessful response: its status and the beginning of its body.
pub(super) fn refusal(answer: &JsonAnswer) -> String {
    const SHOWN_BYTES_MAX: usize = 120;
    let body = String::from_utf8_lossy(&answer.body);
    let body = body.trim();
    let end = body.floor_char_boundary(SHOWN_BYTES_MAX.min(body.len()));
    format!("{}: {}", answer.status.as_u16(), &body[..end])
}
