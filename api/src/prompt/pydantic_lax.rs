//! Reads flags and counts as the engines' Python parser does.
//!
//! vLLM and SGLang validate bodies with pydantic in lax mode: they accept `"stream": 1`, `"stream":
//! "true"` and `"max_tokens": 256.0`. Clients send such values, so the router must not reject them.
//! The engine rejects values that are invalid in lax mode, with its own error.

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// A JSON value, reduced to the kinds from which a flag or a count can be read.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum LaxValue {
    Null,
    Bool(bool),
    Number(f64),
    Text(String),
    /// An array, an object, or a text that is too long.
    Compound,
}

/// Maximum length of text that is read as a flag or a count, in bytes.
const TEXT_BYTES_MAX: usize = 32;

/// Error for a value that is neither null nor of the expected kind. The engine judges the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaxError;

impl LaxValue {
    /// Reads the value as a flag; `None` for null.
    pub(super) fn flag(&self) -> Result<Option<bool>, LaxError> {
        match self {
            Self::Null => Ok(None),
            Self::Bool(flag) => Ok(Some(*flag)),
            Self::Number(0.0) => Ok(Some(false)),
            Self::Number(1.0) => Ok(Some(true)),
            Self::Text(text) => match text.to_ascii_lowercase().as_str() {
                "0" | "off" | "f" | "false" | "n" | "no" => Ok(Some(false)),
                "1" | "on" | "t" | "true" | "y" | "yes" => Ok(Some(true)),
                _ => Err(LaxError),
            },
            Self::Number(_) | Self::Compound => Err(LaxError),
        }
    }

    /// Reads the value as a count; `None` for null. Values above `u32::MAX` saturate.
    pub(super) fn count(&self) -> Result<Option<u32>, LaxError> {
        let number = match self {
            Self::Null => return Ok(None),
            Self::Bool(flag) => f64::from(u8::from(*flag)),
            Self::Number(number) => *number,
            Self::Text(text) => text.trim().parse().map_err(|_| LaxError)?,
            Self::Compound => return Err(LaxError),
        };
        let is_count = number.is_finite() && number >= 0.0 && number.fract() == 0.0;
        // The cast saturates.
        is_count.then_some(Some(number as u32)).ok_or(LaxError)
    }
}

impl<'de> Deserialize<'de> for LaxValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LaxVisitor)
    }
}

struct LaxVisitor;

impl<'de> Visitor<'de> for LaxVisitor {
    type Value = LaxValue;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<LaxValue, E> {
        Ok(LaxValue::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<LaxValue, E> {
        Ok(LaxValue::Bool(flag))
    }

    fn visit_u64<E>(self, number: u64) -> Result<LaxValue, E> {
        Ok(LaxValue::Number(number as f64))
    }

    fn visit_i64<E>(self, number: i64) -> Result<LaxValue, E> {
        Ok(LaxValue::Number(number as f64))
    }

    fn visit_f64<E>(self, number: f64) -> Result<LaxValue, E> {
        Ok(LaxValue::Number(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<LaxValue, E> {
        Ok(if text.len() > TEXT_BYTES_MAX {
            LaxValue::Compound
        } else {
            LaxValue::Text(text.to_owned())
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<LaxValue, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(LaxValue::Compound)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LaxValue, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(LaxValue::Compound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> LaxValue {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn booleans_parse_like_pydantic() {
        for json in ["true", "1", "1.0", "\"true\"", "\"Yes\"", "\"1\""] {
            assert_eq!(read(json).flag(), Ok(Some(true)), "{json}");
        }
        for json in ["false", "0", "-0.0", "\"False\"", "\"off\"", "\"0\""] {
            assert_eq!(read(json).flag(), Ok(Some(false)), "{json}");
        }
        assert_eq!(read("null").flag(), Ok(None));
        for json in ["2", "-1", "0.5", "\"\"", "\"maybe\"", "[]", "{\"a\":[1]}"] {
            assert_eq!(read(json).flag(), Err(LaxError), "{json}");
        }
    }

    #[test]
    fn integers_parse_like_pydantic() {
        for (json, count) in [
            ("3", 3),
            ("3.0", 3),
            ("\"3\"", 3),
            ("true", 1),
            ("0", 0),
            ("1e30", u32::MAX),
        ] {
            assert_eq!(read(json).count(), Ok(Some(count)), "{json}");
        }
        assert_eq!(read("null").count(), Ok(None));
        let long = format!("\"{}\"", "1".repeat(TEXT_BYTES_MAX + 1));
        for json in ["-1", "1.5", "\"x\"", "\"nan\"", "[3]", "{}", &long] {
            assert_eq!(read(json).count(), Err(LaxError), "{json}");
        }
    }
}
