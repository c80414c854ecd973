//! Load of a live run: sends concurrent requests to random replicas, and compares predicted with
//! actual cached tokens.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::Write as _;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, ensure};
use futures_util::future::try_join_all;
use http::Method;
use node::json_client::JsonClient;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tokio::sync::{Notify, RwLock, RwLockWriteGuard};

use super::chats::{Chats, Turn};
use super::endpoints::{Said, Way};
use super::{NEAR_PERCENT, RowReport};

/// Maximum number of misses that are printed.
const TOLD_MAX: usize = 20;

/// Unit of the router's predictions.
#[derive(Debug, Clone, Copy)]
pub(super) enum Target {
    /// Whole blocks of this many tokens, so that predictions can be exact.
    Tokens(u64),
    /// A share of the prompt, so that predictions are approximate.
    Share,
}

/// Predicted and actual cached tokens of one request.
#[derive(Debug)]
struct Finding {
    way: Way,
    said: Said,
    predicted: u64,
    backend: String,
    /// Time of sending the request, since the Unix epoch.
    sent: Duration,
    ended: Duration,
}

/// A running load with its sums so far.
pub(super) struct Load<'a> {
    http: &'a JsonClient,
    replicas: Vec<String>,
    is_up: RefCell<Vec<bool>>,
    chats: RefCell<Chats>,
    target: Target,
    random: RefCell<SmallRng>,
    sums: RefCell<RowReport>,
    /// Lock that every sender holds for reading during a request.
    gate: RwLock<()>,
    ended: Notify,
    is_over: Cell<bool>,
    told: Cell<usize>,
    /// Number of tokens that engines must compute before results count. Until their caches are
    /// full, engines evict nothing.
    to_fill: Cell<u64>,
    /// File to which every response is added.
    record: Option<File>,
}

impl<'a> Load<'a> {
    pub(super) fn new(
        http: &'a JsonClient,
        replicas: Vec<String>,
        chats: Chats,
        target: Target,
        (to_fill, seed): (u64, u64),
        record: Option<File>,
    ) -> Self {
        Self {
            http,
            is_up: RefCell::new(vec![true; replicas.len()]),
            replicas,
            chats: RefCell::new(chats),
            target,
            random: RefCell::new(SmallRng::seed_from_u64(seed)),
            sums: RefCell::default(),
            gate: RwLock::new(()),
            ended: Notify::new(),
            is_over: Cell::new(false),
            told: Cell::new(0),
            to_fill: Cell::new(to_fill),
            record,
        }
    }

    /// Returns the number of compared responses.
    pub(super) fn ended(&self) -> u64 {
        self.sums.borrow().requests
    }

    pub(super) fn report(&self) -> RowReport {
        self.sums.borrow().clone()
    }

    /// Sets whether a replica receives requests.
    pub(super) fn set_up(&self, replica: usize, is_up: bool) {
        self.is_up.borrow_mut()[replica] = is_up;
    }

    /// Waits until `requests` responses were compared. Returns `false` if the load ended before.
    pub(super) async fn wait_for(&self, requests: u64) -> bool {
        loop {
            let next = self.ended.notified();
            if self.is_over.get() {
                return false;
            }
            if self.ended() >= requests {
                return true;
            }
            next.await;
        }
    }

    /// Waits until no request is in flight. Blocks new requests while the guard is held.
    pub(super) async fn pause(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.write().await
    }

    /// Sends requests over `lanes` lanes until `requests` responses were compared.
    pub(super) async fn run(&self, lanes: usize, requests: u64) -> anyhow::Result<()> {
        let lane = async |_| {
            while self.ended() < requests {
                let _passed = self.gate.read().await;
                self.one().await?;
                self.ended.notify_waiters();
            }
            anyhow::Ok(())
        };
        try_join_all((0..lanes).map(lane)).await?;
        self.is_over.set(true);
        self.ended.notify_waiters();
        Ok(())
    }

    async fn one(&self) -> anyhow::Result<()> {
        let Turn { chat, way, body } = self.chats.borrow_mut().next();
        let up: Vec<usize> = {
            let is_up = self.is_up.borrow();
            (0..self.replicas.len()).filter(|at| is_up[*at]).collect()
        };
        let replica = up[self.random.borrow_mut().random_range(0..up.len())];
        match self.ask(&self.replicas[replica], way, &body).await {
            Ok(found) => {
                self.note(replica, &body, &found)?;
                self.chats.borrow_mut().answered(chat, &found.said);
                self.count(replica, &found);
            }
            Err(error) => {
                self.chats.borrow_mut().failed(chat);
                let failed = {
                    let mut sums = self.sums.borrow_mut();
                    sums.failed += 1;
                    sums.failed
                };
                eprintln!("  {way:?}, replica {}: {error:#}", replica + 1);
                let answered = self.ended();
                ensure!(
                    failed < 100 + answered,
                    "{failed} requests failed, the last: {error:#}"
                );
            }
        }
        Ok(())
    }

    async fn ask(&self, replica: &str, way: Way, body: &Value) -> anyhow::Result<Finding> {
        let url = format!("{replica}{}", way.path());
        let sent = now()?;
        let answer = self.http.send(Method::POST, &url, Some(body)).await?;
        let ended = now()?;
        let header = |name: &str| {
            let value = answer.headers.get(name).and_then(|it| it.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        let (prefix, backend) = (header("x-quorate-prefix"), header("x-quorate-backend"));
        let said = if body["stream"] == true && answer.status.is_success() {
            let events = String::from_utf8_lossy(&answer.body);
            let said = way.read_stream(&events);
            said.with_context(|| format!("the stream was: {events}"))?
        } else {
            way.read(&answer.success()?)?
        };
        let (matched, total) = prefix.split_once('/').context("no x-quorate-prefix")?;
        let (matched, total): (u64, u64) = (matched.parse()?, total.parse()?);
        Ok(Finding {
            way,
            predicted: match self.target {
                Target::Tokens(block) => matched * block,
                // On average half a block follows the last full one.
                Target::Share => 2 * matched * said.prompt / (2 * total + 1),
            },
            said,
            backend,
            sent,
            ended,
        })
    }

    /// Appends a response to the record, to find out later why a prediction was wrong.
    fn note(&self, replica: usize, body: &Value, found: &Finding) -> anyhow::Result<()> {
        let Some(mut record) = self.record.as_ref() else {
            return Ok(());
        };
        let line = json!({
            "request": self.ended() + 1,
            "is_counted": self.to_fill.get() == 0,
            "replica": replica + 1,
            "backend": found.backend,
            "way": format!("{:?}", found.way),
            "sent": found.sent.as_secs_f64(),
            "ended": found.ended.as_secs_f64(),
            "prompt": found.said.prompt,
            "predicted": found.predicted,
            "cached": found.said.cached,
            "body": body,
            "answer": found.said.text,
        });
        writeln!(record, "{line}").context("write the record")
    }

    fn count(&self, replica: usize, found: &Finding) {
        let Said { prompt, cached, .. } = found.said;
        let to_fill = self.to_fill.get();
        if to_fill > 0 {
            let computed = prompt.saturating_sub(cached);
            self.to_fill.set(to_fill.saturating_sub(computed));
            return;
        }
        let off = found.predicted.abs_diff(cached);
        let mut sums = self.sums.borrow_mut();
        sums.requests += 1;
        sums.equal += u64::from(off == 0);
        sums.near += u64::from(off * 100 <= prompt * NEAR_PERCENT);
        sums.off[0] += u64::from(found.predicted > cached);
        sums.off[1] += u64::from(found.predicted < cached);
        sums.prompt_tokens += prompt;
        sums.cached_tokens += cached;
        sums.wrong_tokens += off;
        let number = sums.requests;
        drop(sums);
        if off > 0 && matches!(self.target, Target::Tokens(_)) {
            self.tell(&format!(
                "request {number} ({:?}), replica {}, {}: {} of {prompt} tokens predicted, {cached} found",
                found.way,
                replica + 1,
                found.backend,
                found.predicted,
            ));
        }
    }

    /// Prints one of the first misses, to be looked up in the logs.
    fn tell(&self, what: &str) {
        if self.told.get() < TOLD_MAX {
            self.told.set(self.told.get() + 1);
            eprintln!("  {what}");
        }
    }
}

fn now() -> anyhow::Result<Duration> {
    Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?)
}
