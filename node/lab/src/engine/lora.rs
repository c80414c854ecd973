//! LoRA adapters: slots in memory, loading times, and metrics.
//!
//! As in vLLM, a batch has at most `--max-loras` adapters. A request whose adapter has no slot
//! waits while others pass. An adapter stays in memory until another one needs its slot, least
//! recently used first. Loading an adapter delays the whole step.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of `vllm:lora_requests_info` series on the metrics page; the latest are kept.
const SERIES_MAX: usize = 1024;

/// Options of an engine for LoRA adapters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoraOptions {
    /// Names of the available adapters. If empty, the engine serves none.
    pub names: Vec<String>,
    /// Maximum number of adapters in memory.
    pub max_loras: u32,
    /// Time to load an adapter.
    pub load: Duration,
}

impl Default for LoraOptions {
    fn default() -> Self {
        Self {
            names: Vec::new(),
            max_loras: 1,
            load: Duration::from_millis(200),
        }
    }
}

/// Memory slots of an engine for adapters.
#[derive(Debug)]
pub(super) struct LoraSlots {
    max: usize,
    load: Duration,
    /// Adapters in memory, ordered by last use, oldest first.
    resident: Vec<Arc<str>>,
}

impl LoraSlots {
    pub(super) fn new(max: u32, load: Duration) -> Self {
        Self {
            max: max as usize,
            load,
            resident: Vec::new(),
        }
    }

    /// Admits a request for `adapter` to a batch with the adapters `running`. Returns the load
    /// time, which is zero if the adapter is in memory, or `None` if the batch uses all slots.
    pub(super) fn admit<'a>(
        &mut self,
        adapter: &Arc<str>,
        running: &(impl Iterator<Item = &'a Arc<str>> + Clone),
    ) -> Option<Duration> {
        if let Some(at) = self.resident.iter().position(|it| it == adapter) {
            let known = self.resident.remove(at);
            self.resident.push(known);
            return Some(Duration::ZERO);
        }
        if self.resident.len() >= self.max {
            let is_idle = |it: &Arc<str>| !running.clone().any(|running| running == it);
            let idle = self.resident.iter().position(is_idle)?;
            self.resident.remove(idle);
        }
        self.resident.push(Arc::clone(adapter));
        Some(self.load)
    }
}

/// The series of `vllm:lora_requests_info`. Maps each combination of running and waiting adapters
/// to the last time that it occurred, in Unix seconds.
#[derive(Debug, Clone, Default)]
pub(super) struct LoraSeries(BTreeMap<(String, String), f64>);

impl LoraSeries {
    /// Records the adapters of running and of waiting requests at the time `now_s`.
    pub(super) fn note<'a>(
        &mut self,
        running: impl Iterator<Item = &'a Arc<str>>,
        waiting: impl Iterator<Item = &'a Arc<str>>,
        now_s: f64,
    ) {
        self.0.insert((list(running), list(waiting)), now_s);
        if self.0.len() > SERIES_MAX {
            let oldest = self.0.iter().min_by(|one, other| one.1.total_cmp(other.1));
            if let Some(oldest) = oldest.map(|(labels, _)| labels.clone()) {
                self.0.remove(&oldest);
            }
        }
    }

    /// Writes the series to `out`, for an engine with `max` adapter slots.
    pub(super) fn render(&self, max: u32, out: &mut String) {
        out.push_str(
            "# HELP vllm:lora_requests_info Running stats on lora requests.\n\
             # TYPE vllm:lora_requests_info gauge\n",
        );
        for ((running, waiting), at) in &self.0 {
            let _ = writeln!(
                out,
                "vllm:lora_requests_info{{max_lora=\"{max}\",\
                 running_lora_adapters=\"{running}\",waiting_lora_adapters=\"{waiting}\"}} {at:e}"
            );
        }
    }
}

/// Joins the distinct adapter names, sorted and separated by commas.
fn list<'a>(adapters: impl Iterator<Item = &'a Arc<str>>) -> String {
    let mut names: Vec<&str> = adapters.map(|adapter| &**adapter).collect();
    names.sort_unstable();
    names.dedup();
    names.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_idle_adapter_is_unloaded() {
        const LOAD: Duration = Duration::from_millis(10);
        let names: Vec<Arc<str>> = ["a", "b", "c", "d"].map(Arc::from).to_vec();
        let [a, b, c, d] = [&names[0], &names[1], &names[2], &names[3]];
        let mut slots = LoraSlots::new(2, LOAD);
        let none: [&Arc<str>; 0] = [];
        assert_eq!(slots.admit(a, &none.into_iter()), Some(LOAD));
        assert_eq!(slots.admit(b, &none.into_iter()), Some(LOAD));
        assert_eq!(slots.admit(a, &none.into_iter()), Some(Duration::ZERO));
        assert_eq!(slots.admit(c, &none.into_iter()), Some(LOAD), "b goes");
        assert_eq!(slots.admit(a, &none.into_iter()), Some(Duration::ZERO));
        assert_eq!(slots.admit(b, &[c].into_iter()), Some(LOAD), "a goes");
        assert_eq!(slots.admit(d, &[c, b].into_iter()), None);
    }

    #[test]
    fn lora_metrics_keep_earlier_series() {
        let (a, b): (Arc<str>, Arc<str>) = (Arc::from("a"), Arc::from("b"));
        let mut series = LoraSeries::default();
        series.note([&b, &a, &b].into_iter(), [].into_iter(), 1.5);
        series.note([].into_iter(), [].into_iter(), 2.5);
        let mut page = String::new();
        series.render(3, &mut page);
        let expected = "vllm:lora_requests_info{max_lora=\"3\",running_lora_adapters=\"\",\
            waiting_lora_adapters=\"\"} 2.5e0\nvllm:lora_requests_info{max_lora=\"3\",\
            running_lora_adapters=\"a,b\",waiting_lora_adapters=\"\"} 1.5e0\n";
        assert!(page.ends_with(expected), "{page}");
        for step in 0..2 * SERIES_MAX {
            let name: Arc<str> = format!("n{step}").into();
            series.note([&name].into_iter(), [].into_iter(), 3.0 + step as f64);
        }
        assert_eq!(series.0.len(), SERIES_MAX);
    }
}
