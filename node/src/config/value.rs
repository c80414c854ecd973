//! Values of keys: how each [`Kind`] is read from text or TOML, what is expected of it in words,
//! and how it is written out again.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use api::prompt::TokenizerSpec;
use api::proxy::IpPrefix;

use super::key::Kind;

/// Most requests one backend is given at once.
pub(super) const CONCURRENCY_MAX: i64 = 65_536;

/// The tokenizers there are.
const TOKENIZERS: &str = "\"character\", \"tiktoken:cl100k_base\", \"tiktoken:o200k_base\", \
                          \"huggingface:FILE\" or \"engine\"";

/// A value that its key's kind allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Of `Kind::Integer` and `Concurrency`.
    Integer(i64),
    /// Of `Kind::Flag`.
    Flag(bool),
    /// Of `Kind::Text`, `Choice`, `Concurrency`, `HostPort`, `Tokenizer`, `Url` and `UrlPath`.
    Text(String),
    /// Of `Kind::Duration` and `DurationOrZero`.
    Duration(Duration),
    /// Of `Kind::DurationRange`.
    Range(Range<Duration>),
    /// Of `Kind::Size`, in bytes.
    Size(u64),
    /// Of `Kind::Address`.
    Address(SocketAddr),
    /// Of `Kind::HostPorts`, `Identities`, `Prefixes` and `Texts`.
    Texts(Vec<String>),
    /// Of `Kind::Statuses`.
    Statuses(Vec<u16>),
    /// Of `Kind::Labels`.
    Labels(BTreeMap<String, String>),
}

/// A value as it was written, before its kind is known to fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Raw {
    /// A TOML integer.
    Integer(i64),
    /// A TOML boolean.
    Flag(bool),
    /// A TOML string, or the text of a variable or flag.
    Text(String),
    /// Any other TOML type, by its name with an article.
    Other(&'static str),
}

impl fmt::Display for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(number) => number.fmt(f),
            Self::Flag(is_set) => is_set.fmt(f),
            Self::Text(text) if text.len() > 60 => f.write_str("a long text"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Other(name) => f.write_str(name),
        }
    }
}

/// Why a value does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Misfit {
    /// It is not what the kind takes; [`expected`] says what would be.
    Wrong,
    /// It means a feature this version does not have.
    NotAvailable,
}

impl Kind {
    /// Whether the kind is a list: written as a TOML array, or with commas in a variable.
    #[must_use]
    pub(super) fn is_list(self) -> bool {
        matches!(
            self,
            Self::HostPorts
                | Self::Hosts
                | Self::Identities
                | Self::Prefixes
                | Self::Names
                | Self::Paths
                | Self::Texts
                | Self::Statuses
        )
    }

    /// What a value of this kind (for a list: one of its elements) looks like, in words.
    #[must_use]
    pub(super) fn expected(self) -> String {
        match self {
            Self::Integer { min, max } => format!("an integer from {min} to {max}"),
            Self::Concurrency => {
                format!("an integer from 1 to {CONCURRENCY_MAX}, \"adaptive\" or \"unlimited\"")
            }
            Self::Flag => "true or false".to_owned(),
            Self::Text | Self::Texts => "non-empty text".to_owned(),
            Self::Choice { now, .. } => {
                let words: Vec<_> = now.iter().map(|word| format!("{word:?}")).collect();
                words.join(" or ")
            }
            Self::Duration => {
                "a duration from 1ms to 1day, such as \"20ms\" or \"1m 30s\"".to_owned()
            }
            Self::DurationOrZero => "a duration up to 1day, such as \"5s\"".to_owned(),
            Self::DurationRange => {
                "two durations from 1ms to 1day, the shorter first, such as \"150ms..300ms\""
                    .to_owned()
            }
            Self::Size => "a size in bytes above zero, such as \"32MiB\"".to_owned(),
            Self::Address => "an IP address with a port, such as \"127.0.0.1:8080\"".to_owned(),
            Self::HostPort | Self::HostPorts => {
                "a host with a port, such as \"10.0.0.1:8082\"".to_owned()
            }
            Self::Hosts => "a host name without a port".to_owned(),
            Self::Names => "a name, such as \"priority\"".to_owned(),
            Self::Paths => {
                "a path, such as \"/generate\", that is no control route of an engine".to_owned()
            }
            Self::Identities => {
                "\"api_key\", \"body:user\" or \"header:NAME\" with a header's name".to_owned()
            }
            Self::Prefixes => "an IP address or prefix, such as \"10.0.0.0/8\"".to_owned(),
            Self::Statuses => "an HTTP status from 400 to 599".to_owned(),
            Self::Tokenizer => TOKENIZERS.to_owned(),
            Self::Url => "a URL, such as \"http://10.0.1.1:8000\", without a path".to_owned(),
            Self::UrlPath => "a path, such as \"/health\"".to_owned(),
            Self::Labels => "a table of strings".to_owned(),
        }
    }

    /// Reads one value; of a list kind one element, as a list of one.
    ///
    /// # Errors
    /// [`Misfit`].
    pub(super) fn read(self, raw: &Raw) -> Result<Value, Misfit> {
        let value = match (self, raw) {
            (Self::Integer { min, max }, raw) => integer(raw)
                .filter(|number| (min..=max).contains(number))
                .map(Value::Integer),
            (Self::Concurrency, Raw::Text(text))
                if matches!(text.as_str(), "adaptive" | "unlimited") =>
            {
                Some(Value::Text(text.clone()))
            }
            (Self::Concurrency, raw) => integer(raw)
                .filter(|number| (1..=CONCURRENCY_MAX).contains(number))
                .map(Value::Integer),
            (Self::Size, raw) => size(raw).filter(|&bytes| bytes > 0).map(Value::Size),
            (Self::Statuses, raw) => integer(raw)
                .and_then(|number| u16::try_from(number).ok())
                .filter(|status| (400..=599).contains(status))
                .map(|status| Value::Statuses(vec![status])),
            (Self::Flag, raw) => flag(raw).map(Value::Flag),
            (_, Raw::Integer(_) | Raw::Flag(_) | Raw::Other(_)) => None,
            (kind, Raw::Text(text)) => kind.read_text(text)?,
        };
        value.ok_or(Misfit::Wrong)
    }

    fn read_text(self, text: &str) -> Result<Option<Value>, Misfit> {
        let owned = || Value::Text(text.to_owned());
        let listed = || Value::Texts(vec![text.to_owned()]);
        let value = match self {
            Self::Text => (!text.trim().is_empty()).then(owned),
            Self::Texts => (!text.trim().is_empty()).then(listed),
            Self::Choice { now, later } => {
                if later.contains(&text) {
                    return Err(Misfit::NotAvailable);
                }
                now.contains(&text).then(owned)
            }
            Self::Tokenizer => text.parse().ok().map(|_: TokenizerSpec| owned()),
            Self::Duration => duration(text)
                .filter(|span| *span >= SPAN_MIN)
                .map(Value::Duration),
            Self::DurationOrZero => duration(text).map(Value::Duration),
            Self::DurationRange => range(text).map(Value::Range),
            Self::Address => text.parse().ok().map(Value::Address),
            Self::HostPort => is_host_port(text).then(owned),
            Self::HostPorts => is_host_port(text).then(listed),
            Self::Hosts => is_host(text).then(listed),
            Self::Names => is_plain_name(text).then(listed),
            Self::Paths => api::proxy::is_plain(text).then(listed),
            Self::Identities => is_identity(text).then(listed),
            Self::Prefixes => text.parse().ok().map(|_: IpPrefix| listed()),
            Self::Url => is_url(text).then(owned),
            Self::UrlPath => is_url_path(text).then(owned),
            Self::Labels
            | Self::Integer { .. }
            | Self::Concurrency
            | Self::Flag
            | Self::Size
            | Self::Statuses => None,
        };
        Ok(value)
    }
}

fn integer(raw: &Raw) -> Option<i64> {
    match raw {
        Raw::Integer(number) => Some(*number),
        Raw::Text(text) => text.parse().ok(),
        Raw::Flag(_) | Raw::Other(_) => None,
    }
}

fn flag(raw: &Raw) -> Option<bool> {
    match raw {
        Raw::Flag(is_set) => Some(*is_set),
        Raw::Text(text) => text.parse().ok(),
        Raw::Integer(_) | Raw::Other(_) => None,
    }
}

fn size(raw: &Raw) -> Option<u64> {
    match raw {
        Raw::Integer(number) => u64::try_from(*number).ok(),
        Raw::Text(text) => {
            let digits = text
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(text.len());
            let (number, unit) = text.split_at(digits);
            let unit = match unit.trim_start() {
                "" | "B" => 1,
                "kB" => 1_000,
                "MB" => 1_000_000,
                "GB" => 1_000_000_000,
                "KiB" => 1 << 10,
                "MiB" => 1 << 20,
                "GiB" => 1 << 30,
                _ => return None,
            };
            number.parse::<u64>().ok()?.checked_mul(unit)
        }
        Raw::Flag(_) | Raw::Other(_) => None,
    }
}

/// Shorter ones would keep a core busy.
const SPAN_MIN: Duration = Duration::from_millis(1);
/// Longer ones are slips of the pen, and overflow in sums with others.
const SPAN_MAX: Duration = Duration::from_secs(24 * 60 * 60);

fn duration(text: &str) -> Option<Duration> {
    let span = humantime::parse_duration(text).ok();
    span.filter(|span| *span <= SPAN_MAX)
}

fn range(text: &str) -> Option<Range<Duration>> {
    let (from, to) = text.split_once("..")?;
    let (from, to) = (duration(from.trim())?, duration(to.trim())?);
    (from >= SPAN_MIN && from < to).then_some(from..to)
}

/// Whether the text is a host (a name, an IPv4 address or an IPv6 address in brackets) and a port.
fn is_host_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
    is_port && is_host(host)
}

/// Whether the text can stand for a host in an address.
pub(super) fn is_host(host: &str) -> bool {
    if let Some(inner) = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
    {
        return inner.parse::<std::net::Ipv6Addr>().is_ok();
    }
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    !host.is_empty() && host.len() <= 253 && host.chars().all(is_allowed)
}

fn is_identity(text: &str) -> bool {
    match text.strip_prefix("header:") {
        Some(name) => http::HeaderName::from_bytes(name.as_bytes()).is_ok(),
        None => text == "api_key" || text == "body:user",
    }
}

fn is_url(text: &str) -> bool {
    let Some(authority) = text.strip_prefix("http://") else {
        return false;
    };
    let authority = authority.strip_suffix('/').unwrap_or(authority);
    is_host_port(authority) || is_host(authority)
}

fn is_plain_name(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && byte != b',')
}

fn is_url_path(text: &str) -> bool {
    text.starts_with('/') && text.parse::<http::uri::PathAndQuery>().is_ok()
}

/// Writes a time span the way it is read.
fn show_duration(span: Duration) -> String {
    humantime::format_duration(span).to_string()
}

fn show_size(bytes: u64) -> String {
    for (unit, name) in [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if bytes.is_multiple_of(unit) {
            return format!("\"{}{name}\"", bytes / unit);
        }
    }
    bytes.to_string()
}

/// As TOML.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(number) => number.fmt(f),
            Self::Flag(is_set) => is_set.fmt(f),
            Self::Text(text) => quoted(text).fmt(f),
            Self::Duration(span) => quoted(&show_duration(*span)).fmt(f),
            Self::Range(range) => {
                let (from, to) = (show_duration(range.start), show_duration(range.end));
                quoted(&format!("{from}..{to}")).fmt(f)
            }
            Self::Size(bytes) => f.write_str(&show_size(*bytes)),
            Self::Address(address) => quoted(&address.to_string()).fmt(f),
            Self::Texts(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| quoted(text).to_string()).collect();
                write!(f, "[{}]", texts.join(", "))
            }
            Self::Statuses(statuses) => write!(f, "{statuses:?}"),
            Self::Labels(labels) => {
                let pairs: Vec<_> = labels
                    .iter()
                    .map(|(name, text)| format!("{} = {}", quoted(name), quoted(text)))
                    .collect();
                write!(f, "{{ {} }}", pairs.join(", "))
            }
        }
    }
}

fn quoted(text: &str) -> toml::Value {
    toml::Value::String(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Raw {
        Raw::Text(text.to_owned())
    }

    #[test]
    fn sizes_are_read_with_binary_and_decimal_units() {
        assert_eq!(Kind::Size.read(&text("32MiB")), Ok(Value::Size(32 << 20)));
        assert_eq!(Kind::Size.read(&text("5 kB")), Ok(Value::Size(5_000)));
        assert_eq!(Kind::Size.read(&Raw::Integer(7)), Ok(Value::Size(7)));
        for wrong in ["", "MiB", "-1", "1.5MiB", "99999999999GiB", "1mib", "0"] {
            assert_eq!(Kind::Size.read(&text(wrong)), Err(Misfit::Wrong), "{wrong}");
        }
    }

    #[test]
    fn ranges_of_time_need_the_lesser_first() {
        let range = Duration::from_millis(150)..Duration::from_millis(300);
        assert_eq!(
            Kind::DurationRange.read(&text("150ms..300ms")),
            Ok(Value::Range(range))
        );
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
            assert_eq!(
                Kind::DurationRange.read(&text(wrong)),
                Err(Misfit::Wrong),
                "{wrong}"
            );
        }
    }

    #[test]
    fn time_spans_are_bounded() {
        let day = Duration::from_secs(86_400);
        for kind in [Kind::Duration, Kind::DurationOrZero] {
            assert_eq!(kind.read(&text("1day")), Ok(Value::Duration(day)));
            for wrong in ["25h", "584942417355y", "-1s", "1", "soon", ""] {
                assert_eq!(kind.read(&text(wrong)), Err(Misfit::Wrong), "{wrong}");
            }
        }
        assert_eq!(Kind::Duration.read(&text("999us")), Err(Misfit::Wrong));
        let zero = Ok(Value::Duration(Duration::ZERO));
        assert_eq!(Kind::DurationOrZero.read(&text("0s")), zero);
    }

    #[test]
    fn paths_of_urls_begin_with_a_slash() {
        for right in ["/", "/health", "/v1/models?limit=1"] {
            assert!(is_url_path(right), "{right}");
        }
        for wrong in ["", "health", "http://a/health", "/a b", "/\n"] {
            assert!(!is_url_path(wrong), "{wrong:?}");
        }
    }

    #[test]
    fn hosts_with_ports_are_names_or_addresses() {
        for right in [
            "a:1",
            "10.0.0.1:8082",
            "[::1]:8082",
            "quorate-0.quorate.svc:8082",
        ] {
            assert!(is_host_port(right), "{right}");
        }
        for wrong in [
            "a",
            "a:",
            "a:0",
            ":1",
            "a:65536",
            "::1:80",
            "a b:1",
            "http://a:1",
        ] {
            assert!(!is_host_port(wrong), "{wrong}");
        }
    }

    #[test]
    fn urls_are_plain_http_without_a_path() {
        for right in ["http://10.0.1.1:8000", "http://gpu/", "http://[::1]:9"] {
            assert!(is_url(right), "{right}");
        }
        for wrong in [
            "https://a:1",
            "http://",
            "http://a:1/v1",
            "a:1",
            "http://u@a:1",
        ] {
            assert!(!is_url(wrong), "{wrong}");
        }
    }

    #[test]
    fn what_is_written_reads_the_same() {
        for (kind, written) in [
            (Kind::Duration, "1m 30s"),
            (Kind::DurationRange, "150ms..300ms"),
            (Kind::Size, "3MiB"),
            (Kind::Size, "12345"),
            (Kind::Address, "[::1]:80"),
        ] {
            let value = kind.read(&text(written)).unwrap();
            let shown = value.to_string();
            let again = kind.read(&text(shown.trim_matches('"'))).unwrap();
            assert_eq!(value, again, "{written}");
        }
    }
}
