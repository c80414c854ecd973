//! Whose fault a response with a status 4xx is.
//!
//! Usually it is the client's, and the response is relayed. Two kinds are the backend's, and the
//! request goes on to another one, because nothing ran: a refusal of credentials that were not the
//! client's, and a model that the engine is known to list but does not serve, as after another
//! engine took over its address.

use http::StatusCode;
use state::ids::{BackendRef, UserKey};
use tokio::time::Instant;

use super::request_context::ProxiedRequest;
use crate::engines::backends::refuses_credentials;
use crate::proxy::Proxy;
use crate::proxy::request::identify::UserSource;

/// Whether a response with this status refuses credentials that are not the client's.
pub(in crate::proxy) fn refuses_router(
    proxy: &Proxy,
    proxied: &ProxiedRequest,
    backend: BackendRef,
    status: StatusCode,
) -> bool {
    refuses_credentials(status) && !carries_clients_key(proxy, proxied, backend)
}

/// Whether `backend` receives the key that the client sent, if it sent one.
fn carries_clients_key(proxy: &Proxy, proxied: &ProxiedRequest, backend: BackendRef) -> bool {
    if proxy.settings.api_keys.is_some() || proxied.user_source == UserSource::ClusterKey {
        return false;
    }
    let registry = proxy.view.registry();
    let known = registry.backend(backend.slot);
    let known = known.filter(|known| known.handle == backend);
    let keys = proxy.backends.keys();
    known.is_none_or(|known| keys.of_requests(&known.spec.id, &known.spec.url).is_none())
}

/// Reports a response with this status to a backend's circuit breaker. A success counts only once
/// its body begins. With `refuses_router`, the backend is at fault, and its model list, which it
/// refuses too, decides whether it stays healthy.
pub(in crate::proxy) fn report_status(
    proxy: &Proxy,
    (backend, user): (BackendRef, UserKey),
    status: StatusCode,
    refuses_router: bool,
) {
    let (backends, now) = (&proxy.backends, Instant::now());
    backends.count_answer(backend.slot, status);
    if refuses_router {
        // An engine may also refuse what one user writes.
        backends.report_no_answer(backend, Some(user), now);
        backends.doubt_list(backend.slot);
    } else if status.is_client_error() {
        backends.report_answer(backend, user, now);
    } else if !status.is_success() {
        backends.report_no_answer(backend, Some(user), now);
    }
}

/// Whether `backend` refused a request because of its model, although it is known to list it.
/// `body` is the beginning of the response's body.
pub(super) fn lacks_listed_model(
    proxy: &Proxy,
    proxied: &ProxiedRequest,
    backend: BackendRef,
    status: StatusCode,
    body: Option<&[u8]>,
) -> bool {
    let model = &proxied.parsed.model;
    if status != StatusCode::NOT_FOUND || !body.is_some_and(|body| names_model(body, model)) {
        return false;
    }
    let registry = proxy.view.registry();
    let known = registry.backend(backend.slot);
    known.is_some_and(|known| known.named_models().any(|listed| listed == model))
}

/// Whether an error says that the model is unknown: by OpenAI's code or field, or by its name.
fn names_model(body: &[u8], model: &str) -> bool {
    let has = |text: &[u8]| body.windows(text.len()).any(|part| part == text);
    let is_within_word = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_./:".contains(byte);
    let names_it = || {
        let found = body.windows(model.len()).enumerate();
        let mut found = found.filter(|(_, part)| *part == model.as_bytes());
        found.any(|(at, part)| {
            let before = at.checked_sub(1).and_then(|before| body.get(before));
            let mut after = body[at + part.len()..].iter();
            let is_end = match after.next() {
                // The end of a sentence is no part of the name.
                Some(b'.' | b':') => !after.next().is_some_and(is_within_word),
                next => !next.is_some_and(is_within_word),
            };
            is_end && !before.is_some_and(is_within_word)
        })
    };
    has(b"model_not_found") || has(b"\"param\":\"model\"") || (!model.is_empty() && names_it())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_about_the_model_is_recognised() {
        let names = |body: &str| names_model(body.as_bytes(), "m");
        for body in [
            r#"{"error":{"message":"The model `m` does not exist.","code":404}}"#,
            r#"{"error":{"message":"no such model: m."}}"#,
            r#"{"error":{"message":"x","param":"model"}}"#,
            r#"{"error":{"message":"x","code":"model_not_found"}}"#,
        ] {
            assert!(names(body), "{body}");
        }
        for body in [
            r#"{"detail":"Not Found"}"#,
            r#"{"error":{"message":"Response with id 'resp_1' not found.","param":null}}"#,
            r#"{"error":{"message":"The model `m-2` and `org/m` do not exist."}}"#,
            "",
        ] {
            assert!(!names(body), "{body}");
        }
        assert!(!names_model(b"x", ""));
    }
}
