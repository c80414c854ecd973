//! One place where a request meets the view, the overlay, the load and the policy, and where what
//! became of it is recorded.
//!
//! A request whose prompt is read ([`crate::prompt::PromptReader`]) passes through here in two steps.
//! [`Router::decide`] matches them against the applied ownership and this replica's
//! overlay, adds the load, and lets the policy choose; it reads local memory only and waits for no
//! writer. [`Router::dispatch`] makes the decision known (load, overlay, outbox) and gives an
//! [`Attempt`], which books the rest until it ends. [`Router::run_outbox`] carries it all to the log.

mod attempt;
mod decide;
mod explain;
mod filters;
#[cfg(test)]
mod fixture;
mod fleet;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod hidden;
mod lengths;
mod load;
mod metrics;
mod outbox;
mod overlay;
mod panic;
mod predictions;
mod reply;
mod room;
mod samples;
mod select;
mod session;
#[cfg(test)]
mod tests;
mod verdict;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;
use http::HeaderMap;
use state::StateView;
use state::command::{Charge, EngineFacts, Item};
use state::ids::{AttemptId, BackendRef, LogIndex, ReplicaId, SessionId, Slot, UserKey};
use state::policy::{PolicyConfig, Reason, Touch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::fleet::RoutingTable;
use self::lengths::OutputLengths;
use self::metrics::BackendMeter;
use self::outbox::driver::{OutboxDriver, SharedOutbox};
use self::panic::Panics;
use self::room::PricedTotal;
use self::samples::ServiceSamples;
use crate::backends::{Backends, HalfOpenProbe};
use crate::clock::Clock;
use crate::ports::Propose;
use crate::prompt::{ModelSettings, PromptIdentity, PromptReader};

pub(crate) use attempt::pricing_of;
pub use attempt::{Attempt, DispatchTerms};
pub use explain::{ExplainedBackend, ExplainedRequest, Explanation};
pub use fleet::PolicySource;
pub use hidden::HiddenOutput;
pub use load::{EXPIRY, KEEPALIVE, Load, LoadGuard, LoadReportError, LoadReporter, LoadTable};
pub(crate) use load::{put_number, take_number};
pub use metrics::RoutingMetrics;
pub use outbox::{AfterProposal, Outbox, OutboxSettings, OutboxStatus};
pub use overlay::Overlay;
pub use room::LargestRequest;
pub use select::{Labels, SELECT, SelectRejection, SelectSettings};
pub use session::{POLICY, PolicyRejection};
pub use verdict::FilterVerdict;

/// What a [`Router`] is made of.
pub struct RouterParts {
    /// The replicated state's read side.
    pub view: Arc<StateView>,
    /// Health and engine metrics.
    pub backends: Arc<Backends>,
    /// `[[models]]`, first match counts.
    pub models: Vec<ModelSettings>,
    /// This replica.
    pub replica: ReplicaId,
    /// Its run.
    pub session: SessionId,
    /// Bounds and pace of the outbox.
    pub outbox: OutboxSettings,
    /// Policies that a request may ask for in place of the live one; none: requests may not ask.
    pub overrides: Vec<PolicyConfig>,
    /// Stamps what goes to the log, and tells what users' limits go by.
    pub clock: Clock,
}

/// Chooses backends and keeps the books of what was dispatched. One per replica.
pub struct Router {
    view: Arc<StateView>,
    backends: Arc<Backends>,
    reader: Arc<PromptReader>,
    load: LoadTable,
    overlay: Arc<Overlay>,
    desk: SharedOutbox,
    flush_interval: Duration,
    last_attempt: AtomicU64,
    /// What round-robin counts by.
    turn: AtomicU64,
    overrides: Vec<PolicyConfig>,
    metrics: RoutingMetrics,
    /// What is derived from the registry, as of the last decision.
    fleet: ArcSwap<RoutingTable>,
    select: SelectSettings,
    samples: ServiceSamples,
    replica: ReplicaId,
    lengths: OutputLengths,
    priced: PricedTotal,
    /// This replica's run.
    session: SessionId,
    clock: Clock,
    panics: Panics,
}

/// A request as routing sees it.
#[derive(Debug, Clone, Copy)]
pub struct RoutingRequest<'a> {
    /// Model id.
    pub model: &'a str,
    /// The prompt's blocks.
    pub identity: &'a PromptIdentity,
    /// `x-request-id`: its hash breaks ties.
    pub request_id: &'a str,
    /// The name that the tokens are charged to.
    pub user: &'a str,
    /// The request's headers, which may name its session.
    pub headers: Option<&'a HeaderMap>,
    /// From [`Router::asked_policy`]; `None`: the live one.
    pub policy: Option<&'a PolicyConfig>,
    /// Backends tried already.
    pub excluded: &'a [Slot],
}

/// A decision, with what the response headers tell.
#[derive(Debug, Clone)]
pub struct Decision {
    /// The backend.
    pub backend: BackendRef,
    /// Its id.
    pub name: Arc<str>,
    /// Leading blocks it is believed to hold.
    pub matched: u32,
    /// Blocks of the prompt.
    pub total: u32,
    /// Why.
    pub reason: Reason,
    /// Name of the policy.
    pub policy: &'static str,
    /// Whether the request renews the age of blocks that it finds cached.
    pub touch: Touch,
    /// Applied index the decision was made at.
    pub index: LogIndex,
    /// The backend's circuit is open: this request is the one that tries it.
    pub(crate) trial: Option<Arc<HalfOpenProbe>>,
}

/// Why no backend can take a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RoutingRejection {
    /// No registered backend serves the model: 404.
    UnknownModel,
    /// Some do, none of them is healthy and not draining: 503.
    NoneHealthy,
    /// All that could were tried: 502 or 503, as the last attempt ended.
    AllTried,
    /// Some are healthy, none of them has the labels asked for: 503.
    NoneSelected,
    /// None of them has a cache that holds the prompt: 400.
    TooLarge,
    /// Some could, each has as many requests as it may: wait, or 503.
    AtLimit,
}

impl RoutingRejection {
    fn label(self) -> &'static str {
        match self {
            Self::UnknownModel => "unknown-model",
            Self::NoneHealthy => "none-healthy",
            Self::AllTried => "all-tried",
            Self::NoneSelected => "none-selected",
            Self::TooLarge => "too-large",
            Self::AtLimit => "at-limit",
        }
    }
}

/// Tokens an engine reported, or that were counted when it did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Of these, from the prefix cache; `None` when the engine did not say.
    pub cached_tokens: Option<u64>,
    /// Output tokens.
    pub completion_tokens: u64,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptEnd {
    /// The engine answered to the end.
    Finished,
    /// The engine broke after its first byte.
    Broken,
    /// The client left.
    ClientLeft,
    /// Nothing reached the engine, or it refused before its first byte: the next may be tried.
    NotRun,
    /// The engine took it and failed before its first byte, by an error or by breaking off.
    Failed,
}

impl AttemptEnd {
    fn label(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Broken => "broken",
            Self::ClientLeft => "client-left",
            Self::NotRun => "not-run",
            Self::Failed => "failed",
        }
    }
}

impl Router {
    /// A router with nothing under way.
    #[must_use]
    pub fn new(parts: RouterParts) -> Self {
        let overlay = Arc::new(Overlay::default());
        let metrics = RoutingMetrics::default();
        let outbox = Outbox::new(
            parts.replica,
            parts.session,
            parts.outbox,
            Arc::clone(&overlay),
        );
        if !parts.overrides.is_empty() {
            parts.view.want_all();
        }
        Self {
            fleet: ArcSwap::from_pointee(RoutingTable::of(parts.view.registry(), &metrics)),
            reader: Arc::new(PromptReader::new(
                Arc::clone(&parts.view),
                Arc::clone(&parts.backends),
                parts.models,
                metrics.tokenizing.clone(),
            )),
            panics: Panics::new(metrics.clone()),
            view: parts.view,
            backends: parts.backends,
            load: LoadTable::default(),
            overlay,
            desk: SharedOutbox::new(outbox),
            flush_interval: parts.outbox.flush_interval,
            last_attempt: AtomicU64::new(0),
            // Replicas begin in different places.
            turn: AtomicU64::new(parts.session.0),
            overrides: parts.overrides,
            metrics,
            select: SelectSettings::default(),
            samples: ServiceSamples::default(),
            replica: parts.replica,
            lengths: OutputLengths::default(),
            priced: PricedTotal::default(),
            session: parts.session,
            clock: parts.clock,
        }
    }

    /// What requests are read by.
    #[must_use]
    pub fn reader(&self) -> &Arc<PromptReader> {
        &self.reader
    }

    /// This replica's wall clock.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Requests and pending prefill per backend, here and elsewhere.
    #[must_use]
    pub fn load(&self) -> &LoadTable {
        &self.load
    }

    /// Whether nothing is believed here that the log has not told.
    #[must_use]
    pub fn is_overlay_empty(&self) -> bool {
        self.overlay.is_empty()
    }

    /// What routing counts, to be registered once.
    #[must_use]
    pub fn metrics(&self) -> &RoutingMetrics {
        &self.metrics
    }

    /// Brings the gauges up to date and drops the series of removed backends; call it before a
    /// scrape.
    pub fn refresh_metrics(&self) {
        self.metrics.show_outbox(&self.outbox_status());
        let panicking = self.backends.panicking(&self.view.registry());
        self.panics.note_all(&panicking);
        self.metrics.forget_removed(|| self.view.registry());
    }

    /// How far the log is behind.
    #[must_use]
    pub fn outbox_status(&self) -> OutboxStatus {
        self.desk.status(Instant::now())
    }

    /// Queues what an engine said about itself. Later facts of a backend stand over earlier ones.
    pub fn observe(&self, backend: BackendRef, facts: EngineFacts) {
        self.desk.with(|outbox| outbox.observe(backend, facts));
    }

    /// Queues an item for the log that stands for itself, behind the earlier ones. `false`: the queue
    /// is full, and it is as if nothing had been told.
    pub fn note(&self, item: Item) -> bool {
        self.desk.with(|outbox| outbox.note(item))
    }

    /// What `user` was charged here and the state does not show yet.
    #[must_use]
    pub fn unapplied(&self, user: UserKey) -> Charge {
        self.desk.with(|outbox| {
            outbox.settle(self.view.applied());
            outbox.unapplied(user)
        })
    }

    /// The replicated state's read side.
    #[must_use]
    pub fn view(&self) -> &Arc<StateView> {
        &self.view
    }

    /// Carries the outbox to the log until `stop`; then goes on until it is empty or `drain_max`
    /// has passed. Answers what is left. One call per router.
    pub async fn run_outbox(
        &self,
        propose: Arc<dyn Propose>,
        stop: CancellationToken,
        drain_max: Duration,
    ) -> OutboxStatus {
        let driver = OutboxDriver {
            desk: &self.desk,
            propose: &*propose,
            applied: &|| self.view.applied(),
            metrics: self.metrics.driver.clone(),
            flush_interval: self.flush_interval,
            clock: self.clock.clone(),
        };
        driver.run(stop, drain_max).await
    }

    fn next_attempt(&self) -> AttemptId {
        AttemptId(self.last_attempt.fetch_add(1, Relaxed) + 1)
    }

    fn meter(&self, backend: BackendRef, name: &str) -> Arc<BackendMeter> {
        let known = self.fleet.load().meter(backend);
        known.unwrap_or_else(|| self.metrics.meter(name))
    }
}
