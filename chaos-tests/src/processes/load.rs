//! Load for a cluster in trouble: chats over all replicas that take requests, until it is stopped.
//!
//! The next turn of a chat goes to any replica, but each request is charged to a user of the
//! replica it goes to. What a killed replica had not handed over then concerns its own users only,
//! and all other counters must be right to the token. No request is sent twice.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use http::HeaderValue;
use http::header::AUTHORIZATION;
use hyper::body::Bytes;
use lab::gateway::{GatewayOptions, GatewayRequest, StandInGateway};
use lab::replay::chats::{ChatTurn, Chats, ChatsOptions};
use lab::replay::client::{ReplayAnswer, ReplayClient, ReplayError, ReplayRequest};
use lab::replay::targets::{PickedTarget, Targets};
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::client_ledger::{AnsweredRequest, ClientLedger, LostRequest, UserTotals};
use super::{ProcessCluster, until};

/// Users of each replica.
const USERS: usize = 2;
/// Where chats are sent.
const PATH: &str = "/v1/chat/completions";

/// How much of it, and of what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOptions {
    /// Requests under way at a time.
    pub senders: usize,
    /// Shortest time from one request of a sender to its next.
    pub pause: Duration,
    /// Longest a request may take.
    pub timeout: Duration,
    /// Whether every second request goes to an engine by a gateway, which asks the replica where; the
    /// cluster must have pickers.
    pub asks_pickers: bool,
    /// What is said.
    pub chats: ChatsOptions,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            senders: 6,
            pause: Duration::from_millis(25),
            timeout: Duration::from_secs(60),
            asks_pickers: false,
            chats: ChatsOptions {
                users: 1,
                chats: 60,
                systems: 3,
                system_bytes: 512,
                message_bytes: 512,
                reply_tokens: 16,
                turns: 6,
                seed: 1,
            },
        }
    }
}

/// A load under way. It ends when it is dropped.
#[derive(Debug)]
pub struct RunningLoad {
    shared: Arc<LoadShared>,
    senders: JoinSet<()>,
}

#[derive(Debug)]
struct LoadShared {
    targets: Arc<Targets>,
    /// By replica, with [`LoadOptions::asks_pickers`]: one that asks no other.
    gateways: Vec<StandInGateway>,
    /// Requests so far.
    number: AtomicUsize,
    /// By replica: takes no more requests, but owes answers to those it has.
    closing: Vec<AtomicBool>,
    options: LoadOptions,
    client: ReplayClient,
    chats: Mutex<Chats>,
    book: Mutex<ClientLedger>,
    /// Whether it rests.
    pace: watch::Sender<bool>,
    under_way: watch::Sender<usize>,
}

impl RunningLoad {
    /// Begins.
    #[must_use]
    pub fn start(cluster: &ProcessCluster, options: LoadOptions) -> Self {
        let targets = cluster.targets();
        let shared = Arc::new(LoadShared {
            closing: (0..targets.len()).map(|_| AtomicBool::new(false)).collect(),
            client: ReplayClient::of(&targets, options.timeout),
            gateways: match options.asks_pickers {
                true => gateways(cluster),
                false => Vec::new(),
            },
            number: AtomicUsize::new(0),
            targets,
            options,
            chats: Mutex::new(Chats::new(options.chats)),
            book: Mutex::default(),
            pace: watch::Sender::new(false),
            under_way: watch::Sender::new(0),
        });
        let mut senders = JoinSet::new();
        for _ in 0..options.senders {
            senders.spawn(shared.clone().send());
        }
        Self { shared, senders }
    }

    /// What has come of it.
    pub fn book(&self) -> MutexGuard<'_, ClientLedger> {
        self.shared.book()
    }

    /// Sends a replica no more requests, or again. Those it has must still be answered.
    pub fn set_closing(&self, replica: usize, is_closing: bool) {
        self.shared.closing[replica].store(is_closing, Ordering::SeqCst);
    }

    /// Waits until so many more requests are answered.
    ///
    /// # Errors
    /// When that takes a minute.
    pub async fn after(&self, more: u64) -> anyhow::Result<()> {
        let goal = self.book().answered + more;
        let what = format!("{more} more requests are answered");
        until(&what, async || Ok(self.book().answered >= goal)).await
    }

    /// Waits until so many more requests are answered by each of these replicas.
    ///
    /// # Errors
    /// When that takes a minute.
    pub async fn after_by_each(&self, replicas: &[usize], more: u64) -> anyhow::Result<()> {
        for replica in replicas {
            let goal = self.book().answered_by(*replica) + more;
            let what = format!("replica {} answers {more} more requests", replica + 1);
            until(
                &what,
                async || Ok(self.book().answered_by(*replica) >= goal),
            )
            .await?;
        }
        Ok(())
    }

    /// Sends nothing more, and waits until nothing is under way.
    ///
    /// # Errors
    /// When requests do not end.
    pub async fn rest(&self) -> anyhow::Result<()> {
        self.shared.pace.send_replace(true);
        let mut under_way = self.shared.under_way.subscribe();
        // Each request ends within its own time.
        under_way
            .wait_for(|count| *count == 0)
            .await
            .context("the load has ended")?;
        Ok(())
    }

    /// Goes on after a rest.
    pub fn go_on(&self) {
        self.shared.book().rested();
        self.shared.pace.send_replace(false);
    }

    /// Ends it, when what is under way has ended.
    ///
    /// # Errors
    /// When requests do not end.
    pub async fn stop(mut self) -> anyhow::Result<ClientLedger> {
        self.rest().await?;
        self.senders.shutdown().await;
        Ok(std::mem::take(&mut *self.shared.book()))
    }

    /// The last requests that were answered and must be known everywhere, newest first.
    #[must_use]
    pub fn recent(&self, count: usize) -> Vec<AnsweredRequest> {
        self.book().recent(count)
    }
}

impl LoadShared {
    async fn send(self: Arc<Self>) {
        let mut pace = self.pace.subscribe();
        let mut ticks = interval(self.options.pause);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if pace.wait_for(|rests| !rests).await.is_err() {
                return;
            }
            let Some(pick) = self.pick() else {
                self.targets.wait_for_one().await;
                continue;
            };
            self.under_way.send_modify(|count| *count += 1);
            // A rest that began in between must not miss this one.
            if !*self.pace.borrow() {
                let turn = self.chats().next_turn("emulated");
                if let Some(turn) = turn {
                    self.ask(pick, turn).await;
                }
            }
            self.under_way.send_modify(|count| *count -= 1);
        }
    }

    /// The next replica that takes requests.
    fn pick(&self) -> Option<PickedTarget> {
        (0..self.targets.len())
            .filter_map(|_| self.targets.pick())
            .find(|pick| !self.closing[pick.index].load(Ordering::SeqCst))
    }

    async fn ask(&self, pick: PickedTarget, turn: ChatTurn) {
        let user = format!("user-{}-{}", pick.index + 1, turn.chat % USERS);
        let sent = Instant::now();
        let is_picked = self.number.fetch_add(1, Ordering::Relaxed) % 2 == 1;
        let gateway = self.gateways.get(pick.index).filter(|_| is_picked);
        let result = match gateway {
            Some(gateway) => self.ask_gateway(gateway, &user, turn.body.clone()).await,
            None => {
                let uri = format!("{}{PATH}", self.targets.name(pick.index));
                let ask = ReplayRequest {
                    uri: uri.parse().expect("a replica's url"),
                    user: HeaderValue::from_str(&user).expect("visible ascii"),
                    body: turn.body.clone(),
                };
                self.client.stream(ask).await
            }
        };
        match &result {
            Ok(answer) => self.chats().answered(turn.chat, &answer.text),
            Err(_) => self.chats().failed(turn.chat),
        }
        self.note(pick, user, turn.body, sent, result);
    }

    /// Has a gateway send a request, in the time that it may take.
    async fn ask_gateway(
        &self,
        gateway: &StandInGateway,
        user: &str,
        body: Bytes,
    ) -> Result<ReplayAnswer, ReplayError> {
        let mut request = GatewayRequest {
            body,
            ..GatewayRequest::post(PATH, user, &Value::Null)
        };
        if let Some(access) = self.targets.access() {
            let key = format!("Bearer {}{user}", access.key_prefix);
            let key = HeaderValue::from_str(&key).expect("visible ascii");
            request.headers.insert(AUTHORIZATION, key);
        }
        let sent = Instant::now();
        let answer = match timeout(self.options.timeout, gateway.send(&request)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return Err(ReplayError::Broken(format!("{error:#}"))),
            Err(_) => return Err(ReplayError::TimedOut),
        };
        let took = sent.elapsed();
        ReplayAnswer::of_whole(answer.status, &answer.headers, &answer.body, took)
    }

    fn note(
        &self,
        pick: PickedTarget,
        user: String,
        body: Bytes,
        sent: Instant,
        result: Result<ReplayAnswer, ReplayError>,
    ) {
        let replica = pick.index;
        let mut book = self.book();
        match result {
            Ok(answer) => book.note_answer(AnsweredRequest {
                replica,
                user,
                sent,
                ended: Instant::now(),
                answer,
                body,
            }),
            Err(_) if self.targets.went_down(pick) => book.note_lost(LostRequest {
                user,
                body_bytes: body.len() as u64,
                output_max: u64::from(self.options.chats.reply_tokens),
            }),
            Err(failure) => {
                let took = sent.elapsed();
                book.note_failed(format!(
                    "replica {} after {} ms: {failure}",
                    replica + 1,
                    took.as_millis()
                ));
            }
        }
    }

    fn chats(&self) -> MutexGuard<'_, Chats> {
        self.chats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn book(&self) -> MutexGuard<'_, ClientLedger> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A gateway for each replica.
fn gateways(cluster: &ProcessCluster) -> Vec<StandInGateway> {
    let of_one = |at| StandInGateway::new(&[at], GatewayOptions::default());
    cluster.picker_addrs().into_iter().map(of_one).collect()
}

/// All users' usage, as one replica's admin API shows it.
///
/// # Errors
/// When it does not answer.
pub async fn charged(
    cluster: &ProcessCluster,
    replica: usize,
) -> anyhow::Result<BTreeMap<String, UserTotals>> {
    let shown = cluster.ask(replica, "/admin/v1/users?limit=1000").await?;
    let users = shown["users"].as_array().context("no list of users")?;
    let usage = |user: &Value| {
        let of = |field: &str| user["total"][field].as_u64().unwrap_or(0);
        let usage = UserTotals {
            requests: of("requests"),
            uncached: of("input_uncached"),
            cached: of("input_cached"),
            output: of("output"),
        };
        let name = user["name"].as_str().unwrap_or_default().to_owned();
        (name, usage)
    };
    Ok(users.iter().map(usage).collect())
}
