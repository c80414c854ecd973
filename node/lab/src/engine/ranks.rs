//! Data-parallel ranks: several schedulers behind one port, each with its own prefix cache.
//!
//! As with vLLM's `--data-parallel-size`, a request goes to the rank in its header
//! `X-data-parallel-rank`, or to the one with the fewest requests. Each rank publishes KV events at
//! its own ports.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::HeaderMap;

use super::driver::DriverCore;
use super::events::{EventsOptions, Publisher};
use super::model::EngineStats;
use super::rejection::RequestRejection;

/// Header with the number of the rank that serves the request.
const RANK_HEADER: &str = "x-data-parallel-rank";

/// Data-parallel ranks of an engine, at least one.
#[derive(Debug, Clone)]
pub(super) struct Ranks {
    cores: Arc<[Arc<DriverCore>]>,
    /// Counter of searches for the idlest rank. Each search starts at another rank, so that equally
    /// idle ranks take turns.
    turn: Arc<AtomicUsize>,
}

impl Ranks {
    /// Creates the ranks of an engine from their drivers.
    ///
    /// # Panics
    /// If `cores` is empty.
    pub(super) fn new(cores: Vec<Arc<DriverCore>>) -> Self {
        assert!(!cores.is_empty(), "an engine has a rank");
        Self {
            cores: cores.into(),
            turn: Arc::default(),
        }
    }

    /// Returns the first rank, which represents the properties that all ranks share.
    pub(super) fn first(&self) -> &Arc<DriverCore> {
        &self.cores[0]
    }

    /// Returns all ranks, in order.
    pub(super) fn all(&self) -> &[Arc<DriverCore>] {
        &self.cores
    }

    /// Returns the rank that the headers name, or else the idlest one.
    ///
    /// # Errors
    /// If the headers name a rank that does not exist.
    pub(super) fn asked(&self, headers: &HeaderMap) -> Result<&Arc<DriverCore>, RequestRejection> {
        let Some(named) = headers.get(RANK_HEADER) else {
            return Ok(self.idlest());
        };
        let rank = named.to_str().ok().and_then(|it| it.parse::<usize>().ok());
        let core = rank.and_then(|rank| self.cores.get(rank));
        core.ok_or_else(|| {
            let message = format!(
                "data_parallel_rank {named:?} is out of range [0, {}).",
                self.cores.len()
            );
            RequestRejection::bad_request(message, None)
        })
    }

    fn idlest(&self) -> &Arc<DriverCore> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % self.cores.len();
        let (before, from) = self.cores.split_at(turn);
        let by_turn = from.iter().chain(before);
        let idlest = by_turn.min_by_key(|core| *core.watch_open().borrow());
        idlest.expect("an engine has a rank")
    }

    /// Returns the counters and gauges of each rank.
    pub(super) fn stats(&self) -> Vec<EngineStats> {
        self.cores.iter().map(|core| core.stats()).collect()
    }

    /// Returns the publishers of KV events; empty if none are published.
    pub(super) fn publishers(&self) -> impl Iterator<Item = &Arc<Publisher>> {
        self.cores.iter().filter_map(|core| core.publisher())
    }
}

/// Returns the publisher options of rank `rank`: the given ports plus `rank`, except that port 0
/// still selects a free port.
pub(super) fn events_of(options: &EventsOptions, rank: u16) -> EventsOptions {
    let of_rank = |at: SocketAddr| match at.port() {
        0 => at,
        port => SocketAddr::new(at.ip(), port.saturating_add(rank)),
    };
    EventsOptions {
        events: of_rank(options.events),
        replay: options.replay.map(of_rank),
        ..options.clone()
    }
}
