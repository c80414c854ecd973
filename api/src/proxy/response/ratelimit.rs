//! `x-ratelimit-*` headers: a client's own limits in the format of OpenAI's API, so that SDKs and
//! gateways slow down before they are refused.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::admission::{LimitPreview, LimitsLeft};

/// Headers of one limit: its size, the remainder, and the time until it is full again.
type LimitHeaders = [HeaderName; 3];

const REQUESTS: LimitHeaders = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKENS: LimitHeaders = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

/// Adds the user's limits, if any, and their remainders to a response. They replace those that an
/// engine reports about its own limits.
pub(in crate::proxy) fn add_headers(headers: &mut HeaderMap, left: &LimitsLeft) {
    for (names, limit) in [(REQUESTS, &left.requests), (TOKENS, &left.tokens)] {
        let Some(limit) = limit else {
            continue;
        };
        let [size, remaining, reset] = names;
        headers.insert(size, HeaderValue::from(limit.of));
        headers.insert(remaining, HeaderValue::from(limit.left));
        headers.insert(reset, span(limit));
    }
}

/// Returns the time until a limit is full again, as a duration with its unit.
fn span(limit: &LimitPreview) -> HeaderValue {
    let text = match limit.resets_in_ms.unwrap_or_default() {
        ms @ 0..1000 => format!("{ms}ms"),
        ms => format!("{}s", ms.div_ceil(1000)),
    };
    HeaderValue::try_from(text).expect("digits and letters are visible ascii")
}

#[cfg(test)]
mod tests {
    use state::quotas::LimitKind;

    use super::*;

    #[test]
    fn rate_limit_headers_cover_only_existing_limits() {
        let mut headers = HeaderMap::new();
        let left = LimitsLeft {
            requests: None,
            tokens: Some(LimitPreview {
                limit: LimitKind::Tokens,
                of: 100,
                left: 40,
                resets_in_ms: Some(1200),
            }),
        };
        add_headers(&mut headers, &left);
        assert_eq!(headers.len(), 3);
        assert_eq!(headers["x-ratelimit-limit-tokens"], "100");
        assert_eq!(headers["x-ratelimit-remaining-tokens"], "40");
        assert_eq!(headers["x-ratelimit-reset-tokens"], "2s");
    }
}
