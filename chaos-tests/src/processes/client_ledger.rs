//! Results of a load, and the user counters that they imply.
//!
//! Every response has the usage that the engine reported, and a user's counters must grow by
//! exactly the sum. A killed replica loses charges that it had not handed over. For *its* users,
//! the charges lie between the usage of responses well before the kill and that plus the usage of
//! everything that may have started. The next account begins with the counters found.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use anyhow::ensure;
use hyper::body::Bytes;
use lab::replay::client::ReplayAnswer;
use tokio::time::Instant;

/// Maximum number of recent requests that are kept, so that their prompts can be queried.
const RECENT_MAX: usize = 64;
/// Maximum number of failures whose descriptions are kept.
const FAILURES_SHOWN_MAX: usize = 20;
/// Minimum number of bytes per token, for an upper bound. The emulated engine uses four.
const BYTES_PER_TOKEN_MIN: u64 = 2;

/// Number of requests and tokens of a user.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UserTotals {
    /// Number of requests.
    pub requests: u64,
    /// Number of prompt tokens that were computed.
    pub uncached: u64,
    /// Number of prompt tokens that were found in caches.
    pub cached: u64,
    /// Number of output tokens.
    pub output: u64,
}

impl UserTotals {
    /// Adds the counts of `other`.
    pub(in crate::processes) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.uncached += other.uncached;
        self.cached += other.cached;
        self.output += other.output;
    }

    /// Returns the counts with cached and computed prompt tokens added up. Unsettled charges
    /// contain only a prediction of how many were cached.
    fn coarse(&self) -> [u64; 3] {
        [self.requests, self.uncached + self.cached, self.output]
    }
}

/// A request that a replica answered.
#[derive(Debug, Clone)]
pub struct AnsweredRequest {
    /// Number of the replica that responded.
    pub replica: usize,
    /// User who is charged for the request.
    pub user: String,
    /// Time of sending the request.
    pub sent: Instant,
    /// Time at which the response was complete.
    pub ended: Instant,
    /// Response of the replica.
    pub answer: ReplayAnswer,
    /// Body of the request.
    pub body: Bytes,
}

/// A request that was lost with its replica, with bounds of its usage.
#[derive(Debug)]
pub(super) struct LostRequest {
    pub(super) user: String,
    pub(super) body_bytes: u64,
    pub(super) output_max: u64,
}

/// Longest times that clients waited for a response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LongestStall {
    /// Longest time between two responses of any replica.
    pub gap: Duration,
    /// Longest time to first token of any request.
    pub ttft: Duration,
}

/// Figures of the responses over some time, as clients saw them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnswerFigures {
    /// Time from sending the request to the first text, for each response.
    pub ttfts: Vec<Duration>,
    /// Number of tokens in all prompts.
    pub prompt_tokens: u64,
    /// Number of prompt tokens found in engines' caches.
    pub cached_tokens: u64,
}

impl AnswerFigures {
    /// Returns the time to the first text at the quantile `permille`, or zero without responses.
    #[must_use]
    pub fn ttft(&self, permille: usize) -> Duration {
        let mut sorted = self.ttfts.clone();
        sorted.sort_unstable();
        let at = (sorted.len() * permille).div_ceil(1000);
        let at = at.saturating_sub(1);
        sorted.get(at).copied().unwrap_or_default()
    }

    /// Returns the percentage of prompt tokens found in engines' caches.
    #[must_use]
    pub fn hit_percent(&self) -> f64 {
        100.0 * self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64
    }

    fn add(&mut self, answer: &ReplayAnswer) {
        self.ttfts.push(answer.ttft);
        self.prompt_tokens += answer.prompt_tokens.unwrap_or(0);
        self.cached_tokens += answer.cached_tokens.unwrap_or(0);
    }
}

/// Record of a load's requests: counts, failures and usage by user.
#[derive(Debug, Default)]
pub struct ClientLedger {
    /// Number of answered requests.
    pub answered: u64,
    /// Number of requests lost with their replica.
    pub lost: u64,
    /// Number of requests that failed on a running replica.
    pub failed: u64,
    /// Descriptions of the first failures, at most 20.
    pub failures: Vec<String>,
    /// Longest stalls since [`ClientLedger::measure`].
    pub stall: LongestStall,
    by_replica: BTreeMap<usize, u64>,
    /// Figures of the responses; `None` until [`ClientLedger::take_figures`] is first called.
    figures: Option<AnswerFigures>,
    last_answer: Option<Instant>,
    recent: VecDeque<AnsweredRequest>,
    account: UsageSince,
}

/// A span of time in which the responses of a replica may be unknown to its peers.
#[derive(Debug, Clone, Copy)]
struct UnknownWindow {
    since: Instant,
    /// Time at which the replica was killed.
    until: Instant,
}

impl UnknownWindow {
    fn covers(&self, at: Instant) -> bool {
        (self.since..=self.until).contains(&at)
    }
}

/// Usage since the counters were last compared.
#[derive(Debug, Default)]
struct UsageSince {
    /// Counters of users at the last comparison.
    before: BTreeMap<String, UserTotals>,
    /// User, replica, time and usage of each response.
    answers: Vec<(String, usize, Instant, UserTotals)>,
    /// Maximum usage of lost requests, by user.
    lost: BTreeMap<String, UserTotals>,
    /// Spans in which the responses of killed replicas may be unknown to their peers, by replica.
    doubts: BTreeMap<usize, UnknownWindow>,
}

impl ClientLedger {
    pub(super) fn note_answer(&mut self, answered: AnsweredRequest) {
        self.answered += 1;
        *self.by_replica.entry(answered.replica).or_default() += 1;
        if let Some(last) = self.last_answer.replace(answered.ended) {
            self.stall.gap = self.stall.gap.max(answered.ended - last);
        }
        self.stall.ttft = self.stall.ttft.max(answered.answer.ttft);
        let answer = &answered.answer;
        if let Some(figures) = &mut self.figures {
            figures.add(answer);
        }
        let cached = answer.cached_tokens.unwrap_or(0);
        let usage = UserTotals {
            requests: 1,
            uncached: answer.prompt_tokens.unwrap_or(0).saturating_sub(cached),
            cached,
            output: answer.completion_tokens.unwrap_or(0),
        };
        let user = answered.user.clone();
        let entry = (user, answered.replica, answered.ended, usage);
        self.account.answers.push(entry);
        self.recent.push_front(answered);
        self.recent.truncate(RECENT_MAX);
    }

    pub(super) fn note_lost(&mut self, lost: LostRequest) {
        self.lost += 1;
        let most = UserTotals {
            requests: 1,
            uncached: lost.body_bytes / BYTES_PER_TOKEN_MIN,
            cached: 0,
            output: lost.output_max,
        };
        self.account.lost.entry(lost.user).or_default().add(&most);
    }

    pub(super) fn note_failed(&mut self, words: String) {
        self.failed += 1;
        if self.failures.len() < FAILURES_SHOWN_MAX {
            self.failures.push(words);
        }
    }

    /// Ends the measurement of the current gap, because the load rested.
    pub(super) fn rested(&mut self) {
        self.last_answer = None;
    }

    /// Starts a new measurement of stalls.
    pub fn measure(&mut self) {
        self.stall = LongestStall::default();
        self.last_answer = Some(Instant::now());
    }

    /// Returns the figures of all responses since the last call. The first call returns empty
    /// figures and starts the collection.
    pub fn take_figures(&mut self) -> AnswerFigures {
        let figures = self.figures.replace(AnswerFigures::default());
        figures.unwrap_or_default()
    }

    /// Returns the number of requests that a replica has answered.
    #[must_use]
    pub fn answered_by(&self, replica: usize) -> u64 {
        self.by_replica.get(&replica).copied().unwrap_or(0)
    }

    /// Marks responses of a killed replica from `since` to `until` as possibly unknown to others.
    pub fn doubt(&mut self, replica: usize, since: Instant, until: Instant) {
        let new = UnknownWindow { since, until };
        let doubt = self.account.doubts.entry(replica).or_insert(new);
        doubt.since = doubt.since.min(since);
        doubt.until = doubt.until.max(until);
    }

    /// Returns the last `count` answered requests, newest first, without doubtful ones.
    #[must_use]
    pub fn recent(&self, count: usize) -> Vec<AnsweredRequest> {
        let doubts = &self.account.doubts;
        self.recent
            .iter()
            .filter(|answered| is_known(answered, doubts))
            .take(count)
            .cloned()
            .collect()
    }

    /// Compares the users' counters `charged` with the usage in responses.
    ///
    /// # Errors
    /// Describes the first counter that does not match.
    pub fn compare(&self, charged: &BTreeMap<String, UserTotals>) -> anyhow::Result<()> {
        let mut expected: BTreeMap<&str, ExpectedCounters> = BTreeMap::new();
        for (user, usage) in &self.account.before {
            let entry = expected.entry(user).or_default();
            entry.surely.add(usage);
        }
        for (user, replica, ended, usage) in &self.account.answers {
            let entry = expected.entry(user).or_default();
            match self.account.doubts.get(replica) {
                None => entry.surely.add(usage),
                Some(doubt) => {
                    entry.is_coarse = true;
                    if doubt.covers(*ended) {
                        entry.perhaps.add(usage);
                    } else {
                        entry.surely.add(usage);
                    }
                }
            }
        }
        for (user, usage) in &self.account.lost {
            let entry = expected.entry(user).or_default();
            entry.is_coarse = true;
            entry.perhaps.add(usage);
        }
        for (user, expected) in expected {
            let found = charged.get(user).copied().unwrap_or_default();
            expected.check(user, &found)?;
        }
        Ok(())
    }

    /// Begins the next account with the current counters `charged`.
    pub fn begin_account(&mut self, charged: BTreeMap<String, UserTotals>) {
        // Requests in doubt stay unknown when the doubts of this account are forgotten.
        let doubts = &self.account.doubts;
        self.recent.retain(|answered| is_known(answered, doubts));
        self.account = UsageSince {
            before: charged,
            ..UsageSince::default()
        };
    }
}

/// Returns whether all replicas must know of an answered request.
fn is_known(answered: &AnsweredRequest, doubts: &BTreeMap<usize, UnknownWindow>) -> bool {
    let doubt = doubts.get(&answered.replica);
    doubt.is_none_or(|doubt| !doubt.covers(answered.ended))
}

/// Bounds of a user's counters: the sure part, and a part that may be missing.
#[derive(Debug, Default)]
struct ExpectedCounters {
    surely: UserTotals,
    perhaps: UserTotals,
    /// Whether one of the user's replicas was killed and left accounts unsettled.
    is_coarse: bool,
}

impl ExpectedCounters {
    fn check(&self, user: &str, found: &UserTotals) -> anyhow::Result<()> {
        if !self.is_coarse {
            let surely = &self.surely;
            ensure!(
                found == surely,
                "{user} was charged {found:?}, the engines told {surely:?}"
            );
            return Ok(());
        }
        let (least, found) = (self.surely.coarse(), found.coarse());
        let perhaps = self.perhaps.coarse();
        for (field, least) in least.into_iter().enumerate() {
            let most = least + perhaps[field];
            ensure!(
                (least..=most).contains(&found[field]),
                "{user} was charged {found:?} (requests, prompt and output tokens), the engines told \
                 {:?} and perhaps {perhaps:?} more",
                self.surely.coarse(),
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(replica: usize, prompt: u64, cached: u64) -> AnsweredRequest {
        let answer = ReplayAnswer {
            prompt_tokens: Some(prompt),
            cached_tokens: Some(cached),
            completion_tokens: Some(2),
            ..ReplayAnswer::default()
        };
        AnsweredRequest {
            replica,
            user: format!("of {replica}"),
            sent: Instant::now(),
            ended: Instant::now(),
            answer,
            body: Bytes::new(),
        }
    }

    fn charged(list: &[(&str, u64, u64, u64, u64)]) -> BTreeMap<String, UserTotals> {
        let usage = |(user, requests, uncached, cached, output): &(&str, u64, u64, u64, u64)| {
            let usage = UserTotals {
                requests: *requests,
                uncached: *uncached,
                cached: *cached,
                output: *output,
            };
            ((*user).to_owned(), usage)
        };
        list.iter().map(usage).collect()
    }

    #[test]
    fn users_of_a_surviving_replica_are_charged_exactly() {
        let mut book = ClientLedger::default();
        book.begin_account(charged(&[("of 0", 5, 10, 0, 1)]));
        book.note_answer(answered(0, 100, 30));
        assert!(book.compare(&charged(&[("of 0", 6, 80, 30, 3)])).is_ok());
        for wrong in [
            ("of 0", 6, 79, 30, 3),
            ("of 0", 7, 80, 30, 3),
            ("of 0", 6, 80, 30, 5),
            ("of 0", 6, 110, 0, 3),
        ] {
            assert!(book.compare(&charged(&[wrong])).is_err(), "{wrong:?}");
        }
        assert!(book.compare(&charged(&[])).is_err(), "it is forgotten");
    }

    #[test]
    fn figures_cover_answers_since_the_last_call() {
        let mut book = ClientLedger::default();
        book.note_answer(answered(0, 100, 30));
        assert_eq!(book.take_figures(), AnswerFigures::default());
        for ms in 1..=200 {
            let mut answered = answered(0, 10, 4);
            answered.answer.ttft = Duration::from_millis(ms);
            book.note_answer(answered);
        }
        let figures = book.take_figures();
        let shown = [500, 990, 1000].map(|permille| figures.ttft(permille).as_millis());
        assert_eq!(shown, [100, 198, 200]);
        assert!((figures.hit_percent() - 40.0).abs() < 1e-9);
        assert_eq!(AnswerFigures::default().ttft(990), Duration::ZERO);
    }

    #[test]
    fn users_of_a_killed_replica_are_charged_within_bounds() {
        let mut book = ClientLedger::default();
        book.note_answer(answered(0, 100, 30));
        let (before, now) = (Instant::now() - Duration::from_secs(9), Instant::now());
        book.doubt(0, before, before);
        book.note_lost(LostRequest {
            user: "of 0".to_owned(),
            body_bytes: 100,
            output_max: 4,
        });
        assert!(book.compare(&charged(&[("of 0", 1, 70, 30, 2)])).is_ok());
        assert!(book.compare(&charged(&[("of 0", 2, 120, 30, 6)])).is_ok());
        assert!(book.compare(&charged(&[("of 0", 0, 0, 0, 0)])).is_err());
        assert!(book.compare(&charged(&[("of 0", 3, 70, 30, 2)])).is_err());
        book.doubt(0, before, now);
        assert!(book.compare(&charged(&[("of 0", 0, 0, 0, 0)])).is_ok());
        assert_eq!(book.recent(9).len(), 0, "it may be unknown");
    }
}
