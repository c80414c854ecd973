//! Chooses a backend for each request and accounts for its use.
//!
//! A [`Router`] combines the parts that one replica routes with:
//!
//! - the [`PromptReader`] turns a request's body into block hashes (in [`crate::prompt`]);
//! - the [`Decider`] matches them against the applied ownership and the overlay, adds the load and
//!   lets the policy choose. It reads only local memory and changes nothing that other replicas
//!   see;
//! - the [`Dispatcher`] records a decision (load, overlay, outbox) and returns an [`Attempt`],
//!   which accounts for the request until it ends;
//! - the [`SharedOutbox`] with its [`Overlay`] holds what the log does not contain yet;
//!   [`Router::run_outbox`] proposes it;
//! - the [`LoadTable`] counts the requests at each backend, here and at the peers.

mod decide;
mod dispatch;
#[cfg(test)]
mod fixture;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod learnt;
mod load;
mod metrics;
mod outbox;
mod permits;
mod shares;
#[cfg(test)]
mod tests;
mod verdict;

use schemars::JsonSchema;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::HeaderMap;
use state::StateView;
use state::ids::{BackendRef, LogIndex, ReplicaId, SessionId, Slot};
use state::kv_events::LowerTierBlocks;
use state::policy::{Handover, PolicyConfig, Reason, Touch};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use self::decide::load_reader::LoadReader;
use self::decide::pairing::PairRules;
use self::decide::panic::PanicModes;
use self::decide::routing_table::Fleet;
use self::decide::session::SessionParts;
use self::dispatch::output_lengths::OutputLengths;
use self::dispatch::priced_total::PricedTotal;
use self::dispatch::samples::ServiceSamples;
use self::dispatch::text_samples::TextSums;
use self::learnt::KnownPrefixes;
use self::outbox::driver::OutboxDriver;
use crate::base::clock::Clock;
use crate::engines::backends::{Backends, HalfOpenProbe};
use crate::ports::Propose;
use crate::prompt::{ModelSettings, PromptIdentity, PromptReader};
use crate::sessions::NamedSession;

pub use crate::users::user_name::UserName;
pub use decide::Decider;
pub use decide::decision_record::{
    AttemptReport, DecisionRecord, DecisionView, ExplainedRequest, PrefillView, SEEN_MAX,
    SeenBackendView, SeenDecision,
};
pub use decide::endpoints::{OfferedEndpoints, endpoint_of};
pub use decide::explain::{ExplainedBackend, Explanation};
pub use decide::preferences::{POLICY, PreferenceRejection, RoutingPreferences};
pub use decide::request_stages::RequestStages;
pub use decide::routing_table::PolicySource;
pub use decide::select::{Labels, SELECT, SelectRejection, SelectSettings};
pub use dispatch::Dispatcher;
pub(crate) use dispatch::attempt::ResumedStream;
pub(crate) use dispatch::attempt::pricing_of;
pub use dispatch::attempt::{Attempt, DispatchTerms, EarlierAttempts, EarlierCharge};
pub use dispatch::hidden_output::HiddenOutput;
pub use dispatch::prefill::PrefillAttempt;
pub use dispatch::priced_total::LargestRequest;
pub use load::{
    EXPIRY, KEEPALIVE, Load, LoadGuard, LoadReportError, LoadReporter, LoadTable, ReservedPlace,
    SeekGuard,
};
pub(crate) use load::{put_number, take_number};
pub use metrics::RoutingMetrics;
pub use outbox::{
    AfterProposal, ChargeCommit, Outbox, OutboxSettings, OutboxStatus, Overlay, SharedOutbox,
};
pub(crate) use permits::PermitRejection;
pub use permits::{PermitCell, Permits, UserPermit};
pub use shares::{
    PeerPlace, PlaceRejection, PlacedRequest, ShareStatus, Shares, WaitingForPlace, WantedPlaces,
    wire as share_reports,
};
pub use verdict::FilterVerdict;

/// Parts of a [`Router`].
pub struct RouterParts {
    /// Read side of the replicated state.
    pub view: Arc<StateView>,
    /// Health and engine metrics of the backends.
    pub backends: Arc<Backends>,
    /// Settings from `[[models]]`; the first entry that matches a model applies.
    pub models: Vec<ModelSettings>,
    /// Id of this replica.
    pub replica: ReplicaId,
    /// Session of this run of the replica.
    pub session: SessionId,
    /// Capacity and flush interval of the outbox.
    pub outbox: OutboxSettings,
    /// Policies that a request may select in place of the live one; empty to forbid selection.
    pub overrides: Vec<PolicyConfig>,
    /// Settings for the labels that backends must have; the default requires none.
    pub select: SelectSettings,
    /// Clock that stamps log entries and times the users' limits.
    pub clock: Clock,
}

/// The parts that one replica routes with. Each replica has one.
pub struct Router {
    view: Arc<StateView>,
    reader: Arc<PromptReader>,
    decider: Arc<Decider>,
    dispatcher: Arc<Dispatcher>,
    outbox: Arc<SharedOutbox>,
    load: Arc<LoadTable>,
    shares: Arc<Shares>,
    permits: Arc<Permits>,
    metrics: RoutingMetrics,
    replica: ReplicaId,
    flush_interval: Duration,
    clock: Clock,
}

/// A request as routing sees it.
#[derive(Debug, Clone, Copy)]
pub struct RoutingRequest<'a> {
    /// Id of the requested model.
    pub model: &'a str,
    /// The prompt's blocks.
    pub identity: &'a PromptIdentity,
    /// Value of `x-request-id`; its hash breaks ties.
    pub request_id: &'a str,
    /// User to charge the tokens to.
    pub user: &'a UserName,
    /// Session of which the request is a turn; `None` if it names none.
    pub session: Option<NamedSession>,
    /// The request's headers, which may name its session; `None` if there are none.
    pub headers: Option<&'a HeaderMap>,
    /// The client's address; `None` if it is not known.
    pub client: Option<&'a str>,
    /// Policy from [`RoutingPreferences`]; `None` for the policy of the model or of the cluster.
    pub policy: Option<&'a Arc<PolicyConfig>>,
    /// Labels required in addition to those of the model; from [`RoutingPreferences`].
    pub labels: &'a [(String, String)],
    /// Slots of backends that were already tried.
    pub excluded: &'a [Slot],
    /// Number of requests for the model that wait at this replica.
    pub waiting_here: u32,
    /// Endpoints to which a gateway can send the request; `None` if this replica sends it itself.
    pub endpoints: Option<&'a OfferedEndpoints>,
    /// Whether prefill and decode can run on two backends, and with which handover.
    pub stages: RequestStages,
    /// Whose free places count as room.
    pub room: Room,
}

impl<'a> RoutingRequest<'a> {
    /// Returns the parts that may name the request's session.
    fn session_parts(&self) -> SessionParts<'a> {
        SessionParts {
            headers: self.headers,
            client: self.client,
        }
    }
}

/// Whose free places count as room at a backend with a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Room {
    /// Those of all replicas: a backend has room while fewer requests run there than its limit.
    /// Every replica then decides equally; a place that a peer holds is requested from it.
    #[default]
    Cluster,
    /// Those of this replica.
    Here,
}

/// A routing decision, with what the response headers report of it.
#[derive(Debug, Clone)]
pub struct Decision {
    /// Chosen backend.
    pub backend: BackendRef,
    /// Id of the backend.
    pub name: Arc<str>,
    /// Number of leading blocks that the backend is believed to hold.
    pub matched: u32,
    /// Part of `matched` that the engine loads from tiers below the GPU.
    pub loaded: LowerTierBlocks,
    /// Number of full blocks of the prompt.
    pub total: u32,
    /// Why the backend was chosen.
    pub reason: Reason,
    /// Name of the policy that decided.
    pub policy: &'static str,
    /// Rule for whether the request renews the age of the blocks that it finds cached.
    pub touch: Touch,
    /// The backend that computes the prompt; `None` if it is the same one.
    pub prefill: Option<PrefillDecision>,
    /// Log index applied when the decision was made.
    pub index: LogIndex,
    /// This request's trial of the backend's circuit; `None` unless the circuit is half-open.
    pub(crate) trial: Option<Arc<HalfOpenProbe>>,
    /// Inputs of the decision; `None` if decisions are not recorded.
    pub record: Option<Arc<DecisionRecord>>,
}

impl PrefillDecision {
    /// Returns the number of leading blocks that the backend is believed to hold on its GPU.
    #[must_use]
    pub fn on_gpu(&self) -> u32 {
        self.matched.saturating_sub(self.loaded.total())
    }
}

impl Decision {
    /// Returns the number of leading blocks that the backend is believed to hold on its GPU.
    #[must_use]
    pub fn on_gpu(&self) -> u32 {
        self.matched.saturating_sub(self.loaded.total())
    }
}

/// The backend that computes a request's prompt for the one that answers.
#[derive(Debug, Clone)]
pub struct PrefillDecision {
    /// Prefill backend.
    pub backend: BackendRef,
    /// Id of the backend.
    pub name: Arc<str>,
    /// How the prompt's KV cache reaches the backend that answers.
    pub handover: Handover,
    /// Number of leading blocks that the backend is believed to hold.
    pub matched: u32,
    /// Part of `matched` that the engine loads from tiers below the GPU.
    pub loaded: LowerTierBlocks,
    /// Why the backend was chosen.
    pub reason: Reason,
    /// This request's trial of the backend's circuit; `None` unless the circuit is half-open.
    pub(crate) trial: Option<Arc<HalfOpenProbe>>,
}

/// Reason why no backend can take a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RoutingRejection {
    /// No registered backend serves the model: 404.
    UnknownModel,
    /// Backends serve the model, but the gateway offers the endpoint of none: 503.
    NoneOffered,
    /// All backends of the model are unhealthy or draining: 503.
    NoneHealthy,
    /// All usable backends were tried: 502 or 503, depending on the last attempt.
    AllTried,
    /// No healthy backend has the required labels: 503.
    NoneSelected,
    /// No healthy backend isolates this user's cached blocks: 503.
    NoneIsolating,
    /// The prompt is larger than the cache of every backend: 400.
    TooLarge,
    /// The backends separate prefill and decode, which this request does not support: 400.
    NotSeparable,
    /// The usable backends only decode, and no prefill backend is available: 503.
    NoPrefill,
    /// All usable backends have reached their limit of concurrent requests: wait, or 503.
    AtLimit,
}

impl RoutingRejection {
    /// Whether no engine of the model is up, so that a request may be held until one is.
    pub(crate) fn is_at_zero(self) -> bool {
        matches!(self, Self::UnknownModel | Self::NoneHealthy)
    }

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

/// Token counts of a request, as the engine reported or as estimated here if it did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct Usage {
    /// Number of prompt tokens.
    pub prompt_tokens: u64,
    /// Number of prompt tokens from the prefix cache; `None` if the engine did not report it.
    pub cached_tokens: Option<u64>,
    /// Number of output tokens.
    pub completion_tokens: u64,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum AttemptEnd {
    /// The engine completed the response.
    Finished,
    /// The engine failed after the first byte of its response.
    Broken,
    /// The client disconnected.
    ClientLeft,
    /// The request did not reach the engine, or the engine refused it before the response began.
    /// Another backend may be tried.
    NotRun,
    /// The engine accepted the request and failed before the first byte of its response.
    Failed,
    /// Another backend goes on with the response, because this one drains.
    Moved,
}

impl AttemptEnd {
    /// Returns the name used by metrics and the admin API.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Broken => "broken",
            Self::ClientLeft => "client-left",
            Self::NotRun => "not-run",
            Self::Failed => "failed",
            Self::Moved => "moved",
        }
    }
}

impl Router {
    /// Creates a router without requests in flight.
    #[must_use]
    pub fn new(
        RouterParts {
            view,
            backends,
            models,
            replica,
            session,
            outbox: settings,
            overrides,
            select,
            clock,
        }: RouterParts,
    ) -> Self {
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
        let shares = Arc::new(shares);
        let permits = Permits::new(replica, &view, &shares);
        let decider = Decider {
            view: Arc::clone(&view),
            backends: Arc::clone(&backends),
            load: LoadReader::of(&load),
            overlay: Arc::clone(&overlay),
            fleet: Arc::clone(&fleet),
            // Starting at the session id makes replicas start at different backends.
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
            known: KnownPrefixes::default(),
            session,
            last_attempt: AtomicU64::new(0),
            samples: ServiceSamples::default(),
            lengths: OutputLengths::default(),
            texts: TextSums::default(),
            priced: PricedTotal::default(),
            take_overs: Arc::new(Semaphore::new(dispatch::attempt::TAKE_OVERS_PENDING_MAX)),
        };
        Self {
            view,
            reader: Arc::new(reader),
            decider: Arc::new(decider),
            dispatcher: Arc::new(dispatcher),
            outbox,
            load,
            shares,
            permits: Arc::new(permits),
            metrics,
            replica,
            flush_interval: settings.flush_interval,
            clock,
        }
    }

    /// Makes every decision keep its inputs in a [`DecisionRecord`].
    ///
    /// # Panics
    /// Panics if the decider is already in use.
    #[must_use]
    pub fn recording(mut self) -> Self {
        let decider = Arc::get_mut(&mut self.decider);
        decider.expect("nobody decides yet").is_recording = true;
        self
    }

    /// Returns the reader that turns requests into blocks.
    #[must_use]
    pub fn reader(&self) -> &Arc<PromptReader> {
        &self.reader
    }

    /// Returns the decider that chooses backends.
    #[must_use]
    pub fn decider(&self) -> &Arc<Decider> {
        &self.decider
    }

    /// Returns the dispatcher, which dispatches requests and accounts for them.
    #[must_use]
    pub fn dispatcher(&self) -> &Arc<Dispatcher> {
        &self.dispatcher
    }

    /// Returns the outbox, which holds the updates that the log does not contain yet.
    #[must_use]
    pub fn outbox(&self) -> &Arc<SharedOutbox> {
        &self.outbox
    }

    /// Returns the table of each backend's load from this replica and its peers.
    #[must_use]
    pub fn load(&self) -> &Arc<LoadTable> {
        &self.load
    }

    /// Returns this replica's shares of the backends' limits.
    #[must_use]
    pub fn shares(&self) -> &Arc<Shares> {
        &self.shares
    }

    /// Returns the permits of users with a limit on concurrent requests.
    #[must_use]
    pub fn permits(&self) -> &Arc<Permits> {
        &self.permits
    }

    /// Returns the read side of the replicated state.
    #[must_use]
    pub fn view(&self) -> &Arc<StateView> {
        &self.view
    }

    /// Returns the id of this replica.
    #[must_use]
    pub fn replica(&self) -> ReplicaId {
        self.replica
    }

    /// Returns this replica's wall clock.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Whether the overlay is empty: all blocks that this replica routed are applied or dropped.
    #[must_use]
    pub fn is_overlay_empty(&self) -> bool {
        self.dispatcher.overlay.is_empty()
    }

    /// Returns the routing metrics. Register them once.
    #[must_use]
    pub fn metrics(&self) -> &RoutingMetrics {
        &self.metrics
    }

    /// Proposes the outbox to the log until `stop`, then until it is empty or `drain_max` has
    /// passed. Returns the final status of the outbox. Call this once per router.
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
