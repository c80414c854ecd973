//! `quorate engine-check URL`: checks what an engine can do, and states how Quorate will treat it.
//!
//! Each check tests one feature over HTTP, as a replica would use it, and states the consequence.
//! Checks run one after the other because they read the engine's counters. Other traffic would
//! falsify the cached tokens and disconnects that they measure.

mod answers;
mod client;
mod events;
mod facts;
mod tokens;

use std::sync::Arc;
use std::time::Duration;

use api::engines::backends::EngineKind;
use api::engines::kv_transport::endpoint::KvEndpoint;
use api::prompt::Tokenizer;
use http::HeaderValue;
use serde::Serialize;

use client::EngineClient;

/// Options for checking an engine.
#[derive(Debug, Clone)]
pub struct EngineCheckOptions {
    /// URL of the engine, without a trailing slash.
    pub url: String,
    /// Model to request; `None` for the first one that the engine lists.
    pub model: Option<String>,
    /// Value of the `authorization` header; `None` for none.
    pub authorization: Option<HeaderValue>,
    /// Tokenizer whose token ids are compared with the engine's, if any.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Endpoints of the engine's KV events and of their replay; `None` to query the engine for
    /// them.
    pub kv_events: Option<(KvEndpoint, Option<KvEndpoint>)>,
    /// Maximum time to wait for a response, for a message, and for the engine to notice a
    /// disconnect.
    pub patience: Duration,
}

/// Result of all checks of an engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EngineReport {
    /// URL of the engine.
    pub url: String,
    /// Kind of the engine, if its responses reveal it.
    pub kind: Option<EngineKind>,
    /// Version of the engine, if it reports one.
    pub version: Option<String>,
    /// Model that was requested, if any.
    pub model: Option<String>,
    /// Results of the checks, in order.
    pub checks: Vec<CheckResult>,
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckResult {
    /// Name of the check.
    pub name: &'static str,
    /// Whether the engine supports the checked feature.
    pub outcome: CheckOutcome,
    /// Description of what the engine responded.
    pub found: String,
    /// Consequence of the result: how Quorate will behave.
    pub therefore: String,
}

/// Whether an engine supports a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckOutcome {
    /// The engine supports the feature.
    Yes,
    /// The engine supports the feature in part.
    Partly,
    /// The engine does not support the feature, or not in a usable way.
    No,
}

impl CheckOutcome {
    /// Returns the name that tables show.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::Partly => "partly",
            Self::No => "no",
        }
    }

    fn of(is_so: bool) -> Self {
        if is_so { Self::Yes } else { Self::No }
    }
}

impl CheckResult {
    fn new(
        name: &'static str,
        outcome: CheckOutcome,
        found: impl Into<String>,
        therefore: impl Into<String>,
    ) -> Self {
        Self {
            name,
            outcome,
            found: found.into(),
            therefore: therefore.into(),
        }
    }
}

impl EngineReport {
    /// Whether the engine can serve behind Quorate: it is healthy, lists a model, and completes a
    /// chat.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        let needed = ["health", "models", "chat"];
        let can = |name: &&str| {
            let check = self.checks.iter().find(|check| check.name == *name);
            check.is_some_and(|check| check.outcome != CheckOutcome::No)
        };
        needed.iter().all(can)
    }
}

/// Checks an engine and returns all results.
///
/// # Errors
/// Fails if no connection to the engine can be made.
pub async fn check(options: &EngineCheckOptions) -> anyhow::Result<EngineReport> {
    let client = EngineClient::new(options);
    let mut checks = vec![facts::health(&client).await?];
    let (models, listed) = facts::models(&client).await;
    checks.push(models);
    let (kind, version) = facts::kind(&client, &listed).await;
    let (metrics, page) = facts::metrics(&client).await;
    checks.push(metrics);
    let kind = page.as_ref().and_then(|page| page.kind).or(kind);
    let model = options.model.clone().or_else(|| listed.first_base());
    if let Some(model) = &model {
        checks.extend(answers::checks(&client, model).await);
        checks.push(tokens::check(&client, model, kind, options.tokenizer.as_ref()).await);
        checks.push(events::check(&client, model, options.kv_events.as_ref()).await);
        checks.push(answers::hang_up(&client, model, page.as_ref()).await);
    }
    Ok(EngineReport {
        url: options.url.clone(),
        kind,
        version,
        model,
        checks,
    })
}
