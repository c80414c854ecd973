//! Chooses where a request goes, and accounts for it.
//!
//! A [`Router`] puts together what one replica routes with:
//!
//! - the [`PromptReader`] turns a request's body into block hashes (in [`crate::prompt`]);
//! - the [`Decider`] matches them against the applied ownership and the overlay, adds the load and
//!   lets the policy choose. It reads local memory only, waits for no writer, and writes nothing;
//! - the [`Dispatcher`] makes a decision known (load, overlay, outbox) and returns an [`Attempt`],
//!   which accounts for the request until it ends;
//! - the [`SharedOutbox`] with its [`Overlay`] holds what the log does not know yet;
//!   [`Router::run_outbox`] carries it there;
//! - the [`LoadTable`] knows what runs where, here and at the peers.

mod adapters;
mod attempt;
mod capacity;
mod decide;
mod decision_record;
mod dispatch;
mod endpoints;
mod evictions;
mod explain;
mod filters;
#[cfg(test)]
mod fixture;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod hidden_output;
mod load;
mod load_reader;
mod metrics;
mod outbox;
mod output_lengths;
mod pairing;
mod pairs;
mod panic;
mod predictions;
mod preferences;
mod prefill;
mod priced_total;
mod prompt_size;
mod reply;
mod routing_table;
mod samples;
mod select;
mod separable;
mod session;
mod shares;
#[cfg(test)]
mod tests;
mod text_samples;
mod verdict;

use schemars::JsonSchema;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::HeaderMap;
use state::StateView;
use state::ids::{BackendRef, LogIndex, ReplicaId, SessionId, Slot};
use state::policy::{PolicyConfig, Reason, Touch};
use tokio_util::sync::CancellationToken;

use self::load_reader::LoadReader;
use self::outbox::driver::OutboxDriver;
use self::output_lengths::OutputLengths;
use self::pairing::PairRules;
use self::panic::PanicModes;
use self::priced_total::PricedTotal;
use self::routing_table::Fleet;
use self::samples::ServiceSamples;
use self::text_samples::TextSums;
use crate::backends::{Backends, HalfOpenProbe};
use crate::clock::Clock;
use crate::ports::Propose;
use crate::prompt::{ModelSettings, PromptIdentity, PromptReader};

pub(crate) use attempt::pricing_of;
pub use attempt::{Attempt, DispatchTerms};
pub use decide::Decider;
pub use decision_record::{
    AttemptReport, DecisionRecord, DecisionView, ExplainedRequest, PrefillView, SEEN_MAX,
    SeenBackendView, SeenDecision,
};
pub use dispatch::Dispatcher;
pub use endpoints::{OfferedEndpoints, endpoint_of};
pub use explain::{ExplainedBackend, Explanation};
pub use hidden_output::HiddenOutput;
pub use load::{
    EXPIRY, KEEPALIVE, Load, LoadGuard, LoadReportError, LoadReporter, LoadTable, ReservedPlace,
};
pub(crate) use load::{put_number, take_number};
pub use metrics::RoutingMetrics;
pub use outbox::{
    AfterProposal, ChargeCommit, Outbox, OutboxSettings, OutboxStatus, Overlay, SharedOutbox,
};
pub use preferences::{POLICY, PreferenceRejection, RoutingPreferences};
pub use prefill::{PrefillAttempt, PrefillDecision};
pub use priced_total::LargestRequest;
pub use routing_table::PolicySource;
pub use select::{Labels, SELECT, SelectRejection, SelectSettings};
pub use separable::RequestStages;
pub use shares::{
    PlacedRequest, ShareStanding, Shares, WaitingForPlace, WantedPlaces, wire as share_reports,
};
pub use verdict::FilterVerdict;

pub use crate::user_name::UserName;

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
    /// Labels that backends must have; the default demands none.
    pub select: SelectSettings,
    /// Stamps what goes to the log, and tells what users' limits go by.
    pub clock: Clock,
}

/// What one replica routes with. One per replica.
pub struct Router {
    view: Arc<StateView>,
    reader: Arc<PromptReader>,
    decider: Arc<Decider>,
    dispatcher: Arc<Dispatcher>,
    outbox: Arc<SharedOutbox>,
    load: Arc<LoadTable>,
    shares: Arc<Shares>,
    metrics: RoutingMetrics,
    replica: ReplicaId,
    flush_interval: Duration,
    clock: Clock,
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
    pub user: &'a UserName,
    /// The request's headers, which may name its session.
    pub headers: Option<&'a HeaderMap>,
    /// From [`RoutingPreferences`]; `None`: the live one.
    pub policy: Option<&'a Arc<PolicyConfig>>,
    /// Labels the backend must have, beside those of its model; from [`RoutingPreferences`].
    pub labels: &'a [(String, String)],
    /// Backends tried already.
    pub excluded: &'a [Slot],
    /// Requests for the model that wait at this replica.
    pub waiting_here: u32,
    /// The endpoints that a gateway can send it to; `None`: this replica sends it to any backend.
    pub endpoints: Option<&'a OfferedEndpoints>,
    /// Which of its stages can be at two backends.
    pub stages: RequestStages,
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
    /// The backend that computes the prompt; `None`: the same.
    pub prefill: Option<PrefillDecision>,
    /// Applied index the decision was made at.
    pub index: LogIndex,
    /// The backend's circuit is open: this request is the one that tries it.
    pub(crate) trial: Option<Arc<HalfOpenProbe>>,
    /// What it went by; `None`: decisions are not recorded.
    pub record: Option<Arc<DecisionRecord>>,
}

/// Why no backend can take a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RoutingRejection {
    /// No registered backend serves the model: 404.
    UnknownModel,
    /// Some do, none of them is at an endpoint that the gateway offers: 503.
    NoneOffered,
    /// Some do, none of them is healthy and not draining: 503.
    NoneHealthy,
    /// All that could were tried: 502 or 503, as the last attempt ended.
    AllTried,
    /// Some are healthy, none of them has the labels asked for: 503.
    NoneSelected,
    /// Some are, none of them keeps this user's cached blocks apart: 503.
    NoneIsolating,
    /// None of them has a cache that holds the prompt: 400.
    TooLarge,
    /// They compute prompts and answers apart, and this request cannot be taken apart: 400.
    NotSeparable,
    /// They answer prompts that others compute, none of which is there: 503.
    NoPrefill,
    /// Some could, each has as many requests as it may: wait, or 503.
    AtLimit,
}

impl RoutingRejection {
    fn label(self) -> &'static str {
        match self {
            Self::UnknownModel => "unknown-model",
            Self::NoneOffered => "none-offered",
            Self::NoneHealthy => "none-healthy",
            Self::AllTried => "all-tried",
            Self::NoneSelected => "none-selected",
            Self::NoneIsolating => "none-isolating",
            Self::TooLarge => "too-large",
            Self::NotSeparable => "not-separable",
            Self::NoPrefill => "no-prefill",
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
    /// As metrics and the admin API name it.
    #[must_use]
    pub fn label(self) -> &'static str {
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
        let RouterParts {
            view,
            backends,
            models,
            replica,
            session,
            outbox: settings,
            overrides,
            select,
            clock,
        } = parts;
        if !overrides.is_empty() {
            view.want_all();
        }
        let metrics = RoutingMetrics::default();
        let fleet = Arc::new(Fleet::new(Arc::clone(&view), metrics.clone()));
        let load = Arc::new(LoadTable::default());
        let overlay = Arc::new(Overlay::default());
        let outbox = Outbox::new(replica, session, settings, Arc::clone(&overlay));
        let outbox = Arc::new(SharedOutbox::new(outbox));
        let pairs = PairRules::of(&models);
        let reader = PromptReader::new(
            Arc::clone(&view),
            Arc::clone(&backends),
            models,
            metrics.tokenizing.clone(),
        );
        let shares = Shares::new((&view, &load), (replica, session), &metrics);
        let decider = Decider {
            view: Arc::clone(&view),
            backends: Arc::clone(&backends),
            load: LoadReader::of(&load),
            overlay: Arc::clone(&overlay),
            fleet: Arc::clone(&fleet),
            // Replicas begin in different places.
            turn: AtomicU64::new(session.0),
            overrides: overrides.into_iter().map(Arc::new).collect(),
            select,
            pairs,
            is_recording: false,
            metrics: metrics.clone(),
            panics: PanicModes::new(metrics.clone()),
        };
        let dispatcher = Dispatcher {
            view: Arc::clone(&view),
            backends,
            fleet,
            load: Arc::clone(&load),
            outbox: Arc::clone(&outbox),
            overlay,
            session,
            last_attempt: AtomicU64::new(0),
            samples: ServiceSamples::default(),
            tells_beliefs: AtomicBool::new(false),
            lengths: OutputLengths::default(),
            texts: TextSums::default(),
            priced: PricedTotal::default(),
        };
        Self {
            view,
            reader: Arc::new(reader),
            decider: Arc::new(decider),
            dispatcher: Arc::new(dispatcher),
            outbox,
            load,
            shares: Arc::new(shares),
            metrics,
            replica,
            flush_interval: settings.flush_interval,
            clock,
        }
    }

    /// Has every decision keep what it went by, see [`DecisionRecord`].
    ///
    /// # Panics
    /// If the decider is in use already.
    #[must_use]
    pub fn recording(mut self) -> Self {
        let decider = Arc::get_mut(&mut self.decider);
        decider.expect("nobody decides yet").is_recording = true;
        self
    }

    /// Reads requests.
    #[must_use]
    pub fn reader(&self) -> &Arc<PromptReader> {
        &self.reader
    }

    /// Chooses backends.
    #[must_use]
    pub fn decider(&self) -> &Arc<Decider> {
        &self.decider
    }

    /// Dispatches requests and accounts for them.
    #[must_use]
    pub fn dispatcher(&self) -> &Arc<Dispatcher> {
        &self.dispatcher
    }

    /// What the log does not know yet.
    #[must_use]
    pub fn outbox(&self) -> &Arc<SharedOutbox> {
        &self.outbox
    }

    /// Requests and pending prefill per backend, here and elsewhere.
    #[must_use]
    pub fn load(&self) -> &Arc<LoadTable> {
        &self.load
    }

    /// This replica's shares of the backends' limits.
    #[must_use]
    pub fn shares(&self) -> &Arc<Shares> {
        &self.shares
    }

    /// The replicated state's read side.
    #[must_use]
    pub fn view(&self) -> &Arc<StateView> {
        &self.view
    }

    /// This replica.
    #[must_use]
    pub fn replica(&self) -> ReplicaId {
        self.replica
    }

    /// This replica's wall clock.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Whether the overlay holds nothing: all that was routed here is applied.
    #[must_use]
    pub fn is_overlay_empty(&self) -> bool {
        self.dispatcher.overlay.is_empty()
    }

    /// What routing counts, to be registered once.
    #[must_use]
    pub fn metrics(&self) -> &RoutingMetrics {
        &self.metrics
    }

    /// Carries the outbox to the log until `stop`; then goes on until it is empty or `drain_max`
    /// has passed. Returns what is left. One call per router.
    pub fn run_outbox(
        &self,
        propose: Arc<dyn Propose>,
        stop: CancellationToken,
        drain_max: Duration,
    ) -> BoxFuture<'_, OutboxStatus> {
        self.carry_outbox(propose, stop, drain_max).boxed()
    }

    async fn carry_outbox(
        &self,
        propose: Arc<dyn Propose>,
        stop: CancellationToken,
        drain_max: Duration,
    ) -> OutboxStatus {
        let driver = OutboxDriver {
            outbox: &self.outbox,
            propose: &*propose,
            applied: &|| self.view.applied(),
            metrics: self.metrics.driver.clone(),
            flush_interval: self.flush_interval,
            clock: self.clock.clone(),
        };
        driver.run(stop, drain_max).await
    }
}
