//! Log lines in logfmt: `key=value` pairs, quoted where necessary.

use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Formats the time, level and fields of an event. Omits the message and target, which are the same
/// in all lines.
pub(super) struct Logfmt;

impl<S, N> FormatEvent<S, N> for Logfmt
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        writer.write_str("timestamp=")?;
        SystemTime.format_time(&mut writer)?;
        write!(writer, " level={}", event.metadata().level())?;
        let mut pairs = Pairs {
            writer: &mut writer,
            outcome: Ok(()),
        };
        event.record(&mut pairs);
        pairs.outcome?;
        writeln!(writer)
    }
}

struct Pairs<'a, 'w> {
    writer: &'a mut Writer<'w>,
    outcome: fmt::Result,
}

impl Pairs<'_, '_> {
    fn pair(&mut self, field: &Field, text: &str) {
        if field.name() == "message" || self.outcome.is_err() {
            return;
        }
        self.outcome = write!(self.writer, " {}={}", field.name(), LogfmtValue(text));
    }
}

impl Visit for Pairs<'_, '_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.pair(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.pair(field, &format!("{value:?}"));
    }
}

/// A value that is quoted if it is empty or contains a delimiter. Quoted values are escaped as in
/// JSON, so that each event is one line.
struct LogfmtValue<'a>(&'a str);

impl fmt::Display for LogfmtValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain = |c: char| c > ' ' && c != '"' && c != '=' && c != '\\' && !c.is_control();
        if !self.0.is_empty() && self.0.chars().all(is_plain) {
            return f.write_str(self.0);
        }
        f.write_char('"')?;
        for c in self.0.chars() {
            match c {
                '"' => f.write_str("\\\"")?,
                '\\' => f.write_str("\\\\")?,
                '\n' => f.write_str("\\n")?,
                '\r' => f.write_str("\\r")?,
                '\t' => f.write_str("\\t")?,
                // C0, DEL and C1 all fit into 16 bits.
                c if c.is_control() => write!(f, "\\u{:04x}", u32::from(c))?,
                c => f.write_char(c)?,
            }
        }
        f.write_char('"')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logfmt_values_are_quoted_if_needed() {
        for (text, shown) in [
            ("gpu-1", "gpu-1"),
            ("grün", "grün"),
            ("", r#""""#),
            ("a b", r#""a b""#),
            ("a=b", r#""a=b""#),
            ("a\"b\\", r#""a\"b\\""#),
            ("a\nb\u{1b}\u{85}", r#""a\nb\u001b\u0085""#),
        ] {
            assert_eq!(LogfmtValue(text).to_string(), shown);
            if shown.starts_with('"') {
                let read: String = serde_json::from_str(shown).unwrap();
                assert_eq!(read, text, "as JSON");
            }
        }
    }
}
