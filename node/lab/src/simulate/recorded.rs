//! A recording of a cluster's requests (`api::files::recording`) as a workload.
//!
//! A recording has block ids instead of text, so each id gets its own text: equal prefixes stay
//! equal, block for block. Text after the last block is always new. Outputs are not recorded: the
//! next turn of a chat does not contain the simulated engine's output, so it cannot hit those
//! blocks.
//!
//! Engines start with the blocks that the recorded ones reported as cached although nobody had sent
//! them since the recording began.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use api::files::recording::{BlockId, RecordedRequest, Recording};
use serde::Serialize;

use super::argument_error::SimulateArgsError;
use super::recorded_speed::RecordedSpeed;
use super::times::summary;
use super::workload::{SimArrival, SimPrompt, SimSession, SimUser, SimWorkload, WarmPrefix};
use crate::engine::text::TOKEN_BYTES;
use crate::recorded::{output, prompt_tokens, usual_output};
use crate::replay::report::LatencySummary;
use crate::replay::text::passage;

/// Seed of the texts of prompts.
const TEXTS: u64 = 0x7e47;

/// Recorded requests, and properties of the recorded cluster.
#[derive(Debug, Clone)]
pub struct RecordedDemand {
    /// Workload of the recorded requests for the simulated model.
    pub workload: SimWorkload,
    /// Number of tokens per block.
    pub block_tokens: u32,
    /// Number of backends that serve the model.
    pub backends: u16,
    /// Number of recorded replicas.
    pub replicas: u8,
    /// Smallest known capacity of the model's backends, in blocks; `None` if unknown.
    pub capacity_blocks: Option<u32>,
    /// Concurrency limit of the model's backends; `None` if they have none or different ones.
    pub limit: Option<u32>,
    /// Results of the recorded cluster.
    pub figures: RecordedFigures,
}

/// Results of a recorded cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecordedFigures {
    /// Name of the simulated model.
    pub model: String,
    /// Number of requests for the model.
    pub requests: usize,
    /// Number of requests for other models, which the simulation leaves out.
    pub left_out: usize,
    /// Number of completed requests.
    pub ok: usize,
    /// Number of requests by the name of the policy that decided.
    pub policies: BTreeMap<String, usize>,
    /// Share of prompt tokens found in engines' caches, over requests with reports; `None` without
    /// reports.
    pub hit_rate: Option<f64>,
    /// Time from a parsed request to the first token of its stream, in milliseconds.
    pub ttft_ms: LatencySummary,
    /// Part of the time to the first token that was spent waiting for admission and a backend, in
    /// milliseconds.
    pub waited_ms: LatencySummary,
    /// Number of requests of the busiest backend, relative to an even share.
    pub busiest_share: f64,
    /// Number of requests by backend.
    pub by_backend: BTreeMap<String, usize>,
    /// Speed of the backends, which simulated engines get unless flags set it.
    pub speed: RecordedSpeed,
}

impl RecordedDemand {
    /// Reads the requests for `model`, or for the most requested model, from a recording.
    ///
    /// # Errors
    /// If the recording has no requests, or none for the model.
    pub fn of(recording: &Recording, model: Option<&str>) -> Result<Self, SimulateArgsError> {
        let model = model_of(recording, model)?;
        let requests = recording.requests.iter();
        let mut requests: Vec<_> = requests.filter(|it| it.model == model).collect();
        requests.sort_by_key(|request| request.at_ms);
        let block_tokens = block_tokens(&requests);
        let serves = |models: &[String]| models.iter().any(|it| *it == model || it == "*");
        let fleet = recording.head.backends.iter();
        let fleet: Vec<_> = fleet.filter(|it| serves(&it.models)).collect();
        let used = requests.iter().filter_map(|it| it.last());
        let used: BTreeSet<&str> = used.map(|it| &*it.backend).collect();
        let backends = match fleet.len() {
            0 => used.len().max(1),
            registered => registered,
        };
        let figures = RecordedFigures::of(recording, &model, &requests, backends);
        let capacities = fleet.iter().map(|it| it.capacity_blocks);
        let capacities: Option<Vec<u32>> = capacities.collect();
        let limits: BTreeSet<Option<u32>> = fleet.iter().map(|it| it.limit).collect();
        Ok(Self {
            workload: SimWorkload {
                warm: warm(&requests, block_tokens),
                ..workload(&requests, block_tokens, &recording.head.replicas)
            },
            block_tokens,
            backends: u16::try_from(backends).unwrap_or(u16::MAX).min(512),
            replicas: u8::try_from(recording.head.replicas.len().clamp(1, 64)).unwrap_or(1),
            capacity_blocks: capacities.and_then(|all| all.into_iter().min()),
            limit: match limits.len() {
                1 => limits.into_iter().next().flatten(),
                _ => None,
            },
            figures,
        })
    }
}

/// Returns the model to simulate: `asked`, or the most requested one.
///
/// # Errors
/// If the recording has no requests, or none for `asked`.
fn model_of(recording: &Recording, asked: Option<&str>) -> Result<String, SimulateArgsError> {
    let mut models: BTreeMap<&str, usize> = BTreeMap::new();
    for request in &recording.requests {
        *models.entry(&request.model).or_default() += 1;
    }
    let most = models.iter().max_by_key(|(_, requests)| **requests);
    let Some((most, _)) = most else {
        return Err(SimulateArgsError::new("the recording has no requests"));
    };
    let model = asked.unwrap_or(most);
    if models.contains_key(model) {
        return Ok(model.to_owned());
    }
    let all: Vec<&str> = models.into_keys().collect();
    Err(SimulateArgsError::new(format!(
        "no request of the recording is for the model {model:?}, but for {}",
        all.join(", ")
    )))
}

/// Returns the number of tokens per block. If requests differ, because it is an estimate, returns
/// the most common number.
fn block_tokens(requests: &[&RecordedRequest]) -> u32 {
    let mut sizes: BTreeMap<u32, usize> = BTreeMap::new();
    for request in requests.iter().filter(|it| !it.blocks.is_empty()) {
        *sizes.entry(request.block_tokens).or_default() += 1;
    }
    let most = sizes.into_iter().max_by_key(|(_, requests)| *requests);
    most.map_or(super::plan::BLOCK_TOKENS, |(tokens, _)| tokens)
}

fn workload(requests: &[&RecordedRequest], block_tokens: u32, replicas: &[u8]) -> SimWorkload {
    let mut workload = SimWorkload::default();
    let mut users: HashMap<&str, usize> = HashMap::new();
    let mut sessions: HashMap<&str, usize> = HashMap::new();
    let begin = requests.first().map_or(0, |first| first.at_ms);
    let usual_output = usual_output(requests);
    for (number, request) in (0..).zip(requests) {
        let user = *users.entry(&request.user).or_insert_with(|| {
            workload.users.push(SimUser::named(&request.user));
            workload.users.len() - 1
        });
        let mut session = |id: Option<_>, parent| {
            let session = *sessions.entry(id?).or_insert_with(|| {
                workload.sessions.push(SimSession { user, parent });
                workload.sessions.len() - 1
            });
            let known = &mut workload.sessions[session].parent;
            *known = known.or(parent);
            Some(session)
        };
        // A parent that is not in the recording has no turn, but its children are of one tree.
        let parent = session(request.parent_session.as_deref(), None);
        let session = session(request.session.as_deref(), parent);
        let replica = replicas.iter().position(|it| *it == request.replica);
        workload.arrivals.push(SimArrival {
            at: (request.at_ms - begin).saturating_mul(1000),
            user,
            session,
            prompt: Arc::new(prompt(request, block_tokens, number)),
            output_tokens: output(request).unwrap_or(usual_output),
            replica: replica.and_then(|place| u8::try_from(place).ok()),
        });
    }
    workload
}

/// Returns what the engines had cached before the recording: blocks that an engine reported as cached
/// for the first request that brought them there.
fn warm(requests: &[&RecordedRequest], block_tokens: u32) -> Vec<WarmPrefix> {
    let mut engines: BTreeMap<&str, HashSet<BlockId>> = BTreeMap::new();
    for backend in requests.iter().filter_map(|it| it.last()) {
        engines.entry(&backend.backend).or_default();
    }
    let numbers: BTreeMap<&str, usize> = engines.keys().copied().zip(0..).collect();
    let mut warm = Vec::new();
    for request in requests {
        let (Some(last), Some(report)) = (request.last(), request.report()) else {
            continue;
        };
        let sent = engines.entry(&last.backend).or_default();
        let blocks = report.cached_tokens.unwrap_or(0) / u64::from(block_tokens.max(1));
        let blocks = usize::try_from(blocks).unwrap_or(usize::MAX);
        let cached = &request.blocks[..blocks.min(request.blocks.len())];
        if cached.last().is_some_and(|deepest| !sent.contains(deepest)) {
            let text = text_of(cached, block_tokens);
            warm.push(WarmPrefix {
                engine: numbers[&*last.backend],
                prompt: Arc::new(SimPrompt::cut(text.as_bytes(), block_tokens)),
            });
        }
        sent.extend(&request.blocks);
    }
    warm
}

/// Returns substitute text of these blocks.
fn text_of(blocks: &[BlockId], block_tokens: u32) -> String {
    let bytes = block_tokens as usize * TOKEN_BYTES;
    let blocks = blocks.iter();
    blocks.map(|block| passage(TEXTS, block.0, bytes)).collect()
}

/// Returns the prompt of the request with the number `number`, with substitute text.
fn prompt(request: &RecordedRequest, block_tokens: u32, number: u64) -> SimPrompt {
    let tokens = prompt_tokens(request, block_tokens) as usize;
    let mut text = text_of(&request.blocks, block_tokens);
    let left = tokens * TOKEN_BYTES - text.len();
    text.push_str(&passage(!TEXTS, number, left));
    SimPrompt::cut(text.as_bytes(), block_tokens)
}

impl RecordedFigures {
    fn of(
        recording: &Recording,
        model: &str,
        requests: &[&RecordedRequest],
        backends: usize,
    ) -> Self {
        let (mut prompts, mut cached, mut ok) = (0, 0, 0);
        let (mut ttft, mut waited) = (Vec::new(), Vec::new());
        let mut by_backend: BTreeMap<String, usize> = BTreeMap::new();
        let mut policies: BTreeMap<String, usize> = BTreeMap::new();
        for request in requests {
            let Some(last) = request.last() else {
                continue;
            };
            *by_backend.entry(last.backend.clone()).or_default() += 1;
            *policies.entry(last.policy.clone()).or_default() += 1;
            waited.push(micros(last.waited_ms));
            let Some(report) = &last.report else {
                continue;
            };
            ok += usize::from(report.end == "finished");
            ttft.extend(report.ttft_ms.map(|ms| micros(last.after_ms + ms)));
            if let (Some(all), Some(found)) = (report.prompt_tokens, report.cached_tokens) {
                prompts += all;
                cached += found;
            }
        }
        let busiest = by_backend.values().max().copied().unwrap_or_default();
        let all: usize = by_backend.values().sum();
        Self {
            model: model.to_owned(),
            requests: requests.len(),
            left_out: recording.requests.len() - requests.len(),
            ok,
            policies,
            hit_rate: (prompts > 0).then(|| cached as f64 / prompts as f64),
            ttft_ms: summary(&mut ttft),
            waited_ms: summary(&mut waited),
            busiest_share: (busiest * by_backend.len()) as f64 / all.max(1) as f64,
            speed: RecordedSpeed::of(requests, backends),
            by_backend,
        }
    }
}

/// Converts milliseconds from a file, which may have any value.
fn micros(ms: f64) -> u64 {
    (ms.max(0.0) * 1000.0) as u64
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    /// Returns a recording of requests with these models and blocks.
    fn recording(requests: &[(&str, &[u64])]) -> Recording {
        let mut text = "{\"quorate_recording\":1,\"replicas\":[1,2],\"salt\":\"s\",\"from_ms\":5,\
            \"until_ms\":9,\"ended_by\":\"seconds\",\"backends\":[\
            {\"id\":\"a\",\"models\":[\"m\"],\"capacity_blocks\":100,\"limit\":8},\
            {\"id\":\"b\",\"models\":[\"*\"],\"capacity_blocks\":90,\"limit\":8},\
            {\"id\":\"c\",\"models\":[\"n\"]}]}\n"
            .to_owned();
        let mut before: BTreeSet<u64> = BTreeSet::new();
        for (at, (model, blocks)) in requests.iter().enumerate() {
            let known = blocks.iter().rposition(|block| before.contains(block));
            let after = known.map(|at| format!(",\"after\":\"{:016x}\"", blocks[at]));
            let new = &blocks[known.map_or(0, |at| at + 1)..];
            let new: Vec<String> = new.iter().map(|it| format!("\"{it:016x}\"")).collect();
            before.extend(blocks.iter());
            writeln!(
                text,
                "{{\"at_ms\":{},\"replica\":2,\"user\":\"u\",\"model\":\"{model}\",\
                 \"unit\":\"tokens\",\"tokens\":{},\"block_tokens\":16,\"matchable\":1,\
                 \"stream\":false{},\"blocks\":[{}],\"attempts\":[{{\"after_ms\":1,\
                 \"waited_ms\":1,\"index\":1,\"policy\":\"cost\",\"candidates\":2,\
                 \"backend\":\"a\",\"matched\":0,\"reason\":\"jitter\",\"report\":{{\
                 \"end\":\"finished\",\"prompt_tokens\":{},\"cached_tokens\":10,\
                 \"output_tokens\":7,\"ttft_ms\":2.5,\"duration_ms\":9}}}}]}}",
                at + 100,
                16 * blocks.len() + 3,
                after.unwrap_or_default(),
                new.join(","),
                16 * blocks.len() + 3,
            )
            .unwrap();
        }
        api::files::recording::read(&text).unwrap()
    }

    #[test]
    fn recorded_prompts_share_their_recorded_prefixes() {
        let recorded = recording(&[("m", &[1, 2, 3]), ("m", &[1, 2]), ("m", &[4]), ("n", &[5])]);
        let demand = RecordedDemand::of(&recorded, None).unwrap();
        let chains = demand.workload.arrivals.iter();
        let chains: Vec<_> = chains.map(|it| it.prompt.identity.chain.to_vec()).collect();
        assert_eq!((chains[0].len(), chains[1].len()), (3, 2));
        assert_eq!(chains[0][..2], chains[1][..]);
        assert_ne!(chains[0][0], chains[2][0]);
        let engines: Vec<_> = demand.workload.arrivals.iter().collect();
        let hashes = |at: usize| engines[at].prompt.sequence.hashes();
        assert_eq!(hashes(0)[..2], hashes(1)[..]);
        let first = engines[0];
        assert_eq!(
            (first.prompt.tokens, first.output_tokens, first.at),
            (51, 7, 0)
        );
        assert_eq!((engines[1].at, engines[1].replica), (1000, Some(1)));
        let sizes = (demand.block_tokens, demand.backends, demand.replicas);
        assert_eq!(sizes, (16, 2, 2));
        assert_eq!((demand.capacity_blocks, demand.limit), (Some(90), Some(8)));
        let figures = demand.figures;
        assert_eq!((figures.requests, figures.left_out, figures.ok), (3, 1, 3));
        assert_eq!(figures.hit_rate, Some(30.0 / 105.0));
        assert!((figures.ttft_ms.mean - 3.5).abs() < 1e-9);
    }

    #[test]
    fn engines_start_with_what_was_cached_before_the_recording() {
        let mut recorded = recording(&[("m", &[1, 2, 3]), ("m", &[1, 2, 3]), ("m", &[4])]);
        for (request, cached) in recorded.requests.iter_mut().zip([33, 48, 0]) {
            let report = request.attempts[0].report.as_mut().unwrap();
            report.cached_tokens = Some(cached);
        }
        let demand = RecordedDemand::of(&recorded, None).unwrap();
        let warm = &demand.workload.warm;
        let first = &demand.workload.arrivals[0].prompt.identity.chain;
        assert_eq!(
            warm.len(),
            1,
            "the second request found what the first one brought"
        );
        assert_eq!(warm[0].prompt.identity.chain[..], first[..2]);
    }

    #[test]
    fn recorded_sessions_belong_to_the_trees_that_they_named() {
        let mut recorded = recording(&[("m", &[1]), ("m", &[2]), ("m", &[1, 3]), ("m", &[4])]);
        let named = [("root", None), ("child", Some("root")), ("root", None)];
        for (request, (session, parent)) in recorded.requests.iter_mut().zip(named) {
            request.session = Some(session.to_owned());
            request.parent_session = parent.map(str::to_owned);
        }
        let workload = RecordedDemand::of(&recorded, None).unwrap().workload;
        let sent: Vec<_> = workload.arrivals.iter().map(|it| it.session).collect();
        assert_eq!(sent, [Some(0), Some(1), Some(0), None]);
        let parents: Vec<_> = workload.sessions.iter().map(|it| it.parent).collect();
        assert_eq!(parents, [None, Some(0)]);
    }

    #[test]
    fn a_recorded_model_is_selected_by_name() {
        let recorded = recording(&[("m", &[1]), ("n", &[5]), ("n", &[5, 6])]);
        let demand = |model| RecordedDemand::of(&recorded, model);
        assert_eq!(demand(None).unwrap().figures.model, "n");
        assert_eq!(demand(Some("m")).unwrap().workload.arrivals.len(), 1);
        let error = demand(Some("k")).unwrap_err().to_string();
        assert!(error.contains("\"k\"") && error.contains("m, n"), "{error}");
        let none = RecordedDemand::of(&recording(&[]), None).unwrap_err();
        assert!(none.to_string().contains("no requests"), "{none}");
    }
}
