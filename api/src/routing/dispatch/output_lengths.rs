//! Collects the output lengths of finished requests, which go to the log once a second while the
//! admission settings use them, and predicts the length of a running response.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use state::StateView;
use state::command::OUTPUTS_PER_ITEM_MAX;
use state::ids::{ModelKey, UserKey};

/// Maximum number of pairs of user and model. Lengths of further pairs are dropped.
const PAIRS_MAX: usize = 4096;

/// Output lengths by user and model, in the order in which the requests ended.
#[derive(Debug, Default)]
pub(in crate::routing) struct OutputLengths(Mutex<BTreeMap<(UserKey, ModelKey), Vec<u32>>>);

impl OutputLengths {
    /// Adds the output length of a request, unless its log item or the collection is full.
    pub(in crate::routing) fn add(&self, user: UserKey, model: ModelKey, tokens: u32) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let has_room = held.len() < PAIRS_MAX || held.contains_key(&(user, model));
        if has_room {
            let lengths = held.entry((user, model)).or_default();
            if lengths.len() < OUTPUTS_PER_ITEM_MAX {
                lengths.push(tokens);
            }
        }
    }

    /// Removes and returns all output lengths.
    pub(in crate::routing) fn take(&self) -> BTreeMap<(UserKey, ModelKey), Vec<u32>> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Expected output length of a running response whose output is charged in advance.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpectedOutput {
    model: ModelKey,
    tokens: u32,
    /// Maximum number of output tokens, from the request; `None` if it sets none.
    tokens_max: Option<u32>,
}

impl ExpectedOutput {
    pub(in crate::routing) fn of(
        view: &StateView,
        user: UserKey,
        model: ModelKey,
        tokens_max: Option<u32>,
    ) -> Self {
        let tokens = view.outputs().predict(user, model, tokens_max).tokens;
        Self {
            model,
            tokens,
            tokens_max,
        }
    }

    /// Returns the expected number of output tokens.
    pub(in crate::routing) fn tokens(&self) -> u64 {
        self.tokens.into()
    }

    /// If `produced` tokens reach the expected length, corrects it and returns how many more tokens
    /// to expect. Otherwise returns 0.
    pub(super) fn outgrown(&mut self, produced: u64, view: &StateView) -> u64 {
        let produced = u32::try_from(produced).unwrap_or(u32::MAX);
        if produced < self.tokens {
            return 0;
        }
        let outputs = view.outputs();
        self.tokens = outputs.correct(self.model, self.tokens, produced, self.tokens_max);
        self.tokens.saturating_sub(produced).into()
    }
}

#[cfg(test)]
mod tests {
    use state::RouterState;

    use super::*;

    #[test]
    fn an_answer_beyond_its_prediction_is_expected_to_continue() {
        let view = RouterState::new().view();
        let of = |tokens_max| ExpectedOutput::of(&view, UserKey(1), ModelKey(1), tokens_max);
        let mut expected = of(Some(64));
        assert_eq!(expected.tokens(), 64, "nothing is known but its bound");
        assert_eq!(expected.outgrown(63, &view), 0);
        assert_eq!(expected.outgrown(64, &view), 0, "it may not go on");
        let mut expected = of(None);
        let unknown = expected.tokens();
        assert_eq!(expected.outgrown(unknown - 1, &view), 0);
        assert_eq!(expected.outgrown(unknown, &view), 1);
        assert_eq!(expected.outgrown(unknown, &view), 0, "told once");
    }

    #[test]
    fn output_lengths_are_batched_by_user_and_model() {
        let lengths = OutputLengths::default();
        for tokens in 0..1000 {
            lengths.add(UserKey(1), ModelKey(1), tokens);
        }
        lengths.add(UserKey(1), ModelKey(2), 7);
        let taken = lengths.take();
        assert_eq!(taken[&(UserKey(1), ModelKey(2))], [7]);
        let first = &taken[&(UserKey(1), ModelKey(1))];
        assert_eq!(first.len(), OUTPUTS_PER_ITEM_MAX);
        assert_eq!(first[..3], [0, 1, 2]);
        assert!(lengths.take().is_empty());
    }
}
