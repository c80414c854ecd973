//! Users of a soak. A behaviour defines whether a user waits, reads and retries.
//!
//! Requests arrive at random times, independent of earlier results: a user who is rejected does not
//! send less.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use http::{HeaderName, StatusCode};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::SoakContext;
use super::kinds::{ClientKind, LeavePoint, UserBehaviour};
use crate::hostile::client::{self, OutgoingRequest, RequestError, ResponseHead, SourceAddress};
use crate::hostile::engine::MODEL;

/// Path that requests are sent to.
const PATH: &str = "/v1/chat/completions";
/// Number of words in a prompt, in addition to its unique part.
const PROMPT_WORDS: usize = 40;
/// Minimum and maximum pause before a retry, in milliseconds. It doubles per retry, as in SDKs.
const BACKOFF_MS: (u64, u64) = (500, 8000);
/// Maximum number of concurrent requests of one user.
const UNDER_WAY_MAX: usize = 250;
/// Pause of a slow reader between two chunks of the body.
const DAWDLE: Duration = Duration::from_secs(1);

/// End of one try of a request.
enum TryEnd {
    Whole { first: Duration, tokens: u64 },
    Refused(ResponseHead),
    Left,
    Broke(String),
}

/// A user who sends requests with a behaviour.
pub(super) struct SoakUser {
    pub(super) kind: ClientKind,
    pub(super) manner: UserBehaviour,
    pub(super) name: String,
    pub(super) from: Ipv4Addr,
    /// Mean number of requests per second.
    pub(super) rate: f64,
}

impl SoakUser {
    /// Sends requests until the phase is over, and then waits for those in flight.
    pub(super) async fn run(self, scene: Arc<SoakContext>) {
        let seed = scene.seed ^ xxhash_rust::xxh3::xxh3_64(self.name.as_bytes());
        let mut random = SmallRng::seed_from_u64(seed);
        let user = Arc::new(self);
        let mut under_way = JoinSet::new();
        while !scene.over.is_cancelled() {
            // Exponential pauses, like those of many independent users.
            let pause = -(1.0 - random.random::<f64>()).ln() / user.rate;
            let pause = Duration::from_secs_f64(pause);
            tokio::select! {
                biased;
                () = scene.over.cancelled() => break,
                () = sleep(pause) => {}
            }
            while under_way.try_join_next().is_some() {}
            if under_way.len() < UNDER_WAY_MAX {
                under_way.spawn(user.clone().request(scene.clone(), random.random()));
            } else {
                scene.book(user.kind).count("not begun");
            }
        }
        while under_way.join_next().await.is_some() {}
    }

    /// Runs one request with its retries.
    async fn request(self: Arc<Self>, scene: Arc<SoakContext>, seed: u64) {
        let mut random = SmallRng::seed_from_u64(seed);
        scene.book(self.kind).asks(&self.name);
        let prompt: u64 = random.random();
        for attempt in 0..=self.manner.retries {
            let replica = random.random_range(0..scene.data.len());
            let end = self.attempt(&scene, replica, prompt).await;
            let after = self.note(&scene, end);
            let Some(after) = after.filter(|_| attempt < self.manner.retries) else {
                return;
            };
            let backoff_ms = (BACKOFF_MS.0 << attempt).min(BACKOFF_MS.1);
            let pause = after.unwrap_or(Duration::from_millis(backoff_ms));
            tokio::select! {
                biased;
                () = scene.over.cancelled() => return,
                () = sleep(pause) => {}
            }
            scene.book(self.kind).count("tried again");
        }
        scene.book(self.kind).count("gave up trying");
    }

    /// Records the end of a try. `Some` allows a retry, after the given time if there is one.
    fn note(&self, scene: &SoakContext, end: TryEnd) -> Option<Option<Duration>> {
        let mut book = scene.book(self.kind);
        match end {
            TryEnd::Whole { first, tokens } => {
                book.whole(&self.name, first, tokens);
                None
            }
            TryEnd::Refused(reply) => {
                book.count(reply.status.as_str());
                let status = reply.status;
                let is_worth_it = status.is_server_error()
                    || status == StatusCode::TOO_MANY_REQUESTS
                    || status == StatusCode::REQUEST_TIMEOUT;
                (is_worth_it && !reply.is_final()).then(|| reply.retry_after())
            }
            TryEnd::Left => {
                book.count("left");
                Some(None)
            }
            TryEnd::Broke(why) => {
                book.count("broke");
                book.say(why);
                Some(None)
            }
        }
    }

    async fn attempt(&self, scene: &SoakContext, replica: usize, prompt: u64) -> TryEnd {
        let id = scene.next_id(&self.name);
        let sent = Instant::now();
        let patience = Duration::from_millis(match self.manner.leaves {
            LeavePoint::AfterMs(ms) => ms,
            LeavePoint::Never | LeavePoint::AfterPieces(_) | LeavePoint::Dawdles => {
                self.manner.patience_ms
            }
        });
        let asked = self.asked(&id, prompt);
        let from = SourceAddress {
            address: self.from,
            has_little_room: self.manner.leaves == LeavePoint::Dawdles,
        };
        let done = async {
            let mut reply = client::ask(&scene.access, from, scene.data[replica], asked).await?;
            if reply.status != StatusCode::OK {
                // Reads the rest of the rejection, so that the connection does not break off.
                let _ = reply.whole().await;
                return Ok(TryEnd::Refused(reply));
            }
            self.read(scene, reply).await
        };
        // Leaving drops the future and its connection. Honest users finish what they began; the
        // others leave when the phase is over.
        let done = timeout(patience, done);
        let done = match self.kind {
            ClientKind::Honest => Some(done.await),
            _ => scene.unless_over(done).await,
        };
        let end = match done {
            Some(Ok(Ok(end))) => end,
            Some(Ok(Err(broke))) => TryEnd::Broke(format!(
                "{} at replica {} after {} ms: {broke}",
                self.name,
                replica + 1,
                sent.elapsed().as_millis()
            )),
            Some(Err(_)) | None => TryEnd::Left,
        };
        if !matches!(end, TryEnd::Whole { .. }) {
            scene.not_whole(id, Instant::now());
        }
        end
    }

    async fn read(
        &self,
        scene: &SoakContext,
        mut reply: ResponseHead,
    ) -> Result<TryEnd, RequestError> {
        match self.manner.leaves {
            LeavePoint::Never | LeavePoint::AfterMs(_) => {}
            LeavePoint::AfterPieces(pieces) => {
                for _ in 0..pieces {
                    reply.piece().await?;
                }
                return Ok(TryEnd::Left);
            }
            LeavePoint::Dawdles => loop {
                tokio::select! {
                    biased;
                    () = scene.over.cancelled() => return Ok(TryEnd::Left),
                    () = sleep(DAWDLE) => {}
                }
                if reply.piece().await?.is_none() {
                    break;
                }
            },
        }
        let answer = reply.whole().await?;
        Ok(TryEnd::Whole {
            first: answer.first,
            tokens: answer.tokens,
        })
    }

    fn asked(&self, id: &str, prompt: u64) -> OutgoingRequest {
        let words = "so it is ".repeat(PROMPT_WORDS / 3);
        let text = format!("{prompt:016x} {} {words}{}", self.name, self.manner.mark);
        let mut body = json!({
            "model": MODEL,
            "messages": [{ "role": "user", "content": text }],
            "max_tokens": self.manner.tokens,
            "stream": self.manner.is_streamed,
        });
        if self.manner.wants_logprobs {
            body["prompt_logprobs"] = 1.into();
        }
        let mut ask = OutgoingRequest::post(PATH, &super::key(&self.name), body.to_string().into());
        ask.set(HeaderName::from_static("x-request-id"), id);
        if self.manner.makes_up_names {
            let name = format!("made-up-{prompt:x}");
            ask.set(HeaderName::from_static("x-quorate-user"), &name);
            body["user"] = name.into();
            ask.body = body.to_string().into();
        }
        ask
    }
}

/// Maximum time to first token for a user who comes after a storm.
const NEWCOMER_PATIENCE: Duration = Duration::from_secs(2);

/// Sends one request to every replica right after the storm. Each must be served in time.
pub(super) async fn newcomers(scene: &SoakContext) -> anyhow::Result<String> {
    let manner = ClientKind::Honest.manner().unwrap_or_default();
    let mut longest = Duration::ZERO;
    for (replica, to) in scene.data.iter().enumerate() {
        let user = SoakUser {
            kind: ClientKind::Honest,
            manner,
            name: ClientKind::Honest.users().swap_remove(0),
            from: Ipv4Addr::new(127, 0, 1, 1),
            rate: 1.0,
        };
        let asked = user.asked(&scene.next_id(&user.name), scene.seed ^ replica as u64);
        let answer = async {
            let mut reply = client::ask(&scene.access, user.from, *to, asked)
                .await
                .map_err(anyhow::Error::msg)?;
            anyhow::ensure!(reply.status == StatusCode::OK, "answered {}", reply.status);
            reply.whole().await.map_err(anyhow::Error::msg)
        };
        let answer = answer
            .await
            .with_context(|| format!("replica {}", replica + 1))?;
        longest = longest.max(answer.first);
    }
    let found = format!("at most {} ms to the first token", longest.as_millis());
    anyhow::ensure!(longest <= NEWCOMER_PATIENCE, "{found}");
    Ok(found)
}
