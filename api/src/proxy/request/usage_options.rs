//! Adds usage reporting to streaming requests that did not ask for it, by splicing bytes.
//!
//! Users are charged by the engine's own count, so every stream should carry it. With
//! `include_usage` it comes once at the end. With `continuous_usage_stats` it comes on every chunk,
//! which is the only way to charge a client that disconnects without an estimate. This module
//! changes nothing else in the body, except that [`salted`] inserts a salt.

use bytes::Bytes;
use serde_json::{Map, Value};

use crate::engines::backends::pool::Segments;
use crate::prompt::ParsedBody;
use crate::proxy::settings::UsageRequest;

/// Usage reports that the client requested. All others are removed from the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::proxy) struct WantedUsage {
    /// The final chunk, which contains only usage.
    pub(in crate::proxy) final_chunk: bool,
    /// Running `usage` in the other chunks.
    pub(in crate::proxy) running: bool,
}

impl WantedUsage {
    /// All usage reports, for streams whose requests were not changed.
    pub(in crate::proxy) const ALL: Self = Self {
        final_chunk: true,
        running: true,
    };
}

const CONTINUOUS: &[u8] =
    br#""stream_options":{"include_usage":true,"continuous_usage_stats":true},"#;
/// Maximum length of an options object that is completed, in bytes. Real ones have a few members,
/// and parsing a long one costs many times its size. Longer ones stay unchanged.
const OPTIONS_BYTES_MAX: usize = 4096;
const FINAL: &[u8] = br#""stream_options":{"include_usage":true},"#;

/// Returns the body for the engine, and the usage reports that the client itself requested.
pub(in crate::proxy) fn splice(
    mode: UsageRequest,
    path: &str,
    parsed: &ParsedBody,
    body: &Bytes,
) -> (Segments, WantedUsage) {
    let untouched = || (Segments::from(body.clone()), WantedUsage::ALL);
    let has_option = matches!(path, "/v1/chat/completions" | "/v1/completions");
    let is_asked = parsed.stream && has_option && !parsed.are_options_unclear;
    if !is_asked || mode == UsageRequest::Off {
        return untouched();
    }
    let final_chunk = parsed.include_usage == Some(true);
    let running = final_chunk && parsed.continuous_usage == Some(true);
    let wanted = WantedUsage {
        final_chunk,
        running,
    };
    if running || (final_chunk && mode == UsageRequest::Final) {
        return untouched();
    }
    let spliced = match parsed
        .stream_options_span
        .or(parsed.stream_options_null_span)
    {
        Some(span) => replace(mode, body, span),
        None => insert(mode, body, parsed.insert_at),
    };
    spliced.map_or_else(untouched, |segments| (segments, wanted))
}

/// Returns the body with the salt that isolates the user's cached blocks, if any. The client's own
/// salt was removed earlier.
pub(in crate::proxy) fn salted(
    salt: Option<&str>,
    parsed: &ParsedBody,
    body: Segments,
) -> Segments {
    let Some(salt) = salt else {
        return body;
    };
    // The salt has only base64url characters.
    let member = format!("\"cache_salt\":\"{salt}\",");
    body.with_inserted(parsed.insert_at, member.into())
}

/// Inserts the option as the object's first member; `None` if `at` is not in the body.
fn insert(mode: UsageRequest, body: &Bytes, at: usize) -> Option<Segments> {
    if at == 0 || at > body.len() {
        return None;
    }
    let option = if mode == UsageRequest::Continuous {
        CONTINUOUS
    } else {
        FINAL
    };
    Some(Segments::new([
        body.slice(..at),
        Bytes::from_static(option),
        body.slice(at..),
    ]))
}

/// Completes the client's own options object, or replaces null by one; `None` if it is too long or
/// no object. Only this object is rewritten, with its other members.
fn replace(mode: UsageRequest, body: &Bytes, (start, end): (usize, usize)) -> Option<Segments> {
    if end.saturating_sub(start) > OPTIONS_BYTES_MAX {
        return None;
    }
    let options: Option<Map<String, Value>> = serde_json::from_slice(body.get(start..end)?).ok()?;
    let mut options = options.unwrap_or_default();
    options.insert("include_usage".to_owned(), Value::Bool(true));
    if mode == UsageRequest::Continuous {
        options.insert("continuous_usage_stats".to_owned(), Value::Bool(true));
    }
    let options = serde_json::to_vec(&options).ok()?;
    Some(Segments::new([
        body.slice(..start),
        options.into(),
        body.slice(end..),
    ]))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use http_body_util::{BodyExt, Collected};

    use super::*;

    const COMPLETIONS: &str = "/v1/completions";

    /// Parses and splices `body`.
    fn spliced(mode: UsageRequest, path: &str, body: &str) -> (String, WantedUsage) {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let parsed = crate::prompt::parse(path, &body).unwrap();
        let (segments, wanted) = splice(mode, path, &parsed, &body);
        assert_eq!(
            Some(segments.len()),
            http_body::Body::size_hint(&segments).exact()
        );
        let bytes = segments
            .collect()
            .now_or_never()
            .unwrap()
            .map(Collected::to_bytes)
            .unwrap();
        (String::from_utf8(bytes.to_vec()).unwrap(), wanted)
    }

    #[test]
    fn the_usage_option_is_inserted_first_and_the_rest_unchanged() {
        let body = "{ \"model\" : \"m\",\n\"stream\":true }\n";
        let (out, wanted) = spliced(UsageRequest::Continuous, COMPLETIONS, body);
        let option = r#"{"stream_options":{"include_usage":true,"continuous_usage_stats":true}, "#;
        assert_eq!(out, body.replace("{ ", option));
        assert_eq!(
            wanted,
            WantedUsage {
                final_chunk: false,
                running: false
            }
        );
        let body = r#"{"model":"m","stream":true}"#;
        let (out, _) = spliced(UsageRequest::Final, COMPLETIONS, body);
        assert_eq!(
            out,
            r#"{"stream_options":{"include_usage":true},"model":"m","stream":true}"#
        );
    }

    #[test]
    fn a_salt_is_inserted_before_everything_else() {
        for (body, rest) in [
            (
                r#"{"model":"m","stream":false}"#,
                r#""model":"m","stream":false}"#,
            ),
            (
                r#" {"model":"m","stream":true}"#,
                r#""stream_options":{"include_usage":true},"model":"m","stream":true}"#,
            ),
            (
                r#"{"model":"m","stream_options":{},"stream":true}"#,
                r#""model":"m","stream_options":{"include_usage":true},"stream":true}"#,
            ),
        ] {
            let bytes = Bytes::copy_from_slice(body.as_bytes());
            let parsed = crate::prompt::parse(COMPLETIONS, &bytes).unwrap();
            let (segments, _) = splice(UsageRequest::Final, COMPLETIONS, &parsed, &bytes);
            let unsalted = salted(None, &parsed, segments.clone());
            assert_eq!(unsalted.len(), segments.len());
            let salted = salted(Some("s-_"), &parsed, segments);
            let bytes = salted.collect().now_or_never().unwrap();
            let bytes = bytes.map(Collected::to_bytes).unwrap();
            let text = String::from_utf8(bytes.to_vec()).unwrap();
            let brace = body.find('{').unwrap() + 1;
            assert_eq!(
                text,
                format!(r#"{}"cache_salt":"s-_",{rest}"#, &body[..brace])
            );
        }
    }

    #[test]
    fn client_stream_options_are_completed_in_place() {
        for (options, expected) in [
            (
                r#"{"x":1,"include_usage":false}"#,
                r#"{"x":1,"include_usage":true,"continuous_usage_stats":true}"#,
            ),
            (
                "null",
                r#"{"include_usage":true,"continuous_usage_stats":true}"#,
            ),
            (
                "{}",
                r#"{"include_usage":true,"continuous_usage_stats":true}"#,
            ),
        ] {
            let body = format!(r#"{{"stream_options":{options},"model":"m","stream":true}}"#);
            let (out, wanted) = spliced(UsageRequest::Continuous, COMPLETIONS, &body);
            assert_eq!(out, body.replace(options, expected));
            assert!(!wanted.final_chunk);
        }
    }

    #[test]
    fn invalid_stream_options_are_forwarded_unchanged() {
        for options in ["5", "[]", r#"{"include_usage":"x"}"#] {
            let body = format!(r#"{{"model":"m","stream":true,"stream_options":{options}}}"#);
            let (out, wanted) = spliced(UsageRequest::Continuous, COMPLETIONS, &body);
            assert_eq!((out, wanted), (body, WantedUsage::ALL));
        }
        let body = r#"{"model":"m","stream":"true","stream_options":{"include_usage":1}}"#;
        let (out, wanted) = spliced(UsageRequest::Continuous, COMPLETIONS, body);
        let options = r#"{"include_usage":true,"continuous_usage_stats":true}"#;
        assert_eq!(out, body.replace(r#"{"include_usage":1}"#, options));
        assert!(wanted.final_chunk && !wanted.running);
    }

    #[test]
    fn overlong_stream_options_are_forwarded_unchanged() {
        let zeros = "0,".repeat(OPTIONS_BYTES_MAX);
        let body = format!(r#"{{"model":"m","stream":true,"stream_options":{{"x":[{zeros}0]}}}}"#);
        let (out, wanted) = spliced(UsageRequest::Continuous, COMPLETIONS, &body);
        assert_eq!((out, wanted), (body, WantedUsage::ALL));
    }

    #[test]
    fn bodies_that_need_no_usage_option_are_unchanged() {
        let all = r#"{"model":"m","stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#;
        let bare = r#"{"model":"m","stream":true}"#;
        for (mode, path, body) in [
            (UsageRequest::Continuous, COMPLETIONS, all),
            (UsageRequest::Off, COMPLETIONS, bare),
            (UsageRequest::Continuous, "/v1/responses", bare),
            (UsageRequest::Continuous, COMPLETIONS, r#"{"model":"m"}"#),
        ] {
            assert_eq!(
                spliced(mode, path, body),
                (body.to_owned(), WantedUsage::ALL)
            );
        }
    }
}
