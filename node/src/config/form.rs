//! Formats of values that TOML has no type for, such as sizes and addresses: how they are parsed,
//! printed and described. Those shared with the admin API are in `api::settings`.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use api::engines::backends::{AllowedEngines, EngineUrl as BaseUrl};
use api::prices::{read_price, show_price};
use api::prompt::TokenizerSpec;
use api::proxy::{AllowedOrigins, IdentifyBy, IpPrefix};
use api::settings;
use state::form::{NamedForm, is_span, span};
use tracing_subscriber::EnvFilter;

use super::identity::IdSource;

pub(super) use api::settings::DiskSpace;
pub(super) use state::form::{As, AsList, AsOption, Span, SpanOrZero, show_duration};

/// Returns the format called `name` of this module or of `api::settings`, if there is one.
pub(super) fn named(name: &str) -> Option<&'static NamedForm> {
    let own = FORMS.iter().find(|form| form.name == name);
    own.or_else(|| settings::named(name))
}

state::forms! {
    /// A range of durations, such as `150ms..300ms`.
    SpanRange: Range<Duration> = "time-span-range" {
        pattern: r"^.+\.\..+$",
        expected: "two durations from 1ms to 1day, the shorter first, such as \"150ms..300ms\"",
        read: range,
        show: |range| format!("{}..{}", show_duration(&range.start), show_duration(&range.end)),
    }
    /// Id of a replica.
    NodeId: IdSource = "node-id" {
        pattern: "^from-hostname$",
        expected: "an integer from 1 to 255, or \"from-hostname\"",
        integers: (1, Some(255)),
        read: IdSource::read,
        show: IdSource::show,
    }
    /// A fraction above 0 and up to 1, in thousandths.
    FractionForm: u32 = "fraction" {
        pattern: r"^(0?\.\d{1,3}|1)$",
        expected: "a number above 0 and up to 1, with at most three digits behind the point, such as 0.5",
        integers: (1, Some(1)),
        read: fraction,
        show: show_fraction,
    }
    /// A fraction of all requests from 0 to 1, in millionths.
    SampleForm: u32 = "sample" {
        pattern: r"^(0?\.\d{1,6}|0|1)$",
        expected: "a number from 0 to 1, with at most six digits behind the point, such as 0.01",
        integers: (0, Some(1)),
        read: sample,
        show: show_sample,
    }
    /// A price per million tokens, in millionths.
    PriceForm: u64 = "price" {
        pattern: r"^\d+(\.\d{1,6})?$",
        expected: "a price up to 1000000 with at most six digits behind the point, such as \"0.15\"",
        integers: (0, Some(1_000_000)),
        read: read_price,
        show: show_price,
    }
    /// IP address and port of a listener.
    Address: SocketAddr = "address" {
        pattern: r"^.+:\d+$",
        expected: "an IP address with a port, such as \"127.0.0.1:8080\"",
        read: |text| text.parse().ok(),
        show: SocketAddr::to_string,
    }
    /// Host name or address of a replica, with a port.
    HostPort: String = "host-port" {
        pattern: r"^.+:\d+$",
        expected: "a host with a port, such as \"10.0.0.1:8082\"",
        read: |text| is_host_port(text).then(|| text.to_owned()),
        show: String::clone,
    }
    /// Host name or address, without a port.
    Host: String = "host" {
        pattern: r"^[A-Za-z0-9._-]+$|^\[.+\]$",
        expected: "a host name or IP address without a port, IPv6 in brackets",
        read: |text| is_host(text).then(|| text.to_owned()),
        show: String::clone,
    }
    /// Host name of the admin listener.
    HostName: String = "host-name" {
        pattern: r"^[A-Za-z0-9._-]+$|^\[.+\]$",
        expected: "a host name without a port",
        read: |text| is_host(text).then(|| text.to_owned()),
        show: String::clone,
    }
    /// Name of a cluster.
    ClusterName: String = "cluster-name" {
        pattern: r"^[A-Za-z0-9._-]{1,64}$",
        expected: "letters, digits, `-`, `_` and `.`, at most 64 of them",
        read: |text| is_cluster_name(text).then(|| text.to_owned()),
        show: String::clone,
    }
    /// Name of a body field or header.
    PlainName: String = "name" {
        pattern: r"^[!-+\--~]+$",
        expected: "a name, such as \"priority\"",
        read: |text| is_plain_name(text).then(|| text.to_owned()),
        show: String::clone,
    }
    /// Name of a header, in lower case.
    HeaderField: String = "header-name" {
        pattern: r"^[0-9A-Za-z!#$%&'*+.^_`|~-]+$",
        expected: "a header's name, such as \"x-chat-id\"",
        read: |text| text.parse().ok().map(|name: http::HeaderName| name.as_str().to_owned()),
        show: String::clone,
    }
    /// Path that is routed to engines.
    RoutedPath: String = "routed-path" {
        pattern: "^/",
        expected: "a path, such as \"/generate\", except control routes of engines",
        read: |text| api::proxy::is_plain(text).then(|| text.to_owned()),
        show: String::clone,
    }
    /// URL of an engine.
    EngineUrl: String = "engine-url" {
        pattern: "^https?://[^/]+(/.*)?$",
        expected: "a URL, such as \"http://10.0.1.1:8000\" or \"https://gpu-1/prefix\"",
        read: |text| BaseUrl::parse(text).ok().map(|url| url.as_str().to_owned()),
        show: String::clone,
    }
    /// Source of a request's user.
    Identity: IdentifyBy = "identity" {
        pattern: "^(api_key|body:user|header:.+)$",
        expected: "\"api_key\", \"body:user\" or \"header:NAME\" with a header's name",
        read: |text| text.parse().ok(),
        show: IdentifyBy::to_string,
    }
    /// Origin of web pages, or `*` for any.
    Origin: String = "origin" {
        pattern: r"^(\*|https?://[^/]+)$",
        expected: "an origin as browsers send it, such as \"https://chat.example.org\", or \"*\" for any",
        read: |text| AllowedOrigins::new(&[text.to_owned()]).map(|_| text.to_owned()),
        show: String::clone,
    }
    /// IP address or network prefix.
    Prefix: IpPrefix = "ip-prefix" {
        pattern: r"^[0-9a-fA-F.:]+(/\d+)?$",
        expected: "an IP address or prefix, such as \"10.0.0.0/8\"",
        read: |text| text.parse().ok(),
        show: show_prefix,
    }
    /// Rule for the addresses of engines.
    EngineRule: AllowedEngines = "engine-rule" {
        pattern: r"^([0-9a-zA-Z.:*_-]+(/\d+)?|ipc:///.+)$",
        expected: "an IP address, a prefix such as \"10.0.0.0/8\", a host name such as \"gpu-1\" or \"*.engines.internal\", or a Unix socket such as \"ipc:///run/vllm/*\"",
        read: |text| text.parse().ok(),
        show: AllowedEngines::to_string,
    }
    /// Name of a tokenizer.
    TokenizerName: TokenizerSpec = "tokenizer" {
        pattern: "^(character|engine|tiktoken:(cl100k|o200k)_base|(huggingface|engine):.+)$",
        expected: "\"character\", \"tiktoken:cl100k_base\", \"tiktoken:o200k_base\", \"huggingface:FILE\", \"engine\" or \"engine:FILE\"",
        read: |text| text.parse().ok(),
        show: TokenizerSpec::to_string,
    }
    /// Log level or filter.
    LogFilter: String = "log-filter" {
        pattern: ".",
        expected: "error, warn, info, debug, trace, or a filter such as \"info,raft=debug\"",
        read: |text| is_log_filter(text).then(|| text.to_owned()),
        show: String::clone,
    }
}

fn range(text: &str) -> Option<Range<Duration>> {
    let (from, to) = text.split_once("..")?;
    let (from, to) = (span(from.trim())?, span(to.trim())?);
    (is_span(&from) && from < to).then_some(from..to)
}

fn fraction(text: &str) -> Option<u32> {
    up_to_one(text, 3).filter(|permille| *permille > 0)
}

fn show_fraction(permille: &u32) -> String {
    show_up_to_one(*permille, 3)
}

fn sample(text: &str) -> Option<u32> {
    up_to_one(text, 6)
}

fn show_sample(ppm: &u32) -> String {
    show_up_to_one(*ppm, 6)
}

/// Parses a decimal number from 0 to 1 with at most `places` decimal places. Returns it in units of
/// the last place, or `None` if `text` is not such a number.
fn up_to_one(text: &str, places: usize) -> Option<u32> {
    let (whole, digits) = text.split_once('.').unwrap_or((text, ""));
    let is_number = digits.len() <= places && digits.bytes().all(|byte| byte.is_ascii_digit());
    let is_said = text.len() > usize::from(text.contains('.'));
    let one = one(places);
    let whole = match whole {
        "" | "0" => 0,
        "1" => one,
        _ => return None,
    };
    let part: u32 = format!("{digits:0<places$}").parse().ok()?;
    Some(whole + part).filter(|units| is_number && is_said && *units <= one)
}

fn show_up_to_one(units: u32, places: usize) -> String {
    let digits = format!("{:0places$}", units % one(places));
    match (units / one(places), digits.trim_end_matches('0')) {
        (whole, "") => whole.to_string(),
        (whole, digits) => format!("{whole}.{digits}"),
    }
}

/// Returns the number 1 in units of the last of `places` decimal places.
fn one(places: usize) -> u32 {
    (0..places).fold(1, |one, _| one * 10)
}

/// Formats a network; a single address without a prefix length.
fn show_prefix(prefix: &IpPrefix) -> String {
    let text = prefix.to_string();
    let whole = if text.contains(':') { "/128" } else { "/32" };
    text.strip_suffix(whole).unwrap_or(&text).to_owned()
}

/// Whether the text is a host, see [`is_host`], with a port other than 0.
fn is_host_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
    is_port && is_host(host)
}

/// Whether the text is a host name, an IPv4 address, or an IPv6 address in brackets.
fn is_host(host: &str) -> bool {
    let inner = host.strip_prefix('[');
    if let Some(inner) = inner.and_then(|rest| rest.strip_suffix(']')) {
        return inner.parse::<std::net::Ipv6Addr>().is_ok();
    }
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    !host.is_empty() && host.len() <= 253 && host.chars().all(is_allowed)
}

fn is_cluster_name(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=raft::NAME_BYTES_MAX).contains(&text.len()) && text.chars().all(is_plain)
}

fn is_plain_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b',';
    !text.is_empty() && text.bytes().all(is_plain)
}

/// Whether the text is a log level or filter. Accepts a bare word only as a level, and a target only
/// with one: without a level it would silence all others.
fn is_log_filter(text: &str) -> bool {
    let mut directives = text.split(',').map(str::trim);
    let is_meant = |it: &str| match it.rsplit_once('=') {
        Some((_, level)) if !it.ends_with(']') => LOG_LEVELS.contains(&level),
        _ => it.ends_with(']') || LOG_LEVELS.contains(&it),
    };
    directives.all(|it| is_meant(&it.to_ascii_lowercase()))
        && EnvFilter::builder().parse(text).is_ok()
}

const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use state::form::Form;

    use super::*;

    #[test]
    fn fractions_are_above_zero_and_up_to_one() {
        for (text, permille) in [("0.5", 500), (".001", 1), ("1", 1000), ("1.0", 1000)] {
            assert_eq!(FractionForm::read(text), Some(permille), "{text}");
        }
        for wrong in [
            "0", "0.0", "1.1", "2", "-0.5", "0.0005", "", ".", "1e-1", "0.+5",
        ] {
            assert_eq!(FractionForm::read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn sample_fractions_are_between_zero_and_one() {
        for (text, ppm, shown) in [
            ("0", 0, "0"),
            ("0.0", 0, "0"),
            ("0.01", 10_000, "0.01"),
            (".000001", 1, "0.000001"),
            ("1", 1_000_000, "1"),
        ] {
            assert_eq!(SampleForm::read(text), Some(ppm), "{text}");
            assert_eq!(show_sample(&ppm), shown);
        }
        for wrong in ["1.1", "2", "-0.5", "0.0000005", "", ".", "1e-1", "0.+5"] {
            assert_eq!(SampleForm::read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_misspelt_log_level_is_refused() {
        for right in ["info", "WARN", "off", "warn,raft=debug", "raft=debug"] {
            assert!(is_log_filter(right), "{right}");
        }
        for wrong in [
            "",
            "inof",
            "info,",
            "info,raft",
            "raft=loud",
            "bogus=",
            "inof,raft=debug",
        ] {
            assert!(!is_log_filter(wrong), "{wrong}");
        }
    }

    #[test]
    fn time_ranges_need_the_lower_bound_first() {
        let range = Duration::from_millis(150)..Duration::from_millis(300);
        assert_eq!(SpanRange::read("150ms..300ms"), Some(range));
        for wrong in [
            "300ms..150ms",
            "0ms..1s",
            "1us..2us",
            "1s..9days",
            "1s..1s",
            "1s",
            "1s..",
            "..",
            "a..b",
        ] {
            assert_eq!(SpanRange::read(wrong), None, "{wrong}");
        }
    }

    fn check(is: fn(&str) -> bool, right: &[&str], wrong: &[&str]) {
        for text in right {
            assert!(is(text), "{text}");
        }
        for text in wrong {
            assert!(!is(text), "{text:?}");
        }
    }

    #[test]
    fn hosts_with_ports_may_be_names_or_addresses() {
        let right = [
            "a:1",
            "10.0.0.1:8082",
            "[::1]:8082",
            "quorate-0.quorate.svc:8082",
        ];
        let wrong = [
            "a",
            "a:",
            "a:0",
            ":1",
            "a:65536",
            "::1:80",
            "a b:1",
            "http://a:1",
        ];
        check(is_host_port, &right, &wrong);
    }

    #[test]
    fn engine_urls_need_an_http_scheme() {
        assert_eq!(
            EngineUrl::read("http://gpu/").as_deref(),
            Some("http://gpu:80")
        );
        let prefixed = EngineUrl::read("http://a:1/v/m/");
        assert_eq!(prefixed.as_deref(), Some("http://a:1/v/m"));
        let tls = EngineUrl::read("https://a/v");
        assert_eq!(tls.as_deref(), Some("https://a:443/v"));
        for wrong in ["ftp://a:1", "https://", "a:1", "http://u@a:1"] {
            assert_eq!(EngineUrl::read(wrong), None, "{wrong}");
        }
    }

    fn reads_the_same<F: Form<Value: PartialEq + Debug>>(written: &str) {
        let value = F::read(written).unwrap();
        assert_eq!(F::read(&F::show(&value)), Some(value), "{written}");
    }

    #[test]
    fn written_settings_round_trip() {
        reads_the_same::<SpanRange>("150ms..300ms");
        reads_the_same::<FractionForm>("0.5");
        reads_the_same::<FractionForm>(".125");
        reads_the_same::<FractionForm>("1");
        reads_the_same::<Address>("[::1]:80");
        reads_the_same::<Identity>("header:x-user");
        reads_the_same::<Prefix>("10.0.0.0/8");
        reads_the_same::<Prefix>("::1");
        reads_the_same::<EngineRule>("10.0.0.0/8");
        reads_the_same::<EngineRule>("*.engines.internal");
        reads_the_same::<EngineRule>("ipc:///run/vllm/*");
        reads_the_same::<TokenizerName>("huggingface:/a/b.json");
    }
}
