//! The simulated cluster: one event after the other until every request has ended.
//!
//! Everything that happens is an `SimEvent` with a time; handling one plans others. Nothing else
//! passes between replicas, log and engines, so that the order of events is all there is to a run.

mod cells;
mod clients;
mod gossip;
mod restart;
mod serve;

use std::sync::Arc;

use state::RouterState;
use state::admission::{Backlog, Concurrency, Pricing};
use state::command::{BackendRole, BackendSpec, Command, Envelope, UserSpec};
use state::ids::{LogIndex, Ticket, UserKey};
use state::policy::RoutingSettings;
use state::prefix::user_key;

use self::cells::FirstHop;
use super::clock::SimClock;
use super::engine::{ProbedFigures, SimEngine};
use super::events::{EventQueue, Micros};
use super::plan::{EngineModel, SimPlan};
use super::replica::{self, InFlight, SimReplica, SimSender, setup, state_of};
use super::service::ServiceAccounts;
use super::sim_queue::SimQueue;
use super::tally::SimTally;
use super::workload::{HASH_SEED, MODEL, SimPrompt, SimWorkload};
use crate::rng::Rng;

/// Part of the horizon after which shares of those who always wait are compared: one in so many.
const WARM_UP: Micros = 10;

/// Something that happens.
#[derive(Debug)]
enum SimEvent {
    /// The next request with a time of its own arrives.
    Arrive,
    /// A client has waited for its answer as long as it does, in this try.
    Leave { request: usize, tries: u32 },
    /// A client tries again.
    Again(usize),
    /// A user with a backlog may send another.
    Return(usize),
    /// An engine's step is over.
    Step(usize),
    /// A replica may cut a batch.
    Flush(usize),
    /// An entry of the log reaches a replica.
    Apply {
        replica: usize,
        epoch: u32,
        index: LogIndex,
        envelope: Arc<Envelope>,
    },
    /// A replica may tell its load.
    Report(usize),
    /// A peer's load reaches a replica.
    Heard {
        replica: usize,
        from: usize,
        /// `None`: as told before.
        report: Option<Arc<[u8]>>,
        backlog: Option<Backlog>,
    },
    /// A replica may find that somebody can go.
    Wake(usize),
    /// The blocks of a request's prompt, in this try, have come over.
    Fetched { request: usize, tries: u32 },
    /// Replicas read the engines' figures.
    Probe,
    /// The curves get a point.
    Sample,
    /// Shares of who always waits count from here on.
    Watch,
    /// What counts for fairness is over.
    Close,
    /// Replicas crash and start again.
    Restart,
    /// Cells tell the first hop what they have under way.
    Tell,
    /// Cells charge users for what they were served elsewhere.
    Share,
}

/// A request, from its arrival to its end.
struct RequestState {
    user: usize,
    prompt: Arc<SimPrompt>,
    output_tokens: u32,
    arrived: Micros,
    /// The cell that the first hop chose.
    cell: usize,
    replica: usize,
    /// Output tokens as predicted when it came.
    predicted_output: u32,
    stage: RequestStage,
    has_first_token: bool,
    /// When its first token came.
    first_token: Micros,
    /// The replica that it comes to; `None`: its user's, or any.
    pinned: Option<u8>,
    /// Times it was sent.
    tries: u32,
    /// While it waits.
    ticket: Ticket,
    /// Prompt tokens that were computed for it in this try.
    computed: u32,
    /// Output tokens that its user was served: a request that is sent again is served again.
    served_output: u32,
}

enum RequestStage {
    Waiting,
    Running(Box<InFlight>),
    Ended,
}

/// A replica with what the simulation keeps beside it.
struct ReplicaPlace {
    replica: SimReplica,
    lobby: SimQueue,
    session: u64,
    is_flush_planned: bool,
    last_flush: Micros,
    next_report: Micros,
    next_wake: Micros,
    /// What peers were told last.
    last_backlog: Option<Backlog>,
    /// Upper ends of the bins that requests were last spread over.
    bin_edges: Vec<u32>,
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
            lobby: SimQueue::new(plan, run.pricing, lag),
            session,
            is_flush_planned: false,
            last_flush: 0,
            next_report: Micros::MAX,
            next_wake: Micros::MAX,
            last_backlog: None,
            bin_edges: Vec::new(),
        }
    }
}

/// The end of a run.
pub struct SimOutcome {
    /// What was measured.
    pub tally: SimTally,
    /// Events handled.
    pub events: u64,
    /// Requests that engines preempted.
    pub preemptions: u64,
    /// Most that a user had used and not been charged in some replica's eyes, with the most that
    /// its dispatched requests had yet to make; priced tokens at weight 1.
    pub uncharged: u64,
    /// The gate's highest slack, in the same unit.
    pub slack: u64,
    /// Upper ends of the bins at the end, but the last.
    pub bin_edges: Vec<u32>,
    /// The requests in the order they arrived: for the ideal.
    pub asked: Vec<(Arc<SimPrompt>, u32)>,
    /// Priced tokens that the first replica's state has charged.
    pub charged: u64,
    /// The state's digest, of the first replica.
    pub digest: u128,
    /// Faults of the books: empty in a correct run.
    pub faults: Vec<String>,
}

/// The cluster and its time.
pub struct SimWorld<'a> {
    plan: &'a SimPlan,
    workload: &'a SimWorkload,
    keys: Vec<UserKey>,
    senders: Vec<SimSender>,
    now: Micros,
    events: EventQueue<SimEvent>,
    engines: Vec<SimEngine>,
    probed: Vec<ProbedFigures>,
    places: Vec<ReplicaPlace>,
    hop: FirstHop,
    requests: Vec<RequestState>,
    /// Of [`SimWorkload::arrivals`], the next.
    next_arrival: usize,
    /// Requests each user has under way or waiting; for those with a backlog.
    open_by_user: Vec<u32>,
    open: u64,
    rngs: Vec<Rng>,
    spread: Rng,
    /// Draws how long clients wait.
    moods: Rng,
    /// The entries a log begins with.
    setup: Vec<Envelope>,
    /// Next index, of the one log or of each replica's own.
    next_index: Vec<u64>,
    /// How often each replica's log was lost.
    epochs: Vec<u32>,
    run: replica::RunSettings,
    tally: SimTally,
}

impl<'a> SimWorld<'a> {
    /// A cluster at its beginning.
    #[must_use]
    pub fn new(plan: &'a SimPlan, workload: &'a SimWorkload) -> Self {
        let setup = setup(commands(plan, workload));
        let run = replica::RunSettings {
            clock: SimClock::new(),
            flush: plan.flush,
            pricing: Pricing {
                prices: plan.prices,
                charge: plan.admission.charge,
            },
            as_written: plan.as_written,
            pairs: plan.apart.pairs,
            block_tokens: plan.block_tokens,
        };
        let place = |id| ReplicaPlace::new(id, 1, state_of(&setup), plan, &run);
        let weights = workload.users.iter().map(|user| user.weight_milli);
        let service = ServiceAccounts::new(plan.prices, weights);
        let cells = plan.cells.count;
        assert!(cells == 1 || plan.restart.is_none(), "cells do not restart");
        let places = (0..cells).flat_map(|_| 1..=plan.replicas).map(place);
        let places: Vec<ReplicaPlace> = places.collect();
        let engines = plan.engines() as usize;
        let names = || workload.users.iter().map(|user| user.name.as_str());
        let sender = |(number, name): (usize, &str)| SimSender::new(name, number);
        Self {
            keys: names().map(|name| user_key(HASH_SEED, name)).collect(),
            senders: names().enumerate().map(sender).collect(),
            now: 0,
            events: EventQueue::default(),
            engines: (0..engines).map(|_| SimEngine::new(&plan.engine)).collect(),
            probed: vec![ProbedFigures::default(); engines],
            hop: FirstHop::new(&plan.cells, workload.users.len()),
            requests: Vec::new(),
            next_arrival: 0,
            open_by_user: vec![0; workload.users.len()],
            open: 0,
            rngs: (0..workload.users.len() as u64)
                .map(|user| Rng::new(plan.seed, 100 + user))
                .collect(),
            spread: Rng::new(plan.seed, 2),
            moods: Rng::new(plan.seed, 3),
            next_index: vec![setup.len() as u64 + 1; places.len()],
            setup,
            epochs: vec![0; places.len()],
            places,
            run,
            tally: SimTally::new(plan.horizon, service, engines),
            plan,
            workload,
        }
    }

    /// Runs to the end; `progress` hears of the simulated time, now and then.
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
        if let Some(restart) = self.plan.restart {
            self.events.plan(restart.at, SimEvent::Restart);
        }
        self.begin_cells();
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
            SimEvent::Tell => self.tell(),
            SimEvent::Share => {
                if let Some(every) = self.plan.cells.charges_every {
                    self.share_charges(every);
                }
            }
        }
    }

    /// Whether requests are under way or to come: what repeats itself goes on while it is.
    fn is_going_on(&self) -> bool {
        self.open > 0
            || self.next_arrival < self.workload.arrivals.len()
            || (self.now < self.plan.horizon && self.workload.is_backlogged())
    }

    fn probe(&mut self) {
        self.probed = self.engines.iter().map(SimEngine::figures).collect();
        let adapts = self.plan.admission.concurrency == Concurrency::Adaptive;
        let learns = adapts || self.plan.learn;
        let wants_outputs = self.plan.admission.wants_outputs();
        for place in 0..self.places.len() {
            let replica = &self.places[place].replica;
            replica.probed(|slot| self.probed[self.engine_at(place, slot.0.into())]);
            if learns {
                replica.tell_samples(self.now);
            }
            replica.tell_lengths();
            if learns || wants_outputs {
                self.changed(place);
            }
        }
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
        let waiting = self.places.iter().map(|place| place.lobby.len() as u64);
        points.waiting.push(waiting.sum());
        let mut bins = vec![0; usize::from(self.plan.admission.bins)];
        for place in &self.places {
            for (sum, waiting) in bins.iter_mut().zip(place.lobby.by_bin()) {
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
        let slack = self.places.iter().map(|it| it.lobby.slack_most()).max();
        SimOutcome {
            uncharged: (self.tally.uncharged_milli + self.tally.promised_milli) / 1000,
            slack: slack.unwrap_or_default(),
            bin_edges: self.places[0].replica.bin_edges(),
            preemptions: figures.map(|figures| figures.preemptions).sum(),
            charged: self.charged(),
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

    /// Of the first replica in the cell of `place`.
    fn first_digest(&self, place: usize) -> u128 {
        let first = self.places_around(place).start;
        self.places[first].replica.state.digest()
    }

    fn charged(&self) -> u64 {
        let prices = self.plan.prices;
        let cells = 0..usize::from(self.plan.cells.count);
        let users = cells.flat_map(|cell| (0..self.keys.len()).map(move |user| (cell, user)));
        let priced = users.map(|(cell, user)| {
            let [input, output] = self.own_charges(cell, user);
            input * u64::from(prices.input_price) + output * u64::from(prices.output_price)
        });
        priced.sum()
    }

    /// What must hold when all is over, and does not.
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
        for (number, place) in self.places.iter().enumerate() {
            let ReplicaPlace { replica, lobby, .. } = place;
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
            if !lobby.is_empty() {
                faults.push(format!("replica {id}: requests wait"));
            }
            let leases = replica.state.open_leases();
            if leases > 0 {
                faults.push(format!("replica {id}: {leases} leases are open"));
            }
            let is_shared = self.plan.ownership_lag.is_some();
            if is_shared && replica.state.digest() != self.first_digest(number) {
                faults.push(format!("replica {id}: state differs from the first one's"));
            }
        }
        faults
    }
}

/// What a cluster is told before the first request.
fn commands(plan: &SimPlan, workload: &SimWorkload) -> Vec<Command> {
    let mut commands = vec![
        Command::InitCluster {
            hash_seed: HASH_SEED,
            policy: plan.policy.clone(),
            fairness: plan.prices,
        },
        Command::PutRouting(RoutingSettings {
            learn: plan.learn,
            ..RoutingSettings::default()
        }),
        Command::PutAdmission(plan.admission.clone()),
    ];
    let capacity_blocks = match plan.engine {
        // One block is vLLM's null block.
        EngineModel::Continuous(shape) => Some(shape.num_gpu_blocks - 1),
        EngineModel::Static(_) => None,
    };
    let backends = (0..plan.backends).map(|number| {
        Command::PutBackend(BackendSpec {
            id: format!("engine-{number:03}"),
            url: format!("http://127.0.0.1:{}", 10_000 + number),
            models: vec![MODEL.to_owned()],
            labels: Default::default(),
            capacity_blocks,
            kv_events: None,
            kv_replay: None,
            role: match plan.apart.prefill {
                0 => BackendRole::Both,
                prefill if number < prefill => BackendRole::Prefill,
                _ => BackendRole::Decode,
            },
        })
    });
    commands.extend(backends);
    let weighted = workload.users.iter().filter(|it| it.weight_milli != 1000);
    commands.extend(weighted.map(|user| {
        Command::PutUser(UserSpec {
            name: user.name.clone(),
            weight_milli: user.weight_milli,
        })
    }));
    commands
}
