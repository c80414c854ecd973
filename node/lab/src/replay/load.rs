//! The load generator: sends a plan to targets in turn, and reports the results.
//!
//! A trace is sent open loop: each request is sent at its time in the trace, regardless of earlier
//! ones, up to a limit on concurrent requests (the report has the resulting delay). Chats are sent
//! closed loop: a fixed number at a time, each turn after the previous response. Agents pause in
//! between.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderValue;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::agents::Agents;
use super::chats::Chats;
use super::client::{ReplayAnswer, ReplayClient, ReplayError, ReplayRequest};
use super::report::{LoadReport, LoadTally};
use super::targets::{PickedTarget, Targets};
use super::trace::Arrival;

/// Requests to send, and the pace at which to send them.
#[derive(Debug)]
pub struct LoadPlan<'a> {
    /// Source of the requests.
    pub work: LoadSource<'a>,
    /// Name of the model to request if a trace names none.
    pub model: String,
    /// Factor by which the trace's timestamps are sped up.
    pub speed: f64,
    /// Maximum number of requests in flight. Chats keep this many in flight.
    pub in_flight_max: usize,
    /// Timeout of each request.
    pub timeout: Duration,
}

/// Source of a plan's requests.
#[derive(Debug)]
pub enum LoadSource<'a> {
    /// A trace, sent by its timestamps.
    Trace(Vec<Arrival>),
    /// Turns of chats. The chats keep their state afterwards.
    Chats {
        /// The chats to continue.
        chats: &'a mut Chats,
        /// Number of turns to send.
        requests: u64,
    },
    /// Turns of agents.
    Agents {
        /// The agents.
        agents: Agents,
        /// Number of turns to send.
        requests: u64,
    },
}

/// Progress of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Total number of requests.
    pub planned: u64,
    /// Number of requests that have ended.
    pub ended: u64,
    /// Number of requests that have failed.
    pub failed: u64,
    /// Number of requests in flight.
    pub in_flight: u64,
    /// Number of prompt tokens in responses that report cached tokens.
    pub prompt_tokens: u64,
    /// Number of cached tokens that responses report.
    pub cached_tokens: u64,
}

/// A request that is about to be sent.
#[derive(Debug)]
struct PlannedRequest {
    path: &'static str,
    user: Arc<str>,
    session: [Option<String>; 2],
    body: Bytes,
    /// Index of the chat or session.
    chat: Option<usize>,
}

/// A request that has ended, with its target and result.
#[derive(Debug)]
struct EndedRequest {
    pick: PickedTarget,
    user: Arc<str>,
    chat: Option<usize>,
    result: Result<ReplayAnswer, ReplayError>,
}

/// The next step of the load generator.
#[derive(Debug)]
enum NextRequest {
    /// Send a request as soon as this time has passed since the start.
    Send(Duration),
    /// Wait until a request in flight ends.
    Wait,
    /// Stop, because all requests have ended.
    Over,
}

impl LoadSource<'_> {
    /// Lets a trace request no other models than those `served`.
    pub fn request(&mut self, served: &[String]) {
        if let Self::Trace(arrivals) = self {
            for arrival in arrivals {
                arrival.model.take_if(|model| !served.contains(model));
            }
        }
    }

    /// Returns the number of requests.
    #[must_use]
    pub fn planned(&self) -> u64 {
        match self {
            Self::Trace(arrivals) => arrivals.len() as u64,
            Self::Chats { requests, .. } | Self::Agents { requests, .. } => *requests,
        }
    }
}

/// State of a plan in progress.
struct RunningLoad<'a, 'b> {
    work: LoadSource<'a>,
    model: String,
    speed: f64,
    in_flight_max: usize,
    targets: &'b Targets,
    client: ReplayClient,
    tally: LoadTally,
    planned: u64,
    sent: u64,
    started: Instant,
    running: JoinSet<EndedRequest>,
}

/// Sends the requests of `plan` to `targets` and reports the results. Calls `on_progress` whenever
/// a request has ended.
///
/// # Panics
/// If the plan's speed is not a positive number.
pub async fn run(
    plan: LoadPlan<'_>,
    targets: &Targets,
    on_progress: impl Fn(LoadProgress),
) -> LoadReport {
    assert!(
        plan.speed.is_finite() && plan.speed > 0.0,
        "load at speed {}",
        plan.speed
    );
    let mut load = RunningLoad {
        planned: plan.work.planned(),
        work: plan.work,
        model: plan.model,
        speed: plan.speed,
        in_flight_max: plan.in_flight_max.max(1),
        targets,
        client: ReplayClient::of(targets, plan.timeout),
        tally: LoadTally::new((0..targets.len()).map(|index| targets.name(index))),
        sent: 0,
        started: Instant::now(),
        running: JoinSet::new(),
    };
    let started = load.started;
    loop {
        match load.next() {
            NextRequest::Over => break,
            NextRequest::Wait => {
                load.end_one(&on_progress).await;
            }
            NextRequest::Send(at) => {
                let due = started + at;
                tokio::select! {
                    biased;
                    () = sleep_until(due) => load.send(due).await,
                    () = load.end_one(&on_progress) => {}
                }
            }
        }
    }
    load.tally.report(started.elapsed())
}

impl RunningLoad<'_, '_> {
    fn next(&self) -> NextRequest {
        if self.sent == self.planned {
            return if self.running.is_empty() {
                NextRequest::Over
            } else {
                NextRequest::Wait
            };
        }
        if self.running.len() >= self.in_flight_max {
            return NextRequest::Wait;
        }
        match &self.work {
            LoadSource::Trace(arrivals) => {
                let index = usize::try_from(self.sent).expect("a position in a list");
                NextRequest::Send(arrivals[index].at.div_f64(self.speed))
            }
            LoadSource::Chats { chats, .. } if chats.has_idle() => {
                NextRequest::Send(Duration::ZERO)
            }
            LoadSource::Chats { .. } if self.running.is_empty() => NextRequest::Over,
            LoadSource::Chats { .. } => NextRequest::Wait,
            LoadSource::Agents { agents, .. } => match agents.due() {
                Some(at) => NextRequest::Send(at),
                None if self.running.is_empty() => NextRequest::Over,
                None => NextRequest::Wait,
            },
        }
    }

    async fn send(&mut self, due: Instant) {
        let pick = loop {
            match self.targets.pick() {
                Some(pick) => break pick,
                None => self.targets.wait_for_one().await,
            }
        };
        let Some(job) = self.job() else { return };
        self.sent += 1;
        if matches!(self.work, LoadSource::Trace(_)) {
            self.tally.sent(due.elapsed());
        }
        let client = self.client.clone();
        let uri = self.targets.uri(pick.index, job.path);
        self.running.spawn(async move {
            let header = |name: &str| HeaderValue::from_str(name).expect("names are visible ascii");
            let (user, session) = (header(&job.user), job.session);
            let result = client
                .stream(ReplayRequest {
                    uri,
                    user,
                    session: session.map(|name| Some(header(&name?))),
                    body: job.body,
                })
                .await;
            EndedRequest {
                pick,
                user: job.user,
                chat: job.chat,
                result,
            }
        });
    }

    fn job(&mut self) -> Option<PlannedRequest> {
        match &mut self.work {
            LoadSource::Trace(arrivals) => {
                let index = usize::try_from(self.sent).expect("a position in a list");
                let arrival = &arrivals[index];
                let prompt = arrival.prompt.text();
                Some(PlannedRequest {
                    path: "/v1/completions",
                    user: arrival.user.clone(),
                    session: arrival.session.clone(),
                    body: completion(
                        arrival.model.as_ref().unwrap_or(&self.model),
                        &prompt,
                        arrival.output_tokens,
                    ),
                    chat: None,
                })
            }
            LoadSource::Chats { chats, .. } => {
                chats.next_turn(&self.model).map(|turn| PlannedRequest {
                    path: "/v1/chat/completions",
                    user: turn.user,
                    session: [None, None],
                    body: turn.body,
                    chat: Some(turn.chat),
                })
            }
            LoadSource::Agents { agents, .. } => agents.next_turn().map(|turn| PlannedRequest {
                path: "/v1/completions",
                user: turn.user,
                session: [Some(turn.name), turn.parent],
                body: completion(&self.model, &turn.prompt, turn.output_tokens),
                chat: Some(turn.session),
            }),
        }
    }

    /// Waits for a request to end and records its result. Waits forever if none is in flight.
    async fn end_one(&mut self, on_progress: &impl Fn(LoadProgress)) {
        let Some(ended) = self.running.join_next().await else {
            return std::future::pending().await;
        };
        let EndedRequest {
            pick,
            user,
            chat,
            result,
        } = ended.expect("requests neither panic nor abort");
        let target = self.targets.name(pick.index);
        match &result {
            Ok(answer) => self.tally.answered(target, &user, answer),
            Err(_) if self.targets.went_down(pick) => self.tally.lost(target, &user),
            Err(failure) => self.tally.failed(target, &user, failure),
        }
        let now = self.started.elapsed();
        match (&mut self.work, chat, &result) {
            (LoadSource::Chats { chats, .. }, Some(chat), Ok(answer)) => {
                chats.answered(chat, &answer.text);
            }
            (LoadSource::Chats { chats, .. }, Some(chat), Err(_)) => chats.failed(chat),
            (LoadSource::Agents { agents, .. }, Some(session), Ok(answer)) => {
                agents.answered(session, &answer.text, now);
            }
            (LoadSource::Agents { agents, .. }, Some(session), Err(_)) => {
                agents.failed(session, now);
            }
            (_, None, _) | (LoadSource::Trace(_), ..) => {}
        }
        let (ended, failed) = self.tally.counts();
        let (prompt_tokens, cached_tokens) = self.tally.hits();
        on_progress(LoadProgress {
            planned: self.planned,
            ended,
            failed,
            in_flight: self.running.len() as u64,
            prompt_tokens,
            cached_tokens,
        });
    }
}

/// Returns the body of a streamed completion.
fn completion(model: &str, prompt: &str, output_tokens: u32) -> Bytes {
    let body = format!(
        "{{\"model\":{},\"prompt\":{},\"max_tokens\":{},\"stream\":true,\
         \"stream_options\":{{\"include_usage\":true}}}}",
        Value::from(model),
        Value::from(prompt),
        output_tokens.max(1),
    );
    Bytes::from(body)
}
