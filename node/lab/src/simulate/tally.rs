//! What a run is measured by: counts, times, and how they went over time.

use super::events::Micros;
use super::plan::ServiceGoal;
use super::service::ServiceAccounts;

/// Points of every curve over time.
pub const POINTS: u64 = 120;
const COUNT: usize = POINTS as usize;

/// Everything observed.
#[derive(Debug, Clone, Default)]
pub struct SimTally {
    /// Until when service and throughput count.
    pub horizon: Micros,
    /// The users' books.
    pub service: ServiceAccounts,
    /// Requests that arrived.
    pub arrived: u64,
    /// Requests served to their end.
    pub ended: u64,
    /// Requests refused, at their last try.
    pub refused: u64,
    /// Requests whose clients left, at their last try.
    pub abandoned: u64,
    /// Refusals, of all tries.
    pub refusals: u64,
    /// Times a client left, of all tries.
    pub departures: u64,
    /// Tokens computed and made for clients who left.
    pub wasted_tokens: u64,
    /// Requests cut off by a restart and sent again.
    pub resent: u64,
    /// Time to first token of each, in the order they came.
    pub ttft: Vec<Micros>,
    /// Time to the end of each.
    pub latency: Vec<Micros>,
    /// Prompt tokens of requests whose first token came.
    pub prompt_tokens: u64,
    /// Of these, found in a cache.
    pub cached_tokens: u64,
    /// Of these, predicted to be.
    pub predicted_tokens: u64,
    /// Output tokens generated.
    pub output_tokens: u64,
    /// Tokens served before the horizon: computed prompt tokens and output tokens.
    pub tokens_in_time: u64,
    /// Requests that ended before the horizon.
    pub ended_in_time: u64,
    /// Requests that kept the goals.
    pub good: u64,
    /// Mean time between tokens of each request with two or more.
    pub gaps: Vec<Micros>,
    /// Highest price of one request.
    pub largest_priced: u64,
    /// Most that a user had used and not been charged in some replica's eyes, thousandths of a
    /// priced token at weight 1.
    pub uncharged_milli: u64,
    /// Most that dispatched requests of a user had yet to make, in the same unit.
    pub promised_milli: u64,
    /// Requests per backend.
    pub by_backend: Vec<u64>,
    /// Priced output that dispatched requests have yet to make, by user.
    promised: Vec<u64>,
    /// Curves.
    pub points: TimeSeries,
    /// Bytes of the log.
    pub log_bytes: u64,
    /// Entries of the log.
    pub log_entries: u64,
    /// When the last request ended.
    pub last_end: Micros,
}

/// Figures at equal distances of time.
#[derive(Debug, Clone, Default)]
pub struct TimeSeries {
    /// Prompt tokens and, of these, cached ones, by the time of the first token.
    pub hits: Vec<(u64, u64)>,
    /// Times to first token, by when it came.
    pub ttft: Vec<Vec<Micros>>,
    /// Requests that ended.
    pub ended: Vec<u64>,
    /// Requests at each backend.
    pub load: Vec<Vec<u32>>,
    /// What each user was served so far.
    pub shares: Vec<Vec<f64>>,
    /// Requests waiting for admission, in all.
    pub waiting: Vec<u64>,
    /// Requests waiting for admission, by bin.
    pub bins: Vec<Vec<usize>>,
}

impl SimTally {
    /// Nothing so far.
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

    /// Time from one point to the next.
    #[must_use]
    pub fn step(&self) -> Micros {
        (self.horizon / POINTS).max(1)
    }

    /// A request's first token came.
    pub fn first_token(&mut self, now: Micros, waited: Micros, prompt: u32, cached: u32) {
        self.ttft.push(waited);
        self.prompt_tokens += u64::from(prompt);
        self.cached_tokens += u64::from(cached);
        // What comes after the horizon is of no curve.
        let point = usize::try_from(now / self.step()).unwrap_or(usize::MAX);
        if let Some((prompts, hits)) = self.points.hits.get_mut(point) {
            *prompts += u64::from(prompt);
            *hits += u64::from(cached);
            self.points.ttft[point].push(waited);
        }
    }

    /// A request that will make so many tokens was dispatched.
    pub fn promised(&mut self, user: usize, output: u32) {
        self.promised[user] += self.service.price(0, output);
        let milli = self.service.weighed(user, self.promised[user]);
        self.promised_milli = self.promised_milli.max(milli);
    }

    /// So many of them came, or will never.
    pub fn kept(&mut self, user: usize, output: u32) {
        let price = self.service.price(0, output);
        self.promised[user] = self.promised[user].saturating_sub(price);
    }

    /// A user was served so many tokens.
    pub fn served(&mut self, now: Micros, user: usize, uncached: u32, output: u32) {
        self.output_tokens += u64::from(output);
        if now <= self.horizon {
            self.tokens_in_time += u64::from(uncached) + u64::from(output);
        }
        self.service.served(user, uncached, output);
    }

    /// A request with so many tokens ended, whose first came after `waited` and `since` ago.
    pub fn judged(&mut self, goal: &ServiceGoal, waited: Micros, (since, tokens): (Micros, u32)) {
        let gaps = u64::from(tokens.saturating_sub(1));
        let gap = since.checked_div(gaps);
        self.gaps.extend(gap);
        let is_good = waited <= goal.ttft && gap.is_none_or(|gap| gap <= goal.gap);
        self.good += u64::from(is_good);
    }

    /// A request ended.
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
