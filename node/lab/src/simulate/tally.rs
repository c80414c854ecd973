//! Measurements of a run: counts, times, and curves over time.

use super::events::Micros;
use super::plan::ServiceGoal;
use super::service::ServiceAccounts;

/// Number of points of every curve over time.
pub const POINTS: u64 = 120;
const COUNT: usize = POINTS as usize;

/// All measurements of a run.
#[derive(Debug, Clone, Default)]
pub struct SimTally {
    /// Time until which service and throughput count.
    pub horizon: Micros,
    /// Service accounts of the users.
    pub service: ServiceAccounts,
    /// Requests that arrived.
    pub arrived: u64,
    /// Requests served to the end.
    pub ended: u64,
    /// Requests rejected at their last try.
    pub refused: u64,
    /// Requests whose clients left at their last try.
    pub abandoned: u64,
    /// Rejections at any try.
    pub refusals: u64,
    /// Departures of clients at any try.
    pub departures: u64,
    /// Computed and output tokens for clients who had left.
    pub wasted_tokens: u64,
    /// Requests cut off by a restart and sent again.
    pub resent: u64,
    /// Times to first token, in the order of first tokens.
    pub ttft: Vec<Micros>,
    /// Times from arrival to end.
    pub latency: Vec<Micros>,
    /// Prompt tokens of requests that got a first token.
    pub prompt_tokens: u64,
    /// Those of them that were found in a cache.
    pub cached_tokens: u64,
    /// Those of them that were predicted to be cached.
    pub predicted_tokens: u64,
    /// Output tokens generated.
    pub output_tokens: u64,
    /// Tokens served before the horizon: computed prompt tokens and output tokens.
    pub tokens_in_time: u64,
    /// Requests that ended before the horizon.
    pub ended_in_time: u64,
    /// Requests that met the latency goals.
    pub good: u64,
    /// Mean time between tokens of each request with at least two.
    pub gaps: Vec<Micros>,
    /// Highest price of one request.
    pub largest_priced: u64,
    /// Largest service of a user that some replica did not know to be charged, in thousandths of a
    /// priced token at weight 1.
    pub uncharged_milli: u64,
    /// Largest outstanding output of a user's dispatched requests, in the same unit.
    pub promised_milli: u64,
    /// Requests per backend.
    pub by_backend: Vec<u64>,
    /// Priced outstanding output of dispatched requests, by user.
    promised: Vec<u64>,
    /// Curves over time.
    pub points: TimeSeries,
    /// Bytes of the log.
    pub log_bytes: u64,
    /// Entries of the log.
    pub log_entries: u64,
    /// Time at which the last request ended.
    pub last_end: Micros,
}

/// Figures at equal intervals of time.
#[derive(Debug, Clone, Default)]
pub struct TimeSeries {
    /// Prompt tokens and cached prompt tokens, by the time of the first token.
    pub hits: Vec<(u64, u64)>,
    /// Times to first token, by the time of the first token.
    pub ttft: Vec<Vec<Micros>>,
    /// Requests that ended.
    pub ended: Vec<u64>,
    /// Requests at each backend.
    pub load: Vec<Vec<u32>>,
    /// Service of each user so far.
    pub shares: Vec<Vec<f64>>,
    /// Total number of requests waiting for admission.
    pub waiting: Vec<u64>,
    /// Requests waiting for admission, by bin.
    pub bins: Vec<Vec<usize>>,
}

impl SimTally {
    /// Creates an empty tally.
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

    /// Returns the time between two points.
    #[must_use]
    pub fn step(&self) -> Micros {
        (self.horizon / POINTS).max(1)
    }

    /// Records a request's first token.
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

    /// Records the dispatch of a request that will generate `output` tokens.
    pub fn promised(&mut self, user: usize, output: u32) {
        self.promised[user] += self.service.price(0, output);
        let milli = self.service.weighed(user, self.promised[user]);
        self.promised_milli = self.promised_milli.max(milli);
    }

    /// Records that `output` of these tokens were generated, or never will be.
    pub fn kept(&mut self, user: usize, output: u32) {
        let price = self.service.price(0, output);
        self.promised[user] = self.promised[user].saturating_sub(price);
    }

    /// Records tokens that a user was served.
    pub fn served(&mut self, now: Micros, user: usize, uncached: u32, output: u32) {
        self.output_tokens += u64::from(output);
        if now <= self.horizon {
            self.tokens_in_time += u64::from(uncached) + u64::from(output);
        }
        self.service.served(user, uncached, output);
    }

    /// Checks a finished request whose first token came after `waited`, and `since` ago.
    pub fn judged(&mut self, goal: &ServiceGoal, waited: Micros, (since, tokens): (Micros, u32)) {
        let gaps = u64::from(tokens.saturating_sub(1));
        let gap = since.checked_div(gaps);
        self.gaps.extend(gap);
        let is_good = waited <= goal.ttft && gap.is_none_or(|gap| gap <= goal.gap);
        self.good += u64::from(is_good);
    }

    /// Records the end of a request.
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
