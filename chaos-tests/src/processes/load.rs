//! Load for a cluster under faults: chats over all replicas that accept requests.
//!
//! The next turn of a chat goes to any replica, but each request is charged to a user of the
//! replica that receives it. Charges that a killed replica had not handed over thus concern only
//! its own users, and all other counters must be exact. The load sends no request twice.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::gateway::{GatewayOptions, GatewayRequest, StandInGateway};
use anyhow::Context as _;
use http::HeaderValue;
use http::header::AUTHORIZATION;
use hyper::body::Bytes;
use lab::replay::chats::{ChatTurn, Chats, ChatsOptions};
use lab::replay::client::{ReplayAnswer, ReplayClient, ReplayError, ReplayRequest};
use lab::replay::targets::{PickedTarget, Targets};
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::client_ledger::{AnsweredRequest, ClientLedger, LostRequest, UserTotals};
use super::{ProcessCluster, until};

/// Number of users per replica.
const USERS: usize = 2;
/// Path that chat requests are sent to.
const PATH: &str = "/v1/chat/completions";

/// Options of a load: its amount and kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOptions {
    /// Number of senders, each with one request at a time.
    pub senders: usize,
    /// Minimum time between two requests of a sender.
    pub pause: Duration,
    /// Maximum duration of a request.
    pub timeout: Duration,
    /// Whether a gateway sends every second request to the engine that the replica's picker
    /// chooses. The cluster must have pickers.
    pub asks_pickers: bool,
    /// Sizes and contents of the chats.
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

/// A running load, which ends when dropped.
#[derive(Debug)]
pub struct RunningLoad {
    shared: Arc<LoadShared>,
    senders: JoinSet<()>,
}

#[derive(Debug)]
struct LoadShared {
    targets: Arc<Targets>,
    /// Gateways by replica, each of which asks only that replica's picker. Empty without
    /// [`LoadOptions::asks_pickers`].
    gateways: Vec<StandInGateway>,
    /// Number of requests sent so far.
    number: AtomicUsize,
    /// Whether each replica receives no more requests, but must still answer those that it has.
    closing: Vec<AtomicBool>,
    options: LoadOptions,
    client: ReplayClient,
    chats: Mutex<Chats>,
    ledger: Mutex<ClientLedger>,
    /// Whether the load rests, which senders watch.
    pace: watch::Sender<bool>,
    under_way: watch::Sender<usize>,
}

impl RunningLoad {
    /// Starts a load on all replicas of a cluster.
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
            ledger: Mutex::default(),
            pace: watch::Sender::new(false),
            under_way: watch::Sender::new(0),
        });
        let mut senders = JoinSet::new();
        for _ in 0..options.senders {
            senders.spawn(shared.clone().send());
        }
        Self { shared, senders }
    }

    /// Returns the record of the load so far.
    pub fn ledger(&self) -> MutexGuard<'_, ClientLedger> {
        self.shared.ledger()
    }

    /// Stops or resumes sending to a replica. It must still answer its requests in flight.
    pub fn set_closing(&self, replica: usize, is_closing: bool) {
        self.shared.closing[replica].store(is_closing, Ordering::SeqCst);
    }

    /// Waits until `more` further requests are answered.
    ///
    /// # Errors
    /// If that takes more than a minute.
    pub async fn wait_for_requests(&self, more: u64) -> anyhow::Result<()> {
        let goal = self.ledger().answered + more;
        let what = format!("{more} more requests are answered");
        until(&what, async || Ok(self.ledger().answered >= goal)).await
    }

    /// Waits until each of these replicas has answered `more` further requests.
    ///
    /// # Errors
    /// If that takes more than a minute.
    pub async fn after_by_each(&self, replicas: &[usize], more: u64) -> anyhow::Result<()> {
        for replica in replicas {
            let goal = self.ledger().answered_by(*replica) + more;
            let what = format!("replica {} answers {more} more requests", replica + 1);
            until(&what, async || {
                Ok(self.ledger().answered_by(*replica) >= goal)
            })
            .await?;
        }
        Ok(())
    }

    /// Pauses sending and waits until no request is in flight.
    ///
    /// # Errors
    /// If the load has ended.
    pub async fn rest(&self) -> anyhow::Result<()> {
        self.shared.pace.send_replace(true);
        let mut under_way = self.shared.under_way.subscribe();
        // Each request ends within its own timeout.
        under_way
            .wait_for(|count| *count == 0)
            .await
            .context("the load has ended")?;
        Ok(())
    }

    /// Resumes sending after a rest.
    pub fn go_on(&self) {
        self.shared.ledger().rested();
        self.shared.pace.send_replace(false);
    }

    /// Stops the load once no request is in flight, and returns its record.
    ///
    /// # Errors
    /// If the load has ended.
    pub async fn stop(mut self) -> anyhow::Result<ClientLedger> {
        self.rest().await?;
        self.senders.shutdown().await;
        Ok(std::mem::take(&mut *self.shared.ledger()))
    }

    /// Returns the last `count` answered requests that all replicas must know, newest first.
    #[must_use]
    pub fn recent(&self, count: usize) -> Vec<AnsweredRequest> {
        self.ledger().recent(count)
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
            // A rest that began in between must not miss this request.
            if !*self.pace.borrow() {
                let turn = self.chats().next_turn("emulated");
                if let Some(turn) = turn {
                    self.ask(pick, turn).await;
                }
            }
            self.under_way.send_modify(|count| *count -= 1);
        }
    }

    /// Returns the next replica that is up and receives requests.
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
                    session: [None, None],
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

    /// Sends a request through a gateway, within the timeout of requests.
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
        let mut ledger = self.ledger();
        match result {
            Ok(answer) => ledger.note_answer(AnsweredRequest {
                replica,
                user,
                sent,
                ended: Instant::now(),
                answer,
                body,
            }),
            Err(_) if self.targets.went_down(pick) => ledger.note_lost(LostRequest {
                user,
                body_bytes: body.len() as u64,
                output_max: u64::from(self.options.chats.reply_tokens),
            }),
            Err(failure) => {
                let took = sent.elapsed();
                ledger.note_failed(format!(
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

    fn ledger(&self) -> MutexGuard<'_, ClientLedger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates a gateway for the picker of each replica.
fn gateways(cluster: &ProcessCluster) -> Vec<StandInGateway> {
    let of_one = |at| StandInGateway::new(&[at], GatewayOptions::default());
    cluster.picker_addrs().into_iter().map(of_one).collect()
}

/// Queries all users' usage from one replica's admin API.
///
/// # Errors
/// If the replica does not respond.
pub async fn charged(
    cluster: &ProcessCluster,
    replica: usize,
) -> anyhow::Result<BTreeMap<String, UserTotals>> {
    let shown = cluster.get(replica, "/admin/v1/users?limit=1000").await?;
    let users = shown["users"].as_array().context("no list of users")?;
    let usage = |user: &Value| (name_of(user, "name"), totals(&user["total"]));
    Ok(users.iter().map(usage).collect())
}

/// Queries all users' usage of all days, keys and models from one replica's admin API, and adds up
/// the rows of each user.
///
/// # Errors
/// If the replica does not respond.
pub async fn used(
    cluster: &ProcessCluster,
    replica: usize,
) -> anyhow::Result<BTreeMap<String, UserTotals>> {
    let path = "/admin/v1/usage?by=user,key,model,day&limit=10000";
    let shown = cluster.get(replica, path).await?;
    let rows = shown["usage"].as_array().context("no list of usage")?;
    let mut users: BTreeMap<String, UserTotals> = BTreeMap::new();
    for row in rows {
        let user = users.entry(name_of(row, "user")).or_default();
        user.add(&totals(row));
    }
    Ok(users)
}

fn name_of(shown: &Value, field: &str) -> String {
    shown[field].as_str().unwrap_or_default().to_owned()
}

fn totals(shown: &Value) -> UserTotals {
    let of = |field: &str| shown[field].as_u64().unwrap_or(0);
    UserTotals {
        requests: of("requests"),
        uncached: of("input_uncached"),
        cached: of("input_cached"),
        output: of("output"),
    }
}
