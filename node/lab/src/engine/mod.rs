//! An emulated vLLM engine: a real prefix cache and scheduler with modelled time, behind vLLM's
//! HTTP API.
//!
//! It serves to try, test and measure a cluster without a GPU. What determines prefix hits follows
//! vLLM v1: chained block hashes, reference counts, eviction order, queueing and preemption
//! ([`cache`], [`model`]). The computation is replaced by its duration, the tokenizer by pieces of
//! four bytes ([`text`]), and the output by random words ([`output`]).
//!
//! The engine can publish changes of its cache like vLLM ([`events`]). `quorate engine` runs one
//! engine; several can run in one process ([`fleet`]).

mod answer;
mod args;
pub mod cache;
#[cfg(test)]
mod continuation_tests;
mod driver;
mod embeddings;
pub mod events;
mod extras;
pub mod fleet;
mod http;
mod lora;
mod metrics;
pub mod model;
mod named;
pub mod offload;
pub mod output;
mod ranks;
mod rejection;
#[cfg(test)]
mod room_tests;
mod rooms;
#[cfg(test)]
mod tests;
pub mod text;
mod transfer;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use args::{EngineArgs, run};
use driver::DriverCore;
pub use events::{EventEncoding, EventsOptions, PublisherFaults};
use events::{EventSource, OffloadMedia, Publisher};
use http::{EngineServer, serve};
pub use lora::LoraOptions;
use model::{EngineShape, EngineStats, Scheduler};
use offload::OffloadOptions;
use ranks::{Ranks, events_of};
use rooms::EngineRooms;
pub use rooms::{RoomMode, RoomOptions};
pub use transfer::{LoadError, TransferOptions};

/// Maximum number of connections per engine; further ones wait in the listener's queue.
const CONNECTIONS_MAX: usize = 16_384;

/// Options of an engine.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineOptions {
    /// Listening address. Port 0 selects a free port.
    pub listen: SocketAddr,
    /// Served model name.
    pub model: String,
    /// Sizes and speeds of the modelled engine.
    pub shape: EngineShape,
    /// Factor by which the engine runs faster than `shape` states.
    pub speed: f64,
    /// Seed of the output.
    pub seed: u64,
    /// Time after which an idle connection is closed; 5 s in vLLM.
    pub keep_alive: Duration,
    /// Options of the KV events; `None` if the engine publishes none.
    pub events: Option<EventsOptions>,
    /// Options for LoRA adapters.
    pub lora: LoraOptions,
    /// Options of the KV connector; `None` if the engine has none.
    pub transfer: Option<TransferOptions>,
    /// Options of disaggregation through rooms, as in SGLang, with its metric names; `None` for
    /// vLLM.
    pub rooms: Option<RoomOptions>,
    /// Options of the tiers below the GPU.
    pub offload: OffloadOptions,
    /// Number of data-parallel ranks, each with its own `shape`. Zero counts as one.
    pub data_parallel_size: u16,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            model: "emulated".to_owned(),
            shape: EngineShape {
                num_gpu_blocks: 8192,
                block_size: 32,
                max_num_seqs: 256,
                max_num_batched_tokens: 2048,
                prefill_tokens_per_s: 10_000,
                decode: Duration::from_millis(20),
            },
            speed: 1.0,
            seed: 0,
            keep_alive: Duration::from_secs(5),
            events: None,
            lora: LoraOptions::default(),
            transfer: None,
            rooms: None,
            offload: OffloadOptions::default(),
            data_parallel_size: 1,
        }
    }
}

impl EngineOptions {
    /// Returns the options of the tiers below the GPU. SGLang always describes their events.
    fn offload(&self) -> OffloadOptions {
        OffloadOptions {
            is_described: self.offload.is_described || self.rooms.is_some(),
            ..self.offload
        }
    }

    /// Returns what the KV events of a rank have in common.
    fn source(&self, rank: u16) -> EventSource {
        EventSource {
            block_tokens: self.shape.block_size,
            rank,
            media: match &self.rooms {
                Some(_) => OffloadMedia::Sglang,
                None => OffloadMedia::Vllm,
            },
        }
    }
}

/// Entry point to start emulated engines.
#[derive(Debug, Clone, Copy)]
pub struct EmulatedEngine;

/// A running engine. Dropping it stops the engine without waiting.
#[derive(Debug)]
pub struct EngineHandle {
    addr: SocketAddr,
    /// Bootstrap address of a prefill engine with rooms; `None` for other engines.
    bootstrap: Option<SocketAddr>,
    ranks: Ranks,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl EmulatedEngine {
    /// Binds the address and serves an engine there in the background.
    ///
    /// # Errors
    /// If the address of the API, of the KV events or of the rooms cannot be bound.
    ///
    /// # Panics
    /// If a size in the shape is zero, there are fewer than two blocks, or `speed` is not a
    /// positive number.
    pub fn start(options: EngineOptions) -> BoxFuture<'static, io::Result<EngineHandle>> {
        Self::start_here(options).boxed()
    }

    async fn start_here(options: EngineOptions) -> io::Result<EngineHandle> {
        assert!(
            options.speed.is_finite() && options.speed > 0.0,
            "engine speed {}",
            options.speed
        );
        let listener = TcpListener::bind(options.listen).await?;
        let addr = listener.local_addr()?;
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        let mut cores = Vec::new();
        for rank in 0..options.data_parallel_size.max(1) {
            let publisher = match &options.events {
                Some(events) => {
                    let (events, source) = (events_of(events, rank), options.source(rank));
                    Some(Publisher::start(&events, source, &stop, &tasks).await?)
                }
                None => None,
            };
            let scheduler = Scheduler::new(options.shape)
                .with_lora(&options.lora)
                .with_offload(&options.offload());
            let core = DriverCore::new(scheduler, options.speed, publisher);
            tasks.spawn(stop.clone().run_until_cancelled_owned(core.clone().drive()));
            cores.push(core);
        }
        let ranks = Ranks::new(cores);
        let rooms = match options.rooms {
            Some(rooms) => Some(EngineRooms::start(rooms, options.speed, (&stop, &tasks)).await?),
            None => None,
        };
        let prefill = rooms
            .as_ref()
            .filter(|rooms| rooms.mode() == RoomMode::Prefill);
        let bootstrap = prefill.map(EngineRooms::address);
        let surface = EngineServer::new(ranks.clone(), &options, (addr, rooms));
        let acceptor = accept(
            listener,
            surface.routes(),
            options.keep_alive,
            stop.clone(),
            tasks.clone(),
        );
        tasks.spawn(stop.clone().run_until_cancelled_owned(acceptor));
        tasks.close();
        Ok(EngineHandle {
            addr,
            bootstrap,
            ranks,
            stop,
            tasks,
        })
    }
}

impl EngineHandle {
    /// Returns the listening address.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the engine's URL: `http://` and the listening address.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Returns the bootstrap address of a prefill engine with rooms; `None` for other engines.
    #[must_use]
    pub fn bootstrap(&self) -> Option<SocketAddr> {
        self.bootstrap
    }

    /// Returns the first rank's KV event endpoint, as in a backend's `kv_events`; `None` if the
    /// engine publishes no events.
    #[must_use]
    pub fn kv_events(&self) -> Option<String> {
        let publisher = self.ranks.publishers().next()?;
        Some(format!("tcp://{}", publisher.events_at()))
    }

    /// Returns the first rank's endpoint for replays of KV events, as in a backend's `kv_replay`;
    /// `None` if there are no replays.
    #[must_use]
    pub fn kv_replay(&self) -> Option<String> {
        let replay = self.ranks.publishers().next()?.replay_at()?;
        Some(format!("tcp://{replay}"))
    }

    /// Returns the counters and gauges of the first rank.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        self.ranks.first().stats()
    }

    /// Returns the counters and gauges of each rank.
    #[must_use]
    pub fn rank_stats(&self) -> Vec<EngineStats> {
        self.ranks.stats()
    }

    /// Returns a watch on the number of requests of the first rank that have not ended.
    #[must_use]
    pub fn watch_open(&self) -> watch::Receiver<u32> {
        self.ranks.first().watch_open()
    }

    /// Closes all connections at once, and waits until the engine has stopped.
    pub async fn stop(self) {
        self.stop.cancel();
        self.tasks.wait().await;
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn accept(
    listener: TcpListener,
    routes: Router,
    keep_alive: Duration,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let place = places
            .clone()
            .acquire_owned()
            .await
            .expect("the semaphore is never closed");
        match listener.accept().await {
            Ok((socket, _)) => {
                // Nagle's algorithm would delay each word until the previous one is acknowledged.
                if let Err(error) = socket.set_nodelay(true) {
                    tracing::debug!(%error, "set nodelay");
                }
                let connection = serve(routes.clone(), socket, keep_alive, stop.clone());
                tasks.spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            Err(error) => {
                // Usually out of file descriptors: retry when some may have been closed.
                tracing::warn!(%error, "accept connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}
