//! The page `/metrics` with the names of vLLM or SGLang: metrics that a router reads, and counters
//! for tests.

use std::fmt::Write as _;

use super::lora::LoraSeries;
use super::model::{EngineShape, EngineStats};

/// Data that the metrics page shows.
#[derive(Debug, Clone, Copy)]
pub(super) struct EngineMetricsPage<'a> {
    /// Served model name.
    pub model: &'a str,
    /// Sizes of the engine, for the metrics about cache capacity.
    pub shape: EngineShape,
    /// Start of the engine, in Unix seconds.
    pub started_s: f64,
    /// Counters and gauges of each rank.
    pub stats: &'a [EngineStats],
    /// Number of adapter slots, and the series of adapters in use; `None` without adapters.
    pub lora: Option<(u32, &'a LoraSeries)>,
}

impl EngineMetricsPage<'_> {
    /// Renders the page with vLLM's names, in Prometheus' text format.
    #[must_use]
    pub(super) fn render(&self) -> String {
        let mut out = String::with_capacity(4096);
        self.gauge(
            &mut out,
            ("num_requests_running", "Requests in the batch."),
            |stats| f64::from(stats.running),
        );
        self.gauge(
            &mut out,
            ("num_requests_waiting", "Requests in the queue."),
            |stats| f64::from(stats.waiting),
        );
        self.gauge(
            &mut out,
            ("kv_cache_usage_perc", "Used KV blocks, 1 is all."),
            |stats| f64::from(stats.used_blocks) / f64::from(stats.usable_blocks.max(1)),
        );
        self.counters(&mut out);
        self.successes(&mut out);
        self.cache_config(&mut out);
        if let Some((max, series)) = self.lora {
            series.render(max, &mut out);
        }
        let _ = writeln!(
            out,
            "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n\
             # TYPE process_start_time_seconds gauge\n\
             process_start_time_seconds {:.3}",
            self.started_s
        );
        out
    }

    /// Renders the page with SGLang's names, for an engine in disaggregation mode `mode`.
    #[must_use]
    pub(super) fn render_sglang(&self, mode: &str) -> String {
        let mut out = String::with_capacity(2048);
        let tokens = |blocks: u32| u64::from(blocks) * u64::from(self.shape.block_size);
        for (rank, stats) in self.stats.iter().enumerate() {
            let model = self
                .labels(rank)
                .split_off(format!("engine=\"{rank}\",").len());
            let labels = format!("dp_rank=\"{rank}\",engine_type=\"{mode}\",{model}");
            let usage = f64::from(stats.used_blocks) / f64::from(stats.usable_blocks.max(1));
            for (name, value) in [
                ("num_running_reqs", f64::from(stats.running)),
                ("num_queue_reqs", f64::from(stats.waiting)),
                ("token_usage", usage),
                ("max_total_num_tokens", tokens(stats.usable_blocks) as f64),
                ("page_size", f64::from(self.shape.block_size)),
                ("prompt_tokens_total", stats.prompt_tokens as f64),
                ("generation_tokens_total", stats.generation_tokens as f64),
            ] {
                let _ = writeln!(out, "sglang:{name}{{{labels}}} {value}");
            }
        }
        let _ = writeln!(out, "process_start_time_seconds {:.3}", self.started_s);
        out
    }

    fn counters(&self, out: &mut String) {
        type Counter = fn(&EngineStats) -> u64;
        let counters: [(&str, &str, Counter); 5] = [
            (
                "prefix_cache_queries",
                "Tokens looked up in the prefix cache.",
                |stats| stats.cache_queries,
            ),
            (
                "prefix_cache_hits",
                "Tokens found in the prefix cache.",
                |stats| stats.cache_hits,
            ),
            ("num_preemptions", "Preemptions.", |stats| stats.preemptions),
            ("prompt_tokens", "Prompt tokens.", |stats| {
                stats.prompt_tokens
            }),
            ("generation_tokens", "Tokens made.", |stats| {
                stats.generation_tokens
            }),
        ];
        for (name, help, value) in counters {
            self.head(out, name, help, "counter");
            for (rank, stats) in self.stats.iter().enumerate() {
                let labels = self.labels(rank);
                let _ = writeln!(out, "vllm:{name}_total{{{labels}}} {}", value(stats));
            }
        }
    }

    fn successes(&self, out: &mut String) {
        self.head(
            out,
            "request_success",
            "Ended requests by reason.",
            "counter",
        );
        for (rank, stats) in self.stats.iter().enumerate() {
            for (reason, value) in [
                ("stop", stats.finished_stop),
                ("length", stats.finished_length),
                ("abort", stats.aborted),
            ] {
                let labels = self.labels(rank);
                let _ = writeln!(
                    out,
                    "vllm:request_success_total{{{labels},finished_reason=\"{reason}\"}} {value}"
                );
            }
        }
    }

    fn cache_config(&self, out: &mut String) {
        let EngineShape {
            block_size,
            num_gpu_blocks,
            ..
        } = self.shape;
        self.head(
            out,
            "cache_config_info",
            "Information of the LLMEngine CacheConfig",
            "gauge",
        );
        for rank in 0..self.stats.len() {
            let _ = writeln!(
                out,
                "vllm:cache_config_info{{block_size=\"{block_size}\",cache_dtype=\"auto\",\
                 enable_prefix_caching=\"True\",engine=\"{rank}\",num_gpu_blocks=\"{num_gpu_blocks}\",\
                 prefix_caching_hash_algo=\"xxh3\"}} 1.0"
            );
        }
    }

    fn gauge(
        &self,
        out: &mut String,
        (name, help): (&str, &str),
        value: impl Fn(&EngineStats) -> f64,
    ) {
        self.head(out, name, help, "gauge");
        for (rank, stats) in self.stats.iter().enumerate() {
            let labels = self.labels(rank);
            let _ = writeln!(out, "vllm:{name}{{{labels}}} {}", value(stats));
        }
    }

    fn head(&self, out: &mut String, name: &str, help: &str, kind: &str) {
        let suffix = if kind == "counter" { "_total" } else { "" };
        let _ = writeln!(
            out,
            "# HELP vllm:{name}{suffix} {help}\n# TYPE vllm:{name}{suffix} {kind}"
        );
    }

    fn labels(&self, rank: usize) -> String {
        let model = self
            .model
            .replace('\\', "\\\\")
            .replace('"', "\\\"")
            .replace('\n', "\\n");
        format!("engine=\"{rank}\",model_name=\"{model}\"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_metrics_page_has_the_series_a_router_reads() {
        let shape = EngineShape {
            num_gpu_blocks: 100,
            block_size: 32,
            max_num_seqs: 1,
            max_num_batched_tokens: 1,
            prefill_tokens_per_s: 1,
            decode: Duration::ZERO,
        };
        let stats = EngineStats {
            running: 3,
            waiting: 2,
            used_blocks: 25,
            usable_blocks: 100,
            cache_queries: 640,
            cache_hits: 320,
            ..EngineStats::default()
        };
        let page = EngineMetricsPage {
            model: "a\"b",
            shape,
            started_s: 12.5,
            stats: &[stats, EngineStats::default()],
            lora: None,
        }
        .render();
        for line in [
            "vllm:num_requests_running{engine=\"0\",model_name=\"a\\\"b\"} 3",
            "vllm:num_requests_waiting{engine=\"0\",model_name=\"a\\\"b\"} 2",
            "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"a\\\"b\"} 0.25",
            "vllm:prefix_cache_queries_total{engine=\"0\",model_name=\"a\\\"b\"} 640",
            "vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"a\\\"b\"} 320",
            "vllm:num_requests_running{engine=\"1\",model_name=\"a\\\"b\"} 0",
            "process_start_time_seconds 12.500",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} in\n{page}");
        }
        assert!(page.contains("block_size=\"32\""));
        assert!(page.contains("num_gpu_blocks=\"100\""));
    }
}
