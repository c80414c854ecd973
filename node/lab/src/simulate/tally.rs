//! Measurements of a run: counts, times, and curves over time.

use super::events::Micros;
use super::plan::ServiceGoal;
use super::service::ServiceAccounts;
use crate::engine::offload::TierTokens;

/// Number of points of every curve over time.
pub const POINTS: u64 = 120;
const COUNT: usize = POINTS as usize;

/// Measurements of a run, collected while it is simulated.
#[derive(Debug, Clone, Default)]
pub struct SimTally {
    /// Time until which service and throughput count, in microseconds since the start.
    pub horizon: Micros,
    /// Service accounts of the users.
    pub service: ServiceAccounts,
    /// Number of requests that arrived.
    pub arrived: u64,
    /// Number of requests served to the end.
    pub ended: u64,
    /// Number of requests rejected at their last try.
    pub refused: u64,
    /// Number of requests whose clients left at their last try.
    pub abandoned: u64,
    /// Number of rejections at any try.
    pub refusals: u64,
    /// Number of departures of clients at any try.
    pub departures: u64,
    /// Number of uncached prompt tokens and output tokens served to clients who then left. A prompt
    /// counts from its first output token on.
    pub wasted_tokens: u64,
    /// Number of requests cut off by a restart and sent again.
    pub resent: u64,
    /// Number of requests that waited because there was no engine.
    pub held: u64,
    /// Engines that were started and stopped.
    pub fleet: FleetTally,
    /// Where turns of agents were sent.
    pub agents: AgentTally,
    /// Turns of the watched session.
    pub watched: WatchTally,
    /// Time to first token of each request, in the order of the first tokens.
    pub ttft: Vec<Micros>,
    /// Time from arrival to end of each completed request.
    pub latency: Vec<Micros>,
    /// Number of prompt tokens of requests that got a first token.
    pub prompt_tokens: u64,
    /// Number of `prompt_tokens` that were found in a cache.
    pub cached_tokens: u64,
    /// Numbers of `cached_tokens` that were on the GPU, loaded from CPU memory, and loaded from disk.
    /// With disaggregation, what prefill engines found does not count.
    pub found_tokens: [u64; 3],
    /// Numbers of `prompt_tokens` that were predicted to be on each of these tiers.
    pub expected_tokens: [u64; 3],
    /// Number of `expected_tokens` that were found on the tier where they were predicted.
    pub kept_tokens: u64,
    /// Number of `prompt_tokens` that were predicted to be cached.
    pub predicted_tokens: u64,
    /// Number of output tokens generated.
    pub output_tokens: u64,
    /// Number of computed prompt tokens and output tokens served before the horizon.
    pub tokens_in_time: u64,
    /// Number of requests that ended before the horizon.
    pub ended_in_time: u64,
    /// Number of requests that met the latency goals.
    pub good: u64,
    /// Mean time between tokens of each request with at least two output tokens.
    pub gaps: Vec<Micros>,
    /// Highest price of one request.
    pub largest_priced: u64,
    /// Largest service of a user that some replica did not know to be charged, in thousandths of a
    /// priced token at weight 1.
    pub uncharged_milli: u64,
    /// Largest outstanding output of a user's requests, in thousandths of a priced token at weight
    /// 1.
    pub promised_milli: u64,
    /// Number of ended requests per backend.
    pub by_backend: Vec<u64>,
    /// Price of the outstanding output of dispatched requests, by user.
    promised: Vec<u64>,
    /// Figures at equal intervals, for curves over time.
    pub points: TimeSeries,
    /// Number of bytes in the log.
    pub log_bytes: u64,
    /// Number of entries in the log.
    pub log_entries: u64,
    /// Time at which the last request ended.
    pub last_end: Micros,
}

/// Engines that were started and stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FleetTally {
    /// Total time of the engines from start to stop.
    pub ran: Micros,
    /// Number of starts.
    pub starts: u64,
    /// Highest number at the same time.
    pub most: usize,
}

/// Where turns of agents were sent, by what engines had cached at that moment. Turns that a restart
/// cut off count again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AgentTally {
    /// Number of turns.
    pub turns: u64,
    /// Number of turns of whose prompt some engine had at least one block.
    pub with_prefix: u64,
    /// Number of these that were sent to an engine with the longest prefix.
    pub at_longest: u64,
    /// Number of the others that were sent elsewhere although the replica knew of a longer prefix.
    pub moved: u64,
    /// Number of these that had fewer prompt tokens before their first output token where they were sent
    /// than at every engine with the longest prefix.
    pub moved_sooner: u64,
    /// Number of the others whose engine lacked what the replica expected there: it was not computed
    /// yet, or evicted.
    pub early: u64,
    /// Number of the others of whose longest prefix the replica did not know.
    pub unseen: u64,
    /// Number of tokens by which the longest prefix exceeded that at the chosen engine.
    pub missed_tokens: u64,
    /// Number of first turns of sub-agents.
    pub children: u64,
    /// Number of these that were sent to the engine of their parent's last turn, while it had all
    /// that their prompts share.
    pub at_parent: u64,
    /// Number of first turns of sub-agents for which the engine of their parent's last turn had room:
    /// it had all that their prompts share, and no request waited there.
    pub with_room: u64,
    /// Number of these that were sent there.
    pub at_parent_with_room: u64,
    /// Number of the others that were sent to an engine that had the same.
    pub at_copy_with_room: u64,
    /// Number of the others that had fewer prompt tokens before their first output token where they
    /// were sent: no request waited at the parent's engine, but it computed prompts.
    pub sooner_with_room: u64,
}

/// Turns of one session between the warm-up and the horizon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WatchTally {
    /// Number of turns.
    pub turns: u64,
    /// Time from their arrivals to their ends.
    pub took: Micros,
    /// Time from their arrivals to their dispatches.
    pub waited: Micros,
}

/// Figures at equal intervals of time, one entry per interval or point.
#[derive(Debug, Clone, Default)]
pub struct TimeSeries {
    /// Number of prompt tokens and of cached prompt tokens, by the time of the first token.
    pub hits: Vec<(u64, u64)>,
    /// Times to first token, grouped by the time of the first token.
    pub ttft: Vec<Vec<Micros>>,
    /// Number of requests that ended within each interval.
    pub ended: Vec<u64>,
    /// Number of requests at each backend, at each point.
    pub load: Vec<Vec<u32>>,
    /// Service of each user so far, at each point.
    pub shares: Vec<Vec<f64>>,
    /// Total number of requests waiting for admission, at each point.
    pub waiting: Vec<u64>,
    /// Number of requests waiting for admission in each bin, at each point.
    pub bins: Vec<Vec<usize>>,
}

impl SimTally {
    /// Creates an empty tally for `engines` engines.
    #[must_use]
    pub fn new(horizon: Micros, service: ServiceAccounts, engines: usize) -> Self {
        Self {
            horizon,
            promised: vec![0; service.users()],
            by_backend: vec![0; engines],
            points: TimeSeries {
                hits: vec![(0, 0); COUNT],
                ttft: vec![Vec::new(); COUNT],
                ended: vec![0; COUNT],
                ..TimeSeries::default()
            },
            service,
            ..Self::default()
        }
    }

    /// Returns the time between two points of a curve.
    #[must_use]
    pub fn step(&self) -> Micros {
        (self.horizon / POINTS).max(1)
    }

    /// Records a request's first token, `waited` after its arrival, and how many of its `prompt`
    /// tokens were cached.
    pub fn first_token(&mut self, now: Micros, waited: Micros, prompt: u32, cached: u32) {
        self.ttft.push(waited);
        self.prompt_tokens += u64::from(prompt);
        self.cached_tokens += u64::from(cached);
        // Times after the horizon are not on any curve.
        let point = usize::try_from(now / self.step()).unwrap_or(usize::MAX);
        if let Some((prompts, hits)) = self.points.hits.get_mut(point) {
            *prompts += u64::from(prompt);
            *hits += u64::from(cached);
            self.points.ttft[point].push(waited);
        }
    }

    /// Records where a prompt was found, and where the router had expected it.
    pub fn found(&mut self, found: TierTokens, expected: TierTokens) {
        let found = [found.gpu, found.cpu, found.disk];
        let expected = [expected.gpu, expected.cpu, expected.disk];
        for tier in 0..found.len() {
            self.found_tokens[tier] += u64::from(found[tier]);
            self.expected_tokens[tier] += u64::from(expected[tier]);
            self.kept_tokens += u64::from(found[tier].min(expected[tier]));
        }
    }

    /// Records the dispatch of a request of `user` that will generate `output` tokens.
    pub fn promised(&mut self, user: usize, output: u32) {
        self.promised[user] += self.service.price(0, output);
        let milli = self.service.weighed(user, self.promised[user]);
        self.promised_milli = self.promised_milli.max(milli);
    }

    /// Records that `output` of a user's outstanding tokens were generated, or never will be.
    pub fn kept(&mut self, user: usize, output: u32) {
        let price = self.service.price(0, output);
        self.promised[user] = self.promised[user].saturating_sub(price);
    }

    /// Records computed prompt tokens and output tokens that `user` was served.
    pub fn served(&mut self, now: Micros, user: usize, uncached: u32, output: u32) {
        self.output_tokens += u64::from(output);
        if now <= self.horizon {
            self.tokens_in_time += u64::from(uncached) + u64::from(output);
        }
        self.service.served(user, uncached, output);
    }

    /// Checks a request that finished at `now` against the latency goals. Its first token came
    /// after `waited`, and `since` passed between the first and the last of its `tokens` tokens.
    pub fn judged(
        &mut self,
        now: Micros,
        goal: &ServiceGoal,
        waited: Micros,
        (since, tokens): (Micros, u32),
    ) {
        let gaps = u64::from(tokens.saturating_sub(1));
        let gap = since.checked_div(gaps);
        self.gaps.extend(gap);
        let is_good = waited <= goal.ttft && gap.is_none_or(|gap| gap <= goal.gap);
        self.good += u64::from(is_good && now <= self.horizon);
    }

    /// Records that a request ended at `backend`, `took` after its arrival.
    pub fn ended(&mut self, now: Micros, took: Micros, backend: usize) {
        self.ended += 1;
        self.latency.push(took);
        self.by_backend[backend] += 1;
        self.last_end = now;
        let point = usize::try_from(now / self.step()).unwrap_or(usize::MAX);
        if let Some(ended) = self.points.ended.get_mut(point) {
            *ended += 1;
        }
        if now <= self.horizon {
            self.ended_in_time += 1;
        }
    }
}
