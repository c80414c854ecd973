//! Engines that answer probes but do no work: asleep, or with a core that hangs.
//!
//! An engine's server answers health probes even if the process that computes is stuck or has given
//! up its memory (vLLM's sleep mode). Its figures tell: requests run, and nothing moves. Such an
//! engine gets no requests until its figures move again, or it wakes up.

use std::time::Duration;

use serde::Deserialize;
use tokio::time::Instant;

use super::activity::EngineActivity;
use super::client::ProbeClient;
use super::engine::{EngineKind, EngineMetrics};

/// Maximum length of a response to `GET /is_sleeping`, in bytes.
const SLEEP_BYTES_MAX: usize = 1 << 12;

/// Watch on one engine.
#[derive(Debug, Default)]
pub(super) struct StandstillWatch {
    /// Figures of running requests, and the time since which they stand still; `None` if no request
    /// runs.
    since: Option<(EngineActivity, Instant)>,
    sleep_page: SleepPage,
}

/// Whether the engine serves `/is_sleeping`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum SleepPage {
    #[default]
    Unknown,
    Served,
    Missing,
}

impl StandstillWatch {
    /// Forgets what is known, because another process may run at the address.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// Asks the engine whether it sleeps, unless its metrics say so.
    pub(super) async fn is_asleep(
        &mut self,
        client: &mut ProbeClient,
        kind: Option<EngineKind>,
        metrics: &EngineMetrics,
    ) -> bool {
        if let Some(is_asleep) = metrics.is_asleep {
            return is_asleep;
        }
        let is_other = kind.is_some_and(|kind| kind != EngineKind::Vllm);
        if is_other || self.sleep_page == SleepPage::Missing {
            return false;
        }
        #[derive(Deserialize)]
        struct Told {
            is_sleeping: bool,
        }
        let Ok(answer) = client.get("/is_sleeping", SLEEP_BYTES_MAX).await else {
            return false;
        };
        let told: Option<Told> = serde_json::from_slice(&answer.body).ok();
        let told = told.filter(|_| answer.status.is_success());
        self.sleep_page = match (&told, self.sleep_page) {
            (Some(_), _) | (None, SleepPage::Served) => SleepPage::Served,
            (None, SleepPage::Unknown | SleepPage::Missing) => SleepPage::Missing,
        };
        told.is_some_and(|told| told.is_sleeping)
    }

    /// Whether the engine's figures have stood still for `limit` while requests ran. `silence` is
    /// the time since its last output for this replica; `None` if there was none.
    pub(super) fn is_hung(
        &mut self,
        metrics: &EngineMetrics,
        silence: Option<Duration>,
        limit: Duration,
        now: Instant,
    ) -> bool {
        let is_running = metrics.running.is_some_and(|running| running > 0);
        let Some(activity) = metrics.activity.filter(|_| is_running) else {
            self.since = None;
            return false;
        };
        let known = self.since.filter(|(known, _)| *known == activity);
        let (_, since) = *self.since.insert(known.unwrap_or((activity, now)));
        let is_silent = silence.is_none_or(|silence| silence >= limit);
        is_silent && now.saturating_duration_since(since) >= limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(15);

    fn metrics(running: u32, made: u32, usage: &str) -> EngineMetrics {
        let page = format!(
            "vllm:num_requests_running {running}\nvllm:kv_cache_usage_perc {usage}\n\
             vllm:generation_tokens_total {made}\n"
        );
        EngineMetrics::read(page.as_bytes(), None).unwrap()
    }

    #[test]
    fn running_requests_without_progress_show_a_hung_engine() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut watch = StandstillWatch::default();
        let mut looks =
            |metrics: &EngineMetrics, seconds| watch.is_hung(metrics, None, LIMIT, at(seconds));
        assert!(!looks(&metrics(1, 5, "0.1"), 0));
        assert!(!looks(&metrics(1, 5, "0.1"), 14));
        assert!(looks(&metrics(1, 5, "0.1"), 15));
        assert!(!looks(&metrics(1, 6, "0.1"), 16), "it made a token");
        assert!(
            !looks(&metrics(1, 6, "0.2"), 30),
            "it computes a long prompt"
        );
        assert!(!looks(&metrics(0, 6, "0.2"), 60), "nothing runs");
        assert!(!looks(&metrics(1, 6, "0.2"), 70));
        assert!(looks(&metrics(1, 6, "0.2"), 90));
        let mut uncounted = metrics(1, 6, "0.2");
        uncounted.activity = None;
        assert!(!looks(&uncounted, 120), "its tokens are unknown");
    }

    #[test]
    fn an_engine_with_output_does_not_hang() {
        let start = Instant::now();
        let mut watch = StandstillWatch::default();
        let stands = metrics(1, 5, "0.1");
        for (seconds, silence, expected) in
            [(0, None, false), (20, Some(3), false), (21, Some(15), true)]
        {
            let (now, silence) = (
                start + Duration::from_secs(seconds),
                silence.map(Duration::from_secs),
            );
            assert_eq!(watch.is_hung(&stands, silence, LIMIT, now), expected);
        }
    }

    #[test]
    fn metrics_tell_that_an_engine_sleeps() {
        let read = |awake: u8| {
            let page = format!(
                "vllm:engine_sleep_state{{sleep_state=\"awake\"}} {awake}\n\
                 vllm:engine_sleep_state{{sleep_state=\"discard_all\"}} 1\n"
            );
            EngineMetrics::read(page.as_bytes(), None)
                .unwrap()
                .is_asleep
        };
        assert_eq!((read(0), read(1)), (Some(true), Some(false)));
    }
}
