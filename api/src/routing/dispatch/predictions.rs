//! Collects predicted and reported cached tokens per user until they go into a sample.
//!
//! One user can make predictions look wrong by sending requests for which an engine skips its
//! cache. So no single user decides whether a backend's predictions are wrong: of several users,
//! the one whose exclusion makes the predictions most accurate is left out. The predictions of a
//! sole active user wait for those of another user. After [`ALONE_MAX`] they count, because the
//! verdict can harm no other user.

use std::time::Duration;

use state::ids::{BackendRef, UserKey};
use state::service::{BeliefSample, ServiceSample};
use tokio::time::Instant;

/// Maximum time for which the predictions of a sole user wait for those of another user.
const ALONE_MAX: Duration = Duration::from_secs(60);
/// Maximum number of users tracked separately. Further users are added to the last one.
const USERS_MAX: usize = 64;
/// Minimum number of predicted or cached tokens for a request to count as held, lost or found.
const TELLING_TOKENS_MIN: u64 = 64;
/// Maximum number of prompt tokens counted for one request.
const TOKENS_MAX: u64 = 1 << 24;

/// Predictions for one backend that no sample contains yet.
#[derive(Debug, Default)]
pub(in crate::routing) struct Predictions {
    /// Time of the first prediction; `None` if there is none.
    since: Option<Instant>,
    users: Vec<(UserKey, Prediction)>,
}

/// Predictions of one or more requests, summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Prediction {
    requests: u32,
    prompt_tokens: u64,
    predicted_tokens: u64,
    cached_tokens: u64,
    /// Number of requests whose prediction mostly held. `lost` counts requests whose predicted
    /// tokens were mostly not cached, `found` those whose cached tokens were mostly not predicted.
    held: u32,
    lost: u32,
    found: u32,
    /// Number of prompt blocks that were not cached.
    computed_blocks: u64,
}

impl Prediction {
    /// Returns the prediction of one request whose engine reported its cached tokens.
    pub(in crate::routing) fn of(
        prompt_tokens: u64,
        predicted_tokens: u64,
        cached_tokens: u64,
        block_tokens: u32,
    ) -> Self {
        let prompt_tokens = prompt_tokens.min(TOKENS_MAX);
        let predicted = predicted_tokens.min(prompt_tokens);
        let cached = cached_tokens.min(prompt_tokens);
        let is_telling = predicted.max(cached) >= TELLING_TOKENS_MIN;
        let is_lost = is_telling && cached * 2 < predicted;
        let is_found = is_telling && predicted * 2 < cached;
        Self {
            requests: 1,
            prompt_tokens,
            predicted_tokens: predicted,
            cached_tokens: cached,
            held: u32::from(is_telling && !is_lost && !is_found),
            lost: u32::from(is_lost),
            found: u32::from(is_found),
            computed_blocks: (prompt_tokens - cached) / u64::from(block_tokens.max(1)),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
            predicted_tokens: self.predicted_tokens + other.predicted_tokens,
            cached_tokens: self.cached_tokens + other.cached_tokens,
            held: self.held.saturating_add(other.held),
            lost: self.lost.saturating_add(other.lost),
            found: self.found.saturating_add(other.found),
            computed_blocks: self.computed_blocks + other.computed_blocks,
        }
    }

    /// Returns the difference of predicted and cached tokens, in millionths of the prompt tokens.
    fn error(&self) -> u128 {
        let tokens = self.predicted_tokens.abs_diff(self.cached_tokens);
        u128::from(tokens) * 1_000_000 / u128::from(self.prompt_tokens.max(1))
    }

    /// Sets the prediction fields of `sample` to these sums.
    pub(in crate::routing) fn count(&self, sample: &mut ServiceSample) {
        sample.predicted = self.requests;
        sample.predicted_prompt_tokens = self.prompt_tokens;
        sample.predicted_cached_tokens = self.predicted_tokens;
        sample.cached_tokens = self.cached_tokens;
    }

    /// Returns these sums as evidence about the capacity of `backend`; `None` if they contain none.
    pub(super) fn belief(&self, backend: BackendRef) -> Option<BeliefSample> {
        let sample = BeliefSample {
            backend,
            held: self.held,
            lost: self.lost,
            found: self.found,
            computed_blocks: self.computed_blocks,
        };
        (!sample.is_empty()).then_some(sample)
    }
}

impl Predictions {
    pub(super) fn add(&mut self, user: UserKey, prediction: Prediction, now: Instant) {
        if prediction.prompt_tokens == 0 {
            return;
        }
        self.since.get_or_insert(now);
        let known = self.users.iter().position(|(other, _)| *other == user);
        let is_full = self.users.len() == USERS_MAX;
        match known.or(is_full.then_some(USERS_MAX - 1)) {
            Some(at) => self.users[at].1 = self.users[at].1.plus(prediction),
            None => self.users.push((user, prediction)),
        }
    }

    /// Removes the predictions that count at `now` and returns their sum without the user that
    /// distorts it most. Returns an empty sum while a sole user's predictions wait.
    pub(super) fn take(&mut self, now: Instant) -> Prediction {
        let waited = self.since.map(|since| now.saturating_duration_since(since));
        let is_alone = self.users.len() == 1;
        if is_alone && waited.is_none_or(|waited| waited < ALONE_MAX) {
            return Prediction::default();
        }
        let taken = std::mem::take(self);
        let all_but = |left_out: Option<usize>| {
            let users = taken.users.iter().enumerate();
            let counted = users.filter(|(at, _)| Some(*at) != left_out);
            counted.fold(Prediction::default(), |sum, (_, (_, its))| sum.plus(*its))
        };
        if is_alone {
            return all_but(None);
        }
        let each = (0..taken.users.len()).map(|at| all_but(Some(at)));
        each.min_by_key(Prediction::error).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use state::ids::{Incarnation, Slot};

    use super::*;

    const HELD: Prediction = Prediction {
        requests: 1,
        prompt_tokens: 100,
        predicted_tokens: 80,
        cached_tokens: 80,
        held: 1,
        lost: 0,
        found: 0,
        computed_blocks: 5,
    };

    fn off(times: u64) -> Prediction {
        Prediction::of(1000 * times, 1000 * times, 0, 4)
    }

    #[test]
    fn a_single_user_cannot_make_predictions_look_wrong() {
        let (mut predictions, now) = (Predictions::default(), Instant::now());
        for _ in 0..40 {
            predictions.add(UserKey(1), off(1), now);
        }
        assert_eq!(predictions.take(now), Prediction::default(), "it waits");
        predictions.add(UserKey(2), HELD, now);
        assert_eq!(predictions.take(now), HELD);
        assert_eq!(predictions.take(now), Prediction::default());
        predictions.add(UserKey(1), off(1), now);
        let later = now + 2 * ALONE_MAX;
        assert_eq!(predictions.take(later), off(1), "nobody else is served");
    }

    #[test]
    fn prediction_errors_of_most_users_are_reported() {
        let (mut predictions, now) = (Predictions::default(), Instant::now());
        for user in 0..200 {
            predictions.add(UserKey(user), off(1 + user % 2), now);
        }
        assert!(predictions.users.len() <= USERS_MAX);
        let told = predictions.take(now);
        assert_eq!(told.error(), 1_000_000);
        assert!(told.requests >= 63, "{told:?}");
    }

    #[test]
    fn predictions_that_mostly_failed_are_counted() {
        let backend = BackendRef {
            slot: Slot(3),
            incarnation: Incarnation(1),
        };
        let belief = |predicted, cached| {
            let it = Prediction::of(400, predicted, cached, 16).belief(backend)?;
            Some((it.held, it.lost, it.found, it.computed_blocks))
        };
        assert_eq!(belief(300, 290), Some((1, 0, 0, 6)));
        assert_eq!(belief(300, 150), Some((1, 0, 0, 15)));
        assert_eq!(belief(300, 149), Some((0, 1, 0, 15)));
        assert_eq!(belief(0, 64), Some((0, 0, 1, 21)));
        assert_eq!(belief(63, 0), None);
    }

    #[test]
    fn absurd_predictions_stay_within_sample_bounds() {
        let (mut predictions, now) = (Predictions::default(), Instant::now());
        let absurd = Prediction::of(u64::MAX, u64::MAX, u64::MAX, 4);
        for user in [1, 1, 2] {
            predictions.add(UserKey(user), absurd, now);
        }
        predictions.add(UserKey(3), Prediction::of(0, 7, 7, 4), now);
        let told = predictions.take(now);
        assert_eq!(told.cached_tokens, told.predicted_tokens);
        assert!(told.prompt_tokens <= 2 * TOKENS_MAX);
    }
}
