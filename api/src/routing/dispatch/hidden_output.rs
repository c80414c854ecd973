//! Estimates the undelivered output of a response, so that it can be charged.
//!
//! Without `stream`, a response arrives only at its end. If the client leaves or the engine fails
//! earlier, tokens were generated nevertheless. The estimate is the time since the dispatch, less
//! the time to first token, divided by the time between two tokens, both as learned for the backend
//! ([`state::service::LearntPrices`]). It is capped at the request's own bound and is only as
//! accurate as these prices.

use std::time::Duration;

use state::service::LearntPrices;

use crate::routing::Load;

/// Shortest believable time between two tokens of one request.
const GAP_MIN: Duration = Duration::from_micros(500);
/// Time between two tokens if none was measured. Learning starts from this value.
const GAP_UNKNOWN: Duration = Duration::from_millis(10);
/// Nanoseconds by which each prompt token delays the first token if none was measured.
const PREFILL_NS_UNKNOWN: u64 = 100_000;
/// Nanoseconds by which each running request delays the first token if none was measured.
const DECODE_NS_UNKNOWN: u64 = 1_000_000;

/// Properties of a response whose output is not visible while it is generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HiddenOutput {
    /// Number of choices generated concurrently: `n` for each prompt of a batch. 0 counts as 1.
    pub choices: u32,
    /// Maximum number of output tokens of each choice, from the request; `None` if it sets none.
    pub tokens_max: Option<u32>,
    /// Whether the response is complete when its first byte arrives.
    pub is_whole_at_once: bool,
}

impl HiddenOutput {
    /// Returns the estimated number of output tokens generated within `elapsed` of the dispatch.
    pub(super) fn tokens(&self, elapsed: Duration, pace: &BackendPace) -> u64 {
        let Some(making) = elapsed.checked_sub(pace.first_token) else {
            return 0;
        };
        let gaps = making.as_nanos() / pace.gap.max(GAP_MIN).as_nanos();
        let tokens = u64::try_from(gaps).unwrap_or(u64::MAX).saturating_add(1);
        let tokens = tokens.min(self.tokens_max.map_or(u64::MAX, u64::from));
        tokens.saturating_mul(self.choices.max(1).into())
    }
}

/// Estimated speed of a backend for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BackendPace {
    /// Time from the dispatch to the first token.
    pub(in crate::routing) first_token: Duration,
    /// Time between two tokens of the request.
    pub(super) gap: Duration,
}

impl BackendPace {
    /// Returns the pace of a request with `uncached_tokens` that found the load `before` at the
    /// backend and runs there among `running` requests, itself included. Without `learnt` prices,
    /// fixed estimates apply.
    pub(in crate::routing) fn of(
        learnt: Option<&LearntPrices>,
        before: Load,
        uncached_tokens: u64,
        running: u32,
    ) -> Self {
        let tokens = uncached_tokens.saturating_add(before.pending_prefill_tokens);
        let requests = u64::from(before.running);
        let first_token = |base_us: u32, per_token: u64, per_request: u64| {
            let work = tokens
                .saturating_mul(per_token)
                .saturating_add(requests.saturating_mul(per_request));
            Duration::from_micros(base_us.into()).saturating_add(Duration::from_nanos(work))
        };
        match learnt {
            None => Self {
                first_token: first_token(0, PREFILL_NS_UNKNOWN, DECODE_NS_UNKNOWN),
                gap: GAP_UNKNOWN,
            },
            Some(learnt) => Self {
                first_token: first_token(
                    learnt.first_token_base_us,
                    learnt.prices.prefill_ns_per_token.into(),
                    learnt.prices.decode_ns_per_request.into(),
                ),
                gap: match learnt.gaps {
                    0 => GAP_UNKNOWN,
                    _ => {
                        let shared =
                            u64::from(running).saturating_mul(learnt.gap_ns_per_request.into());
                        Duration::from_micros(learnt.gap_base_us.into())
                            .saturating_add(Duration::from_nanos(shared))
                    }
                },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use state::policy::{LoadPrices, Prices};

    use super::*;

    const PACE: BackendPace = BackendPace {
        first_token: Duration::from_millis(200),
        gap: Duration::from_millis(20),
    };

    fn hidden(choices: u32, tokens_max: Option<u32>) -> HiddenOutput {
        HiddenOutput {
            choices,
            tokens_max,
            is_whole_at_once: true,
        }
    }

    #[test]
    fn hidden_output_is_estimated_from_elapsed_time() {
        let made = |ms, hidden: HiddenOutput| hidden.tokens(Duration::from_millis(ms), &PACE);
        assert_eq!(made(0, hidden(1, None)), 0);
        assert_eq!(made(199, hidden(1, None)), 0, "it still reads the prompt");
        assert_eq!(made(200, hidden(1, None)), 1);
        assert_eq!(made(3_200, hidden(1, None)), 151);
        assert_eq!(
            made(3_200, hidden(1, Some(100))),
            100,
            "the request's bound"
        );
        assert_eq!(made(3_200, hidden(4, Some(100))), 400, "of each choice");
        assert_eq!(made(3_200, hidden(0, None)), 151, "there is one at least");
    }

    #[test]
    fn absurd_prices_give_bounded_output() {
        let pace = BackendPace {
            first_token: Duration::ZERO,
            gap: Duration::ZERO,
        };
        let second = Duration::from_secs(1);
        assert_eq!(hidden(1, None).tokens(second, &pace), 2001);
        assert_eq!(
            hidden(u32::MAX, None).tokens(Duration::MAX, &pace),
            u64::MAX
        );
    }

    #[test]
    fn the_pace_is_learned_at_the_given_load() {
        let learnt = LearntPrices {
            prices: Prices {
                prefill_ns_per_token: 50_000,
                decode_ns_per_request: 2_000_000,
                prefill_range_ns: None,
                decode_range_ns: None,
                load: LoadPrices::ASSUMED,
            },
            first_token_base_us: 3_000,
            gap_base_us: 8_000,
            gap_ns_per_request: 500_000,
            first_tokens: 100,
            gaps: 100,
        };
        let before = Load {
            running: 4,
            waiting: 1,
            pending_prefill_tokens: 60,
        };
        let pace = BackendPace::of(Some(&learnt), before, 40, 6);
        assert_eq!(pace.first_token, Duration::from_millis(3 + 5 + 8));
        assert_eq!(pace.gap, Duration::from_millis(8 + 3));
        let pace = BackendPace::of(None, before, 40, 6);
        assert_eq!(pace.first_token, Duration::from_millis(10 + 4));
        assert_eq!(pace.gap, GAP_UNKNOWN);
        let unmeasured = LearntPrices { gaps: 0, ..learnt };
        assert_eq!(
            BackendPace::of(Some(&unmeasured), before, 40, 6).gap,
            GAP_UNKNOWN
        );
    }
}
