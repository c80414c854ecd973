//! The engines behind a demo cluster: emulated in this process, or real ones by URL.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::Context as _;
use state::command::BackendSpec;

use super::events::{EventEncoding, PublisherFaults};
use super::offload::OffloadOptions;
use super::{EmulatedEngine, EngineHandle, EngineOptions, EventsOptions};

/// Port that the first emulated engine tries; each further one tries the next. An engine whose port
/// is taken selects a free port.
const FIRST_PORT: u16 = 9001;

/// Engines to start or to use.
#[derive(Debug, Clone, Copy)]
pub struct EnginesPlan<'a> {
    /// URLs of real engines. If there are any, none are emulated.
    pub urls: &'a [String],
    /// Number of emulated engines.
    pub count: u8,
    /// Speed of the emulated engines, relative to a small GPU.
    pub speed: f64,
    /// Number of cache blocks of each emulated engine; `None` for the default.
    pub blocks: Option<u32>,
    /// Cache tiers of each emulated engine below its GPU.
    pub offload: OffloadOptions,
    /// Whether the engines publish KV events and replicas read them.
    pub has_events: bool,
    /// Faults to inject into the KV events, if any.
    pub faults: Option<&'a PublisherFaults>,
}

/// Running engines with their registrations as backends.
#[derive(Debug)]
pub struct Engines {
    /// Engines in this process. They serve one model: each goes on where another one stopped.
    pub(super) emulated: Vec<EngineHandle>,
    /// Registration of each engine as a backend.
    pub specs: Vec<BackendSpec>,
}

impl Engines {
    /// Starts the emulated engines, unless real ones are named.
    ///
    /// # Errors
    /// If the listener of an emulated engine cannot be bound.
    pub async fn start(plan: EnginesPlan<'_>) -> anyhow::Result<Self> {
        let mut emulated = Vec::new();
        if plan.urls.is_empty() {
            for number in 0..plan.count {
                emulated.push(start_one(plan, number).await?);
            }
        }
        let mut urls = plan.urls.to_vec();
        urls.extend(emulated.iter().map(EngineHandle::url));
        let specs = urls.iter().enumerate();
        let specs = specs.map(|(number, url)| spec(number + 1, url, plan.has_events));
        let specs = specs.collect();
        Ok(Self { emulated, specs })
    }

    /// Stops the emulated engines, and waits until they have stopped.
    pub async fn stop(self) {
        for engine in self.emulated {
            engine.stop().await;
        }
    }
}

async fn start_one(plan: EnginesPlan<'_>, number: u8) -> anyhow::Result<EngineHandle> {
    let options = |port| {
        let mut options = EngineOptions {
            listen: SocketAddr::from(([127, 0, 0, 1], port)),
            speed: plan.speed,
            events: plan.has_events.then(|| EventsOptions {
                events: SocketAddr::from(([127, 0, 0, 1], 0)),
                replay: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
                form: EventEncoding::default(),
                faults: plan.faults.cloned().unwrap_or_default(),
            }),
            offload: plan.offload,
            ..EngineOptions::default()
        };
        options.shape.num_gpu_blocks = plan.blocks.unwrap_or(options.shape.num_gpu_blocks);
        options
    };
    match EmulatedEngine::start(options(FIRST_PORT + u16::from(number))).await {
        Ok(engine) => Ok(engine),
        Err(_) => EmulatedEngine::start(options(0))
            .await
            .context("start emulated engine"),
    }
}

fn spec(number: usize, url: &str, has_events: bool) -> BackendSpec {
    BackendSpec {
        id: format!("engine-{number}"),
        url: url.trim_end_matches('/').to_owned(),
        models: vec!["*".to_owned()],
        labels: BTreeMap::new(),
        capacity_blocks: None,
        kv_events: has_events.then(|| "auto".to_owned()),
        kv_replay: None,
        role: state::command::BackendRole::Both,
    }
}
