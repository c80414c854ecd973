//! Client deadlines, read from request headers.
//!
//! | header | value | sent by |
//! | --- | --- | --- |
//! | `x-request-timeout` | seconds (`2.5`), or with a unit: `250ms`, `30s`, `2m` | clients, on purpose |
//! | `x-envoy-expected-rq-timeout-ms` | milliseconds | Envoy |
//! | `x-stainless-timeout`, `x-stainless-read-timeout` | seconds | OpenAI's and Anthropic's SDKs |
//! | `x-llm-d-slo-ttft-ms`, of streams only | milliseconds to the first token | clients of llm-d |
//! | `grpc-timeout` | digits and one of `H M S m u n` | gRPC gateways |
//!
//! The shortest deadline counts. Unreadable values and 0 are ignored: the headers belong to other
//! systems, and some of them use 0 for "no timeout".

use std::time::Duration;

use http::HeaderMap;

/// Name of a header, and the parser of its value.
type HeaderReader = (&'static str, fn(&str) -> Option<Duration>);

/// Header with the time to the first token.
const FIRST_TOKEN: &str = "x-llm-d-slo-ttft-ms";

const READINGS: [HeaderReader; 6] = [
    ("x-request-timeout", with_unit),
    ("x-envoy-expected-rq-timeout-ms", |text| {
        text.parse().ok().map(Duration::from_millis)
    }),
    (FIRST_TOKEN, |text| {
        text.parse().ok().map(Duration::from_millis)
    }),
    ("x-stainless-timeout", seconds),
    ("x-stainless-read-timeout", seconds),
    ("grpc-timeout", grpc),
];

/// Returns how long the client waits; `None` if no header states it. The time to the first token
/// says nothing about a response that is not streamed.
pub(super) fn client_deadline(headers: &HeaderMap, is_stream: bool) -> Option<Duration> {
    let read = |(name, read): &HeaderReader| read(headers.get(*name)?.to_str().ok()?.trim());
    let counts = |(name, _): &&HeaderReader| is_stream || *name != FIRST_TOKEN;
    let told = READINGS.iter().filter(counts).filter_map(read);
    told.filter(|deadline| !deadline.is_zero()).min()
}

/// Returns the longest wait that leaves time for a response that takes `service` on average. A
/// stream needs no such time, because it starts at once. The result is at least a quarter of the
/// deadline, since the response may be shorter than average.
pub(in crate::proxy) fn wait_max(
    deadline: Duration,
    service: Duration,
    is_stream: bool,
) -> Duration {
    if is_stream {
        deadline
    } else {
        deadline.saturating_sub(service).max(deadline / 4)
    }
}

fn seconds(text: &str) -> Option<Duration> {
    Duration::try_from_secs_f64(text.parse().ok()?).ok()
}

fn with_unit(text: &str) -> Option<Duration> {
    let end = text.find(|letter: char| letter.is_ascii_alphabetic());
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let number: f64 = number.trim().parse().ok()?;
    let seconds = match unit {
        "" | "s" => number,
        "ms" => number / 1000.0,
        "m" => number * 60.0,
        _ => return None,
    };
    Duration::try_from_secs_f64(seconds).ok()
}

fn grpc(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = number.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(number.checked_mul(3600)?)),
        "M" => Some(Duration::from_secs(number.checked_mul(60)?)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn headers(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let field = |(name, value): &(&'static str, &'static str)| {
            let name = HeaderName::from_static(name);
            (name, HeaderValue::from_static(value))
        };
        fields.iter().map(field).collect()
    }

    #[test]
    fn deadlines_parse_in_each_headers_format() {
        for (name, value, ms) in [
            ("x-request-timeout", "3", 3000),
            ("x-request-timeout", " 2.5 ", 2500),
            ("x-request-timeout", "250ms", 250),
            ("x-request-timeout", "30s", 30_000),
            ("x-request-timeout", "2m", 120_000),
            ("x-envoy-expected-rq-timeout-ms", "1500", 1500),
            ("x-llm-d-slo-ttft-ms", "800", 800),
            ("x-stainless-timeout", "600", 600_000),
            ("x-stainless-read-timeout", "600.0", 600_000),
            ("grpc-timeout", "5S", 5000),
            ("grpc-timeout", "200m", 200),
            ("grpc-timeout", "1H", 3_600_000),
        ] {
            let told = client_deadline(&headers(&[(name, value)]), true);
            assert_eq!(told, Some(Duration::from_millis(ms)), "{name}: {value}");
        }
    }

    #[test]
    fn unreadable_deadlines_are_ignored() {
        for value in ["", "0", "-1", "soon", "3h", "NaN", "1e400", "m", "5"] {
            let header = ("grpc-timeout", value);
            let none = client_deadline(&headers(&[header]), true);
            assert_eq!(none, None, "{value}");
        }
        for value in ["", "0", "-1", "soon", "3h", "NaN", "1e400", "inf", "0ms"] {
            assert_eq!(
                client_deadline(&headers(&[("x-request-timeout", value)]), true),
                None,
                "{value}"
            );
        }
        assert_eq!(client_deadline(&HeaderMap::new(), true), None);
    }

    #[test]
    fn the_shortest_deadline_wins() {
        let both = headers(&[("x-stainless-timeout", "600"), ("x-request-timeout", "4s")]);
        assert_eq!(client_deadline(&both, true), Some(Duration::from_secs(4)));
    }

    #[test]
    fn the_time_to_the_first_token_counts_for_streams_only() {
        let first = headers(&[("x-llm-d-slo-ttft-ms", "800")]);
        let told = [true, false].map(|is_stream| client_deadline(&first, is_stream));
        assert_eq!(told, [Some(Duration::from_millis(800)), None]);
    }

    #[test]
    fn the_maximum_wait_leaves_time_for_the_answer() {
        let s = Duration::from_secs;
        assert_eq!(wait_max(s(10), s(4), false), s(6));
        assert_eq!(wait_max(s(8), s(60), false), s(2));
        assert_eq!(wait_max(s(10), s(4), true), s(10));
    }
}
