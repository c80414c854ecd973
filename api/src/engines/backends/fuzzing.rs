//! Fuzz targets for data that engines report about themselves; see [`crate::fuzzing`].

use super::engine::{EngineMetrics, MODELS_PER_ENGINE_MAX, read_models};
use super::prometheus_text;

/// Reads a metrics page and checks the bounds of its figures.
pub fn engine_metrics(bytes: &[u8]) {
    let mut labels = 0;
    let read = prometheus_text::read(bytes, |sample| {
        labels += sample.labels.iter().count();
        // Every listed label can be looked up.
        for (name, _) in sample.labels.iter() {
            assert!(sample.labels.get(name).is_some(), "{name}");
        }
    });
    assert!(labels <= bytes.len());
    let metrics = EngineMetrics::read(bytes, None);
    assert_eq!(metrics.is_ok(), read.is_ok());
    if let Ok(metrics) = metrics {
        assert!(metrics.kv_usage_permille.is_none_or(|it| it <= 1000));
        let adapters = metrics.adapters.unwrap_or_default();
        assert!(adapters.resident.is_sorted());
    }
}

/// Reads a model list and checks its order and bounds.
pub fn engine_models(bytes: &[u8]) {
    if let Ok(models) = read_models(bytes) {
        assert!(models.len() <= MODELS_PER_ENGINE_MAX);
        assert!(models.is_sorted_by_key(|model| &model.id));
    }
}

/// Returns seed inputs: metrics pages in the format of released engines.
#[must_use]
pub fn engine_metrics_seeds() -> Vec<Vec<u8>> {
    let pages = [
        concat!(
            "# HELP vllm:num_requests_running Number of requests\n",
            "# TYPE vllm:num_requests_running gauge\n",
            "vllm:num_requests_running{engine=\"0\",model_name=\"a\"} 3.0\n",
            "vllm:num_requests_waiting{engine=\"0\",model_name=\"a\\n\\\"\\\\b\"} 1e1\n",
            "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"a\"} 0.25\n",
            "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"2048\"} 1.0\n",
            "vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"a,b\",",
            "waiting_lora_adapters=\"c\"} 1.75e+09\n",
            "process_start_time_seconds 1.75e+09\n",
        ),
        concat!(
            "sglang:num_running_reqs{model_name=\"a\",tp_rank=\"0\"} 2.0 1750000000000\n",
            "sglang:num_queue_reqs{model_name=\"a\"} 0 # {trace=\"x\"} 1.0\n",
            "sglang:token_usage{model_name=\"a\"} NaN\n",
            "sglang:max_total_num_tokens +Inf\n",
        ),
    ];
    pages.map(|page| page.as_bytes().to_vec()).to_vec()
}

/// Returns seed inputs: model lists in the format of released engines.
#[must_use]
pub fn engine_models_seeds() -> Vec<Vec<u8>> {
    let list = br#"{"object":"list","data":[{"id":"b","object":"model","created":1750000000,"root":"/m"},{"id":"a","parent":"b"}]}"#;
    vec![list.to_vec(), br#"{"data":[]}"#.to_vec()]
}
