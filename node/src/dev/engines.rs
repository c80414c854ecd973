//! The engines of a dev cluster: emulated ones in this process, or real ones by their URLs.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::Context as _;
use state::command::BackendSpec;

use super::DevArgs;
use crate::engine::{Engine, EngineHandle, EngineOptions};

/// First port of the emulated engines, if it and those after it are free.
const FIRST_PORT: u16 = 9001;

/// Engines to put behind the replicas.
pub(super) struct Engines {
    emulated: Vec<EngineHandle>,
    /// How they are registered.
    pub(super) specs: Vec<BackendSpec>,
}

impl Engines {
    /// Starts the emulated engines, unless real ones are named.
    pub(super) async fn start(args: &DevArgs) -> anyhow::Result<Self> {
        let mut emulated = Vec::new();
        if args.backend.is_empty() {
            for number in 0..args.engines {
                emulated.push(start_one(args, number).await?);
            }
        }
        let mut urls = args.backend.clone();
        urls.extend(emulated.iter().map(EngineHandle::url));
        let specs = urls.iter().enumerate();
        let specs = specs.map(|(number, url)| spec(number + 1, url)).collect();
        Ok(Self { emulated, specs })
    }

    /// Stops the emulated ones.
    pub(super) async fn stop(self) {
        for engine in self.emulated {
            engine.stop().await;
        }
    }
}

async fn start_one(args: &DevArgs, number: u8) -> anyhow::Result<EngineHandle> {
    let options = |port| EngineOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], port)),
        speed: args.speed,
        seed: u64::from(number),
        ..EngineOptions::default()
    };
    match Engine::start(options(FIRST_PORT + u16::from(number))).await {
        Ok(engine) => Ok(engine),
        Err(_) => Engine::start(options(0))
            .await
            .context("start emulated engine"),
    }
}

fn spec(number: usize, url: &str) -> BackendSpec {
    BackendSpec {
        id: format!("engine-{number}"),
        url: url.trim_end_matches('/').to_owned(),
        models: vec!["*".to_owned()],
        labels: BTreeMap::new(),
        capacity_blocks: None,
        kv_events: None,
        kv_replay: None,
    }
}
