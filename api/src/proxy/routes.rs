//! The paths that the data plane serves.
//!
//! An allow-list: engines serve their control routes on the same port, and none of those may be
//! reached from outside. A path has to be plain, so that no engine reads it in another way than it
//! was checked here.

use http::Method;

use super::settings::ProxySettings;
use crate::error::ProxyError;

/// Paths routed by their body's `model`; `requests.extra_paths` adds others.
pub const INFERENCE_PATHS: [&str; 25] = [
    "/classify",
    "/detokenize",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/v1/audio/speech",
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/classify",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/detokenize",
    "/v1/embeddings",
    "/v1/images/generations",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/pooling",
    "/v1/rerank",
    "/v1/reranking",
    "/v1/responses",
    "/v1/score",
    "/v1/tokenize",
    "/v2/embed",
    "/v2/rerank",
];

/// Names of control routes: no path with one of them as a segment is forwarded.
const CONTROL: [&str; 34] = [
    "abort_request",
    "abort_requests",
    "add_lora_adapter",
    "clear_hicache_storage_backend",
    "collective_rpc",
    "configure_logging",
    "continue_generation",
    "flush_cache",
    "freeze_gc",
    "init_weights_send_group_for_remote_instance",
    "is_paused",
    "is_sleeping",
    "load_lora_adapter",
    "metrics",
    "pause",
    "pause_generation",
    "release_memory_occupation",
    "reset_encoder_cache",
    "reset_mm_cache",
    "reset_prefix_cache",
    "resume",
    "resume_memory_occupation",
    "scale_elastic_ep",
    "server_info",
    "set_internal_state",
    "set_trace_level",
    "shutdown",
    "sleep",
    "slow_down",
    "start_profile",
    "stop_profile",
    "unload_lora_adapter",
    "wake_up",
    "weights_checker",
];
/// Beginnings of names of control routes.
const CONTROL_PREFIXES: [&str; 6] = [
    "update_weight",
    "init_weight",
    "destroy_weight",
    "get_weight",
    "send_weight",
    "start_expert_distribution",
];

/// Longest path repeated in an error or a line of the log, in bytes.
const SHOWN_PATH_BYTES_MAX: usize = 256;

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route<'a> {
    /// The list of models.
    Models,
    /// One model of the list, by id.
    Model(&'a str),
    /// An engine.
    Engine,
}

/// Where a request goes.
pub(super) fn route<'a>(
    settings: &ProxySettings,
    method: &Method,
    path: &'a str,
) -> Result<Route<'a>, ProxyError> {
    let (route, allowed, is_method_right) = if path == "/v1/models" {
        (Route::Models, "GET", method == Method::GET)
    } else if let Some(id) = path.strip_prefix("/v1/models/") {
        (Route::Model(id), "GET", method == Method::GET)
    } else if is_routed(settings, path) {
        (Route::Engine, "POST", method == Method::POST)
    } else {
        return Err(unrouted(method, path));
    };
    if is_method_right {
        Ok(route)
    } else {
        Err(ProxyError::WrongMethod { allowed })
    }
}

/// No engine gets a request for this path.
pub(super) fn unrouted(method: &Method, path: &str) -> ProxyError {
    ProxyError::UnknownRoute {
        method: method.as_str().to_owned(),
        path: shown_path(path).to_owned(),
    }
}

/// A path as errors and the log repeat it.
pub(super) fn shown_path(path: &str) -> &str {
    &path[..path.floor_char_boundary(SHOWN_PATH_BYTES_MAX)]
}

fn is_routed(settings: &ProxySettings, path: &str) -> bool {
    INFERENCE_PATHS.contains(&path)
        || (settings.extra_paths.iter().any(|extra| extra == path) && is_plain(path))
}

/// Whether a path can be routed to engines at all: one that no engine reads in another way than it
/// was checked here, and no control route.
#[must_use]
pub fn is_plain(path: &str) -> bool {
    path.strip_prefix('/')
        .is_some_and(|rest| rest.split('/').all(is_plain_segment))
}

fn is_plain_segment(segment: &str) -> bool {
    let is_plain = !segment.is_empty()
        && segment
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && !segment.bytes().all(|byte| byte == b'.');
    let lower = segment.to_ascii_lowercase();
    is_plain
        && !CONTROL.contains(&lower.as_str())
        && !CONTROL_PREFIXES
            .iter()
            .any(|prefix| lower.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use state::ids::ReplicaId;

    use super::*;

    fn status(method: &Method, path: &str) -> u16 {
        let mut settings = ProxySettings::new(ReplicaId(1));
        settings.extra_paths = vec!["/generate".to_owned(), "/flush_cache".to_owned()];
        match route(&settings, method, path) {
            Ok(Route::Engine) => 0,
            Ok(Route::Models | Route::Model(_)) => 1,
            Err(failure) => crate::error::rescue(&failure).status.as_u16(),
        }
    }

    #[test]
    fn only_inference_reaches_an_engine() {
        for path in [
            "/v1/chat/completions",
            "/v1/chat/completions/render",
            "/v1/messages",
            "/tokenize",
            "/generate",
        ] {
            assert_eq!(status(&Method::POST, path), 0, "{path}");
            assert_eq!(status(&Method::GET, path), 405, "{path}");
        }
        for path in [
            "/",
            "/v1",
            "/v1/",
            "/v1/x",
            "/v1/model/load",
            "/v1/lora/load",
            "/v1/responses/resp_1/cancel",
            "/v1/chat/completions/",
            "/V1/chat/completions",
            "/sleep",
            "/v1/load_lora_adapter",
            "/v1/Load_LoRA_adapter",
            "/v1/../sleep",
            "/v1/./sleep",
            "/v1/%2e%2e/sleep",
            "/v1//sleep",
            "/flush_cache",
            "/v1/x;y",
            "/update_weights_from_disk",
            "/v1/update_weights",
            "/health",
            "*",
        ] {
            assert_eq!(status(&Method::POST, path), 404, "{path}");
        }
    }

    #[test]
    fn every_listed_path_is_plain() {
        assert!(INFERENCE_PATHS.iter().all(|path| is_plain(path)));
        for path in [
            "",
            "v1/x",
            "/",
            "//",
            "/v1/",
            "/v1/x?y",
            "/v1/%2e",
            "/v1/sleep",
        ] {
            assert!(!is_plain(path), "{path}");
        }
    }

    #[test]
    fn the_model_list_is_read_only() {
        assert_eq!(status(&Method::GET, "/v1/models"), 1);
        assert_eq!(status(&Method::GET, "/v1/models/org/name"), 1);
        assert_eq!(status(&Method::POST, "/v1/models"), 405);
    }
}
