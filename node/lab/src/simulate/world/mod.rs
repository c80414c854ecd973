//! The simulated cluster: processes events until every request has ended.
//!
//! Everything that happens is a `SimEvent` with a time. Handling an event plans others. Replicas,
//! log and engines interact only through events, so their order determines the run.

mod all_knowing;
mod clients;
mod exact;
mod gossip;
mod restart;
mod scaling;
mod serve;
mod turns;
mod warm;

use std::sync::Arc;

use api::admission::DemandSchedule;
use state::RouterState;
use state::admission::{Backlog, Concurrency, Pricing};
use state::command::{BackendRole, BackendSpec, Command, Envelope, Founding, UserSettings};
use state::ids::{LogIndex, Slot, Ticket, UserKey};
use state::kv_events::KvMode;
use state::policy::{Prices, RoutingSettings};
use state::prefix::user_key;

use super::clock::SimClock;
use super::engine::{ProbedFigures, SimEngine};
use super::events::{EventQueue, Micros};
use super::plan::{EngineModel, SimPlan};
use super::replica::{self, InFlight, SimReplica, SimSender, setup, state_of};
use super::service::ServiceAccounts;
use super::sim_queue::SimQueue;
use super::tally::SimTally;
use super::workload::{HASH_SEED, MODEL, SimPrompt, SimWorkload};
use crate::engine::offload::TierTokens;
use crate::rng::Rng;
use exact::SimEventReader;
use scaling::SimFleet;
use turns::TurnProgress;

/// Divisor of the horizon that yields the warm-up time before services are compared.
const WARM_UP: Micros = 10;

/// An event of the simulation, which happens at its planned time.
#[derive(Debug)]
enum SimEvent {
    /// The next request of [`SimWorkload::arrivals`] arrives.
    Arrive,
    /// The turn with this index in [`SimWorkload::turns`] is sent.
    Turn(usize),
    /// A client's patience ends. Applies only while the request is in the try `tries`.
    Leave { request: usize, tries: u32 },
    /// A client sends a request again.
    Again(usize),
    /// A user with a backlog may send another request.
    Return(usize),
    /// The current step of an engine ends.
    Step(usize),
    /// A replica may cut a batch from its outbox.
    Flush(usize),
    /// An entry of the log arrives at a replica.
    Apply {
        replica: usize,
        epoch: u32,
        index: LogIndex,
        envelope: Arc<Envelope>,
    },
    /// A replica may report its load.
    Report(usize),
    /// A peer's load report arrives at a replica.
    Heard {
        replica: usize,
        from: usize,
        /// Load report; `None` if it is unchanged.
        report: Option<Arc<[u8]>>,
        backlog: Option<Backlog>,
    },
    /// A replica checks whether it can admit a waiting request.
    Wake(usize),
    /// The transfer of a prompt's blocks ends. Applies only during the try `tries`.
    Fetched { request: usize, tries: u32 },
    /// All replicas probe the engines.
    Probe,
    /// The curves over time get a point.
    Sample,
    /// The watch on users who always have requests waiting begins.
    Watch,
    /// The measured period for fairness ends.
    Close,
    /// Replicas crash and restart, as planned.
    Restart,
    /// The autoscaler looks, as it does at intervals.
    Poll,
    /// Engines are started or stopped, as wanted or planned.
    Scale,
    /// An engine has started, by its number.
    Up(u64),
}

/// State of a request, from arrival to end.
struct RequestState {
    user: usize,
    /// Index of the request's sender.
    sender: usize,
    /// Index of the request in [`SimWorkload::turns`], if it is one of them.
    turn: Option<usize>,
    prompt: Arc<SimPrompt>,
    output_tokens: u32,
    arrived: Micros,
    /// Time of the dispatch, for turns of agents.
    sent: Micros,
    replica: usize,
    /// Number of output tokens, as predicted at arrival.
    predicted_output: u32,
    stage: RequestStage,
    has_first_token: bool,
    /// Time of the first token.
    first_token: Micros,
    /// Replica that the workload names for the request; `None` for that of its user, or any.
    pinned: Option<u8>,
    /// Number of tries that have begun.
    tries: u32,
    /// Ticket in the queue while the request waits.
    ticket: Ticket,
    /// Number of prompt tokens that were computed for the first token; 0 before it.
    computed: u32,
    /// Number of prompt tokens that the router expected to be cached at the last dispatch, by tier.
    expected: TierTokens,
    /// Number of output tokens that the client has received. A retry starts from 0; a resend after
    /// a restart does not.
    served_output: u32,
}

enum RequestStage {
    Waiting,
    Running(Box<InFlight>),
    Ended,
}

/// A replica with its queue and the simulation's data about it.
struct ReplicaPlace {
    replica: SimReplica,
    queue: SimQueue,
    session: u64,
    is_flush_planned: bool,
    last_flush: Micros,
    next_report: Micros,
    next_wake: Micros,
    /// Backlog that the replica last reported to peers; `None` if nothing waited.
    last_backlog: Option<Backlog>,
    /// Schedule of reports of demand to the log.
    demand: DemandSchedule,
    /// Number of requests sent to engines since the last of these reports.
    started: u32,
}

impl ReplicaPlace {
    fn new(
        id: u8,
        session: u64,
        state: RouterState,
        plan: &SimPlan,
        run: &replica::RunSettings,
    ) -> Self {
        let lags = [plan.ownership_lag, plan.load_lag];
        let lag = lags.into_iter().flatten().max().unwrap_or_default();
        Self {
            replica: SimReplica::new(id, session, state, run),
            queue: SimQueue::new(plan, run.pricing, lag),
            session,
            is_flush_planned: false,
            last_flush: 0,
            next_report: Micros::MAX,
            next_wake: Micros::MAX,
            last_backlog: None,
            demand: DemandSchedule::default(),
            started: 0,
        }
    }
}

/// Outcome of a run, from which its results are computed.
pub struct SimOutcome {
    /// Measurements of the run.
    pub tally: SimTally,
    /// Number of handled events.
    pub events: u64,
    /// Number of preemptions in engines.
    pub preemptions: u64,
    /// Largest service of a user that some replica did not know to be charged, plus the largest
    /// outstanding output of a user's dispatched requests, in priced tokens at weight 1.
    pub uncharged: u64,
    /// Highest slack of the gate, in priced tokens at weight 1.
    pub slack: u64,
    /// Final upper bounds of all output-length bins but the last.
    pub bin_edges: Vec<u32>,
    /// Prompt and number of output tokens of each request in order of arrival, for ideal bounds.
    pub asked: Vec<(Arc<SimPrompt>, u32)>,
    /// Number of priced tokens that the replicas' state has charged by the end.
    pub charged: u64,
    /// Prices that each engine's measurements have taught the first replica; none without learning.
    pub learnt: Vec<Option<Prices>>,
    /// Digest of the first replica's state at the end.
    pub digest: u128,
    /// Descriptions of inconsistencies; empty in a correct run.
    pub faults: Vec<String>,
}

/// The simulated cluster with its engines and clients, and the simulated time.
pub struct SimWorld<'a> {
    plan: &'a SimPlan,
    workload: &'a SimWorkload,
    keys: Vec<UserKey>,
    /// Senders: first the users, then the sessions of agents.
    senders: Vec<SimSender>,
    turns: TurnProgress,
    now: Micros,
    events: EventQueue<SimEvent>,
    engines: Vec<SimEngine>,
    /// Readers of the engines' KV events; none if replicas do not follow them.
    readers: Vec<SimEventReader>,
    probed: Vec<ProbedFigures>,
    places: Vec<ReplicaPlace>,
    requests: Vec<RequestState>,
    /// Index of the next request in [`SimWorkload::arrivals`].
    next_arrival: usize,
    /// Number of open requests of each user with a backlog.
    open_by_user: Vec<u32>,
    open: u64,
    rngs: Vec<Rng>,
    spread: Rng,
    /// Generator of the clients' patience and pauses.
    patience_rng: Rng,
    /// Entries with which every log starts.
    setup: Vec<Envelope>,
    /// Next log index by place. Replicas that share a log use the entry of the first place.
    next_index: Vec<u64>,
    /// Number of times each replica's log was lost.
    epochs: Vec<u32>,
    run: replica::RunSettings,
    fleet: SimFleet,
    tally: SimTally,
}

impl<'a> SimWorld<'a> {
    /// Creates a cluster at the start of a run.
    ///
    /// # Panics
    /// If the plan has a restart and more than one cell.
    #[must_use]
    pub fn new(plan: &'a SimPlan, workload: &'a SimWorkload) -> Self {
        let engines = (0..plan.backends).map(|_| SimEngine::new(&plan.engine, &plan.offload));
        let mut engines: Vec<SimEngine> = engines.collect();
        warm::fill(&mut engines, &workload.warm);
        let mut setup = setup(commands(plan, workload));
        let mut readers = Vec::new();
        match plan.is_exact {
            true => (readers, setup) = exact::begin(&mut engines, setup),
            false => setup.extend(warm::entries(&setup, &workload.warm)),
        }
        let run = replica::RunSettings {
            clock: SimClock::new(),
            flush: plan.flush,
            pricing: Pricing {
                prices: plan.prices,
                charge: plan.admission.charge,
            },
            reference_policy: plan.reference_policy,
            pairs: plan.disaggregation.pairs,
            block_tokens: plan.block_tokens,
            is_exact: plan.is_exact,
        };
        let place = |id| ReplicaPlace::new(id, 1, state_of(&setup), plan, &run);
        let weights = workload.users.iter().map(|user| user.weight_milli);
        let service = ServiceAccounts::new(plan.prices, weights);
        let places: Vec<ReplicaPlace> = (1..=plan.replicas).map(place).collect();
        let names = || workload.users.iter().map(|user| user.name.as_str());
        Self {
            keys: names().map(|name| user_key(HASH_SEED, name)).collect(),
            senders: turns::senders(workload),
            turns: TurnProgress::new(workload),
            now: 0,
            events: EventQueue::default(),
            probed: vec![ProbedFigures::default(); engines.len()],
            engines,
            readers,
            requests: Vec::new(),
            next_arrival: 0,
            open_by_user: vec![0; workload.users.len()],
            open: 0,
            rngs: (0..workload.users.len() as u64)
                .map(|user| Rng::new(plan.seed, 100 + user))
                .collect(),
            spread: Rng::new(plan.seed, 2),
            patience_rng: Rng::new(plan.seed, 3),
            next_index: vec![setup.len() as u64 + 1; places.len()],
            fleet: SimFleet::new(setup.len() as u64),
            setup,
            epochs: vec![0; places.len()],
            places,
            run,
            tally: SimTally::new(plan.horizon, service, usize::from(plan.backends)),
            plan,
            workload,
        }
    }

    /// Runs the simulation to its end. Passes the simulated time to `progress` at intervals and
    /// at the end.
    #[must_use]
    pub fn run(mut self, mut progress: impl FnMut(Micros)) -> SimOutcome {
        self.begin();
        let mut handled = 0_u64;
        while let Some((at, event)) = self.events.take_next() {
            assert!(at >= self.now, "event at {at} after {}", self.now);
            self.now = at;
            self.handle(event);
            handled += 1;
            if handled.is_multiple_of(16_384) {
                progress(self.now);
            }
        }
        progress(self.now);
        self.finish(handled)
    }

    fn begin(&mut self) {
        if !self.workload.arrivals.is_empty() {
            self.events
                .plan(self.workload.arrivals[0].at, SimEvent::Arrive);
        }
        for (user, spec) in self.workload.users.iter().enumerate() {
            if spec.backlog > 0 {
                self.events.plan(0, SimEvent::Return(user));
                if let Some((_, until)) = spec.off {
                    self.events.plan(until, SimEvent::Return(user));
                }
            }
        }
        self.begin_turns();
        self.begin_scaling();
        if let Some(restart) = self.plan.restart {
            self.events.plan(restart.at, SimEvent::Restart);
        }
        self.events.plan(self.plan.probe, SimEvent::Probe);
        self.events.plan(self.tally.step(), SimEvent::Sample);
        let horizon = self.plan.horizon;
        self.events.plan(horizon / WARM_UP, SimEvent::Watch);
        self.events.plan(horizon, SimEvent::Close);
    }

    fn handle(&mut self, event: SimEvent) {
        match event {
            SimEvent::Arrive => self.arrive_next(),
            SimEvent::Return(user) => self.come_back(user),
            SimEvent::Turn(turn) => self.send_turn(turn),
            SimEvent::Leave { request, tries } => self.leave(request, tries),
            SimEvent::Again(request) => self.try_again(request),
            SimEvent::Step(engine) => self.step_over(engine),
            SimEvent::Flush(place) => self.flush(place),
            SimEvent::Apply {
                replica,
                epoch,
                index,
                envelope,
            } => self.apply(replica, epoch, index, &envelope),
            SimEvent::Report(place) => self.report(place),
            SimEvent::Heard {
                replica,
                from,
                report,
                backlog,
            } => self.heard(replica, from, report.as_deref(), backlog),
            SimEvent::Wake(place) => self.wake(place),
            SimEvent::Fetched { request, tries } => self.fetched(request, tries),
            SimEvent::Probe => self.probe(),
            SimEvent::Sample => self.sample(),
            SimEvent::Watch => self.tally.service.watch(),
            SimEvent::Close => self.tally.service.close(),
            SimEvent::Restart => self.restart(),
            SimEvent::Poll => self.poll(),
            SimEvent::Scale => self.scale(),
            SimEvent::Up(number) => self.up(number),
        }
    }

    /// Returns whether requests are open or still to come. Periodic events repeat while this is so.
    fn is_going_on(&self) -> bool {
        self.open > 0
            || self.next_arrival < self.workload.arrivals.len()
            || self.turns.is_going_on()
            || (self.now < self.plan.horizon && self.workload.is_backlogged())
            || self.is_winding_down()
    }

    fn probe(&mut self) {
        self.probed = self.engines.iter().map(SimEngine::figures).collect();
        let adapts = self.plan.admission.concurrency == Concurrency::Adaptive;
        let learns = adapts || self.plan.learn;
        let wants_outputs = self.plan.admission.wants_outputs();
        for place in 0..self.places.len() {
            let replica = &self.places[place].replica;
            replica.probed(|slot| self.probed[usize::from(slot.0)]);
            if learns {
                replica.queue_samples(self.now);
            }
            replica.queue_output_lengths();
            if learns || wants_outputs {
                self.changed(place);
            }
            self.report_demand(place, true);
        }
        self.remove_drained();
        if self.is_going_on() {
            self.events
                .plan(self.now + self.plan.probe, SimEvent::Probe);
        }
    }

    fn sample(&mut self) {
        if self.now > self.plan.horizon {
            return;
        }
        let load = |engine: &SimEngine| {
            let figures = engine.figures();
            figures.running + figures.waiting
        };
        let points = &mut self.tally.points;
        points.load.push(self.engines.iter().map(load).collect());
        points.shares.push(self.tally.service.shares());
        let waiting = self.places.iter().map(|place| place.queue.len() as u64);
        points.waiting.push(waiting.sum());
        let mut bins = vec![0; usize::from(self.plan.admission.bins)];
        for place in &self.places {
            for (sum, waiting) in bins.iter_mut().zip(place.queue.by_bin()) {
                *sum += waiting;
            }
        }
        points.bins.push(bins);
        self.events
            .plan(self.now + self.tally.step(), SimEvent::Sample);
    }

    fn finish(self, events: u64) -> SimOutcome {
        let faults = self.faults();
        let figures = self.engines.iter().map(SimEngine::figures);
        let slack = self.places.iter().map(|it| it.queue.slack_most()).max();
        SimOutcome {
            uncharged: (self.tally.uncharged_milli + self.tally.promised_milli) / 1000,
            slack: slack.unwrap_or_default(),
            bin_edges: self.places[0].replica.bin_edges(),
            preemptions: figures.map(|figures| figures.preemptions).sum::<u64>()
                + self.fleet.preemptions,
            charged: self.charged(),
            learnt: self.learnt(),
            digest: self.places[0].replica.state.digest(),
            asked: self
                .requests
                .into_iter()
                .map(|request| (request.prompt, request.output_tokens))
                .collect(),
            tally: self.tally,
            events,
            faults,
        }
    }

    fn learnt(&self) -> Vec<Option<Prices>> {
        let service = self.places[0].replica.state.view().service();
        let learnt = |slot| service.get(Slot(slot))?.learnt?.trusted();
        (0..self.plan.backends)
            .filter(|_| self.plan.learn)
            .map(learnt)
            .collect()
    }

    /// Returns the priced tokens that the first replica's state has charged, over all users.
    fn charged(&self) -> u64 {
        let prices = self.plan.prices;
        let state = &self.places[0].replica.state;
        let users = self.keys.iter().filter_map(|key| state.user(*key));
        let priced = users.map(|user| {
            let input = user.total.input_uncached * u64::from(prices.input_price);
            input + user.total.output * u64::from(prices.output_price)
        });
        priced.sum()
    }

    /// Returns descriptions of the invariants that do not hold at the end.
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let tally = &self.tally;
        if tally.arrived != tally.ended + tally.refused + tally.abandoned {
            faults.push(format!(
                "{} requests arrived, {} ended, {} were refused, {} abandoned",
                tally.arrived, tally.ended, tally.refused, tally.abandoned
            ));
        }
        if !self.engines.iter().all(SimEngine::is_idle) {
            faults.push("an engine has work left".to_owned());
        }
        if !self.fleet.is_empty() {
            faults.push("an engine was not stopped".to_owned());
        }
        for (number, place) in self.places.iter().enumerate() {
            let ReplicaPlace { replica, queue, .. } = place;
            let id = number + 1;
            if let Err(broken) = replica.state.check() {
                faults.push(format!("replica {id}: {broken}"));
            }
            if !replica.outbox().is_empty() || replica.outbox().is_outstanding() {
                faults.push(format!("replica {id}: outbox is not empty"));
            }
            if !replica.is_overlay_empty() {
                faults.push(format!("replica {id}: overlay is not empty"));
            }
            if !queue.is_empty() {
                faults.push(format!("replica {id}: requests wait"));
            }
            let view = replica.state.view();
            let is_exact =
                |slot| view.registry().kv(Slot(slot)).map(|it| it.mode) == Some(KvMode::Exact);
            if self.plan.is_exact && !(0..self.plan.backends).all(is_exact) {
                faults.push(format!("replica {id}: an engine is not followed exactly"));
            }
            let leases = replica.state.open_leases();
            if leases > 0 {
                faults.push(format!("replica {id}: {leases} leases are open"));
            }
            let is_shared = self.plan.ownership_lag.is_some();
            if is_shared && replica.state.digest() != self.places[0].replica.state.digest() {
                faults.push(format!("replica {id}: state differs from the first one's"));
            }
        }
        faults
    }
}

/// Returns the first commands of a cluster, which write the plan's settings, backends and weights.
fn commands(plan: &SimPlan, workload: &SimWorkload) -> Vec<Command> {
    let mut commands = vec![Command::from(Founding {
        fairness: plan.prices,
        routing: RoutingSettings {
            learn: plan.learn,
            tiers: plan.visible_tiers,
            ..RoutingSettings::default()
        },
        admission: plan.admission.clone(),
        ..Founding::of_seed(HASH_SEED, plan.policy.clone())
    })];
    let begin_with = match plan.scaling {
        Some(_) => 0,
        None => plan.backends,
    };
    let backends = (0..begin_with).map(|number| {
        let name = format!("engine-{number:03}");
        Command::PutBackend(backend_spec(plan, name, number.into()))
    });
    commands.extend(backends);
    let weighted = workload.users.iter().filter(|it| it.weight_milli != 1000);
    commands.extend(weighted.map(|user| {
        Command::configure_user(&user.name, UserSettings::of_weight(user.weight_milli))
    }));
    commands
}

/// Returns how the engine with this name and number is registered.
fn backend_spec(plan: &SimPlan, name: String, number: u64) -> BackendSpec {
    BackendSpec {
        id: name,
        url: format!("http://127.0.0.1:{}", 10_000 + number),
        models: vec![MODEL.to_owned()],
        labels: Default::default(),
        capacity_blocks: match plan.engine {
            // One block is vLLM's null block.
            EngineModel::Continuous(shape) => Some(shape.num_gpu_blocks - 1),
            EngineModel::Static(_) => None,
        },
        kv_events: plan.is_exact.then(|| "tcp://127.0.0.1:5557".to_owned()),
        kv_replay: None,
        role: match u64::from(plan.disaggregation.prefill) {
            0 => BackendRole::Both,
            prefill if number < prefill => BackendRole::Prefill,
            _ => BackendRole::Decode,
        },
    }
}
