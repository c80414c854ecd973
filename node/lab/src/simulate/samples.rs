//! What a replica measures of the engines, for limits that adapt and prices that are learnt: the
//! sums of a [`ServiceSample`], by backend, told to the log once a second as production does.

use std::collections::BTreeMap;

use state::ids::BackendRef;
use state::service::ServiceSample;

use super::events::Micros;
use super::plan::BLOCK_TOKENS;

/// Sums by backend since they were last told.
#[derive(Debug, Default)]
pub struct SimSamples(BTreeMap<BackendRef, ServiceSample>);

/// What was known of a backend when a request was dispatched to it.
#[derive(Debug, Clone, Copy)]
pub struct DispatchConditions {
    /// When.
    pub at: Micros,
    /// Requests that ran there, all replicas.
    pub running: u32,
    /// Uncached tokens before its first: its own and what was pending.
    pub prefill_tokens: u64,
}

/// A request that ended.
#[derive(Debug, Clone, Copy)]
pub struct EndedSample {
    /// When its first token came, and its last.
    pub tokens_between: (Micros, Micros),
    /// Prompt tokens.
    pub prompt: u32,
    /// Of these, found in the cache.
    pub cached: u32,
    /// Of these, predicted to be.
    pub predicted: u32,
    /// Output tokens.
    pub output: u32,
    /// Requests that run there now, all replicas.
    pub running: u32,
    /// Whether that is as many as it is given.
    pub is_at_limit: bool,
}

impl SimSamples {
    fn of(&mut self, backend: BackendRef) -> &mut ServiceSample {
        self.0
            .entry(backend)
            .or_insert_with(|| ServiceSample::empty(backend))
    }

    /// A first token came.
    pub fn first_token(&mut self, backend: BackendRef, before: &DispatchConditions, now: Micros) {
        let sample = self.of(backend);
        sample.first_tokens += 1;
        sample.first_token_us += now - before.at;
        sample.prefill_tokens += before.prefill_tokens;
        sample.first_running += u64::from(before.running);
    }

    /// A request ended.
    pub fn ended(&mut self, backend: BackendRef, ended: &EndedSample) {
        let sample = self.of(backend);
        let added = u64::from(ended.prompt - ended.cached.min(ended.prompt) + ended.output);
        sample.ended += 1;
        sample.prompt_tokens += u64::from(ended.prompt);
        sample.output_tokens += u64::from(ended.output);
        sample.added_tokens += added;
        sample.added_squared += added * added;
        sample.block_tokens = BLOCK_TOKENS;
        let gaps = u64::from(ended.output.saturating_sub(1));
        let (first, last) = ended.tokens_between;
        sample.gaps += gaps;
        sample.gap_us += if gaps > 0 { last - first } else { 0 };
        sample.gap_running += gaps * u64::from(ended.running);
        sample.gaps_at_limit += if ended.is_at_limit { gaps } else { 0 };
        sample.predicted += 1;
        sample.predicted_prompt_tokens += u64::from(ended.prompt);
        sample.predicted_cached_tokens += u64::from(ended.predicted.min(ended.prompt));
        sample.cached_tokens += u64::from(ended.cached.min(ended.prompt));
    }

    /// Takes out what is to be told.
    pub fn take(&mut self) -> impl Iterator<Item = ServiceSample> + use<> {
        std::mem::take(&mut self.0).into_values()
    }
}
