//! Engines' reports of cached tokens: which responses contain them, and whether an engine's cache
//! appears to be emptied.
//!
//! vLLM up to 0.12 omits the count if nothing was cached, so a response without it is ambiguous. If
//! the engine has reported it in responses of the same form (path, stream or not), it means zero.
//!
//! The restart of an engine that reports neither its start time nor a counter may show only in its
//! responses: after correct predictions, several in a row find almost nothing cached. One user
//! alone could send prompts that skip the cache, so it takes two users, or twice as many responses.
//! Occasional misses mean that the prediction is too high, not that the cache was emptied.
//!
//! vLLM computes the last block of every hit again if its speculator reads the model's hidden states
//! (EAGLE, MTP), in some versions, and says so nowhere. It shows in responses of which every one
//! that is off is off by this block, while none is right.

use std::sync::{Mutex, MutexGuard, PoisonError};

use state::command::BACKENDS_MAX;
use state::ids::{BackendRef, UserKey};

/// Minimum number of predicted tokens for a response to count.
const PREDICTED_MIN: u64 = 256;
/// A response is cold if less than one part in this many of the prediction was cached.
const COLD_PART: u64 = 8;
/// Number of consecutive cold responses, to several users or to one, that indicate an empty cache.
const COLD_OF_SEVERAL: u32 = 4;
const COLD_OF_ONE: u32 = 8;
/// Minimum number of preceding warm responses, and maximum number that is remembered.
const WARM_MIN: u32 = 8;
const WARM_MAX: u32 = 16;

/// Number of responses in a row, none of them as predicted, whose hits were a block shorter (or
/// longer) than predicted, that indicate that the engine computes the last block again (or not).
const OFF_BY_A_BLOCK: u32 = 16;

/// Form of a response: its path, and whether it is a stream. Only some forms may report cached
/// tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerForm(u8);

impl AnswerForm {
    /// Returns the form of the response to a request to `path`.
    #[must_use]
    pub fn of(path: &str, is_stream: bool) -> Self {
        let kind = match path.split('?').next().unwrap_or(path) {
            "/v1/chat/completions" => 0,
            "/v1/completions" => 1,
            "/v1/responses" => 2,
            "/v1/messages" => 3,
            _ => 4,
        };
        Self(kind * 2 + u8::from(is_stream))
    }

    fn bit(self) -> u16 {
        1 << self.0
    }
}

/// Reports of cached tokens in responses, by slot.
pub(super) struct CacheReports(Box<[Mutex<EngineReports>]>);

/// Reports of one incarnation of a backend.
#[derive(Debug, Default)]
struct EngineReports {
    /// Backend that sent the reports; `None` before the first report.
    backend: Option<BackendRef>,
    /// Forms of responses that reported cached tokens.
    forms: u16,
    /// Number of recent warm responses, less twice the number of cold ones between them.
    warm: u32,
    /// Number of cold responses since the last warm one.
    cold: u32,
    /// User who got the first of the cold responses; `None` if there are none.
    first: Option<UserKey>,
    is_of_several: bool,
    /// Numbers of hits that were a block shorter or longer than predicted, since the last one that
    /// was as predicted or the contrary.
    shorter: u32,
    longer: u32,
}

impl Default for CacheReports {
    fn default() -> Self {
        Self((0..BACKENDS_MAX).map(|_| Mutex::default()).collect())
    }
}

impl CacheReports {
    /// Records that a response of this form reported cached tokens.
    pub(super) fn told(&self, backend: BackendRef, form: AnswerForm) {
        if let Some(mut reports) = self.of(backend) {
            reports.forms |= form.bit();
        }
    }

    /// Whether a response of this form has reported cached tokens.
    pub(super) fn tells(&self, backend: BackendRef, form: AnswerForm) -> bool {
        let reports = self.of(backend);
        reports.is_some_and(|reports| reports.forms & form.bit() != 0)
    }

    /// Whether a response of any form has reported cached tokens.
    pub(super) fn tells_any(&self, backend: BackendRef) -> bool {
        self.of(backend).is_some_and(|reports| reports.forms != 0)
    }

    /// Records how many of the predicted tokens a response to `user` found cached.
    pub(super) fn found(&self, backend: BackendRef, user: UserKey, predicted: u64, cached: u64) {
        if predicted < PREDICTED_MIN {
            return;
        }
        if let Some(mut reports) = self.of(backend) {
            reports.found(user, cached.saturating_mul(COLD_PART) < predicted);
        }
    }

    /// Records how a response compares with its prediction, in tokens, at an engine with blocks of
    /// `block` tokens.
    pub(super) fn compare(&self, backend: BackendRef, block: u64, predicted: u64, cached: u64) {
        if predicted.max(cached) < 2 * block.max(1) {
            return;
        }
        let Some(mut reports) = self.of(backend) else {
            return;
        };
        let (shorter, longer) = match () {
            () if predicted == cached => (0, 0),
            () if predicted == cached + block => (reports.shorter.saturating_add(1), 0),
            () if cached == predicted + block => (0, reports.longer.saturating_add(1)),
            () => return,
        };
        (reports.shorter, reports.longer) = (shorter, longer);
    }

    /// Returns whether the engine computes the last block of hits again; `None` unless that appears
    /// to differ from what was predicted.
    pub(super) fn drops_last_block(&self, backend: BackendRef) -> Option<bool> {
        let reports = self.of(backend)?;
        match () {
            () if reports.shorter >= OFF_BY_A_BLOCK => Some(true),
            () if reports.longer >= OFF_BY_A_BLOCK => Some(false),
            () => None,
        }
    }

    /// Whether the engine's cache appears to be emptied.
    pub(super) fn is_emptied(&self, backend: BackendRef) -> bool {
        self.of(backend).is_some_and(|reports| reports.is_emptied())
    }

    /// Returns the reports of `backend`, reset if they were of an earlier incarnation; `None` if
    /// `backend` itself is an earlier incarnation.
    fn of(&self, backend: BackendRef) -> Option<MutexGuard<'_, EngineReports>> {
        let place = self.0.get(usize::from(backend.slot.0))?;
        // The reports are only counters, so a partial update is harmless.
        let mut reports = place.lock().unwrap_or_else(PoisonError::into_inner);
        match reports.backend {
            Some(known) if known == backend => {}
            Some(known) if known.incarnation > backend.incarnation => return None,
            _ => {
                *reports = EngineReports {
                    backend: Some(backend),
                    ..EngineReports::default()
                }
            }
        }
        Some(reports)
    }
}

impl EngineReports {
    fn found(&mut self, user: UserKey, is_cold: bool) {
        if !is_cold {
            let doubtful = self.cold.saturating_mul(2);
            self.warm = (self.warm.saturating_sub(doubtful) + 1).min(WARM_MAX);
            (self.cold, self.first, self.is_of_several) = (0, None, false);
            return;
        }
        self.cold = self.cold.saturating_add(1);
        let first = *self.first.get_or_insert(user);
        self.is_of_several |= first != user;
    }

    fn is_emptied(&self) -> bool {
        let needed = match self.is_of_several {
            true => COLD_OF_SEVERAL,
            false => COLD_OF_ONE,
        };
        self.warm >= WARM_MIN && self.cold >= needed
    }
}

#[cfg(test)]
mod tests {
    use state::ids::{Incarnation, Slot};

    use super::*;

    fn life(incarnation: u32) -> BackendRef {
        BackendRef {
            slot: Slot(3),
            incarnation: Incarnation(incarnation),
        }
    }

    #[test]
    fn cache_reports_are_tracked_per_form_and_incarnation() {
        let reports = CacheReports::default();
        let chat = AnswerForm::of("/v1/chat/completions", false);
        let stream = AnswerForm::of("/v1/chat/completions?x", true);
        assert!(!reports.tells(life(1), chat) && !reports.tells_any(life(1)));
        reports.told(life(1), chat);
        assert!(reports.tells(life(1), chat) && reports.tells_any(life(1)));
        assert!(!reports.tells(life(1), stream));
        assert!(!reports.tells(life(2), chat), "it may have other flags now");
        reports.told(life(1), chat);
        assert!(!reports.tells(life(2), chat), "an answer of its last life");
    }

    #[test]
    fn consecutive_cold_answers_indicate_an_emptied_cache() {
        let reports = CacheReports::default();
        let found = |user, cached| reports.found(life(1), UserKey(user), 512, cached);
        (0..20).for_each(|_| found(1, 500));
        for nth in 0..COLD_OF_ONE {
            assert!(!reports.is_emptied(life(1)), "after {nth} of one user");
            found(1, 0);
        }
        assert!(reports.is_emptied(life(1)));
        found(1, 512);
        assert!(!reports.is_emptied(life(1)), "not so empty");
        (0..20).for_each(|_| found(1, 500));
        (0..COLD_OF_SEVERAL).for_each(|user| found(user.into(), 16));
        assert!(reports.is_emptied(life(1)));
        assert!(!reports.is_emptied(life(2)), "it has another one");
    }

    #[test]
    fn hits_that_are_all_off_by_a_block_indicate_that_it_is_computed_again() {
        let (reports, engine) = (CacheReports::default(), life(1));
        let times = |count: u32, predicted: u64, cached: u64| {
            (0..count).for_each(|_| reports.compare(engine, 16, predicted, cached));
            reports.drops_last_block(engine)
        };
        assert_eq!(times(OFF_BY_A_BLOCK - 1, 64, 48), None);
        // Evictions and hits of one block tell nothing.
        assert_eq!(times(9, 160, 32), None);
        assert_eq!(times(9, 16, 0), None);
        assert_eq!(times(1, 32, 16), Some(true));
        assert_eq!(reports.drops_last_block(life(2)), None);
        let (reports, engine) = (CacheReports::default(), life(1));
        let times = |count: u32, predicted: u64, cached: u64| {
            (0..count).for_each(|_| reports.compare(engine, 16, predicted, cached));
            reports.drops_last_block(engine)
        };
        // One hit as predicted, or longer, speaks against it.
        for (predicted, cached) in [(64, 64), (48, 64)] {
            assert_eq!(times(OFF_BY_A_BLOCK - 1, 64, 48), None);
            assert_eq!(times(1, predicted, cached), None);
        }
        assert_eq!(times(OFF_BY_A_BLOCK - 2, 64, 80), None);
        assert_eq!(times(1, 64, 80), Some(false));
        assert_eq!(times(1, 64, 64), None);
    }

    #[test]
    fn occasional_misses_do_not_indicate_an_emptied_cache() {
        let reports = CacheReports::default();
        for round in 0..100 {
            let cached = if round % 5 < 3 { 0 } else { 500 };
            reports.found(life(1), UserKey(round), 512, cached);
            assert!(!reports.is_emptied(life(1)), "round {round}");
        }
        (0..20).for_each(|user| reports.found(life(1), UserKey(user), 100, 0));
        assert!(!reports.is_emptied(life(1)), "too short to tell");
    }
}
