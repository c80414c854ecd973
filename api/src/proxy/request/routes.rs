//! The paths that the data plane serves.
//!
//! This is an allow-list: engines serve their control routes on the same port, and clients must not
//! reach those. A path must be plain, so that no engine interprets it differently from this check.

use std::borrow::Cow;

use http::uri::PathAndQuery;
use http::{Method, Uri};
use percent_encoding::percent_decode_str;

use crate::error::ProxyError;
use crate::proxy::settings::ProxySettings;

/// Paths routed by the `model` in the body. `requests.extra_paths` adds others.
pub const INFERENCE_PATHS: [&str; 29] = [
    "/classify",
    "/detokenize",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/classify",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/detokenize",
    "/v1/embeddings",
    "/v1/images/edits",
    "/v1/images/generations",
    "/v1/images/variations",
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

/// Paths whose bodies are forms with a file.
const FORM_PATHS: [&str; 4] = [
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/edits",
    "/v1/images/variations",
];

/// OpenAI's routes to objects that are kept between requests. Engines do not keep such objects, and
/// each of several engines would only know its own.
const KEPT_THINGS: [&str; 7] = [
    "assistants",
    "batches",
    "conversations",
    "files",
    "fine_tuning",
    "uploads",
    "vector_stores",
];

/// Names of control routes. A path with such a segment is never forwarded.
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
/// Prefixes of names of control routes.
const CONTROL_PREFIXES: [&str; 6] = [
    "update_weight",
    "init_weight",
    "destroy_weight",
    "get_weight",
    "send_weight",
    "start_expert_distribution",
];

/// Paths below `/v1/responses` that are no stored responses. Not all engines serve them.
const NOT_STORED: [&str; 2] = ["/v1/responses/compact", "/v1/responses/input_tokens"];

/// Maximum length of a stored response's id, in bytes.
const RESPONSE_ID_BYTES_MAX: usize = 256;
/// Maximum length of a path in an error or log line, in bytes.
const SHOWN_PATH_BYTES_MAX: usize = 256;

/// Route of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proxy) enum Route<'a> {
    /// The list of models.
    Models,
    /// One model of the list, by id.
    Model(Cow<'a, str>),
    /// The engine that stored the response with this id.
    Stored(&'a str),
    /// Any engine of the requested model.
    Engine,
}

/// Returns the route of a request. Fails if its path or method is not served. `HEAD` is served
/// wherever `GET` is (RFC 9110, 9.1).
pub(in crate::proxy) fn route<'a>(
    settings: &ProxySettings,
    method: &Method,
    path: &'a str,
) -> Result<Route<'a>, ProxyError> {
    let (route, methods, allowed): (_, &[Method], _) = if path == "/v1/models" {
        (Route::Models, &[Method::GET, Method::HEAD], "GET, HEAD")
    } else if let Some(id) = path.strip_prefix("/v1/models/") {
        (
            Route::Model(model_id(id)),
            &[Method::GET, Method::HEAD],
            "GET, HEAD",
        )
    } else if is_routed(settings, path) {
        (Route::Engine, &[Method::POST], "POST")
    } else if let Some((id, is_cancel)) = stored_response(path) {
        match is_cancel {
            true => (Route::Stored(id), &[Method::POST], "POST"),
            false => {
                let methods = &[Method::GET, Method::HEAD, Method::DELETE];
                (Route::Stored(id), methods, "GET, HEAD, DELETE")
            }
        }
    } else {
        return Err(unrouted(method, path));
    };
    if methods.contains(method) {
        Ok(route)
    } else {
        Err(ProxyError::WrongMethod { allowed })
    }
}

/// Decodes a model's id from a path. Clients write a slash as it is or as `%2F`.
fn model_id(path: &str) -> Cow<'_, str> {
    let decoded = percent_decode_str(path).decode_utf8();
    decoded.unwrap_or(Cow::Borrowed(path))
}

/// Parses `/v1/responses/ID` and `/v1/responses/ID/cancel`; `None` for other paths. Also returns
/// whether to cancel.
fn stored_response(path: &str) -> Option<(&str, bool)> {
    let rest = path.strip_prefix("/v1/responses/")?;
    let (id, is_cancel) = match rest.strip_suffix("/cancel") {
        Some(id) => (id, true),
        None => (rest, false),
    };
    let whole = path.strip_suffix("/cancel").unwrap_or(path);
    (!NOT_STORED.contains(&whole) && is_response_id(id)).then_some((id, is_cancel))
}

/// Whether `id` may be part of the path of a stored response.
pub(in crate::proxy) fn is_response_id(id: &str) -> bool {
    id.len() <= RESPONSE_ID_BYTES_MAX && is_plain_segment(id)
}

/// Whether bodies for this path are forms.
pub(super) fn takes_form(path: &str) -> bool {
    FORM_PATHS.contains(&path)
}

/// Returns the path without a trailing slash.
pub(super) fn without_slash(path: &str) -> &str {
    let shorter = path.strip_suffix('/');
    shorter.filter(|it| !it.is_empty()).unwrap_or(path)
}

/// Returns the URI without the trailing slash of its path; `None` if it has none.
pub(in crate::proxy) fn unslashed(uri: &Uri) -> Option<Uri> {
    let path = without_slash(uri.path());
    if path.len() == uri.path().len() {
        return None;
    }
    let target = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(target).ok()?);
    Uri::from_parts(parts).ok()
}

/// Returns the error for a path without a route.
pub(super) fn unrouted(method: &Method, path: &str) -> ProxyError {
    let kept = path
        .strip_prefix("/v1/")
        .and_then(|it| it.split('/').next());
    if let Some(kept) = KEPT_THINGS.iter().find(|known| kept == Some(**known)) {
        return ProxyError::KeepsNothing { kept };
    }
    if let Some(path) = NOT_STORED.iter().find(|known| **known == path) {
        return ProxyError::UnlistedPath { path };
    }
    ProxyError::UnknownRoute {
        method: method.as_str().to_owned(),
        path: shown_path(path).to_owned(),
    }
}

/// Returns a path as errors and the log show it, cut to [`SHOWN_PATH_BYTES_MAX`].
pub(in crate::proxy) fn shown_path(path: &str) -> &str {
    &path[..path.floor_char_boundary(SHOWN_PATH_BYTES_MAX)]
}

fn is_routed(settings: &ProxySettings, path: &str) -> bool {
    INFERENCE_PATHS.contains(&path)
        || (settings.extra_paths.iter().any(|extra| extra == path) && is_plain(path))
}

/// Whether a path may be routed to engines: no engine interprets it differently from this check,
/// and it is no control route.
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
            Ok(Route::Stored(_)) => 2,
            Err(failure) => crate::error::rescue(&failure).status.as_u16(),
        }
    }

    #[test]
    fn only_inference_paths_reach_an_engine() {
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
            "/v1/responses/",
            "/v1/responses/../sleep/cancel",
            "/v1/responses/resp%5f1/cancel",
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
    fn files_and_batches_are_refused_with_an_explanation() {
        for path in ["/v1/files", "/v1/files/file-1/content", "/v1/batches"] {
            assert_eq!(status(&Method::POST, path), 501, "{path}");
            assert_eq!(status(&Method::GET, path), 501, "{path}");
        }
        assert_eq!(status(&Method::POST, "/v1/filesystem"), 404);
        assert_eq!(status(&Method::POST, "/files"), 404);
        assert!(takes_form("/v1/images/edits") && !takes_form("/v1/images/generations"));
    }

    #[test]
    fn every_listed_path_is_normalised() {
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
    fn stored_responses_have_their_methods() {
        for (method, path, expected) in [
            (Method::GET, "/v1/responses/resp_1", 2),
            (Method::DELETE, "/v1/responses/resp_1", 2),
            (Method::POST, "/v1/responses/resp_1/cancel", 2),
            (Method::POST, "/v1/responses/resp_1", 405),
            (Method::GET, "/v1/responses/resp_1/cancel", 405),
            (Method::GET, "/v1/responses/a/b", 404),
            (Method::DELETE, "/v1/responses/metrics", 404),
            (Method::POST, "/v1/responses/compact", 404),
            (Method::POST, "/v1/responses/compact/cancel", 404),
            (Method::GET, "/v1/responses/input_tokens", 404),
        ] {
            assert_eq!(status(&method, path), expected, "{method} {path}");
        }
    }

    #[test]
    fn one_trailing_slash_is_removed() {
        let unslashed = |uri: &str| unslashed(&uri.parse().unwrap()).map(|it| it.to_string());
        assert_eq!(unslashed("/v1/x/").as_deref(), Some("/v1/x"));
        assert_eq!(unslashed("/v1/x/?a=/").as_deref(), Some("/v1/x?a=/"));
        let absolute = unslashed("http://h:1/v1/x/");
        assert_eq!(absolute.as_deref(), Some("http://h:1/v1/x"));
        assert_eq!(unslashed("/v1/x//").as_deref(), Some("/v1/x/"));
        for uri in ["/", "/v1/x", "/v1/x?a/", "*"] {
            assert_eq!(unslashed(uri), None, "{uri}");
        }
    }

    #[test]
    fn the_model_list_is_read_only() {
        assert_eq!(status(&Method::GET, "/v1/models"), 1);
        assert_eq!(status(&Method::GET, "/v1/models/org/name"), 1);
        assert_eq!(status(&Method::HEAD, "/v1/models"), 1);
        assert_eq!(status(&Method::HEAD, "/v1/responses/resp_1"), 2);
        assert_eq!(status(&Method::HEAD, "/v1/completions"), 405);
        assert_eq!(status(&Method::POST, "/v1/models"), 405);
        assert_eq!(model_id("org%2Fname"), "org/name");
        assert_eq!(model_id("org%2fname%"), "org/name%");
        assert_eq!(model_id("%ff"), "%ff");
    }
}
