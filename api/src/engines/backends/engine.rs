//! Reads an engine's metrics page and model list, in the dialects of vLLM, SGLang, llama.cpp and
//! Dynamo.
//!
//! Several samples of one name (one per data-parallel rank or model) are summed; for cache usage,
//! the fullest rank counts. For a single rank, only its own samples and those of the whole engine
//! are read. Figures that an engine does not export are `None`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use state::command::{LIST_BYTES_MAX, NAME_BYTES_MAX};

use super::activity::{ActivitySeries, EngineActivity};
use super::adapters::{LoraAdapters, LoraSeries};
pub use super::engine_kind::EngineKind;
use super::prometheus_text::{self, MetricsPageError, Sample};

/// Maximum number of models that one engine may list.
pub const MODELS_PER_ENGINE_MAX: usize = 1024;

/// Figures of an engine's metrics page; `null` if the page does not have them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, JsonSchema)]
pub struct EngineMetrics {
    /// Kind of engine, by the names of its metrics.
    pub kind: Option<EngineKind>,
    /// Running requests from all clients.
    pub running: Option<u32>,
    /// Requests in the engine's own queue.
    pub waiting: Option<u32>,
    /// KV cache usage, in thousandths; per cent in JSON.
    #[serde(
        rename = "kv_usage_percent",
        serialize_with = "state::readable::percent"
    )]
    #[schemars(with = "Option<f64>")]
    pub kv_usage_permille: Option<u32>,
    /// Capacity of the KV cache, in tokens.
    pub cache_tokens: Option<u64>,
    /// Tokens per block of the KV cache.
    pub block_size: Option<u32>,
    /// Prompt tokens looked up in the prefix cache since the engine started.
    pub prefix_queried_tokens: Option<u64>,
    /// Part of `prefix_queried_tokens` that was found.
    pub prefix_hit_tokens: Option<u64>,
    /// Prompt tokens processed since the engine started; falls only when it restarts.
    pub prompt_tokens: Option<u64>,
    /// Start time of the engine process, in Unix seconds.
    pub started_at_s: Option<u64>,
    /// LoRA adapters, if the engine serves any.
    pub adapters: Option<LoraAdapters>,
    /// Number of data-parallel ranks of the whole engine, if it reports every rank from 0 on.
    pub ranks: Option<u16>,
    /// Whether the engine has given up its memory until it is woken up.
    #[serde(skip)]
    pub is_asleep: Option<bool>,
    /// Whether the engine guesses tokens ahead, in whatever way.
    #[serde(skip)]
    pub(super) is_speculating: bool,
    /// Figures that change while the engine computes; `None` without a count of its tokens.
    #[serde(skip)]
    pub(super) activity: Option<EngineActivity>,
}

/// Set of the data-parallel ranks that a page reports, one bit per rank.
#[derive(Default)]
struct RankSet(u64);

impl RankSet {
    /// Adds the sample's rank if every rank reports the metric.
    fn add(&mut self, sample: &Sample<'_>) {
        let is_of_each = matches!(
            sample.name,
            "vllm:num_requests_running" | "sglang:num_running_reqs"
        );
        if let Some(rank) = rank_of(sample).filter(|_| is_of_each) {
            self.0 |= 1_u64.checked_shl(rank.into()).unwrap_or(0);
        }
    }

    /// Returns the number of ranks; `None` if one is missing, as when each rank has its own server.
    fn count(&self) -> Option<u16> {
        let has_all = self.0 > 0 && self.0.trailing_ones() == self.0.count_ones();
        has_all.then(|| u16::try_from(self.0.count_ones()).ok())?
    }
}

/// Returns a sample's data-parallel rank; `None` for the whole engine.
fn rank_of(sample: &Sample<'_>) -> Option<u16> {
    let label = EngineKind::of(sample.name)?.rank_label()?;
    sample.labels.get(label)?.parse().ok()
}

impl EngineMetrics {
    /// Reads the figures on a metrics page, of rank `rank` or of all ranks together.
    ///
    /// # Errors
    /// Returns a [`MetricsPageError`] if the page does not follow the text format.
    pub fn read(page: &[u8], rank: Option<u16>) -> Result<Self, MetricsPageError> {
        let (mut metrics, mut adapters) = (Self::default(), LoraSeries::default());
        let mut ranks = RankSet::default();
        let mut activity = ActivitySeries::default();
        prometheus_text::read(page, |sample| {
            ranks.add(&sample);
            let is_other = rank.is_some() && rank_of(&sample).is_some_and(|it| Some(it) != rank);
            match sample.name {
                _ if is_other => {}
                LoraSeries::NAME => adapters.add(&sample),
                name => {
                    metrics.add(&sample);
                    activity.add(name, sample.value);
                }
            }
        })?;
        metrics.activity = activity.activity();
        metrics.adapters = adapters.adapters();
        metrics.ranks = ranks.count();
        Ok(metrics)
    }

    fn add(&mut self, sample: &Sample<'_>) {
        let value = sample.value;
        self.kind = self.kind.or_else(|| EngineKind::of(sample.name));
        match sample.name {
            "vllm:num_requests_running"
            | "sglang:num_running_reqs"
            | "llamacpp:requests_processing"
            | "dynamo_frontend_inflight_requests" => add_u32(&mut self.running, value),
            "vllm:num_requests_waiting"
            | "sglang:num_queue_reqs"
            | "llamacpp:requests_deferred" => add_u32(&mut self.waiting, value),
            "vllm:kv_cache_usage_perc"
            | "vllm:gpu_cache_usage_perc"
            | "sglang:token_usage"
            | "llamacpp:kv_cache_usage_ratio" => most_permille(&mut self.kv_usage_permille, value),
            "vllm:prefix_cache_queries_total" | "vllm:gpu_prefix_cache_queries_total" => {
                add_u64(&mut self.prefix_queried_tokens, value);
            }
            "vllm:prefix_cache_hits_total" | "vllm:gpu_prefix_cache_hits_total" => {
                add_u64(&mut self.prefix_hit_tokens, value);
            }
            "vllm:prompt_tokens_total"
            | "sglang:prompt_tokens_total"
            | "llamacpp:prompt_tokens_total"
            | "dynamo_frontend_input_sequence_tokens_sum" => {
                add_u64(&mut self.prompt_tokens, value);
            }
            "sglang:max_total_num_tokens" => add_u64(&mut self.cache_tokens, value),
            "vllm:cache_config_info" => self.add_cache_config(sample),
            // The figure is reported per worker, but without the number of workers.
            "sglang:page_size" | "dynamo_frontend_model_kv_cache_block_size" => {
                self.add_page_size(whole(value));
            }
            // The equivalent before SGLang 0.5.12.
            "sglang:cache_config_info" => {
                let label = sample.labels.get("page_size");
                self.add_page_size(label.and_then(|label| label.parse().ok()));
            }
            "vllm:engine_sleep_state"
                if sample.labels.get("sleep_state").as_deref() == Some("awake") =>
            {
                self.is_asleep = Some(value == 0.0 || self.is_asleep == Some(true));
            }
            "vllm:spec_decode_num_drafts_total" => self.is_speculating = true,
            "process_start_time_seconds" => self.started_at_s = whole(value),
            _ => {}
        }
    }

    fn add_page_size(&mut self, tokens: Option<u64>) {
        let size = tokens.and_then(|size| u32::try_from(size).ok());
        self.block_size = size.filter(|size| *size > 0).or(self.block_size);
    }

    /// Adds the cache size, which vLLM exports as labels. `num_gpu_blocks` is `None` or `0` until
    /// the engine has measured its memory, and forever in some front-end processes.
    fn add_cache_config(&mut self, sample: &Sample<'_>) {
        let label = |name| sample.labels.get(name)?.parse::<u64>().ok();
        let size = label("block_size").and_then(|size| u32::try_from(size).ok());
        self.block_size = size.filter(|size| *size > 0).or(self.block_size);
        let tokens = match (label("block_size"), label("num_gpu_blocks")) {
            (Some(size), Some(blocks)) if size > 0 && blocks > 0 => size.saturating_mul(blocks),
            _ => match label("kv_cache_size_tokens") {
                Some(tokens) if tokens > 0 => tokens,
                _ => return,
            },
        };
        let sum = self.cache_tokens.unwrap_or(0).saturating_add(tokens);
        self.cache_tokens = Some(sum);
    }
}

/// Converts a float to a count; `None` if it is negative or not finite.
fn whole(value: f64) -> Option<u64> {
    // The cast saturates, so a forged 1e300 is merely a large number.
    (value.is_finite() && value >= 0.0).then_some(value as u64)
}

fn add_u64(sum: &mut Option<u64>, value: f64) {
    if let Some(value) = whole(value) {
        *sum = Some(sum.unwrap_or(0).saturating_add(value));
    }
}

fn add_u32(sum: &mut Option<u32>, value: f64) {
    if let Some(value) = whole(value) {
        let value = u32::try_from(value).unwrap_or(u32::MAX);
        *sum = Some(sum.unwrap_or(0).saturating_add(value));
    }
}

fn most_permille(most: &mut Option<u32>, ratio: f64) {
    if ratio.is_finite() {
        let permille = (ratio.clamp(0.0, 1.0) * 1000.0).round() as u32;
        *most = Some(most.unwrap_or(0).max(permille));
    }
}

/// Error for a response to `GET /v1/models` that is not a model list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("model list: {0}")]
pub(super) struct ModelListError(String);

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
    // Engines may use any types for these fields.
    #[serde(default)]
    root: Value,
    #[serde(default)]
    parent: Value,
    #[serde(default)]
    max_model_len: Value,
    /// Context length in Dynamo's model list.
    #[serde(default)]
    context_window: Value,
    /// Object that contains the context length as `n_ctx`, in llama.cpp.
    #[serde(default)]
    meta: Value,
    #[serde(default)]
    permission: Value,
    #[serde(default)]
    owned_by: Value,
}

/// Returns the maximum context length in tokens, whichever field contains it; `None` if none does.
/// 0 says that the engine does not know it, as in the list of Dynamo's mocker.
fn model_length(listed: &ListedModel) -> Option<u64> {
    let names = [
        &listed.max_model_len,
        &listed.context_window,
        &listed.meta["n_ctx"],
    ];
    let mut told = names.into_iter().filter_map(Value::as_u64);
    told.find(|tokens| *tokens > 0)
}

/// Maximum length of each text in a model's entry, and of its permissions, in bytes.
const KEPT_BYTES_MAX: usize = 1024;

/// Entry of a model in an engine's list. A field is `None` if the list lacks it, or if its value
/// has another type or is too long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineModel {
    /// Id of the model.
    pub id: String,
    /// Name or location of the model's weights.
    pub root: Option<String>,
    /// Base model, if the model is an adapter.
    pub parent: Option<String>,
    /// Maximum context length, in tokens.
    pub max_model_len: Option<u64>,
    /// Permissions, a list of objects.
    pub permission: Option<Value>,
    /// Owner of the model. Engines put their own names here.
    pub owned_by: Option<String>,
}

/// Returns the version in a response to `GET /version`; `None` if there is none.
pub(super) fn read_version(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Version {
        version: String,
    }
    let version = serde_json::from_slice::<Version>(body).ok()?.version;
    (version.len() <= KEPT_BYTES_MAX).then_some(version)
}

impl EngineModel {
    /// Prefixes the id of an SGLang engine's adapter with its base model. SGLang lists the adapter
    /// alone, but answers requests for that name with the base model.
    fn qualify(&mut self) {
        let owner = self.owned_by.as_deref().and_then(EngineKind::named);
        if owner == Some(EngineKind::Sglang)
            && self.is_adapter()
            && let Some(parent) = &self.parent
        {
            self.id = format!("{parent}:{}", self.id);
        }
    }

    /// Whether the model is a LoRA adapter.
    pub(crate) fn is_adapter(&self) -> bool {
        let parent = self.parent.as_ref();
        parent.is_some_and(|parent| *parent != self.id)
    }
}

impl From<ListedModel> for EngineModel {
    fn from(listed: ListedModel) -> Self {
        let text = |value: Value| match value {
            Value::String(text) if text.len() <= KEPT_BYTES_MAX => Some(text),
            _ => None,
        };
        let is_kept = |value: &Value| value.is_array() && value.to_string().len() <= KEPT_BYTES_MAX;
        let max_model_len = model_length(&listed);
        Self {
            id: listed.id,
            root: text(listed.root),
            parent: text(listed.parent),
            max_model_len,
            permission: Some(listed.permission).filter(is_kept),
            owned_by: text(listed.owned_by),
        }
    }
}

/// Reads an OpenAI model list. Returns the models sorted by id and without duplicates.
///
/// # Errors
/// Returns a [`ModelListError`] if `body` is not such a list or exceeds a bound.
pub(super) fn read_models(body: &[u8]) -> Result<Vec<EngineModel>, ModelListError> {
    let list: ModelList =
        serde_json::from_slice(body).map_err(|fault| ModelListError(fault.to_string()))?;
    if list.data.len() > MODELS_PER_ENGINE_MAX {
        return Err(ModelListError(format!(
            "{} models, expected at most {MODELS_PER_ENGINE_MAX}",
            list.data.len()
        )));
    }
    let mut models: Vec<EngineModel> = list.data.into_iter().map(EngineModel::from).collect();
    models.iter_mut().for_each(EngineModel::qualify);
    if let Some(bad) = models
        .iter()
        .find(|it| it.id.is_empty() || it.id.len() > NAME_BYTES_MAX)
    {
        return Err(ModelListError(format!(
            "a model id of {} bytes, expected 1 to {NAME_BYTES_MAX}",
            bad.id.len()
        )));
    }
    models.sort_by(|a, b| a.id.cmp(&b.id));
    models.dedup_by(|a, b| a.id == b.id);
    let bytes: usize = models.iter().map(|it| it.id.len()).sum();
    if bytes > LIST_BYTES_MAX {
        return Err(ModelListError(format!(
            "model ids of {bytes} bytes together, expected at most {LIST_BYTES_MAX}"
        )));
    }
    Ok(models)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the figures of a page, without their digest.
    fn figures(page: &[u8]) -> EngineMetrics {
        EngineMetrics {
            activity: None,
            ..EngineMetrics::read(page, None).unwrap()
        }
    }

    #[test]
    fn a_vllm_metrics_page_is_parsed() {
        let page = include_bytes!("samples/vllm.txt");
        let expected = EngineMetrics {
            kind: Some(EngineKind::Vllm),
            running: Some(7),
            waiting: Some(3),
            kv_usage_permille: Some(418),
            cache_tokens: Some(16 * 27_520),
            block_size: Some(16),
            prefix_queried_tokens: Some(1_834_215),
            prefix_hit_tokens: Some(1_201_664),
            prompt_tokens: Some(1_834_215),
            started_at_s: Some(1_763_630_102),
            adapters: None,
            ranks: Some(1),
            is_asleep: Some(false),
            is_speculating: false,
            activity: None,
        };
        assert_eq!(figures(page), expected);
        let drafts = "vllm:spec_decode_num_drafts_total{engine=\"0\"} 0.0\n";
        let speculating = [page.as_slice(), drafts.as_bytes()].concat();
        assert!(figures(&speculating).is_speculating);
    }

    #[test]
    fn an_sglang_metrics_page_is_parsed() {
        let page = include_bytes!("samples/sglang.txt");
        let expected = EngineMetrics {
            kind: Some(EngineKind::Sglang),
            running: Some(5),
            waiting: Some(2),
            kv_usage_permille: Some(280),
            cache_tokens: Some(471_258),
            prompt_tokens: Some(812_844),
            ..EngineMetrics::default()
        };
        assert_eq!(figures(page), expected);
    }

    #[test]
    fn a_dynamo_metrics_page_is_parsed() {
        let page = include_bytes!("samples/dynamo.txt");
        let expected = EngineMetrics {
            kind: Some(EngineKind::Dynamo),
            running: Some(0),
            block_size: Some(32),
            prompt_tokens: Some(62),
            ..EngineMetrics::default()
        };
        assert_eq!(figures(page), expected);
        let busy = b"dynamo_frontend_inflight_requests{model=\"a\"} 2\n\
            dynamo_frontend_inflight_requests{model=\"b\"} 3\n";
        let busy = EngineMetrics::read(busy, None).unwrap();
        assert_eq!(busy.running, Some(5));
    }

    #[test]
    fn sglang_page_size_is_read_under_both_names() {
        for (page, size) in [
            (&b"sglang:page_size{tp_rank=\"0\"} 64.0\n"[..], Some(64)),
            (
                b"sglang:cache_config_info{num_pages=\"9\",page_size=\"32\"} 1.0\n",
                Some(32),
            ),
            (b"sglang:page_size 0\n", None),
            (b"sglang:page_size 1e12\n", None),
        ] {
            assert_eq!(EngineMetrics::read(page, None).unwrap().block_size, size);
        }
    }

    #[test]
    fn older_metric_names_are_known() {
        let page = b"vllm:gpu_cache_usage_perc{model_name=\"m\"} 0.25\n\
            vllm:gpu_prefix_cache_queries_total 8\nvllm:gpu_prefix_cache_hits_total 4\n";
        let metrics = EngineMetrics::read(page, None).unwrap();
        assert_eq!(metrics.kv_usage_permille, Some(250));
        assert_eq!(metrics.prefix_queried_tokens, Some(8));
        assert_eq!(metrics.prefix_hit_tokens, Some(4));
    }

    #[test]
    fn ranks_are_summed_and_the_fullest_cache_counts() {
        let page = b"vllm:num_requests_running{engine=\"0\"} 2.0\nvllm:num_requests_running{engine=\"1\"} 3.0\n\
            vllm:kv_cache_usage_perc{engine=\"0\"} 0.9\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n\
            vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"} 1.0\n\
            vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"50\"} 1.0\n";
        let metrics = EngineMetrics::read(page, None).unwrap();
        assert_eq!(metrics.running, Some(5));
        assert_eq!(metrics.kv_usage_permille, Some(900));
        assert_eq!(metrics.cache_tokens, Some(2400));
        let second = EngineMetrics::read(page, Some(1)).unwrap();
        assert_eq!((metrics.ranks, second.ranks), (Some(2), Some(2)));
        assert_eq!((second.running, second.cache_tokens), (Some(3), Some(800)));
        assert_eq!(second.kv_usage_permille, Some(500));
    }

    #[test]
    fn the_number_of_ranks_is_known_if_none_is_missing() {
        let ranks = |ranks: &[&str]| {
            let line = |rank| format!("vllm:num_requests_running{{engine=\"{rank}\"}} 1\n");
            let page: String = ranks.iter().map(line).collect();
            EngineMetrics::read(page.as_bytes(), None).unwrap().ranks
        };
        assert_eq!(ranks(&["0", "2", "1", "0"]), Some(3));
        for unknown in [&[][..], &["1"], &["0", "2"], &["4", "5"], &["x"], &["64"]] {
            assert_eq!(ranks(unknown), None, "{unknown:?}");
        }
        let page = b"sglang:num_running_reqs{dp_rank=\"0\",tp_rank=\"0\"} 1\n\
            sglang:num_running_reqs{dp_rank=\"1\",tp_rank=\"2\"} 4\n";
        let second = EngineMetrics::read(page, Some(1)).unwrap();
        assert_eq!((second.ranks, second.running), (Some(2), Some(4)));
    }

    #[test]
    fn implausible_metrics_are_unknown_or_bounded() {
        let page = b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 1e300\n\
            vllm:kv_cache_usage_perc 17\nprocess_start_time_seconds -4\n\
            vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"None\"} 1\n";
        let metrics = EngineMetrics::read(page, None).unwrap();
        assert_eq!(metrics.running, None);
        assert_eq!(metrics.waiting, Some(u32::MAX));
        assert_eq!(metrics.kv_usage_permille, Some(1000));
        assert_eq!(metrics.started_at_s, None);
        assert_eq!(metrics.cache_tokens, None);
    }

    #[test]
    fn well_formed_model_details_are_kept() {
        let long = "x".repeat(KEPT_BYTES_MAX + 1);
        let body = format!(
            r#"{{"data":[{{"id":"a","root":"org/a","parent":null,"max_model_len":4096,"permission":[{{"id":"p"}}]}},
            {{"id":"b","root":7,"parent":"a","max_model_len":"long","permission":["{long}"]}},
            {{"id":"c","owned_by":"nvidia","context_window":8192}},
            {{"id":"d","owned_by":"llamacpp","meta":{{"n_ctx":4096,"n_ctx_train":32768}}}},
            {{"id":"e","owned_by":"nvidia","context_window":0}},
            {{"id":"f","max_model_len":0,"context_window":512}}]}}"#
        );
        let models = read_models(body.as_bytes()).unwrap();
        assert_eq!(models[0].root.as_deref(), Some("org/a"));
        assert_eq!(models[0].max_model_len, Some(4096));
        assert!(models[0].permission.is_some() && models[0].parent.is_none());
        assert_eq!((&models[1].root, models[1].max_model_len), (&None, None));
        assert_eq!(models[1].parent.as_deref(), Some("a"));
        assert_eq!(models[1].permission, None);
        assert_eq!(models[2].max_model_len, Some(8192));
        assert_eq!(models[3].max_model_len, Some(4096));
        assert_eq!(models[4].max_model_len, None);
        assert_eq!(models[5].max_model_len, Some(512));
    }

    #[test]
    fn an_sglang_adapter_is_listed_as_requests_must_name_it() {
        let ids = |owner: &str| {
            let body = r#"{"data":[{"id":"base","owned_by":"OWNER","parent":null},
                {"id":"ada","owned_by":"OWNER","parent":"base"}]}"#;
            let models = read_models(body.replace("OWNER", owner).as_bytes()).unwrap();
            assert!(models.iter().any(EngineModel::is_adapter));
            models.into_iter().map(|model| model.id).collect::<Vec<_>>()
        };
        assert_eq!(ids("vllm"), ["ada", "base"]);
        assert_eq!(ids("sglang"), ["base", "base:ada"]);
    }

    #[test]
    fn a_model_list_is_sorted_and_bounded() {
        let body =
            br#"{"object":"list","data":[{"id":"b","object":"model"},{"id":"a"},{"id":"b"}]}"#;
        let models = read_models(body).unwrap();
        let ids: Vec<_> = models.iter().map(|model| &*model.id).collect();
        assert_eq!(ids, ["a", "b"]);
        let body = br#"{"data":[{"id":"b","parent":"base"},{"id":"base","parent":null},
            {"id":"a","parent":"base"},{"id":"c","parent":7},{"id":"d","parent":"d"}]}"#;
        let mut models = read_models(body).unwrap();
        models.retain(EngineModel::is_adapter);
        let adapters: Vec<_> = models.iter().map(|model| &*model.id).collect();
        assert_eq!(adapters, ["a", "b"]);
        for bad in [
            &b"<html>"[..],
            b"[]",
            b"{\"data\":[{}]}",
            b"{\"data\":[{\"id\":\"\"}]}",
        ] {
            assert!(read_models(bad).is_err());
        }
        let long = format!("{{\"data\":[{{\"id\":\"{}\"}}]}}", "x".repeat(257));
        assert_eq!(
            read_models(long.as_bytes()).unwrap_err().to_string(),
            "model list: a model id of 257 bytes, expected 1 to 256"
        );
        let many: Vec<String> = (0..257)
            .map(|n| format!("{{\"id\":\"{n:0256}\"}}"))
            .collect();
        let many = format!("{{\"data\":[{}]}}", many.join(","));
        assert_eq!(
            read_models(many.as_bytes()).unwrap_err().to_string(),
            "model list: model ids of 65792 bytes together, expected at most 65536"
        );
    }
}
