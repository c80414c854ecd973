//! String formats of types that TOML and JSON lack: parsing, printing and describing them. `node`
//! defines the formats that occur only in config files.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Deref;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::json;
use state::admission::{BATCH_MAX, Concurrency};

/// Smallest and largest valid integer; `None`: no upper bound.
pub type Bounds = (u64, Option<u64>);

/// Returns the first element; `None` for an empty slice. [`forms`](crate::forms) passes at most
/// one.
#[must_use]
pub const fn first(bounds: &[Bounds]) -> Option<Bounds> {
    match bounds {
        [bounds, ..] => Some(*bounds),
        [] => None,
    }
}

/// A string format for values of one type.
pub trait Form {
    /// The parsed value.
    type Value;
    /// Name of the format, used as `format` in schemas.
    const NAME: &'static str;
    /// Regular expression that every valid string matches, for editors. It may match others too.
    const PATTERN: &'static str;
    /// Description of the valid strings, used in error messages after "expected".
    const EXPECTED: &'static str;
    /// Bounds of the integers that the format also accepts; `None` if it accepts only strings.
    const INTEGERS: Option<Bounds>;

    /// Parses a string; `None` if it is not valid.
    fn read(text: &str) -> Option<Self::Value>;
    /// Formats a value. [`Form::read`] parses the result to an equal value.
    fn show(value: &Self::Value) -> String;
}

/// A value that is serialized in the format `F`.
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

/// Serializes the value as an integer if the format accepts integers and the value is one,
/// otherwise as a string.
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

/// Description of a [`Form`], independent of its type.
#[derive(Debug)]
pub struct NamedForm {
    /// [`Form::NAME`].
    pub name: &'static str,
    /// [`Form::EXPECTED`].
    pub expected: &'static str,
    /// Whether the format also accepts integers.
    pub takes_integers: bool,
    /// Returns whether a string is valid.
    pub is_read: fn(&str) -> bool,
}

/// Function that returns the format with a given name; `None` if there is none.
pub type FormLookup = fn(&str) -> Option<&'static NamedForm>;

/// Returns the format of this crate named `name`, if there is one.
#[must_use]
pub fn named(name: &str) -> Option<&'static NamedForm> {
    FORMS.iter().find(|form| form.name == name)
}

/// Defines a unit struct that implements [`Form`](crate::settings::Form) for each format, and
/// `FORMS`, the list of all of them.
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
    /// A duration from 1 ms to 1 day.
    Span: Duration = "time-span" {
        pattern: SPAN_PATTERN,
        expected: "a duration from 1ms to 1day, such as \"20ms\" or \"1m 30s\"",
        read: |text| span(text).filter(is_span),
        show: show_duration,
    }
    /// A duration of at most 1 day; may be zero.
    SpanOrZero: Duration = "time-span-or-zero" {
        pattern: SPAN_PATTERN,
        expected: "a duration up to 1day, such as \"5s\"",
        read: span,
        show: show_duration,
    }
    /// A duration from 1 ms to `u32::MAX` milliseconds (49 days), the maximum in the log.
    LongSpan: Duration = "long-time-span" {
        pattern: SPAN_PATTERN,
        expected: "a duration from 1ms to 49days, such as \"20ms\" or \"1m 30s\"",
        read: |text| long_span(text).filter(is_span),
        show: show_duration,
    }
    /// A duration of at most `u32::MAX` milliseconds; may be zero.
    LongSpanOrZero: Duration = "long-time-span-or-zero" {
        pattern: SPAN_PATTERN,
        expected: "a duration up to 49days, such as \"5s\"",
        read: long_span,
        show: show_duration,
    }
    /// Maximum number of concurrent requests per backend.
    Slots: Concurrency = "concurrency" {
        pattern: "^(adaptive|unlimited)$",
        expected: "an integer from 1 to 65536, \"adaptive\" or \"unlimited\"",
        integers: (1, Some(BATCH_MAX as u64)),
        read: concurrency,
        show: show_concurrency,
    }
}

/// One or more pairs of a number and a unit.
const SPAN_PATTERN: &str = r"^\d+ *[a-zA-Z]+( *\d+ *[a-zA-Z]+)*$";

/// Minimum of a [`Span`]. Shorter intervals would keep a core busy.
const SPAN_MIN: Duration = Duration::from_millis(1);
/// Maximum of a [`Span`]. Longer durations are probably typos, and sums of them could overflow.
const SPAN_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Parses a duration of at most 1 day; `None` if the text is not one.
#[must_use]
pub fn span(text: &str) -> Option<Duration> {
    let span = humantime::parse_duration(text).ok();
    span.filter(|span| *span <= SPAN_MAX)
}

/// Parses a duration of at most `u32::MAX` milliseconds, the maximum in the log; `None` for all
/// else.
fn long_span(text: &str) -> Option<Duration> {
    let span = humantime::parse_duration(text).ok();
    span.filter(|span| span.as_millis() <= u32::MAX.into())
}

/// Whether a duration is at least 1 ms, the minimum of a [`Span`].
#[must_use]
pub fn is_span(span: &Duration) -> bool {
    *span >= SPAN_MIN
}

/// Formats a duration for people and for [`span`] to parse, for example as `1m 30s`.
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

/// Returns a duration of `ms` milliseconds in the format `F`. Does not check its bounds.
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
    fn written_settings_round_trip() {
        reads_the_same::<Span>("1m 30s");
        reads_the_same::<Slots>("adaptive");
        reads_the_same::<Slots>("8");
    }
}
