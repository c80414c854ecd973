//! Formats of values that neither TOML nor JSON has a type for: how they are parsed, printed and
//! described. Those of values that only a config file has are in `node`.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Deref;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::json;
use state::admission::{BATCH_MAX, Concurrency};

/// Least and greatest integer.
pub type Bounds = (u64, Option<u64>);

/// Returns the first of at most one pair of bounds; for [`forms`](crate::forms).
#[must_use]
pub const fn first(bounds: &[Bounds]) -> Option<Bounds> {
    match bounds {
        [bounds, ..] => Some(*bounds),
        [] => None,
    }
}

/// A format of strings.
pub trait Form {
    /// The parsed value.
    type Value;
    /// Name: `format` in the schema.
    const NAME: &'static str;
    /// A regular expression that all valid strings match, for editors.
    const PATTERN: &'static str;
    /// Describes valid strings in words.
    const EXPECTED: &'static str;
    /// Bounds of integers, if the format accepts them too.
    const INTEGERS: Option<Bounds>;

    /// Parses a string; `None` if it is not valid.
    fn read(text: &str) -> Option<Self::Value>;
    /// Formats a value such that it parses to the same value.
    fn show(value: &Self::Value) -> String;
}

/// A value that settings write in the format `F`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Parsed<F: Form>(pub F::Value);

impl<F: Form> Deref for Parsed<F> {
    type Target = F::Value;

    fn deref(&self) -> &F::Value {
        &self.0
    }
}

impl<'de, F: Form> Deserialize<'de> for Parsed<F> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let value = F::read(&text).map(Self);
        value.ok_or_else(|| D::Error::custom(format!("expected {}", F::EXPECTED)))
    }
}

/// As an integer if the format accepts them and the value is one.
impl<F: Form> Serialize for Parsed<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = F::show(&self.0);
        match text.parse::<i64>() {
            Ok(number) if F::INTEGERS.is_some() => number.serialize(serializer),
            _ => text.serialize(serializer),
        }
    }
}

impl<F: Form> JsonSchema for Parsed<F> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        F::NAME.into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let mut text = json!({ "type": "string", "pattern": F::PATTERN });
        if let Some((min, max)) = F::INTEGERS {
            let mut integer = json!({ "type": "integer", "minimum": min });
            if let Some(max) = max {
                integer["maximum"] = json!(max);
            }
            text = json!({ "anyOf": [integer, text] });
        }
        text["format"] = json!(F::NAME);
        text.try_into().expect("it is an object")
    }
}

/// A format without its type.
#[derive(Debug)]
pub struct NamedForm {
    /// Its name.
    pub name: &'static str,
    /// Describes valid strings in words.
    pub expected: &'static str,
    /// Whether it accepts integers too.
    pub takes_integers: bool,
    /// Whether a string is valid.
    pub is_read: fn(&str) -> bool,
}

/// Finds a format by its name.
pub type FormLookup = fn(&str) -> Option<&'static NamedForm>;

/// Returns the format of this name.
#[must_use]
pub fn named(name: &str) -> Option<&'static NamedForm> {
    FORMS.iter().find(|form| form.name == name)
}

/// Defines formats and `FORMS`, the list of them.
#[macro_export]
macro_rules! forms {
    ($(
        $(#[$attribute:meta])*
        $form:ident: $value:ty = $name:literal {
            pattern: $pattern:expr,
            expected: $expected:literal,
            $(integers: $integers:expr,)?
            read: $read:expr,
            show: $show:expr,
        }
    )*) => {
        $(
            $(#[$attribute])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
            pub struct $form;

            impl $crate::settings::Form for $form {
                type Value = $value;
                const NAME: &'static str = $name;
                const PATTERN: &'static str = $pattern;
                const EXPECTED: &'static str = $expected;
                const INTEGERS: Option<$crate::settings::Bounds> = $crate::settings::first(&[$($integers)?]);

                fn read(text: &str) -> Option<$value> {
                    let read: fn(&str) -> Option<$value> = $read;
                    read(text)
                }

                fn show(value: &$value) -> String {
                    let show: fn(&$value) -> String = $show;
                    show(value)
                }
            }
        )*

        const FORMS: &[$crate::settings::NamedForm] = &[$($crate::settings::NamedForm {
            name: <$form as $crate::settings::Form>::NAME,
            expected: <$form as $crate::settings::Form>::EXPECTED,
            takes_integers: <$form as $crate::settings::Form>::INTEGERS.is_some(),
            is_read: |text| <$form as $crate::settings::Form>::read(text).is_some(),
        }),*];
    };
}

forms! {
    /// A duration.
    Span: Duration = "time-span" {
        pattern: SPAN_PATTERN,
        expected: "a duration from 1ms to 1day, such as \"20ms\" or \"1m 30s\"",
        read: |text| span(text).filter(is_span),
        show: show_duration,
    }
    /// A duration that may be zero.
    SpanOrZero: Duration = "time-span-or-zero" {
        pattern: SPAN_PATTERN,
        expected: "a duration up to 1day, such as \"5s\"",
        read: span,
        show: show_duration,
    }
    /// A duration that may be as long as the log can say.
    LongSpan: Duration = "long-time-span" {
        pattern: SPAN_PATTERN,
        expected: "a duration from 1ms to 49days, such as \"20ms\" or \"1m 30s\"",
        read: |text| long_span(text).filter(is_span),
        show: show_duration,
    }
    /// The same, or zero.
    LongSpanOrZero: Duration = "long-time-span-or-zero" {
        pattern: SPAN_PATTERN,
        expected: "a duration up to 49days, such as \"5s\"",
        read: long_span,
        show: show_duration,
    }
    /// Maximum number of concurrent requests of a backend.
    Slots: Concurrency = "concurrency" {
        pattern: "^(adaptive|unlimited)$",
        expected: "an integer from 1 to 65536, \"adaptive\" or \"unlimited\"",
        integers: (1, Some(BATCH_MAX as u64)),
        read: concurrency,
        show: show_concurrency,
    }
}

/// A number and a unit, as often as wanted.
const SPAN_PATTERN: &str = r"^\d+ *[a-zA-Z]+( *\d+ *[a-zA-Z]+)*$";

/// Minimum; shorter intervals would keep a core busy.
const SPAN_MIN: Duration = Duration::from_millis(1);
/// Maximum; longer durations are typos, and sums of them overflow.
const SPAN_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Parses a duration of at most a day.
#[must_use]
pub fn span(text: &str) -> Option<Duration> {
    let span = humantime::parse_duration(text).ok();
    span.filter(|span| *span <= SPAN_MAX)
}

/// Parses a duration that the log can say in milliseconds.
fn long_span(text: &str) -> Option<Duration> {
    let span = humantime::parse_duration(text).ok();
    span.filter(|span| span.as_millis() <= u32::MAX.into())
}

/// Whether a duration is long enough to wait for.
#[must_use]
pub fn is_span(span: &Duration) -> bool {
    *span >= SPAN_MIN
}

/// Formats a duration.
#[must_use]
pub fn show_duration(span: &Duration) -> String {
    humantime::format_duration(*span).to_string()
}

fn concurrency(text: &str) -> Option<Concurrency> {
    match text {
        "adaptive" => Some(Concurrency::Adaptive),
        "unlimited" => Some(Concurrency::Unlimited),
        number => {
            let number = number.parse().ok();
            let number = number.filter(|number| (1..=BATCH_MAX).contains(number));
            number.map(Concurrency::Fixed)
        }
    }
}

fn show_concurrency(concurrency: &Concurrency) -> String {
    match concurrency {
        Concurrency::Adaptive => "adaptive".to_owned(),
        Concurrency::Unlimited => "unlimited".to_owned(),
        Concurrency::Fixed(requests) => requests.to_string(),
    }
}

/// A value in milliseconds.
#[must_use]
pub fn ms<F: Form<Value = Duration>>(ms: u32) -> Parsed<F> {
    Parsed(Duration::from_millis(ms.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_spans_are_bounded() {
        let day = Duration::from_secs(86_400);
        for read in [Span::read, SpanOrZero::read] {
            assert_eq!(read("1day"), Some(day));
            for wrong in ["25h", "584942417355y", "-1s", "1", "soon", ""] {
                assert_eq!(read(wrong), None, "{wrong}");
            }
        }
        assert_eq!(Span::read("999us"), None);
        let longest = Duration::from_millis(u32::MAX.into());
        for read in [LongSpan::read, LongSpanOrZero::read] {
            assert_eq!(read(&show_duration(&longest)), Some(longest));
            assert_eq!(read("50days"), None);
        }
        assert_eq!(LongSpan::read("0s"), None);
        assert_eq!(LongSpanOrZero::read("0s"), Some(Duration::ZERO));
        assert_eq!(SpanOrZero::read("0s"), Some(Duration::ZERO));
    }

    fn reads_the_same<F: Form<Value: PartialEq + Debug>>(written: &str) {
        let value = F::read(written).unwrap();
        assert_eq!(F::read(&F::show(&value)), Some(value), "{written}");
    }

    #[test]
    fn what_is_written_reads_the_same() {
        reads_the_same::<Span>("1m 30s");
        reads_the_same::<Slots>("adaptive");
        reads_the_same::<Slots>("8");
    }
}
