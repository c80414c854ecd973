//! What an engine can do, and what Quorate will therefore do: `quorate engine-check URL`.
//!
//! Each check asks for one thing over HTTP, as a replica would, and says in a sentence what
//! follows. They run one after the other, because they read the engine's own counters: other
//! traffic would falsify the cached tokens and hang-ups that they find.

mod answers;
mod client;
mod events;
mod facts;
mod tokens;

use std::sync::Arc;
use std::time::Duration;

use api::backends::EngineKind;
use api::kv_events::endpoint::KvEndpoint;
use api::prompt::Tokenizer;
use http::HeaderValue;
use serde::Serialize;

use client::EngineClient;

/// What to check, and how.
#[derive(Debug, Clone)]
pub struct EngineCheckOptions {
    /// Where the engine is, without a slash at the end.
    pub url: String,
    /// Model to ask for; `None`: the first that the engine lists.
    pub model: Option<String>,
    /// Sent as `authorization`.
    pub authorization: Option<HeaderValue>,
    /// The tokenizer whose ids the engine's are compared with.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Where it publishes KV events, and replays; `None`: it is asked.
    pub kv_events: Option<(KvEndpoint, Option<KvEndpoint>)>,
    /// Longest wait for an answer, for a message and for a hang-up to be noticed.
    pub patience: Duration,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EngineReport {
    /// Where the engine is.
    pub url: String,
    /// Its kind, as far as its answers tell.
    pub kind: Option<EngineKind>,
    /// Its version, in its own words.
    pub version: Option<String>,
    /// The model that was asked for.
    pub model: Option<String>,
    /// The checks, in order.
    pub checks: Vec<CheckResult>,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckResult {
    /// What was checked.
    pub name: &'static str,
    /// Whether the engine can do it.
    pub outcome: CheckOutcome,
    /// What it answered.
    pub found: String,
    /// What Quorate will do.
    pub therefore: String,
}

/// Whether an engine can do something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckOutcome {
    /// It can.
    Yes,
    /// Some of it.
    Partly,
    /// It cannot, or not so that it could be used.
    No,
}

impl CheckOutcome {
    /// As tables show it.
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
    /// Whether the engine can serve behind Quorate at all: it is healthy, lists a model, and
    /// answers for it.
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

/// Checks an engine.
///
/// # Errors
/// If there is no connection to it at all.
pub async fn check(options: &EngineCheckOptions) -> anyhow::Result<EngineReport> {
    let client = EngineClient::new(options);
    let mut checks = vec![facts::health(&client).await?];
    let (models, listed) = facts::models(&client).await;
    checks.push(models);
    let (kind, version) = facts::kind(&client, &listed).await;
    let (metrics, page) = facts::metrics(&client).await;
    checks.push(metrics);
    let model = options.model.clone().or_else(|| listed.first_base());
    if let Some(model) = &model {
        checks.extend(answers::checks(&client, model).await);
        checks.push(tokens::check(&client, model, options.tokenizer.as_ref()).await);
        checks.push(events::check(&client, model, options.kv_events.as_ref()).await);
        checks.push(answers::hang_up(&client, model, page.as_ref()).await);
    }
    Ok(EngineReport {
        url: options.url.clone(),
        kind: page.and_then(|page| page.kind).or(kind),
        version,
        model,
        checks,
    })
}
