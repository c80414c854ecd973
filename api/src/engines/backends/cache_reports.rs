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
//! (EAGLE, MTP), in some versions, and says so nowhere. It shows in responses of which many are off
//! by this block, while none is right. Such evidence contradicts only the predictions that it was
//! compared with, so it is discarded once the cluster predicts otherwise: else replicas that saw
//! the engine at different times would correct each other without end.

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

/// Number of responses, to several users or to one and none between them as predicted, whose hits
/// were a block shorter (or longer) than predicted, that indicate that the engine computes the last
/// block again (or not).
const OFF_OF_SEVERAL: u32 = 16;
const OFF_OF_ONE: u32 = 32;

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

/// Cached tokens that a response reports, and their prediction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FoundTokens {
    pub(crate) user: UserKey,
    pub(crate) predicted: u64,
    pub(crate) cached: u64,
    /// Whether predictions leave out the last block; `None` if the prompt is identified by
    /// characters, so that a prediction is not accurate to a block.
    pub(crate) leaves_out: Option<bool>,
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
    /// Cold responses since the last warm one.
    cold: EvidenceRun,
    /// Whether the predictions that `off` contradicts left out the last block.
    left_out: bool,
    /// Responses that were off by this block, since the last one that was not.
    off: EvidenceRun,
}

/// Responses of one kind, without one of the contrary between them.
#[derive(Debug, Default)]
struct EvidenceRun {
    count: u32,
    /// User who got the first; `None` if there are none.
    first: Option<UserKey>,
    is_of_several: bool,
}

impl EvidenceRun {
    fn add(&mut self, user: UserKey) {
        self.count = self.count.saturating_add(1);
        let first = *self.first.get_or_insert(user);
        self.is_of_several |= first != user;
    }

    /// Whether there are as many as are needed of several users, or of one.
    fn is_enough(&self, of_several: u32, of_one: u32) -> bool {
        match self.is_of_several {
            true => self.count >= of_several,
            false => self.count >= of_one,
        }
    }
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

    /// Records what a response found cached. Compares it with the prediction if the engine's blocks
    /// are known to have `block` tokens.
    pub(super) fn found(&self, backend: BackendRef, found: FoundTokens, block: Option<u32>) {
        let Some(mut reports) = self.of(backend) else {
            return;
        };
        if found.predicted >= PREDICTED_MIN {
            reports.found(found);
        }
        if let Some((block, leaves_out)) = block.zip(found.leaves_out) {
            reports.compare(found, leaves_out, u64::from(block.max(1)));
        }
    }

    /// Returns whether the engine computes the last block of hits again; `None` unless that appears
    /// to differ from `known`, which the cluster predicts.
    pub(super) fn drops_last_block(&self, backend: BackendRef, known: bool) -> Option<bool> {
        let mut reports = self.of(backend)?;
        let off = reports.off_from(known);
        off.is_enough(OFF_OF_SEVERAL, OFF_OF_ONE).then_some(!known)
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
    fn found(&mut self, found: FoundTokens) {
        if found.cached.saturating_mul(COLD_PART) < found.predicted {
            self.cold.add(found.user);
            return;
        }
        let doubtful = self.cold.count.saturating_mul(2);
        self.warm = (self.warm.saturating_sub(doubtful) + 1).min(WARM_MAX);
        self.cold = EvidenceRun::default();
    }

    fn compare(&mut self, found: FoundTokens, leaves_out: bool, block: u64) {
        let off = self.off_from(leaves_out);
        let FoundTokens {
            predicted, cached, ..
        } = found;
        let is_hit = predicted.max(cached) >= block.saturating_mul(2);
        let is_shorter = is_hit && predicted.checked_sub(cached) == Some(block);
        let is_longer = is_hit && cached.checked_sub(predicted) == Some(block);
        let (contradicts, confirms) = match leaves_out {
            true => (is_longer, is_shorter),
            false => (is_shorter, is_longer),
        };
        if contradicts {
            off.add(found.user);
        } else if confirms || predicted == cached && cached > 0 {
            *off = EvidenceRun::default();
        }
    }

    /// Returns the evidence against predictions that leave out the last block, or do not. Discards
    /// that against others.
    fn off_from(&mut self, leaves_out: bool) -> &mut EvidenceRun {
        if self.left_out != leaves_out {
            self.left_out = leaves_out;
            self.off = EvidenceRun::default();
        }
        &mut self.off
    }

    fn is_emptied(&self) -> bool {
        self.warm >= WARM_MIN && self.cold.is_enough(COLD_OF_SEVERAL, COLD_OF_ONE)
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

    fn of_text(user: u64, predicted: u64, cached: u64) -> FoundTokens {
        FoundTokens {
            user: UserKey(user),
            predicted,
            cached,
            leaves_out: None,
        }
    }

    /// Reports responses to two users whose predictions leave out the last block or do not, and
    /// returns what the engine does in contrast.
    fn after(
        reports: &CacheReports,
        count: u32,
        leaves_out: bool,
        (predicted, cached): (u64, u64),
    ) -> Option<bool> {
        for nth in 0..count {
            let found = FoundTokens {
                leaves_out: Some(leaves_out),
                ..of_text(u64::from(nth % 2), predicted, cached)
            };
            reports.found(life(1), found, Some(16));
        }
        reports.drops_last_block(life(1), leaves_out)
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
        let found = |user, cached| reports.found(life(1), of_text(user, 512, cached), None);
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
        for (leaves_out, off, contrary) in [(false, (64, 48), (48, 64)), (true, (48, 64), (64, 48))]
        {
            let reports = CacheReports::default();
            let times = |count, hits| after(&reports, count, leaves_out, hits);
            assert_eq!(times(OFF_OF_SEVERAL - 1, off), None);
            // Evictions, misses and hits of one block tell nothing.
            for hits in [
                (160, 32),
                (16, 0),
                (0, 16),
                (0, 0),
                (u64::MAX, 0),
                (0, u64::MAX),
            ] {
                assert_eq!(times(9, hits), None, "{hits:?}");
            }
            assert_eq!(times(1, off), Some(!leaves_out));
            assert_eq!(reports.drops_last_block(life(2), leaves_out), None);
            // A hit as predicted, however short, or off in the other direction speaks against it.
            for hits in [(64, 64), (16, 16), contrary] {
                let reports = CacheReports::default();
                let times = |count, hits| after(&reports, count, leaves_out, hits);
                assert_eq!(times(OFF_OF_SEVERAL - 1, off), None);
                assert_eq!(times(1, hits), None, "{hits:?}");
                assert_eq!(times(OFF_OF_SEVERAL - 1, off), None);
                assert_eq!(times(99, contrary), None);
            }
        }
    }

    #[test]
    fn one_user_or_text_does_not_soon_indicate_that_a_block_is_computed_again() {
        let reports = CacheReports::default();
        let found = |leaves_out| {
            let found = FoundTokens {
                leaves_out,
                ..of_text(1, 64, 48)
            };
            reports.found(life(1), found, Some(16));
            reports.drops_last_block(life(1), false)
        };
        (0..99).for_each(|_| assert_eq!(found(None), None));
        (1..OFF_OF_ONE).for_each(|_| assert_eq!(found(Some(false)), None));
        assert_eq!(found(Some(false)), Some(true));
    }

    #[test]
    fn replicas_with_contrary_evidence_settle_on_the_latest() {
        let replicas = [CacheReports::default(), CacheReports::default()];
        let mut known = false;
        // Each replica probes the engine in turn, and its proposal is applied at once.
        let settle = |known: &mut bool| {
            let mut changes = 0;
            for reports in replicas.iter().cycle().take(8) {
                if let Some(drops) = reports.drops_last_block(life(1), *known) {
                    *known = drops;
                    changes += 1;
                }
            }
            changes
        };
        // Both saw a speculator that drops blocks; then only one gets requests.
        for reports in &replicas {
            after(reports, 99, false, (64, 48));
        }
        assert_eq!((settle(&mut known), known), (1, true));
        after(&replicas[0], 99, true, (48, 64));
        assert_eq!((settle(&mut known), known), (1, false));
        after(&replicas[1], 99, false, (64, 48));
        assert_eq!((settle(&mut known), known), (1, true));
    }

    #[test]
    fn occasional_misses_do_not_indicate_an_emptied_cache() {
        let reports = CacheReports::default();
        for round in 0..100 {
            let cached = if round % 5 < 3 { 0 } else { 500 };
            reports.found(life(1), of_text(round, 512, cached), None);
            assert!(!reports.is_emptied(life(1)), "round {round}");
        }
        (0..20).for_each(|user| reports.found(life(1), of_text(user, 100, 0), None));
        assert!(!reports.is_emptied(life(1)), "too short to tell");
    }
}
