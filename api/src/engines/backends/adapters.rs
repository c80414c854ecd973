//! LoRA adapters in an engine's memory, from `vllm:lora_requests_info`.
//!
//! At each step vLLM sets a series of this metric to the current time, with the adapters of the
//! requests as labels. An adapter without requests is not named, but stays in memory until another
//! replaces it; and the page keeps showing the series of earlier steps. So the adapters of the
//! newest series are in memory, followed by those of earlier ones, latest first, as long as they
//! fit. Every replica concludes the same from the same page.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use state::command::NAME_BYTES_MAX;

use super::prometheus_text::Sample;

/// Maximum number of adapters that are read from one metrics page.
const ADAPTERS_MAX: usize = 1024;

/// LoRA adapters of an engine, as reported.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, JsonSchema)]
pub struct LoraAdapters {
    /// Number of adapters that fit in memory: `max_lora`.
    pub max: u32,
    /// Adapters in memory, sorted.
    pub resident: Vec<String>,
}

/// Adapters of an engine, as far as routing decisions need them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct EngineAdapters {
    /// Number of adapters that fit in memory.
    pub max: u32,
    /// Adapters in memory, or to be loaded for a request that was sent; sorted.
    pub resident: Vec<String>,
    /// Adapters that can be loaded: models with a parent in the engine's model list; sorted.
    pub listed: Vec<String>,
}

/// The relation of an engine to the adapter that a request names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdapterPlace {
    /// The adapter is in memory.
    Resident,
    /// The adapter would be loaded alongside the others.
    Room,
    /// The adapter would replace another, the engine reports none, or the model is no adapter.
    Other,
}

impl EngineAdapters {
    /// Returns whether `model` is an adapter in memory, or one that would fit.
    #[must_use]
    pub fn place(&self, model: &str) -> AdapterPlace {
        let is_in = |names: &[String]| names.binary_search_by(|name| (**name).cmp(model)).is_ok();
        if is_in(&self.resident) {
            AdapterPlace::Resident
        } else if is_in(&self.listed) && self.resident.len() < self.max as usize {
            AdapterPlace::Room
        } else {
            AdapterPlace::Other
        }
    }
}

/// Collects the series of `vllm:lora_requests_info` on a page.
#[derive(Debug, Default)]
pub(super) struct LoraSeries {
    /// Time and `max_lora` of the newest series; `None` before the first.
    newest: Option<(f64, u32)>,
    /// For each adapter, the time of the newest series that names it.
    named: BTreeMap<String, f64>,
}

impl LoraSeries {
    /// Name of the metric.
    pub(super) const NAME: &str = "vllm:lora_requests_info";

    pub(super) fn add(&mut self, sample: &Sample<'_>) {
        let at = sample.value;
        let max = sample.labels.get("max_lora");
        let Some(max) = max.and_then(|max| max.trim().parse().ok()) else {
            return;
        };
        if !at.is_finite() {
            return;
        }
        if self.newest.is_none_or(|(newest, _)| newest <= at) {
            self.newest = Some((at, max));
        }
        for label in ["running_lora_adapters", "waiting_lora_adapters"] {
            let names = sample.labels.get(label).unwrap_or_default();
            for name in names.split(',').map(str::trim) {
                self.name(name, at);
            }
        }
    }

    fn name(&mut self, name: &str, at: f64) {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return;
        }
        if let Some(known) = self.named.get_mut(name) {
            *known = known.max(at);
        } else if self.named.len() < ADAPTERS_MAX {
            self.named.insert(name.to_owned(), at);
        }
    }

    /// Returns the adapters in memory according to the page; `None` if the page has no such series.
    pub(super) fn adapters(self) -> Option<LoraAdapters> {
        let (newest, max) = self.newest?;
        let mut named: Vec<(String, f64)> = self.named.into_iter().collect();
        // Equal times keep the order of names.
        named.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        let under_way = named.iter().take_while(|(_, at)| *at >= newest).count();
        named.truncate(under_way.max(max as usize));
        let mut resident: Vec<String> = named.into_iter().map(|(name, _)| name).collect();
        resident.sort_unstable();
        Some(LoraAdapters { max, resident })
    }
}

#[cfg(test)]
mod tests {
    use super::super::engine::EngineMetrics;
    use super::*;

    fn read(series: &[(&str, &str, f64)]) -> Option<LoraAdapters> {
        let line = |(running, waiting, at): &(&str, &str, f64)| {
            format!(
                "vllm:lora_requests_info{{max_lora=\"2\",running_lora_adapters=\"{running}\",\
                 waiting_lora_adapters=\"{waiting}\"}} {at:e}\n"
            )
        };
        let page: String = series.iter().map(line).collect();
        EngineMetrics::read(page.as_bytes(), None).unwrap().adapters
    }

    fn resident(series: &[(&str, &str, f64)]) -> Vec<String> {
        read(series).unwrap().resident
    }

    #[test]
    fn running_and_waiting_adapters_are_resident() {
        assert_eq!(read(&[]), None);
        assert_eq!(resident(&[("", "", 1.0)]), [""; 0]);
        assert_eq!(resident(&[("b, a", "", 5.0)]), ["a", "b"]);
        assert_eq!(read(&[("a", "b,c", 5.0)]).unwrap().max, 2);
        assert_eq!(resident(&[("a", "b,c", 5.0)]), ["a", "b", "c"]);
    }

    #[test]
    fn recently_used_idle_adapters_stay_while_they_fit() {
        let idle = [("a", "", 10.0), ("b", "", 30.0), ("c", "", 20.0)];
        assert_eq!(resident(&idle), ["b", "c"]);
        let again = [idle.as_slice(), &[("a", "", 40.0)]].concat();
        assert_eq!(resident(&again), ["a", "b"]);
        let nothing_runs = [again.as_slice(), &[("", "", 50.0)]].concat();
        assert_eq!(resident(&nothing_runs), ["a", "b"]);
    }

    #[test]
    fn implausible_adapter_series_are_ignored() {
        let page = b"vllm:lora_requests_info{max_lora=\"x\",running_lora_adapters=\"a\"} 1\n\
            vllm:lora_requests_info{running_lora_adapters=\"a\"} 1\n\
            vllm:lora_requests_info{max_lora=\"1\",running_lora_adapters=\"a\"} NaN\n";
        assert_eq!(EngineMetrics::read(page, None).unwrap().adapters, None);
        let many: String = (0..5000).map(|number| format!("a{number},")).collect();
        assert_eq!(resident(&[(&many, "", 1.0)]).len(), ADAPTERS_MAX);
    }

    #[test]
    fn an_adapter_has_a_place_where_it_is_loaded_or_fits() {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let engine = |max| EngineAdapters {
            max,
            resident: names(&["a"]),
            listed: names(&["a", "b"]),
        };
        assert_eq!(engine(1).place("a"), AdapterPlace::Resident);
        assert_eq!(engine(1).place("b"), AdapterPlace::Other);
        assert_eq!(engine(2).place("b"), AdapterPlace::Room);
        assert_eq!(engine(2).place("base"), AdapterPlace::Other);
    }
}
