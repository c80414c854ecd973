//! `POST /admin/v1/policy/what-if`: what policies would have chosen in the last decisions.
//!
//! Each decision is repeated with its recorded inputs: the candidates with their matches and load.
//! Decisions on two backends, or among too many to record, are left out. For one decision, the
//! answer is exact unless the record lacks an input of the policy (`lacks`). It ignores a policy's
//! long-term effects on block placement and queue lengths, which `quorate simulate
//! --from-decisions` covers (docs/guide/what-if.md). This reads only kept records, on its own
//! thread and one call at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::extract::State;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use state::command::Rejection;
use state::ids::{BackendRef, BlockHash, ReplicaId};
use state::policy::{self, Choice, PolicyConfig, PolicyRequest};

use super::answer::{Answer, MaybeJson};
use super::problem::invalid;
use super::{Admin, AdminState};
use api::error::Problem;
use api::proxy::TakenRequest;
use api::routing::SeenDecision;

/// Maximum number of decisions to repeat.
const DECISIONS_MAX: usize = 10_000;
/// Maximum number of policies to evaluate.
const POLICIES_MAX: usize = 20;

/// Decisions to repeat, and the policies to repeat them with.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(
    example = json!({ "decisions": 1000, "policies": [{ "policy": "cost" }, { "policy": "random" }] })
)]
pub(super) struct WhatIfQuestion {
    /// Number of last decisions to examine.
    #[schemars(range(min = 1, max = 10_000))]
    decisions: usize,
    /// Only requests for this model.
    model: Option<String>,
    /// Policies with their settings; `null`: the live one, and all others with their defaults.
    #[schemars(length(min = 1, max = 20))]
    policies: Option<Vec<PolicyConfig>>,
}

impl Default for WhatIfQuestion {
    fn default() -> Self {
        Self {
            decisions: 1000,
            model: None,
            policies: None,
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(example = WhatIfAnswer::example())]
pub(super) struct WhatIfAnswer {
    /// Replica that decided.
    replica: ReplicaId,
    /// Number of decisions repeated.
    decisions: u64,
    /// Number of repeated decisions with more than one backend to choose from.
    choices: u64,
    /// Number of last decisions that could not be repeated: with more than 64 backends, two
    /// backends for one request, or none.
    left_out: u64,
    /// Arrival of the first request examined, in Unix milliseconds; `null`: there is none.
    from_ms: Option<u64>,
    /// Arrival of the last request examined, in Unix milliseconds; `null`: there is none.
    until_ms: Option<u64>,
    /// Share of prompt tokens that engines found in their caches, among requests whose engine
    /// reported it; `null`: none did.
    reported_hit_rate: Option<f64>,
    /// Figures of the actual decisions.
    decided: WhatIfFigures,
    policies: Vec<WhatIfPolicy>,
}

impl WhatIfAnswer {
    /// Returns an example with two backends and one policy.
    fn example() -> Self {
        let figures = |hit_rate, busiest, [first, second]: [u64; 2]| WhatIfFigures {
            predicted_hit_rate: Some(hit_rate),
            busiest_share: Some(busiest),
            by_backend: [("gpu-1".to_owned(), first), ("gpu-2".to_owned(), second)].into(),
        };
        Self {
            replica: ReplicaId(1),
            decisions: 1000,
            choices: 1000,
            left_out: 0,
            from_ms: Some(1_790_000_000_000),
            until_ms: Some(1_790_000_060_000),
            reported_hit_rate: Some(0.71),
            decided: figures(0.72, 1.06, [530, 470]),
            policies: vec![WhatIfPolicy {
                config: PolicyConfig::LeastRequest,
                is_live: false,
                elsewhere: 471,
                lacks: BTreeSet::new(),
                figures: figures(0.38, 1.0, [500, 500]),
            }],
        }
    }
}

/// Result for one policy.
#[derive(Debug, Serialize, JsonSchema)]
struct WhatIfPolicy {
    config: PolicyConfig,
    /// Whether it is the live policy with its live settings.
    is_live: bool,
    /// Number of decisions in which this policy would have chosen another backend.
    elsewhere: u64,
    /// Inputs of this policy that were not recorded, because the deciding policy does not use them:
    /// `session`, `user_tokens`, `learnt_prices`.
    lacks: BTreeSet<&'static str>,
    #[serde(flatten)]
    figures: WhatIfFigures,
}

/// Figures of a set of choices.
#[derive(Debug, Default, Clone, PartialEq, Serialize, JsonSchema)]
struct WhatIfFigures {
    /// Share of prompt tokens that the chosen backends were predicted to hold; `null`: there were
    /// none.
    predicted_hit_rate: Option<f64>,
    /// Requests of the busiest backend, divided by an even share among all available backends;
    /// `null`: there were no requests.
    busiest_share: Option<f64>,
    /// Number of requests by backend.
    by_backend: BTreeMap<String, u64>,
}

/// Handles `POST /admin/v1/policy/what-if`.
pub(super) async fn ask(
    State(admin): State<AdminState>,
    MaybeJson(question): MaybeJson<WhatIfQuestion>,
) -> Result<Answer<WhatIfAnswer>, Problem> {
    let question = question.unwrap_or_default();
    if !(1..=DECISIONS_MAX).contains(&question.decisions) {
        let found = question.decisions;
        let expected = format!("{found}, expected 1 to {DECISIONS_MAX}");
        return Err(invalid("decisions", expected));
    }
    let policies = policies(&admin, question.policies)?;
    let Ok(permit) = Arc::clone(&admin.what_ifs).try_acquire_owned() else {
        let title = "another what-if query is running";
        let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, "limit", title);
        return Err(problem.retry_after(1));
    };
    let asked = Arc::clone(&admin.admin);
    let (limit, model) = (question.decisions, question.model);
    let answering = tokio::task::spawn_blocking(move || {
        let mut taken = asked.decisions.with_blocks(limit);
        if let Some(model) = model {
            taken.retain(|it| *it.record.model == *model);
        }
        let answer = answer(&asked, &taken, policies);
        drop(permit);
        answer
    });
    let answered = answering.await.map_err(|_| {
        let title = "the replica is stopping";
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", title).retry_after(1)
    })?;
    Ok(Answer(answered))
}

fn policies(admin: &Admin, asked: Option<Vec<PolicyConfig>>) -> Result<Vec<PolicyConfig>, Problem> {
    let Some(asked) = asked else {
        let live = admin.view.registry().policy.clone();
        let others = PolicyConfig::defaults().into_iter();
        let others = others.filter(|other| other.name() != live.name());
        return Ok([live.clone()].into_iter().chain(others).collect());
    };
    if !(1..=POLICIES_MAX).contains(&asked.len()) {
        let expected = format!("{}, expected 1 to {POLICIES_MAX}", asked.len());
        return Err(invalid("policies", expected));
    }
    for (at, policy) in asked.iter().enumerate() {
        policy.validate().map_err(|reject| match reject {
            Rejection::Invalid { field, expected } => {
                invalid(&format!("policies[{at}].{field}"), expected)
            }
            other => invalid(&format!("policies[{at}]"), other.to_string()),
        })?;
    }
    Ok(asked)
}

/// A recorded decision to be repeated.
struct ReplayedDecision<'a> {
    seen: SeenDecision<'a>,
    chain: &'a [BlockHash],
}

fn answer(admin: &Admin, taken: &[TakenRequest], policies: Vec<PolicyConfig>) -> WhatIfAnswer {
    let kept: Vec<_> = taken
        .iter()
        .filter_map(|it| {
            let attempts = it.record.attempts();
            Some((it, Arc::clone(&attempts.first()?.decision)))
        })
        .collect();
    let again = kept.iter().filter_map(|(it, decision)| {
        let seen = decision.as_seen()?;
        let chain = &*it.chain;
        (!seen.candidates.is_empty()).then_some(ReplayedDecision { seen, chain })
    });
    let again: Vec<ReplayedDecision<'_>> = again.collect();
    let name = |handle: BackendRef| {
        let name = admin.decider.name_of(handle);
        name.map_or_else(
            || format!("slot {}", handle.slot.0),
            |name| name.to_string(),
        )
    };
    let (mut prompts, mut cached) = (0, 0);
    for (_, decision) in &kept {
        let usage = decision.outcome().and_then(|report| report.usage);
        if let Some((usage, found)) = usage.and_then(|it| Some((it, it.cached_tokens?))) {
            prompts += usage.prompt_tokens;
            cached += found;
        }
    }
    let live = admin.view.registry().policy.clone();
    let decided = figures(&again, |again, _| Some(again.seen.choice), name);
    let asked = policies.into_iter().map(|config| {
        let choose = |again: &ReplayedDecision<'_>, at| chosen(&config, again, at);
        let elsewhere = (0..).zip(&again);
        let elsewhere = elsewhere.filter(|(at, it)| {
            choose(it, *at).is_some_and(|choice| choice.slot != it.seen.choice.slot)
        });
        WhatIfPolicy {
            is_live: config == live,
            elsewhere: elsewhere.count() as u64,
            lacks: again.iter().flat_map(|it| lacks(&config, it)).collect(),
            figures: figures(&again, choose, name),
            config: config.clone(),
        }
    });
    WhatIfAnswer {
        replica: admin.decisions.replica(),
        decisions: again.len() as u64,
        choices: again
            .iter()
            .filter(|it| it.seen.candidates.len() > 1)
            .count() as u64,
        left_out: (taken.len() - again.len()) as u64,
        from_ms: taken.first().map(|first| first.record.at_ms),
        until_ms: taken.last().map(|last| last.record.at_ms),
        reported_hit_rate: (prompts > 0).then(|| cached as f64 / prompts as f64),
        decided,
        policies: asked.collect(),
    }
}

/// Returns the choice that `config` would have made in the decision number `at`; `None` without
/// candidates.
fn chosen(config: &PolicyConfig, again: &ReplayedDecision<'_>, at: u64) -> Option<Choice> {
    let seen = &again.seen;
    if config == seen.policy {
        return Some(seen.choice);
    }
    let needs = config.needs();
    let mut request = seen.request;
    if needs.turn {
        request.turn = at;
    }
    if let Some(blocks) = needs.prefix_blocks {
        let first = again.chain.get(..blocks as usize).unwrap_or(again.chain);
        // The key of a shorter prompt is its last kept block.
        request.prefix_key = first.last().map_or(request.jitter, |block| block.0);
    }
    policy::choose(config, &request, &seen.candidates)
}

/// Returns the inputs that `config` needs and that the deciding policy did not record.
fn lacks(
    config: &PolicyConfig,
    again: &ReplayedDecision<'_>,
) -> impl Iterator<Item = &'static str> {
    let (needs, noted) = (config.needs(), again.seen.policy.needs());
    let session = needs.session.is_some() && needs.session != noted.session;
    let users = needs.user_tokens && !noted.user_tokens;
    let prices = needs.learnt && !noted.learnt;
    let all = [
        (session, "session"),
        (users, "user_tokens"),
        (prices, "learnt_prices"),
    ];
    all.into_iter().filter_map(|(is, what)| is.then_some(what))
}

fn figures(
    again: &[ReplayedDecision<'_>],
    choose: impl Fn(&ReplayedDecision<'_>, u64) -> Option<Choice>,
    name: impl Fn(BackendRef) -> String,
) -> WhatIfFigures {
    let mut by_handle: BTreeMap<BackendRef, u64> = BTreeMap::new();
    let (mut tokens, mut held) = (0, 0);
    for (at, it) in (0..).zip(again) {
        for handle in &it.seen.handles {
            by_handle.entry(*handle).or_default();
        }
        let Some(choice) = choose(it, at) else {
            continue;
        };
        let place = it
            .seen
            .candidates
            .iter()
            .position(|one| one.slot == choice.slot);
        if let Some(place) = place {
            *by_handle.entry(it.seen.handles[place]).or_default() += 1;
        }
        tokens += u64::from(it.seen.request.tokens);
        held += held_tokens(&it.seen.request, choice.matched);
    }
    let busiest = by_handle.values().max().copied().unwrap_or_default();
    let all: u64 = by_handle.values().sum();
    let mut by_backend: BTreeMap<String, u64> = BTreeMap::new();
    for (handle, count) in &by_handle {
        *by_backend.entry(name(*handle)).or_default() += count;
    }
    WhatIfFigures {
        predicted_hit_rate: (tokens > 0).then(|| held as f64 / tokens as f64),
        busiest_share: (all > 0).then(|| busiest as f64 * by_handle.len() as f64 / all as f64),
        by_backend,
    }
}

/// Returns the number of prompt tokens in the first `matched` blocks.
fn held_tokens(request: &PolicyRequest, matched: u32) -> u64 {
    let blocks = u64::from(matched.min(request.blocks));
    let tokens = blocks * u64::from(request.tokens_per_block);
    tokens.min(request.tokens.into())
}
