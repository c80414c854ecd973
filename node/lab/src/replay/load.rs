//! The load generator: a plan sent to targets in turn, and a report of what came back.
//!
//! A trace is sent open loop: each request goes out at the trace's time, whatever became of earlier
//! ones, up to a bound on concurrent requests (the resulting delay is reported). Chats are sent
//! closed loop: a fixed number at a time, each turn after the answer to the last.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderValue;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::chats::Chats;
use super::client::{ReplayAnswer, ReplayClient, ReplayError, ReplayRequest};
use super::report::{LoadReport, LoadTally};
use super::targets::{PickedTarget, Targets};
use super::trace::Arrival;

/// What is to be sent, and how.
#[derive(Debug)]
pub struct LoadPlan<'a> {
    /// The requests.
    pub work: LoadSource<'a>,
    /// Model that is asked for.
    pub model: String,
    /// How many times faster than the trace's timestamps.
    pub speed: f64,
    /// Requests under way at most; chats keep so many under way.
    pub in_flight_max: usize,
    /// Longest a request may take.
    pub timeout: Duration,
}

/// The requests of a plan.
#[derive(Debug)]
pub enum LoadSource<'a> {
    /// A trace, by its timestamps.
    Trace(Vec<Arrival>),
    /// Turns of chats, which are left where they have got to.
    Chats {
        /// The chats.
        chats: &'a mut Chats,
        /// How many turns.
        requests: u64,
    },
}

/// How far a load has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Requests that will be sent in all.
    pub planned: u64,
    /// Requests that have ended.
    pub ended: u64,
    /// Of these, failed.
    pub failed: u64,
    /// Requests under way.
    pub in_flight: u64,
    /// Prompt tokens whose cached part the engines told.
    pub prompt_tokens: u64,
    /// That part.
    pub cached_tokens: u64,
}

/// A request on its way.
#[derive(Debug)]
struct PlannedRequest {
    path: &'static str,
    user: Arc<str>,
    body: Bytes,
    chat: Option<usize>,
}

/// A request that has ended.
#[derive(Debug)]
struct EndedRequest {
    pick: PickedTarget,
    user: Arc<str>,
    chat: Option<usize>,
    result: Result<ReplayAnswer, ReplayError>,
}

/// What can be done next.
#[derive(Debug)]
enum NextRequest {
    /// Send, when this long has passed since the beginning.
    Send(Duration),
    /// Nothing until some request ends.
    Wait,
    /// Nothing more.
    Over,
}

impl LoadSource<'_> {
    fn planned(&self) -> u64 {
        match self {
            Self::Trace(arrivals) => arrivals.len() as u64,
            Self::Chats { requests, .. } => *requests,
        }
    }
}

/// A plan being carried out.
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
    running: JoinSet<EndedRequest>,
}

/// Carries a plan out; `on_progress` is called whenever a request has ended.
///
/// # Panics
/// When the plan's speed is not a positive number.
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
        running: JoinSet::new(),
    };
    let started = Instant::now();
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
            let user = HeaderValue::from_str(&job.user).expect("user names are visible ascii");
            let result = client
                .stream(ReplayRequest {
                    uri,
                    user,
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
                let body = format!(
                    "{{\"model\":{},\"prompt\":\"{}\",\"max_tokens\":{},\"stream\":true,\
                     \"stream_options\":{{\"include_usage\":true}}}}",
                    Value::from(self.model.as_str()),
                    arrival.prompt.text(),
                    arrival.output_tokens.max(1),
                );
                Some(PlannedRequest {
                    path: "/v1/completions",
                    user: arrival.user.clone(),
                    body: Bytes::from(body),
                    chat: None,
                })
            }
            LoadSource::Chats { chats, .. } => {
                chats.next_turn(&self.model).map(|turn| PlannedRequest {
                    path: "/v1/chat/completions",
                    user: turn.user,
                    body: turn.body,
                    chat: Some(turn.chat),
                })
            }
        }
    }

    /// Waits for a request to end; for ever when none is under way.
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
        if let (LoadSource::Chats { chats, .. }, Some(chat)) = (&mut self.work, chat) {
            match &result {
                Ok(answer) => chats.answered(chat, &answer.text),
                Err(_) => chats.failed(chat),
            }
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
