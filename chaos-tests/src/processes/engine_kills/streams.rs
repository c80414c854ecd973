//! Clients that stream without a pause, and what they receive.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lab::connector::ReplicaConnector;
use lab::engine::{EmulatedEngine, EngineHandle, EngineOptions};
use node::json_client::JsonClient;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::received::{ReceivedStream, StreamDifference};
use super::requests::StreamRequest;
use super::resuming::ResumedStream;
use super::{EngineKillsReport, Victims};
use crate::processes::access::key;
use crate::processes::client_ledger::UserTotals;
use crate::processes::waiting::PATIENCE;
use crate::processes::{ProcessCluster, until};

/// Speed of the undisturbed engine, so that its answers take no time.
const UNDISTURBED_SPEED: f64 = 100_000.0;

/// Time after which a client asks another replica.
const BETWEEN_REPLICAS: Duration = Duration::from_millis(50);

/// A request under way.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct UnderWay {
    /// Number of the engine that the response names; `None` before its head.
    engine: Option<usize>,
    /// Number of the replica that was asked last.
    replica: Option<usize>,
    /// Number of events that have arrived, at least.
    pub(super) events: usize,
    /// Whether an engine or replica was killed meanwhile that may have had the request.
    is_disturbed: bool,
}

impl UnderWay {
    /// Returns the number of the engine or replica that carries the stream, if known.
    pub(super) fn carrier(&self, victims: Victims) -> Option<usize> {
        match victims {
            Victims::Engines => self.engine,
            Victims::Replicas => self.replica,
        }
    }
}

/// The clients of all replicas, with what they received.
#[derive(Debug)]
pub(super) struct StreamClients {
    client: Client<ReplicaConnector, Full<Bytes>>,
    /// Data and admin URLs of the replicas.
    replicas: Vec<(String, String)>,
    operator: JsonClient,
    is_secure: bool,
    victims: Victims,
    seed: u64,
    next: AtomicU64,
    is_stopping: AtomicBool,
    under_way: watch::Sender<BTreeMap<u64, UnderWay>>,
    undisturbed: EngineHandle,
    report: Mutex<EngineKillsReport>,
    /// Requests that were disturbed and have ended.
    disturbed: Mutex<Vec<DisturbedRequest>>,
    /// What each user would pay if no engine had been killed.
    charges: Mutex<BTreeMap<String, UserTotals>>,
    /// What each user may pay in addition for answers that were begun again.
    extra: Mutex<BTreeMap<String, UserTotals>>,
}

/// A request that has ended, of which an engine may have been killed.
#[derive(Debug)]
struct DisturbedRequest {
    /// Number and path of the request.
    name: String,
    /// URL of its record.
    record: String,
    /// What the undisturbed answer costs.
    cost: UserTotals,
}

/// A response, or a part of it.
#[derive(Debug)]
struct Received {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
    /// Why the response ended early; `None` if it is complete.
    broken: Option<String>,
    longest_pause: Duration,
}

impl StreamClients {
    /// Starts the undisturbed engine. No client runs yet.
    pub(super) async fn start(
        cluster: &ProcessCluster,
        seed: u64,
        victims: Victims,
    ) -> anyhow::Result<Arc<Self>> {
        let undisturbed = EmulatedEngine::start(EngineOptions {
            speed: UNDISTURBED_SPEED,
            ..EngineOptions::default()
        });
        let access = cluster.access();
        let connector = ReplicaConnector::new(access.tls().cloned());
        let urls = |number| {
            (
                cluster.data_url(number).to_owned(),
                cluster.admin_url(number, ""),
            )
        };
        Ok(Arc::new(Self {
            client: Client::builder(TokioExecutor::new())
                .retry_canceled_requests(false)
                .build(connector),
            replicas: (0..cluster.replicas()).map(urls).collect(),
            operator: cluster.operator().clone(),
            is_secure: access.is_secure(),
            victims,
            seed,
            next: AtomicU64::new(0),
            is_stopping: AtomicBool::new(false),
            under_way: watch::Sender::default(),
            undisturbed: undisturbed.await.context("start the undisturbed engine")?,
            report: Mutex::default(),
            disturbed: Mutex::default(),
            charges: Mutex::default(),
            extra: Mutex::default(),
        }))
    }

    /// Lets the clients end after their current streams.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::SeqCst);
    }

    /// Watches the requests under way, by number.
    pub(super) fn watch(&self) -> watch::Receiver<BTreeMap<u64, UnderWay>> {
        self.under_way.subscribe()
    }

    /// Notes that an engine or replica was killed. Returns the requests under way, each of which may
    /// be its.
    pub(super) fn note_kill(&self, victim: usize) -> Vec<u64> {
        let mut numbers = Vec::new();
        let mut hit = 0;
        self.under_way.send_modify(|streams| {
            for (number, stream) in streams {
                numbers.push(*number);
                let carrier = stream.carrier(self.victims);
                stream.is_disturbed |= carrier.is_none_or(|of| of == victim);
                hit += u64::from(carrier == Some(victim) && stream.events > 0);
            }
        });
        self.noted().hit += hit;
        numbers
    }

    /// Returns what the clients received.
    pub(super) fn report(&self) -> EngineKillsReport {
        self.noted().clone()
    }

    /// Returns the users whose counters are not those of undisturbed answers.
    pub(super) fn compare_charges(&self, charged: &BTreeMap<String, UserTotals>) -> Vec<String> {
        let expected = self.charges.lock().unwrap_or_else(PoisonError::into_inner);
        let extra = self.extra.lock().unwrap_or_else(PoisonError::into_inner);
        let differs = expected.iter().filter_map(|(user, expected)| {
            let found = charged.get(user).copied().unwrap_or_default();
            let extra = extra.get(user).copied().unwrap_or_default();
            // How much of a prompt was cached depends on the engine, and a request that is sent
            // again starts again.
            let least = tokens(expected);
            let most: [u64; 2] = std::array::from_fn(|at| least[at] + tokens(&extra)[at]);
            let is_equal = (0..2).all(|at| (least[at]..=most[at]).contains(&tokens(&found)[at]))
                && found.requests >= expected.requests;
            (!is_equal).then(|| format!("{user}: {found:?}, not {expected:?}"))
        });
        differs.collect()
    }

    /// Sends requests one after another until the clients are to stop.
    pub(super) async fn run(self: Arc<Self>) -> anyhow::Result<()> {
        while !self.is_stopping.load(Ordering::SeqCst) {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let request = StreamRequest::draw(self.seed, number);
            self.one(number, &request).await?;
        }
        Ok(())
    }

    async fn one(&self, number: u64, request: &StreamRequest) -> anyhow::Result<()> {
        let replica = usize::try_from(number)? % self.replicas.len();
        let begun = UnderWay::default();
        self.under_way.send_modify(|streams| {
            streams.insert(number, begun);
        });
        let mut stream = ResumedStream::default();
        let received = match self.victims {
            Victims::Engines => self.ask(number, replica, request, None).await,
            Victims::Replicas => self.resume(number, replica, request, &mut stream).await,
        };
        let mut ended = begun;
        self.under_way.send_modify(|streams| {
            ended = streams.remove(&number).unwrap_or_default();
        });
        let undisturbed = self.undisturbed_answer(request).await;
        let undisturbed =
            undisturbed.with_context(|| format!("undisturbed {}", request.body(None)))?;
        let cost = self.charge(request, &undisturbed)?;
        if stream.has_begun_again {
            add(&self.extra, &request.user, &cost);
        }
        // The record of a replica that was killed is gone.
        let has_record = ended.is_disturbed && self.victims == Victims::Engines;
        if let (Ok(received), true) = (&received, has_record) {
            let id = received.headers.get("x-request-id");
            let id = id.and_then(|id| id.to_str().ok()).context("no id")?;
            let path = format!("/admin/v1/decisions/{id}");
            let disturbed = DisturbedRequest {
                name: format!("request {number} to {}", request.path),
                record: format!("{}{path}", self.replicas[replica].1),
                cost,
            };
            self.disturbed().push(disturbed);
        }
        let mut report = self.noted();
        report.moved += u64::from(stream.breaks > 0);
        report.begun_again += u64::from(stream.has_begun_again);
        match request.is_chat() {
            true => report.chats += 1,
            false => report.texts += 1,
        }
        let differences = match &received {
            Err(error) => vec![(StreamDifference::Refused, format!("{error:#}"))],
            Ok(received) => {
                if ended.is_disturbed {
                    report.longest_pause = report.longest_pause.max(received.longest_pause);
                }
                differences(received, &undisturbed, request)
            }
        };
        for (what, how) in differences {
            report.add(what, || {
                let (path, events) = (request.path, ended.events);
                let when = match ended.is_disturbed {
                    true => "its engine or replica was killed",
                    false => "nothing of its was killed",
                };
                format!("request {number} to {path}, {when}, {events} events: {how}")
            });
        }
        Ok(())
    }

    /// Sends a request, and goes on at the next replica whenever a response breaks off.
    async fn resume(
        &self,
        number: u64,
        first: usize,
        request: &StreamRequest,
        stream: &mut ResumedStream,
    ) -> anyhow::Result<Received> {
        let begun = Instant::now();
        for replica in (0..self.replicas.len()).cycle().skip(first) {
            let asked = self.ask(number, replica, request, Some(&mut *stream));
            let is_late = begun.elapsed() > 2 * PATIENCE;
            match asked.await {
                Ok(received) if received.broken.is_none() || is_late => {
                    // What a replica without a quorum or in its start refuses, another one takes.
                    let is_refused = received.status == StatusCode::SERVICE_UNAVAILABLE;
                    if !is_refused || is_late {
                        let body = match received.status {
                            StatusCode::OK => std::mem::take(&mut stream.body),
                            _ => received.body,
                        };
                        return Ok(Received { body, ..received });
                    }
                }
                Err(error) if is_late => return Err(error),
                Ok(_) => stream.breaks(),
                // No response has begun.
                Err(_) => {}
            }
            tokio::time::sleep(BETWEEN_REPLICAS).await;
        }
        unreachable!("the cycle does not end")
    }

    async fn ask(
        &self,
        number: u64,
        replica: usize,
        request: &StreamRequest,
        mut stream: Option<&mut ResumedStream>,
    ) -> anyhow::Result<Received> {
        self.note(number, |under_way| under_way.replica = Some(replica));
        let url = format!("{}{}", self.replicas[replica].0, request.path);
        let mut sent = Request::post(url)
            .header(CONTENT_TYPE, "application/json")
            .header("x-quorate-user", &request.user);
        if self.is_secure {
            sent = sent.header(AUTHORIZATION, format!("Bearer {}", key(&request.user)));
        }
        let claim = stream.as_deref().and_then(ResumedStream::claim);
        if stream.is_some() {
            sent = sent.header("x-quorate-resumable", "1");
        }
        if let Some((id, _)) = claim {
            sent = sent.header("last-event-id", id);
        }
        let body = request.body(claim.map(|(_, text)| text));
        let sent = self.client.request(sent.body(body.into())?);
        let response = timeout(PATIENCE, sent)
            .await
            .context("no response in time")??;
        let (head, mut body) = response.into_parts();
        let engine = head.headers.get("x-quorate-backend");
        let engine = engine.and_then(|name| name.to_str().ok()?.strip_prefix("engine-"));
        let engine = engine.and_then(|number| number.parse::<usize>().ok());
        self.note(number, |stream| {
            stream.engine = engine.and_then(|number| number.checked_sub(1));
        });
        let mut received = Received {
            status: head.status,
            headers: head.headers,
            body: Vec::new(),
            broken: None,
            longest_pause: Duration::ZERO,
        };
        let mut last = Instant::now();
        loop {
            let frame = match timeout(PATIENCE, body.frame()).await {
                Ok(None) => {
                    let is_open = stream.is_some_and(|it| !it.is_done());
                    if is_open && received.status == StatusCode::OK {
                        received.broken = Some("the stream has no end".to_owned());
                    }
                    return Ok(received);
                }
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(error))) => {
                    received.broken = Some(format!("{:#}", anyhow::Error::from(error)));
                    return Ok(received);
                }
                Err(_) => {
                    received.broken = Some("nothing more came in time".to_owned());
                    return Ok(received);
                }
            };
            received.longest_pause = received.longest_pause.max(last.elapsed());
            last = Instant::now();
            let data = frame.into_data().unwrap_or_default();
            match &mut stream {
                Some(stream) if received.status == StatusCode::OK => stream.push(&data),
                _ => received.body.extend_from_slice(&data),
            }
            let events = data.windows(2).filter(|two| two == b"\n\n").count();
            self.note(number, |stream| stream.events += events);
        }
    }

    fn note(&self, number: u64, change: impl FnOnce(&mut UnderWay)) {
        self.under_way.send_modify(|streams| {
            streams.entry(number).and_modify(change);
        });
    }

    async fn undisturbed_answer(&self, request: &StreamRequest) -> anyhow::Result<ReceivedStream> {
        let send = || {
            let url = format!("{}{}", self.undisturbed.url(), request.path);
            let sent = Request::post(url).header(CONTENT_TYPE, "application/json");
            let sent = sent.body(request.undisturbed_body().into());
            sent.map(|sent| self.client.request(sent))
        };
        let response = match send()?.await {
            // The engine may close an idle connection in the moment in which it is used again.
            Err(_) => send()?.await,
            response => response,
        };
        let (head, body) = response?.into_parts();
        let body = body.collect().await?.to_bytes();
        ensure!(
            head.status == StatusCode::OK,
            "{}: {}",
            head.status,
            String::from_utf8_lossy(&body)
        );
        Ok(ReceivedStream::read(&body))
    }

    /// Adds what the undisturbed answer costs to the user's expected counters, and returns it.
    fn charge(
        &self,
        request: &StreamRequest,
        undisturbed: &ReceivedStream,
    ) -> anyhow::Result<UserTotals> {
        let usage = undisturbed.usage().context("the engine reports no usage")?;
        let cost = UserTotals {
            requests: 1,
            uncached: usage.prompt_tokens,
            cached: 0,
            output: usage.completion_tokens,
        };
        add(&self.charges, &request.user, &cost);
        Ok(cost)
    }

    /// Reads the records of the requests that were disturbed since the last call and have ended:
    /// counts those that were decided more than once, and compares what their attempts charged.
    pub(super) async fn read_records(&self) -> anyhow::Result<()> {
        let ended = std::mem::take(&mut *self.disturbed());
        for DisturbedRequest { name, record, cost } in ended {
            let found = RefCell::new(Value::Null);
            until("the request is recorded", async || {
                let record = self.operator.call(Method::GET, &record, None).await?;
                let has_ended = record["end"].is_object();
                found.replace(record);
                Ok(has_ended)
            })
            .await?;
            let found = found.into_inner();
            let decisions = found["decisions"].as_array().context("no decisions")?;
            let outcomes: Vec<&Value> = decisions.iter().map(|it| &it["outcome"]).collect();
            let sum = |names: &[&str]| {
                let counts = outcomes.iter().flat_map(|outcome| {
                    let charged = &outcome["charged"];
                    names
                        .iter()
                        .map(|name| charged[*name].as_u64().unwrap_or(0))
                });
                counts.sum::<u64>()
            };
            let charged = [sum(&["input_uncached", "input_cached"]), sum(&["output"])];
            let mut report = self.noted();
            report.moved += u64::from(outcomes.len() > 1);
            if charged != tokens(&cost) {
                report.add(StreamDifference::Charge, || {
                    format!("{name}: {charged:?}, not {:?}: {outcomes:?}", tokens(&cost))
                });
            }
        }
        Ok(())
    }

    fn disturbed(&self) -> MutexGuard<'_, Vec<DisturbedRequest>> {
        self.disturbed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn noted(&self) -> MutexGuard<'_, EngineKillsReport> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn add(to: &Mutex<BTreeMap<String, UserTotals>>, user: &str, cost: &UserTotals) {
    let mut users = to.lock().unwrap_or_else(PoisonError::into_inner);
    users.entry(user.to_owned()).or_default().add(cost);
}

/// Returns the numbers of input and output tokens.
fn tokens(totals: &UserTotals) -> [u64; 2] {
    [totals.uncached + totals.cached, totals.output]
}

/// Returns how a response differs from the undisturbed stream.
fn differences(
    received: &Received,
    undisturbed: &ReceivedStream,
    request: &StreamRequest,
) -> Vec<(StreamDifference, String)> {
    let text = || {
        let end = received.body.len().saturating_sub(300);
        String::from_utf8_lossy(&received.body[end..]).into_owned()
    };
    if received.status != StatusCode::OK {
        let how = format!("{}: {}", received.status, text());
        return vec![(StreamDifference::Refused, how)];
    }
    let stream = ReceivedStream::read(&received.body);
    let differences = stream.differences(undisturbed, request.usage);
    let is_failed = differences
        .iter()
        .any(|(what, _)| *what == StreamDifference::Failed);
    match &received.broken {
        Some(why) if !is_failed => {
            let how = format!("{why}, after {:?}", text());
            vec![(StreamDifference::Broken, how)]
        }
        _ => differences,
    }
}
