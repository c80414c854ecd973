//! String formats of types that TOML and JSON lack, such as durations: parsing, printing and
//! describing them.
//!
//! [`As`] and its kin apply a format to a field of a plain type:
//! `#[serde(with = "As::<Span>")] pub timeout: Duration`. The schema generator follows the same
//! attribute. Each crate defines the formats of its own types with [`forms`](crate::forms).

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::bounds::{BATCH_MAX, WINDOW_MS_MAX};
use crate::caches::CacheScope;
use crate::concurrency::Concurrency;
use crate::validate::is_name;

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

/// Adapter for `serde(with)`: a value in the format `F`. Serialized as an integer if the format
/// accepts integers and the value is one, otherwise as a string.
#[derive(Debug)]
pub struct As<F>(PhantomData<F>);

/// Adapter for `serde(with)`: an optional value in the format `F`.
#[derive(Debug)]
pub struct AsOption<F>(PhantomData<F>);

/// Adapter for `serde(with)`: a list of values in the format `F`.
#[derive(Debug)]
pub struct AsList<F>(PhantomData<F>);

/// A value by reference that is serialized in the format `F`.
struct Shown<'a, F: Form>(&'a F::Value);

impl<F: Form> Serialize for Shown<'_, F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = F::show(self.0);
        match text.parse::<i64>() {
            Ok(number) if F::INTEGERS.is_some() => number.serialize(serializer),
            _ => text.serialize(serializer),
        }
    }
}

/// A value that was deserialized in the format `F`.
struct Read<F: Form>(F::Value);

impl<'de, F: Form> Deserialize<'de> for Read<F> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FormVisitor<F>(PhantomData<F>);

        impl<F: Form> Visitor<'_> for FormVisitor<F> {
            type Value = Read<F>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(F::EXPECTED)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Read<F>, E> {
                let value = F::read(text).map(Read);
                value.ok_or_else(|| E::custom(format!("expected {}", F::EXPECTED)))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Read<F>, E> {
                match F::INTEGERS {
                    Some(_) => self.visit_str(&number.to_string()),
                    None => Err(E::custom(format!("expected {}", F::EXPECTED))),
                }
            }
        }

        deserializer.deserialize_any(FormVisitor(PhantomData))
    }
}

impl<F: Form> As<F> {
    /// Serializes `value`.
    ///
    /// # Errors
    /// Those of `serializer`.
    pub fn serialize<S: Serializer>(value: &F::Value, serializer: S) -> Result<S::Ok, S::Error> {
        Shown::<F>(value).serialize(serializer)
    }

    /// Deserializes a value.
    ///
    /// # Errors
    /// Fails if it does not have the format.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<F::Value, D::Error> {
        Read::<F>::deserialize(from).map(|read| read.0)
    }
}

impl<F: Form> AsOption<F> {
    /// Serializes `value`, `None` as null.
    ///
    /// # Errors
    /// Those of `serializer`.
    pub fn serialize<S: Serializer>(
        value: &Option<F::Value>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.as_ref().map(Shown::<F>).serialize(serializer)
    }

    /// Deserializes a value, null as `None`.
    ///
    /// # Errors
    /// Fails if it does not have the format.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<F::Value>, D::Error> {
        let read = Option::<Read<F>>::deserialize(from)?;
        Ok(read.map(|read| read.0))
    }
}

impl<F: Form> AsList<F> {
    /// Serializes `values`.
    ///
    /// # Errors
    /// Those of `serializer`.
    pub fn serialize<S: Serializer>(values: &[F::Value], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(Shown::<F>))
    }

    /// Deserializes a list.
    ///
    /// # Errors
    /// Fails if an element does not have the format.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<F::Value>, D::Error> {
        let read = Vec::<Read<F>>::deserialize(from)?;
        Ok(read.into_iter().map(|read| read.0).collect())
    }
}

impl<F: Form> JsonSchema for As<F> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        F::NAME.into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let text = json_schema!({ "type": "string", "pattern": F::PATTERN });
        let mut schema = match F::INTEGERS {
            None => text,
            Some((min, None)) => {
                json_schema!({ "anyOf": [{ "type": "integer", "minimum": min }, text] })
            }
            Some((min, Some(max))) => json_schema!({
                "anyOf": [{ "type": "integer", "minimum": min, "maximum": max }, text]
            }),
        };
        schema.insert("format".to_owned(), F::NAME.into());
        schema
    }
}

impl<F: Form> JsonSchema for AsOption<F> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        F::NAME.into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        As::<F>::json_schema(generator)
    }
}

impl<F: Form> JsonSchema for AsList<F> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        F::NAME.into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "array", "items": As::<F>::json_schema(generator) })
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

/// Defines a unit struct that implements [`Form`](crate::form::Form) for each format, and
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

            impl $crate::form::Form for $form {
                type Value = $value;
                const NAME: &'static str = $name;
                const PATTERN: &'static str = $pattern;
                const EXPECTED: &'static str = $expected;
                const INTEGERS: Option<$crate::form::Bounds> = $crate::form::first(&[$($integers)?]);

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

        const FORMS: &[$crate::form::NamedForm] = &[$($crate::form::NamedForm {
            name: <$form as $crate::form::Form>::NAME,
            expected: <$form as $crate::form::Form>::EXPECTED,
            takes_integers: <$form as $crate::form::Form>::INTEGERS.is_some(),
            is_read: |text| <$form as $crate::form::Form>::read(text).is_some(),
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
    /// A number of milliseconds above zero, at most `u32::MAX` (49 days).
    Millis: u32 = "long-time-span" {
        pattern: SPAN_PATTERN,
        expected: "a duration from 1ms to 49days, such as \"20ms\" or \"1m 30s\"",
        read: |text| millis(text).filter(|ms| *ms > 0),
        show: |ms| show_duration(&Duration::from_millis((*ms).into())),
    }
    /// A number of milliseconds above zero, at most a day.
    MillisOfDay: u32 = "time-span-of-day" {
        pattern: SPAN_PATTERN,
        expected: "a duration from 1ms to 1day, such as \"20ms\" or \"1m 30s\"",
        read: |text| millis(text).filter(|ms| (1..=WINDOW_MS_MAX).contains(ms)),
        show: |ms| show_duration(&Duration::from_millis((*ms).into())),
    }
    /// A number of milliseconds; may be zero.
    MillisOrZero: u32 = "long-time-span-or-zero" {
        pattern: SPAN_PATTERN,
        expected: "a duration up to 49days, such as \"5s\"",
        read: millis,
        show: |ms| show_duration(&Duration::from_millis((*ms).into())),
    }
    /// A number of microseconds; may be zero.
    MicrosOrZero: u32 = "short-time-span-or-zero" {
        pattern: SPAN_PATTERN,
        expected: "a duration up to 1h, such as \"25ms\"",
        read: |text| {
            let span = humantime::parse_duration(text).ok()?;
            u32::try_from(span.as_micros()).ok()
        },
        show: |us| show_duration(&Duration::from_micros((*us).into())),
    }
    /// Maximum number of concurrent requests per backend.
    Slots: Concurrency = "concurrency" {
        pattern: "^(adaptive|unlimited)$",
        expected: "an integer from 1 to 65536, \"adaptive\" or \"unlimited\"",
        integers: (1, Some(BATCH_MAX as u64)),
        read: concurrency,
        show: show_concurrency,
    }
    /// Users with whom a user shares cached blocks.
    Sharing: CacheScope = "cache-scope" {
        pattern: "^(shared|isolated|group:.+)$",
        expected: "\"shared\", \"isolated\" or \"group:NAME\"",
        read: cache_scope,
        show: show_cache_scope,
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

fn millis(text: &str) -> Option<u32> {
    let span = humantime::parse_duration(text).ok()?;
    u32::try_from(span.as_millis()).ok()
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

fn cache_scope(text: &str) -> Option<CacheScope> {
    match text {
        "shared" => Some(CacheScope::Shared),
        "isolated" => Some(CacheScope::Own),
        group => {
            let name = group.strip_prefix("group:")?;
            is_name(name).then(|| CacheScope::Group(name.to_owned()))
        }
    }
}

fn show_cache_scope(scope: &CacheScope) -> String {
    match scope {
        CacheScope::Shared => "shared".to_owned(),
        CacheScope::Own => "isolated".to_owned(),
        CacheScope::Group(name) => format!("group:{name}"),
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

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
        for read in [Millis::read, MillisOrZero::read] {
            assert_eq!(read(&Millis::show(&u32::MAX)), Some(u32::MAX));
            assert_eq!(read("50days"), None);
        }
        assert_eq!(Millis::read("0s"), None);
        assert_eq!(MillisOrZero::read("0s"), Some(0));
        assert_eq!(MicrosOrZero::read("25ms"), Some(25_000));
        assert_eq!(MicrosOrZero::read("2h"), None);
        assert_eq!(SpanOrZero::read("0s"), Some(Duration::ZERO));
    }

    fn reads_the_same<F: Form<Value: PartialEq + Debug>>(written: &str) {
        let value = F::read(written).unwrap();
        assert_eq!(F::read(&F::show(&value)), Some(value), "{written}");
    }

    #[test]
    fn written_values_read_as_the_same() {
        reads_the_same::<Span>("1m 30s");
        reads_the_same::<MicrosOrZero>("25ms 500us");
        reads_the_same::<Slots>("adaptive");
        reads_the_same::<Slots>("8");
        reads_the_same::<Sharing>("shared");
        reads_the_same::<Sharing>("isolated");
        reads_the_same::<Sharing>("group:a:b c");
    }

    #[test]
    fn a_cache_group_has_a_name() {
        for wrong in ["", "group", "group:", "own", "shared:a"] {
            assert_eq!(Sharing::read(wrong), None, "{wrong}");
        }
    }
}
